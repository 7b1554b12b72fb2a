"""The Triton kernels of norms: the reference's codes, and its values up to the order of sums."""

from __future__ import annotations

import pytest
import torch
from lq_testing.codec_data import awkward_rows
from lq_testing.interpreter import skip_old_interpreter
from torch import Tensor

from lq_lightning.kernels.message import MessageFormat, parse_format
from lq_lightning.kernels.message.matrix import empty_message, encode_matrix
from lq_lightning.kernels.norm import KINDS, norm_backward, norm_dequantize, norm_quantize
from lq_lightning.kernels.norm.tiles import (
    MAX_NUMEL,
    SCHEDULES,
    choose_schedule,
    parts_of_rows,
    whole_rows,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    skip_old_interpreter,
]

FOUR = parse_format("int4/128/asymmetric/0/nearest/bfloat16")
MIXED = parse_format("int4/128/asymmetric/128/nearest/bfloat16")
SMALL = parse_format("int4/64/asymmetric/32/nearest/float32")
NF4 = parse_format("nf4/128/symmetric/0/nearest/bfloat16")
EIGHT = parse_format("int8/16/symmetric/0/nearest/float32")
FP8 = parse_format("fp8_e4m3/16/symmetric/0/nearest/bfloat16")
ODD = parse_format("int3/16/asymmetric/0/nearest/float16")
WIDE = parse_format("int4/1024/symmetric/0/nearest/float32")
EPS = 1e-5

# Several rows in a tile, of which the last is incomplete; one row in an incomplete tile, flat and
# not; one that fills its tile; 3 planes whose padding reaches into another tile; groups as long as
# rows or longer.
CASES = [
    ("layer", 9, 128, FOUR, torch.bfloat16),
    ("rms", 16, 64, SMALL, torch.float16),
    ("rms_cast", 3, 197, FOUR, torch.bfloat16),
    ("layer", 3, 197, FP8, torch.float32),
    ("rms_offset", 2, 1600, SMALL, torch.bfloat16),
    ("layer", 2, 1600, MIXED, torch.float16),
    ("rms_cast", 3, 1024, MIXED, torch.bfloat16),
    ("layer", 2, 2048, NF4, torch.bfloat16),
    ("rms", 3, 384, EIGHT, torch.float32),
    ("layer", 3, 1008, ODD, torch.bfloat16),
    ("rms", 2, 1024, WIDE, torch.bfloat16),
    ("rms", 2, 200, WIDE, torch.bfloat16),
    ("rms_offset", 1, 1, FOUR, torch.float32),
]
IDS = [f"{kind}-{rows}x{numel}-{str(fmt).replace('/', '.')}" for kind, rows, numel, fmt, _ in CASES]


def summable(rows: int, numel: int) -> Tensor:
    """Random multiples of 1/64: sums over a row are exact in any order, and so are its mean's bits,
    which the codes of "layer" depend on."""
    return (torch.randn(rows, numel) * 128 + 32).round() / 64


def assert_close(actual: Tensor, expected: Tensor, roundings: int = 1) -> None:
    """A unit in the last place of 16 bits for every rounding; fp32 has that of sums over a row."""
    eps = torch.finfo(expected.dtype).eps
    rtol = max(roundings * eps, 4e-6)
    torch.testing.assert_close(actual.cpu(), expected, rtol=rtol, atol=4e-6, equal_nan=True)


