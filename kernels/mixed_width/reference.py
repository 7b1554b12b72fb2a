"""Messages of mixed widths in plain torch: the truth that the Triton kernels must match.

Fast on a CPU, too, where values are worked on in blocks that stay in a core's cache.

Shape legend: T tokens, N lines, L lines of a block, P tokens padded to a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lq_lightning.kernels.message import ALIGNMENT_NBYTES, round_up
from lq_lightning.kernels.message import reference as blocks
from lq_lightning.kernels.message.format import PLANES as CODE_PLANES
from lq_lightning.kernels.message.reference import asymmetric_scaling

from .format import (
    FITTED_ERRORS,
    FULL_ERRORS,
    HALF_RANGES,
    MAX_CODE_WIDTH,
    MOMENT_CENTER,
    MOMENT_LEVELS,
    ORDER_ROW,
    PLACE_ROW,
    PLANES,
    SCALES,
    TOKENS_PER_WORD,
    WIDTH_ROW,
    MixedLayout,
    mixed_layout,
)

# Values that are worked on at once, and tokens of a block of lines, a multiple of 8.
_BLOCK_NUMEL = 1 << 18
_BLOCK_TOKENS = 1024
# Squares of 512 at most, of which fp32 adds up so many without rounding.
_EXACT_TERMS = 64
# What a cast to bf16 makes of NaN depends on the machine.
_NAN_BITS = 0x7FC0


def quantize(
    x: Tensor,
    rows: Tensor,
    counts: Sequence[int],
    fitted: bool,
    out: Tensor,
    rounded: Tensor | None = None,
) -> None:
    """Encode as the operator does; ``rounded`` gets what ``round_trip`` returns."""
    tokens = x.shape[0]
    layout = mixed_layout(counts, tokens)
    for end in layout.ends:
        out[end : round_up(end, ALIGNMENT_NBYTES)] = 0
    if tokens == 0:
        return
    order = rows[ORDER_ROW].to(torch.int64)
    coded, raw = order[: layout.coded_lines], order[layout.coded_lines :]
    if raw.numel():
        section = _raw_section(out, layout)
        values = x.index_select(1, raw)
        bits = values.to(torch.bfloat16).view(torch.int16).masked_fill_(values.isnan(), _NAN_BITS)
        section[:, :tokens] = bits.t()
        section[:, tokens:] = 0
    if coded.numel():
        scaling = scaling_of_lines(x, rows, fitted)
        store_codes(_codes(x, scaling, layout, rounded), coded, counts, out)
        message = out.unsqueeze(0)
        scale, minimum = scaling.scale[coded], scaling.minimum[coded]
        blocks.store_scales(scale.unsqueeze(0), message, layout.scale_offset, SCALES)
        blocks.store_scales(minimum.unsqueeze(0), message, layout.minimum_offset, SCALES)
    if rounded is not None:
        _round_raw(x, raw, rounded)


def dequantize(message: Tensor, rows: Tensor, counts: Sequence[int], out: Tensor) -> None:
    """Decode values to ``out``; other arguments as for the operator."""
    tokens = out.shape[0]
    layout = mixed_layout(counts, tokens)
    if tokens == 0:
        return
    count = layout.coded_lines
    if count:
        place = rows[PLACE_ROW].to(torch.int64).clamp_(max=count - 1)
        codes = load_codes(message, counts, layout)
        message_row = message.unsqueeze(0)
        scale = blocks.load_scales(message_row, layout.scale_offset, count, SCALES)[0, place]
        minimum = blocks.load_scales(message_row, layout.minimum_offset, count, SCALES)[0, place]
        for part, lines, scratch in _blocks(*out.shape):
            # transposed as bytes, in a copy of its own: 7 times as fast for some shapes
            block = codes[:, part].index_select(0, place[lines]).t().contiguous()
            levels = scratch[: block.shape[0]].copy_(block)
            _scale_back(levels, scale[lines], minimum[lines], out[part, lines])
    raw = rows[ORDER_ROW, count:].to(torch.int64)
    if raw.numel():
        values = _raw_section(message, layout)[:, :tokens].view(torch.bfloat16)
        out[:, raw] = values.t().to(out.dtype)


def round_trip(x: Tensor, rows: Tensor, fitted: bool, out: Tensor) -> None:
    """Write what is decoded from the message of ``x`` to ``out``, without packing."""
    if x.shape[0] == 0:
        return
    scaling = scaling_of_lines(x, rows, fitted)
    for part, scratch in _strips(x):
        levels = _levels(x[part], scaling, slice(None), scratch)
        _scale_back(levels, scaling.scale, scaling.minimum, out[part])
    _round_raw(x, (rows[WIDTH_ROW] > MAX_CODE_WIDTH).nonzero().view(-1), out)


def _round_raw(x: Tensor, raw: Tensor, out: Tensor) -> None:
    """Write the values of lines that travel as bf16."""
    if raw.numel():
        out[:, raw] = x.index_select(1, raw).to(torch.bfloat16).to(out.dtype)


class LineScaling(NamedTuple):
    """Scaling of lines, as ``Scaling`` of groups, ``[N]`` fp32 each.

    Attributes:
        scale: NaN where a line is not finite.
        minimum: 0 where the scale is NaN.
        norm: None where all are 1, as they mostly are.
        inverse: 0 where the scale is 0 or NaN.
        most: the largest codes where values may lie outside the range; else None.
    """

    scale: Tensor
    minimum: Tensor
    norm: Tensor | None
    inverse: Tensor
    most: Tensor | None


def scaling_of_lines(x: Tensor, rows: Tensor, fitted: bool) -> LineScaling:
    """Return how ``[T, N]`` values are scaled; bf16 lines as if they had 8 bits.

    If ``fitted``, the range of a line is that of ``fitted_range``, and not that of its values.
    """
    bits = rows[WIDTH_ROW].clamp(max=MAX_CODE_WIDTH)
    max_level = ((1 << bits) - 1).to(torch.float32)
    # A strip is read twice, from the cache.
    lows, highs = zip(*((x[part].amin(0), x[part].amax(0)) for part, _ in _strips(x)), strict=True)
    low, high = torch.stack(lows).amin(0), torch.stack(highs).amax(0)
    low, high = low.to(torch.float32), high.to(torch.float32)
    if fitted:
        low, high = fitted_range(x, low, high, bits)
    return _line_scaling(low, high, max_level, max_level if fitted else None)


def _line_scaling(
    low: Tensor, high: Tensor, levels: float | Tensor, most: Tensor | None
) -> LineScaling:
    scale, minimum, norm, inverse = asymmetric_scaling(low, high, 1.0, levels, SCALES)
    if minimum is None or norm is None:
        raise AssertionError("asymmetric scaling without a minimum")
    return LineScaling(scale, minimum, None if (norm == 1.0).all() else norm, inverse, most)


def fitted_range(x: Tensor, low: Tensor, high: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of each line less and plus so many deviations, within its extremes.

    Lines keep their extremes (``low``, ``high``) where these promise a smaller error: with many
    ``bits``, few values, or a value that is far off; and where they have no scale, because they are
    constant, tiny or not finite. A fitted range is taken to have the error of normal values and, on
    top, that of the two extremes, which become its ends.
    """
    half, expected, limit = torch.tensor(
        (HALF_RANGES, FITTED_ERRORS, FULL_ERRORS), dtype=torch.float32
    )[:, (bits - 1).to(torch.int64)]
    measure = _line_scaling(low, high, float(MOMENT_LEVELS), None)
    sums, squares = _moments(x, measure)
    mean = sums / x.shape[0]
    variance = squares / x.shape[0] - mean * mean
    center = mean.to(torch.float32) + MOMENT_CENTER
    variance = variance.clamp_(min=0.0).to(torch.float32)
    reach = variance.sqrt() * half
    below, above = center - reach, MOMENT_LEVELS - (center + reach)  # what the ends cut off
    below, above = below.clamp_(min=0.0), above.clamp_(min=0.0)
    clipped = (below * below + above * above) / torch.tensor(float(x.shape[0]))
    fits = (measure.scale > 0) & (variance * expected + clipped < limit)
    ends = []
    for end, extreme in ((center - reach, low), (center + reach, high)):
        value = end * measure.scale + measure.minimum
        value = value if measure.norm is None else value / measure.norm
        value = torch.minimum(torch.maximum(value, low), high)
        ends.append(torch.where(fits, value, extreme))
    return ends[0], ends[1]


