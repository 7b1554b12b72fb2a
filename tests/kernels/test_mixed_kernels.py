"""The Triton kernels for messages of mixed widths write and read the reference's bits."""

from __future__ import annotations

import pytest
import torch
from lq_testing.interpreter import skip_old_interpreter
from torch import Tensor

from lq_lightning.kernels.mixed_width import mixed_layout, reference, width_counts, width_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    skip_old_interpreter,
]

TINY = 1e-37  # ranges of some of it have no scale; the interpreter cannot read subnormals of bf16


def values(tokens: int, lines: int, dtype: torch.dtype) -> Tensor:
    """Lines of very different sizes; some constant, tiny, huge, and some not finite."""
    x = torch.randn(tokens, lines) * torch.logspace(-3, 3, lines) + torch.randn(lines)
    x[:, 1] = 2.5
    x[:, 2] = TINY * (1 + torch.rand(tokens) / 10)
    x[:, 4] = 0.0
    if dtype != torch.float16:
        x[:, 3] = (2 * torch.rand(tokens) - 1) * 3.3e38
    x[0, 5] = float("inf")
    x[-1, 6] = -float("inf")
    x[tokens // 2, lines - 1] = float("nan")
    return x.to(dtype)


# Some lines of every width; none that is wider than 4 bits; bytes, bf16, or one plane alone.
TABLES = {
    "all": lambda lines: torch.randint(1, 17, (lines,)),
    "narrow": lambda lines: torch.randint(1, 5, (lines,)),
    "bytes": lambda lines: torch.full((lines,), 8),
    "bf16": lambda lines: torch.full((lines,), 9),
    "seven": lambda lines: torch.full((lines,), 7),
}


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize(
    ("tokens", "lines", "table", "dtype"),
    [
        (1, 9, "all", torch.float32),
        (7, 70, "all", torch.bfloat16),
        (300, 80, "all", torch.float16),
        (139, 64, "all", torch.float32),
        (24, 33, "narrow", torch.bfloat16),
        (20, 10, "bytes", torch.float32),
        (20, 10, "bf16", torch.float32),
        (20, 10, "seven", torch.float16),
    ],
)
def test_kernels_match_the_reference(
    tokens: int, lines: int, table: str, dtype: torch.dtype, fitted: bool, device: torch.device
) -> None:
    from lq_lightning.kernels.mixed_width import triton_kernels as launch

    widths = TABLES[table](lines)
    rows, counts = width_rows(widths), width_counts(widths)
    x = values(tokens, lines, dtype)
    expected = torch.empty(mixed_layout(counts, tokens).nbytes, dtype=torch.uint8)
    reference.quantize(x, rows, counts, fitted, expected)
    rounded = torch.full(x.shape, 7.0, dtype=dtype)
    reference.round_trip(x, rows, fitted, rounded)
    moved, there = x.to(device), rows.to(device)
    for strided in (moved, moved.t().contiguous().t()):
        message = torch.full(expected.shape, 0xAB, dtype=torch.uint8, device=device)
        out = torch.full(x.shape, 3.0, dtype=dtype, device=device)
        launch.launch_mixed_quantize(strided, there, counts, fitted, message, out)
        assert torch.equal(message.cpu(), expected)
        torch.testing.assert_close(out.cpu(), rounded, rtol=0, atol=0, equal_nan=True)
    for result in {dtype, torch.float32}:
        decoded = torch.full(x.shape, 7.0, dtype=result)
        reference.dequantize(expected, rows, counts, decoded)
        out = torch.full(x.shape, 3.0, dtype=result, device=device)
        launch.launch_mixed_dequantize(expected.to(device), there, counts, out)
        torch.testing.assert_close(out.cpu(), decoded, rtol=0, atol=0, equal_nan=True)
    out = torch.full(x.shape, 3.0, dtype=dtype, device=device)
    launch.launch_mixed_round_trip(moved, there, fitted, out)
    torch.testing.assert_close(out.cpu(), rounded, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fitted", [False, True])
def test_lines_that_are_not_finite_have_no_codes(fitted: bool, device: torch.device) -> None:
    from lq_lightning.kernels.mixed_width import triton_kernels as launch

    widths = torch.arange(1, 17)
    rows, counts = width_rows(widths), width_counts(widths)
    x = torch.randn(9, 16)
    # as a GPU makes it, with ones where codes are cut from
    x[3] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    expected = torch.empty(mixed_layout(counts, 9).nbytes, dtype=torch.uint8)
    reference.quantize(x, rows, counts, fitted, expected)
    message = torch.full_like(expected, 0xAB, device=device)
    launch.launch_mixed_quantize(x.to(device), rows.to(device), counts, fitted, message)
    assert torch.equal(message.cpu(), expected)


@pytest.mark.parametrize("fitted", [False, True])
def test_programs_of_several_tiles(
    fitted: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lq_lightning.kernels.mixed_width import triton_kernels as launch

    monkeypatch.setattr(launch, "_ENOUGH_PROGRAMS", 4)
    monkeypatch.setattr(launch, "RANGE_TILE", launch.Tile(32, 8, 1))
    monkeypatch.setattr(launch, "MOMENT_TILE", launch.Tile(16, 8, 1))
    monkeypatch.setattr(launch, "_EXACT_STEPS", 2)
    widths = TABLES["all"](70)
    rows, counts = width_rows(widths), width_counts(widths)
    x = values(77, 70, torch.float32)
    expected = torch.empty(mixed_layout(counts, 77).nbytes, dtype=torch.uint8)
    reference.quantize(x, rows, counts, fitted, expected)
    message = torch.full_like(expected, 0xAB, device=device)
    tile = launch.Tile(32, 16, 1)
    launch.launch_mixed_quantize(x.to(device), rows.to(device), counts, fitted, message, tile=tile)
    assert torch.equal(message.cpu(), expected)
    out = torch.empty_like(x, device=device)
    launch.launch_mixed_dequantize(message, rows.to(device), counts, out, tile)
    decoded = torch.empty_like(x)
    reference.dequantize(expected, rows, counts, decoded)
    torch.testing.assert_close(out.cpu(), decoded, rtol=0, atol=0, equal_nan=True)


def test_grids_cover_all_tokens() -> None:
    from lq_lightning.kernels.mixed_width.triton_kernels import Tile, _grid

    for tokens in (1, 8, 100, 1024, 100_000):
        for lines in (1, 64, 4096):
            for most in (32, tokens):
                (across, parts), steps = _grid(Tile(64, 32, 4), tokens, lines, most)
                assert across * 64 >= lines
                assert (parts - 1) * steps * 32 < tokens <= parts * steps * 32
                assert parts <= most
