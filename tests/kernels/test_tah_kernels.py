"""The Triton kernels of TAH-Quant write and read the reference's bits."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from lq_testing.codec_data import awkward_rows
from lq_testing.interpreter import skip_old_interpreter
from torch import Tensor

from lq_lightning.kernels.tah import TAHFormat, parse_tah_format, reference
from lq_lightning.kernels.tah.reference import lowest

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    skip_old_interpreter,
]

# Several sequences whose bits share a byte; incomplete programs; all tile sizes, and so all planes
# of pivots; without transform; all bits that tokens can have alike, and so all planes of codes, in
# complete programs too.
CASES = [
    ("tah/64/4/1/5/hadamard", (3, 7, 128), torch.float32),
    ("tah/32/4/1/5/hadamard", (1, 41, 96), torch.bfloat16),
    ("tah/8/4/1/5/hadamard", (2, 9, 40), torch.float16),
    ("tah/16/4/2/5/hadamard", (1, 70, 48), torch.bfloat16),
    ("tah/256/4/1/2/hadamard", (1, 6, 512), torch.float32),
    ("tah/128/4/1/3/hadamard", (1, 9, 384), torch.bfloat16),
    ("tah/64/4/1/5/none", (1, 32, 64), torch.float32),
    ("tah/64/2/0/none", (1, 5, 192), torch.bfloat16),
    ("tah/64/3/0/hadamard", (1, 5, 192), torch.bfloat16),
    ("tah/64/4/0/hadamard", (1, 5, 192), torch.float32),
    ("tah/64/5/0/hadamard", (2, 16, 128), torch.bfloat16),
    ("tah/128/5/0/hadamard", (1, 7, 384), torch.float32),
    ("tah/32/6/0/hadamard", (1, 11, 96), torch.float16),
    ("tah/8/7/0/hadamard", (1, 33, 40), torch.float32),
    ("tah/64/8/0/hadamard", (1, 9, 192), torch.float32),
]


def values(shape: tuple[int, int, int], fmt: TAHFormat, dtype: torch.dtype) -> Tensor:
    x = awkward_rows(shape[0] * shape[1], shape[2], fmt.tile)
    x.view(-1, fmt.tile)[::4, fmt.tile - 3] *= 30
    x.view(-1, fmt.tile)[1::8, 0] = 7.0
    x[-1] = 0.0
    return x.view(shape).to(dtype)


@pytest.mark.parametrize(("text", "shape", "dtype"), CASES)
def test_kernels_match_the_reference(
    text: str, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    from lq_lightning.kernels.tah import triton_kernels as launch

    fmt = parse_tah_format(text)
    layout = fmt.layout(*shape)
    x = values(shape, fmt, dtype)
    found = reference.statistics_of(x, fmt)
    expected = torch.empty(layout.nbytes, dtype=torch.uint8)
    reference.quantize(x, fmt, expected)
    outliers, _ = reference.load_outliers(expected, layout, fmt)
    assert not fmt.hadamard or 0 < int(outliers.sum()) < layout.tiles

    moved, places = x.to(device), expected.to(device)
    if layout.adaptive:
        # sums take another order on a GPU, so near-ties may be ranked otherwise
        entropies = launch.launch_entropies(moved, fmt)
        torch.testing.assert_close(entropies.cpu(), found.entropies, rtol=1e-4, atol=1e-4)
        exact = found.entropies.to(device)
        places = launch.launch_places(exact, places, layout, shape[0], rank=True)
        low = lowest(found.entropies.view(shape[0], -1), layout.low_per_sequence).view(-1)
        where = torch.where(low, -low.cumsum(0), low.logical_not().cumsum(0) - 1)
        assert torch.equal(places.cpu().long(), where)
    for tile in (None, launch.Tile(1024 if fmt.tile < 256 else 2048, 16, 2)):
        message = torch.full((layout.nbytes,), 0xAB, dtype=torch.uint8, device=device)
        if layout.adaptive:
            launch.launch_bits(places, message)
        launch.launch_encode(moved, places, fmt, message, tile)
        assert torch.equal(message.cpu(), expected)
        for result in (dtype, torch.float32):
            decoded = torch.full(shape, 7.0, dtype=result)
            reference.dequantize(expected, fmt, decoded)
            out = torch.full(shape, 3.0, dtype=result, device=device)
            launch.launch_tah_dequantize(message, fmt, out, tile)
            torch.testing.assert_close(out.cpu(), decoded, rtol=0, atol=0, equal_nan=True)


def test_all_at_once(device: torch.device) -> None:
    from lq_lightning.kernels.tah import triton_kernels as launch

    fmt = parse_tah_format("tah/16/4/1/5/hadamard")
    # entropies far apart
    x = torch.randn(2, 10, 32).abs() ** torch.linspace(0.5, 4, 20).view(2, 10, 1)
    expected = torch.empty(fmt.layout(2, 10, 32).nbytes, dtype=torch.uint8)
    reference.quantize(x, fmt, expected)
    message = torch.full_like(expected, 0xAB, device=device)
    launch.launch_tah_quantize(x.to(device), fmt, message)
    assert torch.equal(message.cpu(), expected)


@pytest.mark.parametrize("many", [8192, 299])
def test_ranks_of_many_units(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    """Several steps of a program, equal entropies in several of them, ranks at either end."""
    from lq_lightning.kernels.tah import triton_kernels as launch

    monkeypatch.setattr(launch, "_MANY_UNITS", many)
    monkeypatch.setattr(launch, "_RANK_BLOCK", 64)
    monkeypatch.setattr(launch, "_PLACE_BLOCK", 64)
    for share in (Fraction(1, 300), Fraction(1, 2), Fraction(299, 300)):
        fmt = TAHFormat(8, 4, share, False)
        layout = fmt.layout(2, 300, 8)
        entropies = torch.randint(0, 9, (600,)).float() / 4
        places = launch.launch_places(
            entropies.to(device), torch.empty(0, device=device), layout, 2, rank=True
        )
        low = lowest(entropies.view(2, -1), layout.low_per_sequence).view(-1)
        assert torch.equal(places.cpu() < 0, low)
        assert places[places >= 0].tolist() == list(range(layout.high_tokens))
        message = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        launch.launch_bits(places, message)
        again = launch.launch_places(message, message, layout, 2, rank=False)
        assert torch.equal(again, places)


def test_nothing_is_launched_for_nothing(device: torch.device) -> None:
    from lq_lightning.kernels.tah import triton_kernels as launch

    fmt = parse_tah_format("tah/16/4/1/5/hadamard")
    for shape in ((0, 5, 32), (2, 0, 32)):
        x = torch.empty(shape, device=device)
        message = torch.empty(0, dtype=torch.uint8, device=device)
        launch.launch_tah_quantize(x, fmt, message)
        launch.launch_tah_dequantize(message, fmt, x)
