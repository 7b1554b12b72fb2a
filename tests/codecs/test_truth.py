"""The reference itself against independent, naive computations."""

from __future__ import annotations

import hashlib

import pytest
import torch

from lq_lightning.codecs import CodecSpec, decode, encode
from lq_lightning.kernels.message import reference as blocks
from lq_lightning.kernels.message.format import SCALES
from lq_lightning.kernels.message.reference import CHUNK_NUMEL


def sylvester(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.kron(step, matrix)
    return matrix


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_transform_is_the_sylvester_matrix(size: int) -> None:
    x = torch.randint(-50, 50, (7, size)).float()
    expected = x.double() @ sylvester(size)
    assert torch.equal(blocks.hadamard_(x.clone(), size).double(), expected)
    fmt = CodecSpec(code="int8", group_size=128, hadamard_size=size).message_format
    assert fmt.forward_norm * fmt.inverse_norm == 1 / size
    assert 2.0**-0.5 <= fmt.forward_norm * size**0.5 <= 1


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_planes(width: int) -> None:
    """Element j of a byte sits at bit j * width."""
    codes = torch.randint(0, 2**width, (64,), dtype=torch.uint8)
    packed = blocks.pack_plane(codes, width)
    per_byte = 8 // width
    shifts = torch.arange(per_byte) * width
    expected = (codes.view(-1, per_byte).int() << shifts).sum(1)
    assert torch.equal(packed.int(), expected.int())
    assert torch.equal(blocks.unpack_plane(packed, width), codes)


def test_int4_message_by_hand() -> None:
    """The documented layout, byte by byte: offset codes, low nibble first, then the scale."""
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([7.0, -7.0, 1.0, -3.4])
    message = encode(CodecSpec(code="int4", group_size=16), x)
    assert message.shape == (1, 32)
    codes = [8 + 7, 8 - 7, 8 + 1, 8 - 3] + [8] * 12
    expected = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    assert message[0, :8].tolist() == expected
    assert message[0, 8:16].tolist() == [0] * 8
    assert message[0, 16:20].view(torch.float32).item() == 1.0
    assert message[0, 20:].tolist() == [0] * 12


@pytest.mark.parametrize("bits", range(2, 9))
def test_integer_codes_match_the_formula(bits: int) -> None:
    x = torch.randn(4, 512)
    spec = CodecSpec(code=f"int{bits}", group_size=64)  # type: ignore[arg-type]
    largest = 2 ** (bits - 1) - 1
    groups = x.view(4, 8, 64)
    scale = groups.abs().amax(-1, keepdim=True) / largest
    expected = (groups * (1 / scale)).round() * scale
    assert torch.equal(decode(spec, encode(spec, x), 512), expected.view(4, 512))


def test_float8_codes_match_the_cast_of_torch() -> None:
    # 2**17 values over the whole range, subnormals of the code and ties included
    exponents = torch.randint(-30, 17, (1, 1 << 16)).float()
    x = torch.randn(1, 1 << 16) * torch.exp2(exponents)
    ties = torch.arange(1 << 16).float()[None] * 2.0**-12
    x = torch.cat([x, ties], dim=1).clamp(-448.0, 448.0)
    x[:, ::4096] = 448.0
    spec = CodecSpec(code="fp8_e4m3", group_size=4096)
    message = encode(spec, x)
    expected = x.to(torch.float8_e4m3fn)  # every scale is exactly 1
    assert torch.equal(message[0, : x.shape[1]], expected.view(torch.uint8)[0])
    assert torch.equal(decode(spec, message, x.shape[1]), expected.float())


def test_nf4_levels_are_quantiles_and_the_nearest_is_taken() -> None:
    levels = torch.tensor(CodecSpec(code="nf4", group_size=64).message_format.levels).double()
    offset = 0.9677083
    upper = torch.special.ndtri(torch.linspace(offset, 0.5, 9, dtype=torch.float64))
    lower = torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64))
    quantiles = torch.cat([-lower, upper[:-1].flip(0)]) / upper[0]
    torch.testing.assert_close(levels, quantiles, rtol=0, atol=2e-6)
    x = torch.linspace(-1, 1, 4096)[None]
    spec = CodecSpec(code="nf4", group_size=4096)
    decoded = decode(spec, encode(spec, x), 4096)[0].double()
    distance = (x[0].double()[:, None] - levels).abs().amin(1)
    torch.testing.assert_close((decoded - x[0]).abs(), distance, rtol=0, atol=1e-7)