def _moments(x: Tensor, measure: LineScaling) -> Tensor:
    """Sums of codes less their center, and of the squares of that: ``[2, N]`` fp64, exact."""
    moments = torch.zeros(2, x.shape[1], dtype=torch.float64)
    for part, scratch in _strips(x):
        levels = _levels(x[part], measure, slice(None), scratch).sub_(MOMENT_CENTER)
        moments[0] += _exact_sum(levels)
        moments[1] += _exact_sum(levels.square_())
    return moments


def _exact_sum(values: Tensor) -> Tensor:
    """Sum integers of at most 2**18 over tokens: ``[N]``."""
    whole = values.shape[0] // _EXACT_TERMS * _EXACT_TERMS
    last = values[whole:].sum(0)
    if not whole:
        return last
    parts = values[:whole].view(-1, _EXACT_TERMS, values.shape[1]).sum(1)
    return parts.sum(0, dtype=torch.float64).add_(last)


def _levels(x: Tensor, scaling: LineScaling, lines: slice, scratch: Tensor) -> Tensor:
    """Codes of ``[T, L]`` values as fp32, in scratch memory; any number where there is no scale."""
    minimum = scaling.minimum[lines]
    if x.dtype == torch.float32 and scaling.norm is None:
        levels = torch.sub(x, minimum, out=scratch)
    else:  # an operator that is given bf16 makes an fp32 copy of its own
        levels = scratch.copy_(x)
        if scaling.norm is not None:
            levels.mul_(scaling.norm[lines])
        levels.sub_(minimum)
    levels.mul_(scaling.inverse[lines]).round_()
    if scaling.most is not None:
        most = scaling.most[lines]
        levels.clamp_(torch.zeros_like(most), most)
    return levels