def parameters_of(kind: str, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return torch.randn(numel).to(dtype), torch.randn(numel) if kind == "layer" else None


def check_forward(
    x: Tensor, kind: str, fmt: MessageFormat, device: torch.device, weighted: bool = True
) -> tuple[Tensor, Tensor]:
    """Compare the forward; return the message and the statistics."""
    from lq_lightning.kernels.norm.triton_kernels import launch_norm_quantize

    rows, numel = x.shape
    weight, bias = parameters_of(kind, numel, x.dtype) if weighted else (None, None)
    expected = norm_quantize(x, weight, bias, EPS, kind, str(fmt), x.dtype, True)
    y, rstd, message, amax = (
        torch.full_like(expected[0], 7.0, device=device),
        torch.full_like(expected[1], 7.0, device=device),
        torch.full_like(expected[2], 0xAB, device=device),
        torch.zeros(1, device=device),
    )
    others = [p if p is None else p.to(device) for p in (weight, bias)]
    # a copy would be contiguous
    moved = x if device.type == "cpu" else x.new_empty(rows, x.stride(0), device=device)[:, :numel]
    if moved is not x:
        moved.copy_(x)
    launch_norm_quantize((moved, *others, y, rstd, message, amax), EPS, kind, fmt)
    assert torch.equal(message.cpu(), expected[2])
    assert_close(y, expected[0], roundings=2 if kind == "rms_cast" else 1)
    assert_close(rstd, expected[1])
    largest = y.abs().max().float().view(1) if y.numel() else torch.zeros(1)
    torch.testing.assert_close(amax.cpu(), largest.cpu(), rtol=0, atol=0, equal_nan=True)
    if not weighted:
        nothing = torch.zeros(0, device=device)
        again = torch.empty_like(y)
        launch_norm_quantize((moved, *others, again, rstd, message, nothing), EPS, kind, fmt)
        torch.testing.assert_close(again, y, rtol=0, atol=0, equal_nan=True)
    return expected[2], expected[1]


def check_rebuild(
    message: Tensor,
    rstd: Tensor,
    numel: int,
    kind: str,
    fmt: MessageFormat,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Equal bits, since there are no sums."""
    from lq_lightning.kernels.norm.triton_kernels import launch_norm_dequantize

    weight, bias = parameters_of(kind, numel, torch.float32)
    expected = norm_dequantize(
        message, rstd, weight, bias, numel, kind, str(fmt), dtype, torch.bfloat16
    )
    actual = torch.full_like(expected, 7.0, device=device)
    others = [p if p is None else p.to(device) for p in (rstd, weight, bias)]
    launch_norm_dequantize((message.to(device), *others, actual), kind, fmt, torch.bfloat16)
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def check_backward(
    message: Tensor,
    rstd: Tensor,
    dy: Tensor,
    kind: str,
    fmt: MessageFormat,
    device: torch.device,
    weighted: bool = True,
) -> None:
    from lq_lightning.kernels.norm.triton_kernels import launch_norm_backward

    weight = torch.randn(dy.shape[1]) if weighted else None
    expected = norm_backward(message, rstd, dy, weight, kind, str(fmt), dy.dtype, True)
    moved = [p if p is None else p.to(device) for p in (message, rstd, dy, weight)]
    dx, *sums = [torch.full_like(result, 7.0, device=device) for result in expected]
    launch_norm_backward((*moved, dx, *sums), kind, fmt)
    assert_close(dx, expected[0])
    for actual, exact in zip(sums, expected[1:], strict=True):
        atol = 1e-5 * max(1.0, dy.shape[0] ** 0.5)
        torch.testing.assert_close(actual.cpu(), exact, rtol=1e-4, atol=atol, equal_nan=True)
    again, nothing = torch.empty_like(dx, dtype=torch.float32), torch.empty(0, device=device)
    launch_norm_backward((*moved, again, nothing, nothing), kind, fmt)
    torch.testing.assert_close(again.to(dy.dtype), dx, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("kind", "rows", "numel", "fmt", "dtype"), CASES, ids=IDS)
def test_kernels_match_the_reference(
    kind: str, rows: int, numel: int, fmt: MessageFormat, dtype: torch.dtype, device: torch.device
) -> None:
    x = summable(rows, numel).to(dtype)
    message, rstd = check_forward(x, kind, fmt, device)
    check_rebuild(message, rstd, numel, kind, fmt, dtype, device)
    check_backward(message, rstd, torch.randn(rows, numel).to(dtype), kind, fmt, device)


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [1600, 2048, 4096, 8192, 16384, MAX_NUMEL])
@pytest.mark.parametrize("kind", ["layer", "rms_cast"])
def test_many_rows_per_program(kind: str, numel: int, device: torch.device) -> None:
    """By the table, which in the other tests has a program for every row."""
    rows = 2 * max(table[min(table)].programs for table in SCHEDULES.values()) // (numel // 512) + 1
    x = summable(rows, numel).bfloat16()
    message, rstd = check_forward(x, kind, MIXED, device)
    check_rebuild(message, rstd, numel, kind, MIXED, x.dtype, device)
    check_backward(message, rstd, torch.randn(rows, numel).bfloat16(), kind, MIXED, device)


@pytest.mark.parametrize("numel", [128, 208])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite(kind: str, numel: int, device: torch.device) -> None:
    """A few bad rows: others, which share their tile or reach into theirs, stay as they are."""
    x = summable(5, numel)
    for row, bad in ((1, float("nan")), (3, float("inf")), (4, float("-inf"))):
        x[row, 0] = bad
    message, rstd = check_forward(x, kind, EIGHT, device)
    check_rebuild(message, rstd, numel, kind, EIGHT, torch.bfloat16, device)
    check_backward(message, rstd, torch.randn(5, numel), kind, EIGHT, device)


def test_awkward_values(device: torch.device) -> None:
    x = awkward_rows(4, 1600, 64)
    check_forward(x, "rms", SMALL, device)
    check_forward(awkward_rows(4, 1600, 64)[:, :128], "rms", SMALL, device)


@pytest.mark.parametrize("numel", [128, 197])
def test_no_rows_and_rows_apart(numel: int, device: torch.device) -> None:
    check_forward(torch.zeros(0, numel), "layer", SMALL, device)
    wide = summable(6, 2 * numel + 6) + 50  # so that padding would be far from the mean
    message, rstd = check_forward(wide[::2, :numel].bfloat16(), "layer", SMALL, device)
    wide = wide.bfloat16()[:, :numel]
    message, rstd = check_forward(wide, "layer", SMALL, device, weighted=False)
    check_backward(message, rstd, wide, "layer", SMALL, device, weighted=False)
    gradients = norm_backward(
        message[:0] if message.shape[0] > 1 else message[:, :0],
        *(rstd[:0], wide[:0], None, "layer", str(SMALL), torch.float32, True),
    )
    from lq_lightning.kernels.norm.triton_kernels import launch_norm_backward

    empty = empty_message(SMALL, 0, numel, device)
    others = [value.to(device) for value in (rstd[:0], wide[:0])]
    found = [torch.full_like(gradient, 7.0, device=device) for gradient in gradients]
    launch_norm_backward((empty, *others, None, *found), "layer", SMALL)
    for actual, expected in zip(found, gradients, strict=True):
        assert torch.equal(actual.cpu(), expected)


def test_largest_magnitude_is_that_of_the_rounded_output(device: torch.device) -> None:
    from lq_lightning.kernels.norm.triton_kernels import launch_norm_quantize

    x = torch.ones(2, 64, device=device)
    weight = torch.full((64,), 0.3, device=device)
    weight[5] = -65519.9  # the largest of fp16 after rounding; 65520 is infinite
    for value, expected in ((-65519.9, 65504.0), (65520.1, float("inf"))):
        weight[5] = value
        message = encode_matrix(x.cpu(), SMALL).to(device)
        y, rstd = torch.empty_like(x, dtype=torch.float16), torch.empty(2, 1, device=device)
        amax = torch.zeros(1, device=device)
        launch_norm_quantize((x, weight, None, y, rstd, message, amax), 0.0, "rms", SMALL)
        assert float(amax) == expected


def test_tiles_hold_rows_groups_and_padding() -> None:
    for numel in (1, 16, 64, 100, 128, 197, 1008, 1024, 1600, 4096, 5120, 16384):
        for fmt in (FOUR, SMALL, EIGHT, ODD, WIDE):
            for tile in (whole_rows(fmt, 100, numel), parts_of_rows(fmt, 100, numel)):
                assert tile.block & (tile.block - 1) == 0
                assert tile.rows == 1 or tile.rows * numel == tile.block
            tile = whole_rows(fmt, 100, numel)
            assert tile.block % fmt.group_size == 0
            assert tile.block >= numel
            assert not tile.full or tile.block == tile.rows * numel
            if tile.flat and len(fmt.planes) > 1:  # the section of each plane ends in the tile
                assert tile.block >= numel + (-numel % 128 and 112)
    x = torch.zeros(4, 200)[:, :128]
    assert whole_rows(FOUR, 4, 128, x).rows == 1
    assert whole_rows(FOUR, 4, 128, x.contiguous()).rows == 8
    with pytest.raises(NotImplementedError, match="rows of 32769 values"):
        whole_rows(FOUR, 4, MAX_NUMEL + 1)


def test_schedules_fill_threads() -> None:
    for kind, table in SCHEDULES.items():
        for block, schedule in table.items():
            assert choose_schedule(kind, block, torch.device("cuda")) == schedule
            per_thread = block // (32 * schedule.warps)
            assert per_thread % schedule.run == 0
            assert schedule.run >= 8
        assert choose_schedule(kind, 1, torch.device("cuda")) == table[min(table)]
        assert choose_schedule(kind, 1 << 20, torch.device("cuda")) == table[max(table)]


@pytest.mark.parametrize("numel", [208, 1008])
def test_constant_rows(numel: int, device: torch.device) -> None:
    """Their mean is that constant: times a rounded 1 / N it would not be, for these N."""
    x = torch.tensor([0.0, 896.0, -7.0, 2.0**20]).bfloat16()[:, None].repeat(1, numel)
    message, rstd = check_forward(x, "layer", SMALL, device)
    check_backward(message, rstd, torch.randn(4, numel).bfloat16(), "layer", SMALL, device)