# Of codes, planes and scales of every format before the table of codes, by code and symmetry. They
# are in checkpoints, and ranks of different versions exchange them.
DIGESTS = {
    "int2 symmetric": "7a10031f8f304546",
    "int2 asymmetric": "2d2f5203e70a1c20",
    "int3 symmetric": "a0f473cadb8769bc",
    "int3 asymmetric": "e76f1dd2faf51e36",
    "int4 symmetric": "0bc4063ac014c7bc",
    "int4 asymmetric": "73e1bf6df24188a9",
    "int5 symmetric": "de6ef9b1e1f90d58",
    "int5 asymmetric": "80a0477da38b6182",
    "int6 symmetric": "e962834c38a2058f",
    "int6 asymmetric": "e19611ee24862dcb",
    "int7 symmetric": "ef9cc4b90c4d556d",
    "int7 asymmetric": "9576723fd551a334",
    "int8 symmetric": "e15be224c211ed9d",
    "int8 asymmetric": "704afa5c999c3017",
    "fp8_e4m3 symmetric": "56b285f634ecb5ba",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_bytes_stay_as_they_are(name: str) -> None:
    code, symmetry = name.split()
    digest = hashlib.sha256()
    # not from a generator of random numbers, whose values may change between versions
    x = (torch.arange(3 * 1001, dtype=torch.int64) * 7919 % 2003 - 1001).view(3, 1001)
    x = x.float() * torch.tensor([[1.0], [2.0**-20], [2.0**60]])
    x[0, 200:210] = float("nan")
    for hadamard_size, rounding, scale_dtype in (
        (0, "nearest", "float32"),
        (32, "stochastic", "bfloat16"),
        (16, "nearest", "float16"),
    ):
        spec = CodecSpec(
            code=code,  # type: ignore[arg-type]
            group_size=64,
            symmetric=symmetry == "symmetric",
            hadamard_size=hadamard_size,
            rounding=rounding,  # type: ignore[arg-type]
            scale_dtype=scale_dtype,  # type: ignore[arg-type]
        )
        rows = x[:2] if scale_dtype == "float16" else x
        digest.update(bytes(encode(spec, rows, seed=11).flatten().tolist()))
    assert digest.hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16"])
def test_scales_are_rounded_up_and_minima_down(scale_dtype: str) -> None:
    dtype = torch.bfloat16 if scale_dtype == "bfloat16" else torch.float16
    values = torch.randn(4096) * torch.exp2(torch.randint(-30, 15, (4096,)).float())
    values[:4] = torch.tensor([0.0, -0.0, 2.0**-26, -(2.0**-26)])
    down = blocks.round_minimum_down(values, SCALES[scale_dtype])
    up = blocks.round_scale_up(values.abs(), SCALES[scale_dtype])
    for rounded, exact in ((down, values), (up, values.abs())):
        assert torch.equal(rounded.to(dtype).float(), rounded)
        nearest = exact.to(dtype).float()
        spacing = torch.maximum(nearest.abs() * torch.finfo(dtype).eps, torch.tensor(2.0**-24))
        assert ((rounded - exact).abs() <= spacing).all()
    assert (down <= values).all()
    assert (up >= values.abs()).all()
    assert not torch.signbit(down[:2]).any()


@pytest.mark.parametrize("symmetric", [True, False])
def test_one_scale_per_row_wherever_its_extremes_are(symmetric: bool) -> None:
    """In any of the chunks that the reference cuts a long row into."""
    spec = CodecSpec(code="int8", group_size="row", symmetric=symmetric)
    numel = 2 * CHUNK_NUMEL + 100
    x = torch.rand(3, numel) - 0.5
    for row, places in enumerate([(0, -1), (-1, 0), (CHUNK_NUMEL, CHUNK_NUMEL + 1)]):
        x[row, places[0]], x[row, places[1]] = -3.0, 5.0
    step = 5.0 / 127 if symmetric else 8.0 / 255
    decoded = decode(spec, encode(spec, x), numel)
    assert (decoded - x).abs().max() <= 0.5001 * step
    x[0, -1] = float("nan")
    broken = decode(spec, encode(spec, x), numel)
    assert broken[0].isnan().all()
    assert torch.equal(broken[1:], decoded[1:])