def _scale_back(levels: Tensor, scale: Tensor, minimum: Tensor, out: Tensor) -> None:
    """Write the values of codes; ``levels`` is overwritten."""
    levels.mul_(scale)
    if out.dtype == torch.float32:
        torch.add(levels, minimum, out=out)
    else:
        out.copy_(levels.add_(minimum))


def _codes(x: Tensor, scaling: LineScaling, layout: MixedLayout, rounded: Tensor | None) -> Tensor:
    """Codes of all lines, ``[N, P]`` uint8, with zeros beyond the last token.

    Their values are written to ``rounded``, if given, while codes are in the cache.
    """
    codes = torch.empty(x.shape[1], layout.padded_tokens, dtype=torch.uint8)
    words = codes.view(torch.int32)
    broken = scaling.scale.isnan()
    for part, lines, scratch in _blocks(*x.shape):
        values = x[part, lines]
        levels = _levels(values, scaling, lines, scratch[: values.shape[0]])
        if broken[lines].any():
            levels.masked_fill_(broken[lines], 0.0)
        scratch[values.shape[0] :] = 0.0
        # Four tokens are transposed as one number; two are exact in fp32.
        pairs = torch.add(scratch[0::2], scratch[1::2], alpha=256.0).to(torch.int32)
        fours = torch.add(pairs[0::2], pairs[1::2], alpha=1 << 16)
        words[lines, part.start // 4 : part.start // 4 + fours.shape[0]] = fours.t()
        if rounded is not None:
            _scale_back(levels, scaling.scale[lines], scaling.minimum[lines], rounded[part, lines])
    return codes


def _blocks(tokens: int, lines: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Cut ``[T, N]`` into blocks of tokens and lines.

    Each comes with fp32 scratch memory of its lines and of its tokens, a multiple of 8 of them.
    """
    height = min(round_up(tokens, TOKENS_PER_WORD), _BLOCK_TOKENS)
    width = min(lines, max(1, _BLOCK_NUMEL // height))
    scratch = torch.empty(height * width, dtype=torch.float32)
    for line in range(0, lines, width):
        for token in range(0, tokens, height):
            part = slice(token, min(token + height, tokens))
            columns = slice(line, min(line + width, lines))
            shape = round_up(part.stop - token, TOKENS_PER_WORD), columns.stop - line
            yield part, columns, scratch[: shape[0] * shape[1]].view(shape)


def _strips(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Cut ``[T, N]`` into parts of all lines, each with fp32 scratch memory of its shape."""
    tokens, lines = x.shape
    height = min(tokens, max(1, _BLOCK_NUMEL // lines))
    scratch = torch.empty(height, lines, dtype=torch.float32)
    for token in range(0, tokens, height):
        end = min(token + height, tokens)
        yield slice(token, end), scratch[: end - token]


def _raw_section(message: Tensor, layout: MixedLayout) -> Tensor:
    """Bits of the lines that travel as bf16: ``[lines, P]`` int16."""
    section = message[: layout.plane_lines[0] * layout.padded_tokens * 2]
    return section.view(torch.int16).view(-1, layout.padded_tokens)


def _parts(
    counts: Sequence[int], padded: int
) -> Iterator[tuple[slice, tuple[int, ...], list[int]]]:
    """Yield, for each width of codes, its lines in sorted order, its planes and their offsets."""
    layout = mixed_layout(counts, padded)
    starts = dict(zip(PLANES, layout.plane_offsets, strict=True))
    first = 0
    for width, count in enumerate(counts[:MAX_CODE_WIDTH], 1):
        if count:
            planes = CODE_PLANES[width]
            yield slice(first, first + count), planes, [starts[plane] for plane in planes]
            for plane in planes:
                starts[plane] += count * padded * plane // 8
            first += count


def store_codes(codes: Tensor, coded: Tensor, counts: Sequence[int], out: Tensor) -> None:
    """Write the planes of ``[N, P]`` uint8 codes; ``coded`` lists the coded lines, sorted."""
    for part, planes, offsets in _parts(counts, codes.shape[1]):
        chosen = codes.index_select(0, coded[part]).view(1, -1)
        blocks.store_codes(chosen, out.unsqueeze(0), 0, planes, offsets)


def load_codes(message: Tensor, counts: Sequence[int], layout: MixedLayout) -> Tensor:
    """Undo ``store_codes``; return ``[lines, P]`` uint8, sorted."""
    codes = torch.empty(layout.coded_lines, layout.padded_tokens, dtype=torch.uint8)
    for part, planes, offsets in _parts(counts, layout.padded_tokens):
        target = codes[part]
        found = blocks.load_codes(message.unsqueeze(0), 0, target.numel(), planes, offsets)
        target.copy_(found.view_as(target))
    return codes
