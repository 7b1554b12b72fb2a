"""Positions beyond 32 bits: addresses, and the counter of stochastic rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from lq_testing.interpreter import skip_old_interpreter

from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message import reference as blocks
from lq_lightning.kernels.message import reference as reference_rows
from lq_lightning.kernels.message.triton_rounding import mixed_noise

FORMAT = MessageFormat(
    code="int4",
    group_size=2048,
    symmetric=True,
    hadamard_size=0,
    stochastic=False,
    scale_dtype="float32",
)


@triton.jit(do_not_specialize=["seed_a", "seed_b"])
def noise_kernel(out_ptr, place_ptr, seed_a, seed_b, BLOCK: tl.constexpr):
    row = tl.load(place_ptr)
    start = tl.load(place_ptr + 1) * BLOCK
    offsets = tl.arange(0, BLOCK // 8)
    tl.store(out_ptr + 2 * offsets, mixed_noise(seed_a, seed_b, row, start, BLOCK, 0))
    tl.store(out_ptr + 2 * offsets + 1, mixed_noise(seed_a, seed_b, row, start, BLOCK, 1))


@pytest.mark.parametrize("row", [0, 1, 2**31, 2**32 + 1, 2**40 + 3])
@pytest.mark.parametrize("tile", [0, 3, 2**22 + 1, 2**24 - 1, 2**24, 2**33 + 5])
def test_noise_far_away(row: int, tile: int, device: torch.device) -> None:
    block = 512
    actual = torch.empty(block // 4, dtype=torch.int32, device=device)
    place = torch.tensor([row, tile], device=device)
    noise_kernel[(1,)](actual, place, *blocks.seed_words(77), BLOCK=block)
    expected = blocks.rounding_noise(77, row, 1, tile * block, block, 16)
    unrotated = expected.view(-1, 2, 2, 2)[..., 0].transpose(1, 2)
    assert torch.equal(actual.cpu().view(torch.int16).view(-1, 2, 2), unrotated.to(torch.int16))


def test_noise_crosses_the_32_bit_border_like_two_pieces() -> None:
    border = 2**33
    whole = blocks.rounding_noise(5, 2, 2, border - 64, 128, 16)
    left = blocks.rounding_noise(5, 2, 2, border - 64, 64, 16)
    right = blocks.rounding_noise(5, 2, 2, border, 64, 16)
    assert torch.equal(whole, torch.cat([left, right], dim=1))


def test_noise_differs_beyond_every_border() -> None:
    places = [(0, 0), (1, 0), (2**32, 0), (0, 2**32), (0, 2**33), (2**32, 2**33), (0, 64)]
    rows = [blocks.rounding_noise(9, row, 1, start, 64, 16)[0] for row, start in places]
    for first in range(len(rows)):
        for second in range(first):
            assert (rows[first] == rows[second]).float().mean() < 0.1


@skip_old_interpreter
def test_row_offsets_beyond_32_bits(tmp_path: Path) -> None:
    """Four rows, 2**30 elements apart, in a sparse file: int32 offsets would overflow."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter's test; GPUs have their own below")
    from lq_lightning.kernels.message.triton_kernels import launch_dequantize, launch_quantize

    stride, numel = 2**30, 3000
    nbytes = FORMAT.layout(numel).nbytes
    floats = torch.from_file(str(tmp_path / "x"), shared=True, size=3 * stride + numel)
    x = floats.as_strided((4, numel), (stride, 1))
    x.copy_(torch.randn(4, numel))
    expected = torch.empty(4, nbytes, dtype=torch.uint8)
    reference_rows.quantize(x, None, FORMAT, 0, expected)
    payload = torch.from_file(
        str(tmp_path / "out"), shared=True, size=3 * stride + nbytes, dtype=torch.uint8
    )
    message = payload.as_strided((4, nbytes), (stride, 1))
    launch_quantize(x, None, FORMAT, 0, message)
    assert torch.equal(message, expected)

    decoded = torch.empty(4, numel)
    reference_rows.dequantize(expected[None], numel, FORMAT, 1.0, False, decoded)
    launch_dequantize(message[None], numel, FORMAT, 1.0, False, x)
    assert torch.equal(x, decoded)
    launch_dequantize(message[:, None], numel, FORMAT, 1.0, False, x[3:])
    total = torch.empty(1, numel)
    reference_rows.dequantize(expected[:, None], numel, FORMAT, 1.0, False, total)
    assert torch.equal(x[3:], total)


@pytest.mark.gpu
@pytest.mark.uninitialized_memory_ok
def test_more_than_2_to_the_31_elements() -> None:
    from lq_lightning.codecs import CodecSpec, decode, encode

    spec = CodecSpec(code="int4", group_size=2048)
    numel = 2**31 + 2**20 + 5
    x = torch.empty(1, numel, dtype=torch.bfloat16, device="cuda").normal_()
    message = encode(spec, x)
    decoded = decode(spec, message, numel, dtype=torch.bfloat16)
    start = 2**31 - 2**20
    tail = x[:, start:].cpu()
    expected = encode(spec, tail)
    codes = -(-(numel - start) // 8) * 4
    assert torch.equal(message[0, start // 2 : start // 2 + codes].cpu(), expected[0, :codes])
    expected_values = decode(spec, expected, tail.shape[1], dtype=torch.bfloat16)
    assert torch.equal(decoded[:, start:].cpu(), expected_values)


@pytest.mark.gpu
@pytest.mark.uninitialized_memory_ok
def test_rows_far_apart_on_the_gpu() -> None:
    from lq_lightning.codecs import CodecSpec, decode, encode

    spec = CodecSpec(code="int8", group_size=128, hadamard_size=32, rounding="stochastic")
    storage = torch.empty(3 * 2**30 + 4096, dtype=torch.bfloat16, device="cuda")
    x = storage.as_strided((4, 4096), (2**30, 1))
    x.normal_()
    expected = encode(spec, x.cpu(), seed=1)
    assert torch.equal(encode(spec, x, seed=1).cpu(), expected)
    decode(spec, expected.cuda(), 4096, out=x)
    assert torch.equal(x.cpu(), decode(spec, expected, 4096, dtype=torch.bfloat16))
