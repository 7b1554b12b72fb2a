"""Messages of mixed widths on a CPU: what they say bit by bit, and what is decoded from them."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lq_lightning.codecs import CodecSpec, decode, encode
from lq_lightning.kernels.mixed_width import (
    mixed_dequantize,
    mixed_layout,
    mixed_quantize,
    mixed_quantize_and_round,
    mixed_round_trip,
    reference,
    width_counts,
    width_rows,
)
from lq_lightning.kernels.mixed_width.format import HALF_RANGES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Planes of a code from its low bits on.
PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
EVERY_WIDTH = torch.tensor([3, 16, 1, 8, 5, 2, 7, 12, 4, 6, 9, 1, 7, 3, 10, 8, 5])


def spread(tokens: int, lines: int, dtype: torch.dtype) -> Tensor:
    """Lines of very different sizes and centers."""
    x = torch.randn(tokens, lines) * torch.logspace(-3, 3, lines)
    return (x + torch.randn(lines)).to(dtype)


def quantize(x: Tensor, widths: Tensor) -> Tensor:
    return mixed_quantize(x, width_rows(widths), width_counts(widths))


def dequantize(message: Tensor, widths: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    return mixed_dequantize(message, width_rows(widths), width_counts(widths), tokens, dtype)


class Section:
    """Reads a message bit by bit, and clears what it has read."""

    def __init__(self, message: Tensor, start: int) -> None:
        self.message, self.start, self.bit = message, start, 0

    def read(self, width: int) -> int:
        value = 0
        for place in range(width):
            byte, shift = self.start + self.bit // 8, self.bit % 8
            value |= (int(self.message[byte]) >> shift & 1) << place
            self.message[byte] &= 255 - (1 << shift)
            self.bit += 1
        return value


def bfloat(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])


def read_message(message: Tensor, widths: Tensor, tokens: int) -> Tensor:
    """Decode as the description of the format says; the message is left without what it says."""
    sent = [width if width <= 8 else 16 for width in widths.tolist()]
    order = sorted(range(len(sent)), key=lambda line: (int(widths[line]), line))
    padded = -(-tokens // 8) * 8
    start, values = 0, torch.zeros(padded, len(sent))
    codes = {line: [0] * padded for line in order}
    done = dict.fromkeys(order, 0)
    for plane in (16, 8, 4, 2, 1):
        members = [line for line in order if plane in PLANES.get(sent[line], (16,))]
        section = Section(message, start)
        for line in members:
            for token in range(padded):
                codes[line][token] |= section.read(plane) << done[line]
            done[line] += plane
        start += -(-len(members) * padded * plane // 8 // 16) * 16
    coded = [line for line in order if sent[line] <= 8]
    size = -(-2 * len(coded) // 16) * 16
    scales, minima = Section(message, start), Section(message, start + size)
    factor, offset = torch.zeros(len(sent)), torch.zeros(len(sent))
    for line in coded:
        factor[line], offset[line] = bfloat(scales.read(16)), bfloat(minima.read(16))
    for line in order:
        assert done[line] == sent[line]
        assert not any(codes[line][tokens:])
        raw = sent[line] == 16
        values[:, line] = torch.tensor([bfloat(c) if raw else float(c) for c in codes[line]])
    values[:, coded] = values[:, coded] * factor[coded] + offset[coded]
    assert message.numel() == start + 2 * size
    return values[:tokens]


@pytest.mark.parametrize("tokens", [1, 8, 11])
@pytest.mark.parametrize("dtype", DTYPES)
def test_messages_are_as_described(tokens: int, dtype: torch.dtype) -> None:
    x = spread(tokens, len(EVERY_WIDTH), dtype)
    message = quantize(x, EVERY_WIDTH)
    rest = message.clone()
    values = read_message(rest, EVERY_WIDTH, tokens)
    assert not rest.any()  # zeros between sections and beyond the last token
    assert torch.equal(dequantize(message, EVERY_WIDTH, tokens, torch.float32), values)
    assert torch.equal(dequantize(message, EVERY_WIDTH, tokens, dtype), values.to(dtype))


tables = st.lists(st.integers(1, 16), min_size=1, max_size=40).map(torch.tensor)


@given(tables, st.integers(0, 40), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 99))
def test_size_error_and_round_trip(
    widths: Tensor, tokens: int, dtype: torch.dtype, transposed: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x = spread(tokens, len(widths), dtype)
    strided = x.t().contiguous().t() if transposed else torch.stack((x, x), 2)[..., 1]
    message = quantize(strided, widths)
    assert torch.equal(message, quantize(x, widths))

    padded, coded = -(-tokens // 8) * 8, int((widths <= 8).sum())
    sent = widths.where(widths <= 8, torch.tensor(16))
    sections = [int((sent & plane != 0).sum()) * padded * plane // 8 for plane in (16, 8, 4, 2, 1)]
    sections += [2 * coded * (tokens > 0)] * 2
    assert message.numel() == sum(-(-size // 16) * 16 for size in sections)

    decoded = dequantize(message, widths, tokens, dtype)
    assert torch.equal(mixed_round_trip(strided, width_rows(widths)), decoded)
    both, rounded = mixed_quantize_and_round(strided, width_rows(widths), width_counts(widths))
    assert torch.equal(both, message)
    assert torch.equal(rounded, decoded)
    assert decoded.dtype == dtype
    assert decoded.is_contiguous()
    if tokens:
        error = (dequantize(message, widths, tokens, torch.float32) - x.float()).abs()
        low, largest = x.float().amin(0), x.float().abs().amax(0)
        # a minimum rounded down and a step rounded up, to 8 bits each; arithmetic in 24 bits
        width = x.float().amax(0) - low + low.abs() * 2**-7
        step = width / (2.0 ** widths.clamp(max=8) - 1) * (1 + 2**-7)
        bound = (step / 2 + largest * 2**-22).where(widths <= 8, largest * 2**-8)
        assert (error <= bound).all()


@pytest.mark.parametrize("width", range(2, 9))
def test_lines_are_coded_as_groups_of_other_codecs(width: int) -> None:
    x = spread(64, 9, torch.float32)
    spec = CodecSpec(code=f"int{width}", group_size=64, symmetric=False, scale_dtype="bfloat16")
    widths = torch.full((9,), width)
    groups = decode(spec, encode(spec, x.t().contiguous()), 64).t()
    assert torch.equal(mixed_round_trip(x, width_rows(widths)), groups)


def test_a_width_of_one_has_the_minimum_and_the_maximum() -> None:
    x = torch.tensor([[-2.0, 1.0], [-1.0, 1.0], [0.0, 5.0], [6.0, 9.0]])
    expected = torch.tensor([[-2.0, 1.0], [-2.0, 1.0], [-2.0, 1.0], [6.0, 9.0]])
    assert torch.equal(mixed_round_trip(x, width_rows(torch.tensor([1, 1]))), expected)


def fitted(x: Tensor, widths: Tensor) -> Tensor:
    """What arrives; encoded with blocks of its own, and checked against the round trip."""
    rows = width_rows(widths)
    message, both = mixed_quantize_and_round(x, rows, width_counts(widths), True)
    assert torch.equal(message, mixed_quantize(x, rows, width_counts(widths), True))
    decoded = dequantize(message, widths, x.shape[0], x.dtype)
    rounded = mixed_round_trip(x, rows, True)
    torch.testing.assert_close(rounded, decoded, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(both, decoded, rtol=0, atol=0, equal_nan=True)
    return decoded


def normal_error(half_range: float, levels: int) -> float:
    """Mean square error of uniform codes from -half to half for normal values, numerically."""
    x = torch.linspace(-9, 9, 200_001, dtype=torch.float64)
    step = 2 * half_range / (levels - 1)
    codes = ((x + half_range) / step).round().clamp(0, levels - 1) * step - half_range
    return float(
        ((codes - x).square() * torch.exp(-x * x / 2)).sum() * 9e-5 / math.sqrt(2 * math.pi)
    )


@pytest.mark.parametrize("width", range(1, 9))
def test_fitted_ranges_have_the_least_error_for_normal_values(width: int) -> None:
    half = HALF_RANGES[width - 1]
    least = normal_error(half, 2**width)
    assert all(normal_error(half * other, 2**width) > least for other in (0.99, 1.01))
    x = torch.randn(20_000, 4) * torch.tensor([1e-3, 1.0, 5.0, 1e3]) + 2e-4
    widths = torch.full((4,), width)
    found = (fitted(x, widths) - x).square().mean(0) / x.var(0)
    # a handful of values are outside the range of 8 bits
    torch.testing.assert_close(found, torch.full((4,), least), rtol=0.25, atol=0.0)
    full = (mixed_round_trip(x, width_rows(widths)) - x).square().mean(0) / x.var(0)
    assert width > 6 or (found < full * 0.8).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranges_are_fitted_where_that_promises_a_smaller_error(dtype: torch.dtype) -> None:
    """Mean and deviations, where the error of normal values and of the two extremes is less."""
    widths = torch.arange(1, 9).repeat(2)
    x = (torch.randn(600, 16) * torch.logspace(-2, 2, 16) + torch.randn(16)).to(dtype)
    x[7, :8] *= 10  # values far off, which become the end of the range with few bits
    wide = x.double()
    deviation, smallest, largest = wide.std(0, correction=0), wide.amin(0), wide.amax(0)
    reach = torch.tensor(HALF_RANGES).repeat(2) * deviation
    low = torch.maximum(wide.mean(0) - reach, smallest)
    high = torch.minimum(wide.mean(0) + reach, largest)
    normal = torch.tensor(
        [normal_error(half, 2**width) for width, half in enumerate(HALF_RANGES, 1)]
    )
    cut = ((low - smallest).square() + (largest - high).square()) / 600
    full = ((largest - smallest) / (2**widths - 1)).square() / 12
    full[widths == 1] *= 3
    fits = normal.repeat(2) * deviation.square() + cut < full
    assert fits[[0, 1, 2, 8, 9, 10, 11]].all()
    assert not fits[[4, 5, 6, 7]].any()
    low, high = torch.where(fits, low, smallest), torch.where(fits, high, largest)
    decoded = fitted(x, widths).double()
    margin = (high - low) * 2e-2 + low.abs() * 2**-6
    assert ((decoded.amin(0) - low).abs() <= margin).all()
    assert ((decoded.amax(0) - high).abs() <= margin + (high - low) / (2**widths - 1)).all()
    inside = (x >= low) & (x <= high)
    step = (high - low + low.abs() * 2**-7) / (2**widths - 1)
    assert (((decoded - wide).abs() <= step * 0.53 + wide.abs() * 2**-8) | ~inside).all()


def test_fitted_ranges_of_what_does_not_deviate_are_full() -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.zeros(9, 9)
    x[:, 1] = 1.2345
    x[:, 2] = torch.linspace(1.0, 1.5, 9) * 2.0**-126
    x[3, 3] = float("nan")
    x[3, 4] = float("inf")
    x[3:, 5] = -float("inf")
    x[:, 6], x[3, 6] = -3.3, float("inf")
    x[:, 7] = torch.tensor([-1.0, 1.0, 0, 0, 0, 0, 0, 0, 0]) * largest
    x[:, 8] = torch.linspace(0.99, 1.0, 9) * largest
    for width in range(1, 9):
        widths = torch.full((9,), width)
        full = mixed_round_trip(x, width_rows(widths))
        decoded = fitted(x, widths)
        same = [0, 1, 2, 3, 4, 5, 6]
        torch.testing.assert_close(decoded[:, same], full[:, same], rtol=0, atol=0, equal_nan=True)
        assert decoded[:, 7:].isfinite().all()
        assert (decoded[:, 8] / largest > 0.2).all()
        one = x[:1, [0, 1, 2, 7, 8]]
        rows = width_rows(widths[:5])
        assert torch.equal(mixed_round_trip(one, rows, True), mixed_round_trip(one, rows))
    assert mixed_round_trip(x[:0], width_rows(torch.full((9,), 3)), True).shape == (0, 9)


def test_one_value_far_off_is_clipped_only_if_that_costs_less() -> None:
    x = torch.randn(1024, 3).clamp(-3, 3)
    x[5, 1], x[5, 2] = 1e4, 9.0
    widths = torch.tensor([3, 4, 3])
    decoded, full = fitted(x, widths), mixed_round_trip(x, width_rows(widths))
    assert decoded[5, 1] == pytest.approx(1e4, rel=0.02)  # a third of all squares otherwise
    torch.testing.assert_close(decoded[:, 1], full[:, 1], rtol=0, atol=0)
    assert decoded[5, 2] == pytest.approx(HALF_RANGES[2] * float(x[:, 2].std()), rel=0.1)
    errors, others = ((y - x).square().mean(0) for y in (decoded, full))
    assert (errors[[0, 2]] < others[[0, 2]] * 0.8).all()


def test_widths_above_eight_are_bf16() -> None:
    x = spread(19, 8, torch.float32)
    x[3, 1], x[4, 2], x[5, 3] = float("nan"), float("inf"), -float("inf")
    widths = torch.arange(9, 17)
    message = quantize(x, widths)
    assert message.numel() == 24 * 8 * 2
    decoded = dequantize(message, widths, 19, torch.float32)
    torch.testing.assert_close(decoded, x.bfloat16().float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(quantize(decoded, widths), message)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_line_alone(dtype: torch.dtype, bad: float) -> None:
    x = spread(20, len(EVERY_WIDTH), dtype)
    expected = mixed_round_trip(x, width_rows(EVERY_WIDTH))
    for line, width in enumerate(EVERY_WIDTH.tolist()):
        broken, rows = x.clone(), width_rows(EVERY_WIDTH)
        broken[13, line] = bad
        decoded = dequantize(quantize(broken, EVERY_WIDTH), EVERY_WIDTH, 20, dtype)
        torch.testing.assert_close(
            mixed_round_trip(broken, rows), decoded, rtol=0, atol=0, equal_nan=True
        )
        both = mixed_quantize_and_round(broken, rows, width_counts(EVERY_WIDTH))
        torch.testing.assert_close(both[1], decoded, rtol=0, atol=0, equal_nan=True)
        changed = expected.clone()
        changed[13 if width > 8 else slice(None), line] = bad if width > 8 else float("nan")
        torch.testing.assert_close(decoded, changed, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("width", range(1, 9))
def test_extreme_lines_stay_finite(width: int) -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.zeros(9, 6)
    x[:, 1] = 1.5  # constant
    x[:, 2] = torch.linspace(-1.0, 1.0, 9) * largest  # wider than fp32
    x[:, 3] = torch.linspace(1.0, 1.5, 9) * 2.0**-126  # steps too small to divide by
    x[:, 4] = torch.linspace(0.99, 1.0, 9) * largest
    x[4, 5] = -0.0
    widths = torch.full((6,), width)
    decoded = dequantize(quantize(x, widths), widths, 9, torch.float32)
    assert decoded.isfinite().all()
    assert torch.equal(decoded, mixed_round_trip(x, width_rows(widths)))
    both = mixed_quantize_and_round(x, width_rows(widths), width_counts(widths))
    assert torch.equal(decoded, both[1])
    assert torch.equal(decoded[:, [0, 1, 5]], x[:, [0, 1, 5]])
    assert (decoded[:, 3] <= 2.0**-126).all()
    for line in (2, 4):  # smaller than they were, by one factor
        ratio = decoded[-1, line] / largest
        assert 0.2 < ratio < 1.01
        assert (decoded[:, line] - x[:, line] * ratio).abs().max() < largest / (2**width - 1)


def test_blocks_of_tokens_and_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = torch.arange(67) % 16 + 1
    x = spread(43, 67, torch.bfloat16)
    message, rounded = quantize(x, widths), mixed_round_trip(x, width_rows(widths))
    clipped = fitted(x, widths)
    monkeypatch.setattr(reference, "_BLOCK_NUMEL", 200)
    monkeypatch.setattr(reference, "_BLOCK_TOKENS", 16)
    assert torch.equal(quantize(x, widths), message)
    assert torch.equal(dequantize(message, widths, 43, torch.bfloat16), rounded)
    assert torch.equal(mixed_round_trip(x, width_rows(widths)), rounded)
    assert torch.equal(fitted(x, widths), clipped)
    monkeypatch.setattr(reference, "_EXACT_TERMS", 2)
    assert torch.equal(fitted(x, widths), clipped)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [0, 13])
def test_opcheck(device: str, tokens: int) -> None:
    x = torch.randn(tokens, len(EVERY_WIDTH), device=device)
    rows, counts = width_rows(EVERY_WIDTH).to(device), width_counts(EVERY_WIDTH)
    torch.library.opcheck(mixed_quantize, (x, rows, counts))
    torch.library.opcheck(mixed_quantize, (x, rows, counts, True))
    torch.library.opcheck(mixed_quantize_and_round, (x, rows, counts, True))
    torch.library.opcheck(mixed_round_trip, (x.t().contiguous().t(), rows, True))
    message = mixed_quantize(x, rows, counts)
    torch.library.opcheck(mixed_dequantize, (message, rows, counts, tokens, torch.bfloat16))


def test_refusals() -> None:
    x, rows, counts = torch.randn(9, 3), width_rows(torch.tensor([2, 4, 16])), [0] * 16
    counts[1] = counts[3] = counts[15] = 1
    message = mixed_quantize(x, rows, counts)
    with pytest.raises(ValueError, match="x has dtype torch.float64"):
        mixed_quantize(x.double(), rows, counts)
    for shape in ((9, 4), (1, 9, 3), (3,)):
        with pytest.raises(ValueError, match=r"expected \[T, N\] and \[8, N\]"):
            mixed_round_trip(torch.randn(shape), rows)
    with pytest.raises(
        ValueError, match=r"rows has shape \(7, 3\) on cpu; expected \[8, N\] on cpu"
    ):
        mixed_round_trip(x, rows[1:])
    with pytest.raises(ValueError, match=r"rows has shape \(7, 3\)"):
        mixed_dequantize(message, rows[1:], counts, 9, torch.float32)
    many = 2**31 // 3 + 1
    with pytest.raises(ValueError, match=f"{many} tokens of 3 lines are too many"):
        mixed_quantize(x[:1].expand(many, 3), rows, counts)
    with pytest.raises(ValueError, match="less than 2147483648 values"):
        mixed_dequantize(message, rows, counts, many, torch.float32)
    with pytest.raises(ValueError, match="does not count 3 lines"):
        mixed_quantize(x, rows, [1, *counts[1:]])
    with pytest.raises(ValueError, match="does not count 3 lines"):
        mixed_dequantize(message, rows, counts[:15], 9, torch.float32)
    with pytest.raises(ValueError, match="dtype has dtype torch.float64"):
        mixed_dequantize(message, rows, counts, 9, torch.float64)
    with pytest.raises(ValueError, match=f"need {mixed_layout(counts, 9).nbytes}"):
        mixed_dequantize(message[:-16], rows, counts, 9, torch.float32)


@pytest.mark.gpu
def test_rows_of_another_device_are_refused() -> None:
    rows, counts = width_rows(EVERY_WIDTH), width_counts(EVERY_WIDTH)
    x = torch.randn(9, len(EVERY_WIDTH), device="cuda")
    message = mixed_quantize(x, rows.cuda(), counts)
    for call in (
        lambda: mixed_quantize(x, rows, counts),
        lambda: mixed_round_trip(x, rows),
        lambda: mixed_dequantize(message, rows, counts, 9, torch.float32),
    ):
        with pytest.raises(ValueError, match="on cpu; expected"):
            call()
