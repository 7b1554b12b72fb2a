"""The codec in plain torch, which the Triton kernels must match bit for bit.

First the building blocks, then whole rows, in parts that stay in a CPU core's cache. Building
blocks take contiguous tensors, do the same IEEE fp32 operations in the same order as their twins in
``triton_*.py``, and may overwrite their input.

Values become levels, in units of the scale. Symmetric formats divide by a scale that maps the
largest magnitude of a group to the largest level; asymmetric ones subtract the minimum first.

Finite values stay finite, up to the largest of fp32. Where a scale, a minimum or a decoded value
would not fit into its dtype, the group shrinks: its decoded values are too small by a factor. This
needs values within 2% of the largest of fp32, or beyond 65504 times the largest level with fp16
scales, or an asymmetric group whose range is as wide as fp32.

Shape legend: K messages, R rows, N elements, G groups, S elements of a group, B bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_tensor

from lq_lightning.kernels.message.format import (
    ALIGNMENT_NBYTES,
    FP32_MAX,
    Code,
    MessageFormat,
    ScaleDtype,
    round_up,
    section_starts,
)


def hadamard_(x: Tensor, size: int) -> Tensor:
    """Apply the unnormalised Sylvester transform in place to every ``size`` consecutive elements.

    The butterfly runs over distances 1, 2, 4, ..., ``size / 2``; that order is part of the
    definition, since it decides the rounding. ``x`` is fp32, contiguous. Size 0 does nothing.
    """
    if not size:
        return x
    # Transposed, so that every butterfly is one vector operation over contiguous memory.
    current = x.view(-1, size).t().contiguous()
    other = torch.empty_like(current)
    distance = 1
    while distance < size:
        source = current.view(size // (2 * distance), 2, -1)
        target = other.view(size // (2 * distance), 2, -1)
        torch.add(source[:, 0], source[:, 1], out=target[:, 0])
        torch.sub(source[:, 0], source[:, 1], out=target[:, 1])
        current, other = other, current
        distance *= 2
    x.view(-1, size).copy_(current.t())
    return x


_MASK_32 = 0xFFFFFFFF
_HASH_A = 0x7FEB352D
_HASH_B = 0x846CA68B
_ROW_HIGH_FACTOR = 0x85EBCA6B
_QUAD_HIGH_FACTOR = 0xC2B2AE35

_Word = TypeVar("_Word", int, Tensor)  # 32 bits, in an int64 tensor many of them


def _int32(value: int) -> int:
    """Read the low 32 bits as two's complement."""
    value &= _MASK_32
    return value - (1 << 32) if value >> 31 else value


def _shift_right(x: Tensor, amount: int) -> Tensor:
    """Logical right shift of int32."""
    return (x >> amount).bitwise_and_((1 << (32 - amount)) - 1)


def _mix(x: _Word) -> _Word:
    """Mix 32 bits (two multiply-xorshift rounds; constants of the ``lowbias32`` hash)."""
    x ^= x >> 16
    x = x * _HASH_A & _MASK_32
    x ^= x >> 15
    x = x * _HASH_B & _MASK_32
    return x ^ (x >> 16)


def _mix_words(low: _Word, high: _Word) -> tuple[_Word, _Word]:
    first = _mix(_mix(low ^ 0x9E3779B9) ^ high)
    second = _mix(_mix(high ^ 0x7F4A7C15) ^ low)
    return first, second


def seed_words(seed: int) -> tuple[int, int]:
    """Turn a seed of up to 64 bits into two signed 32-bit words, each depending on all bits."""
    first, second = _mix_words(seed & _MASK_32, seed >> 32 & _MASK_32)
    return _int32(first), _int32(second)


def packed_seed_words(seeds: Tensor) -> Tensor:
    """``seed_words`` of ``[N]`` int64 seeds: the first word in the low 32 bits, the other above."""
    first, second = _mix_words(seeds & _MASK_32, (seeds >> 32) & _MASK_32)
    return (second << 32) | first


def _stream_keys(words: tuple[int, int], row: int, quad_high: int) -> tuple[int, int]:
    first = _mix(words[0] + row & _MASK_32)
    extra = (row >> 32) * _ROW_HIGH_FACTOR + quad_high * _QUAD_HIGH_FACTOR
    second = _mix((words[1] ^ first ^ extra) & _MASK_32)
    return _int32(first), _int32(second)


def rounding_noise(
    seed: int, row: int, num_rows: int, start: int, count: int, noise_bits: int
) -> Tensor:
    """Return the random bits that stochastic rounding adds below the unit before it truncates.

    Of every eight columns, 0, 1, 4 and 5 share one 32-bit hash of (column, row, seed), and 2, 3, 6
    and 7 the next; each takes ``noise_bits`` of it from another byte on, cyclically. Beyond 8 bits
    the fine bits of one are the coarse bits of another: their correlation is ``2**-8``. Noise
    depends on the position alone, not on the device or the part of a row that computes it.

    Values that are multiples of ``u = 2**-noise_bits`` are rounded without bias. Others are first
    rounded to the nearest multiple, so the expectation is off by at most ``u / 2`` of the distance
    between codes, with a sign that depends on the value.

    Returns ``[num_rows, count]`` int32, uniform on ``[0, 2**noise_bits)``, from ``row`` and column
    ``start`` on; ``start`` is a multiple of 16, ``count`` of 8, ``noise_bits`` at most 16.
    """
    words = seed_words(seed)
    noise = torch.empty(num_rows, count // 4, dtype=torch.int32)
    first_quad = start // 4
    segment_start = 0
    while segment_start < count // 4:
        low = (first_quad + segment_start) & _MASK_32
        length = min(count // 4 - segment_start, (1 << 32) - low)
        quads = torch.arange(low, low + length, dtype=torch.int64).to(torch.int32)
        for index in range(num_rows):
            quad_high = (first_quad + segment_start) >> 32
            key_a, key_b = _stream_keys(words, row + index, quad_high)
            x = quads + key_a
            x ^= _shift_right(x, 16)
            x.mul_(_int32(_HASH_A)).add_(key_b)
            x ^= _shift_right(x, 15)
            x.mul_(_int32(_HASH_B))
            x ^= _shift_right(x, 16)
            noise[index, segment_start : segment_start + length] = x
        segment_start += length
    rotated = _shift_right(noise, 8) | noise << 24
    # [.., which hash, rotated or not, which half of it] -> [.., half, hash, rotated]
    each = torch.stack([noise, rotated], dim=-1).view(torch.int16).view(num_rows, -1, 2, 2, 2)
    each = each.permute(0, 1, 4, 2, 3).to(torch.int32)
    return each.bitwise_and_((1 << noise_bits) - 1).reshape(num_rows, count)


_INTEGERS = {2: torch.int16, 4: torch.int32}
# Codes that share a byte are packed and unpacked as one integer, a byte each.
_LANES = {4: torch.int16, 2: torch.int32, 1: torch.int64}
_FACTORS = {
    width: sum(1 << (8 - width) * index for index in range(1, 8 // width + 1)) for width in _LANES
}


def pack_plane(codes: Tensor, width: int) -> Tensor:
    """Pack uint8 codes below ``2**width`` (1, 2, 4 or 8 bits), low bits first, to 1-D uint8.

    ``codes`` are contiguous, and their number is a multiple of 8.
    """
    flat = codes.reshape(-1)
    if width == 8:
        return flat
    # The product brings all codes of a lane together in its last byte; no two share a bit.
    bits, factor = 64 // width, _FACTORS[width]
    lanes = flat.view(_LANES[width]) * factor
    return lanes.bitwise_right_shift_(bits - 8).to(torch.uint8)


def unpack_plane(packed: Tensor, width: int) -> Tensor:
    """Undo ``pack_plane``."""
    flat = packed.reshape(-1)
    if width == 8:
        return flat
    if width == 4:
        lanes = flat.to(torch.int16)
        lanes |= lanes << 4
        return lanes.bitwise_and_(0x0F0F).view(torch.uint8)
    # 3 to 8 times as fast as to shift and mask
    lanes = _lanes_of_bytes(width).index_select(0, flat.to(torch.int32))
    return lanes.view(torch.uint8)


@lru_cache(maxsize=2)
def _lanes_of_bytes(width: int) -> Tensor:
    """Codes of each byte as one integer: ``[256]`` of the dtype of lanes."""
    byte = torch.arange(256, dtype=torch.uint8, device="cpu").unsqueeze(1)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device="cpu")
    return ((byte >> shifts) & ((1 << width) - 1)).view(_LANES[width]).view(-1)


def store_codes(
    codes: Tensor, out: Tensor, start: int, widths: Sequence[int], offsets: Sequence[int]
) -> None:
    """Write ``[R, N]`` uint8 codes into the planes of rows, from column ``start``, a multiple of 8.

    Planes of ``widths`` bits begin at byte ``offsets``, low bits first.
    """
    rows, count = codes.shape
    if count % 8:
        codes = pad_tensor(codes, (0, -count % 8))
    shift = 0
    for width, offset in zip(widths, offsets, strict=True):
        part = codes
        if len(widths) > 1:
            part = (codes >> shift).bitwise_and_((1 << width) - 1)
        packed = pack_plane(part.contiguous(), width).view(rows, -1)
        begin = offset + start * width // 8
        out[:, begin : begin + packed.shape[1]] = packed
        shift += width


def load_codes(
    message: Tensor, start: int, count: int, widths: Sequence[int], offsets: Sequence[int]
) -> Tensor:
    """Undo ``store_codes``: return ``[R, count]`` uint8, zeros without planes."""
    rows, padded = message.shape[0], -(-count // 8) * 8
    codes: Tensor | None = None
    shift = 0
    for width, offset in zip(widths, offsets, strict=True):
        begin = offset + start * width // 8
        packed = message[:, begin : begin + padded * width // 8].contiguous()
        part = unpack_plane(packed, width).view(rows, padded)
        codes = part if codes is None else codes | part << shift
        shift += width
    if codes is None:
        return message.new_zeros(rows, count)
    return codes[:, :count]


def store_scales(values: Tensor, out: Tensor, offset: int, fmt: MessageFormat) -> None:
    """Write ``[R, G]`` fp32 values, exact in the scale dtype, at byte ``offset`` of each row.

    NaN is written as one fixed bit pattern, since the result of a cast depends on the machine.
    """
    bits = values.to(fmt.scale.dtype).contiguous().view(_INTEGERS[fmt.scale_nbytes])
    stored = bits.masked_fill(values.isnan(), fmt.scale.nan_bits).view(torch.uint8)
    out[:, offset : offset + stored.shape[1]] = stored


def load_scales(message: Tensor, offset: int, count: int, fmt: MessageFormat) -> Tensor:
    """Read ``[R, count]`` values of the scale dtype from byte ``offset`` of each row, as fp32."""
    stored = message[:, offset : offset + count * fmt.scale_nbytes].contiguous()
    return stored.view(fmt.scale.dtype).to(torch.float32)


# Groups whose scale would be subnormal are stored as zeros: 1/scale could overflow.
_MIN_SCALE = 2.0**-126
# More than rounding a scale up, to 8 bits, adds to the range of a group.
_WIDER = 1.0 + 2.0**-6


class GroupRange(NamedTuple):
    """Extremes of groups, ``[R, G]`` fp32, before the norm of a transform; NaN if one value is."""

    low: Tensor | None  # None for symmetric formats
    high: Tensor  # largest value, or magnitude for symmetric formats

    def widened(self, other: GroupRange) -> GroupRange:
        """Return the range of both."""
        high = torch.maximum(self.high, other.high)
        if self.low is None or other.low is None:
            return GroupRange(None, high)
        return GroupRange(torch.minimum(self.low, other.low), high)


class Scaling(NamedTuple):
    """Factors that turn values into levels: ``(x * norm - minimum) * inverse``; ``[R, G]`` fp32.

    Attributes:
        scale: exact in the scale dtype; 0 where the range is too small to divide by, NaN where
            anything in the group is not finite.
        minimum: exact in the scale dtype, 0 where the scale is NaN; None for symmetric formats.
        norm: a power of two; None for symmetric formats, where it is a part of ``inverse``.
        inverse: 0 where the scale is 0 or NaN.
    """

    scale: Tensor
    minimum: Tensor | None
    norm: Tensor | None
    inverse: Tensor


def round_scale_up(scale: Tensor, dtype: ScaleDtype) -> Tensor:
    """Round non-negative fp32 up to ``dtype``, kept as fp32, so that no code leaves its range."""
    if dtype.truncated is not None:
        below = (1 << dtype.truncated) - 1
        if not below:
            return scale
        bits = (scale.view(torch.int32) + below) & ~below
        return torch.where(scale.isnan(), scale, bits.view(torch.float32))
    rounded = scale.to(torch.float16)
    up = (rounded.view(torch.int16) + 1).view(torch.float16)
    return torch.where(rounded < scale, up, rounded).to(torch.float32)


def round_minimum_down(minimum: Tensor, dtype: ScaleDtype) -> Tensor:
    """Round fp32 down to ``dtype``, kept as fp32; -0 becomes +0."""
    minimum = torch.where(minimum == 0, 0.0, minimum)
    if dtype.truncated is not None:
        below = (1 << dtype.truncated) - 1
        if not below:
            return minimum
        away_from_zero = torch.where(minimum < 0, below, 0)
        bits = (minimum.view(torch.int32) + away_from_zero) & ~below
        return torch.where(minimum.isnan(), minimum, bits.to(torch.int32).view(torch.float32))
    rounded = minimum.to(torch.float16)
    bits = rounded.view(torch.int16)
    down = torch.where(rounded > 0, bits - 1, bits + 1)
    down = torch.where(rounded == 0, torch.tensor(-0x7FFF, dtype=torch.int16), down)
    down = down.to(torch.int16).view(torch.float16)
    return torch.where(rounded > minimum, down, rounded).to(torch.float32)


def group_range(x: Tensor, valid: int, fmt: MessageFormat) -> GroupRange:
    """Find the extremes of each group of ``[R, G, S]`` fp32.

    Only the first ``valid`` elements of a row count for the minimum: padding must not widen the
    range.
    """
    if fmt.symmetric:
        return GroupRange(None, x.abs().amax(-1))
    groups, size = x.shape[1:]
    if valid == groups * size:
        return GroupRange(x.amin(-1), x.amax(-1))  # 4 times as fast as both at once
    beyond = torch.arange(groups * size).view(groups, size) >= valid
    low = x.masked_fill(beyond, float("inf")).amin(-1)
    return GroupRange(low, x.masked_fill(beyond, float("-inf")).amax(-1))


def scaling_of(extremes: GroupRange, norm: float, fmt: MessageFormat) -> Scaling:
    """Derive the scaling; ``norm`` is ``fmt.forward_norm`` after ``hadamard_``, else 1."""
    low, high = extremes
    if low is None:
        raw = (high * norm).div_(fmt.max_level)
        scale = round_scale_up(raw, fmt.scale).clamp(max=fmt.max_scale)
        scale = torch.where(raw < _MIN_SCALE, 0.0, scale)
        scale = scale.masked_fill_(~raw.isfinite(), float("nan"))
        # Below `raw` only where it was limited: the group shrinks.
        inverse = torch.where(scale > 0, 1.0 / torch.maximum(scale, raw), 0.0)
        return Scaling(scale, None, None, inverse.mul_(norm))
    return asymmetric_scaling(low, high, norm, fmt.max_level, fmt)


def asymmetric_scaling(
    low: Tensor, high: Tensor, norm: float, max_level: float | Tensor, fmt: MessageFormat
) -> Scaling:
    """``scaling_of`` for asymmetric formats; the largest level may differ by group."""
    low, high = low * norm, high * norm
    # With room for the scale to be rounded up. Groups that do not fit shrink by a power of two.
    minimum = round_minimum_down(low, fmt.scale)
    width = (high - minimum).mul_(_WIDER)
    fits = (width <= fmt.max_width) & (width + minimum <= FP32_MAX)
    largest = torch.maximum(low.abs(), high.abs()).view(torch.int32)
    exponent = (254 + fmt.shrunk_exponent) - (largest >> 23)
    shrink = torch.where(fits, 1.0, (exponent << 23).view(torch.float32))
    minimum = round_minimum_down(low.mul_(shrink), fmt.scale)
    raw = high.mul_(shrink).sub_(minimum).div_(max_level)
    finite = raw <= FP32_MAX
    scale = torch.where(raw < _MIN_SCALE, 0.0, round_scale_up(raw, fmt.scale))
    scale = torch.where(finite, scale, float("nan"))
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    return Scaling(scale, torch.where(finite, minimum, 0.0), shrink.mul_(norm), inverse)


def quantize_groups(
    x: Tensor, scaling: Scaling, noise: Tensor | None, fmt: MessageFormat
) -> Tensor:
    """Turn ``[R, G, S]`` fp32 values, which are overwritten, into uint8 codes.

    ``noise`` is given for stochastic rounding. Codes are 0 in groups whose scale is NaN.
    """
    inverse = scaling.inverse.unsqueeze(-1)
    if scaling.minimum is None or scaling.norm is None:
        x.mul_(inverse)
    else:
        x.mul_(scaling.norm.unsqueeze(-1)).sub_(scaling.minimum.unsqueeze(-1)).mul_(inverse)
        x.clamp_(fmt.min_level, fmt.max_level)  # padding may lie outside the range of the group
    broken = scaling.scale.isnan().unsqueeze(-1)
    if broken.any():
        x.masked_fill_(broken, 0.0)
    codes = _round(x, noise, fmt)
    return codes.masked_fill_(broken, 0) if broken.any() else codes


def _round(x: Tensor, noise: Tensor | None, fmt: MessageFormat) -> Tensor:
    """Round levels to uint8 codes; ``x`` is overwritten."""
    code = fmt.parameters
    if fmt.kind == "table":
        thresholds = torch.tensor(fmt.thresholds, dtype=torch.float32)
        return torch.bucketize(x, thresholds, out_int32=True).to(torch.uint8)
    if noise is not None:
        return _round_stochastic(x, noise, fmt)
    if fmt.kind == "float":
        return _round_to_float(x, code)
    return x.round_().add_(fmt.zero_code).to(torch.uint8)


def _round_stochastic(x: Tensor, noise: Tensor, fmt: MessageFormat) -> Tensor:
    """Round to ``fraction_bits`` places, add the noise and truncate; ``x`` is overwritten.

    Values that are codes already stay as they are.
    """
    if fmt.kind == "integer":
        fixed = x.mul_(2.0**fmt.fraction_bits).round_().to(torch.int32)
        fixed += noise.view_as(x)
        fixed += fmt.zero_code << fmt.fraction_bits
        return fixed.bitwise_right_shift_(fmt.fraction_bits).to(torch.uint8)
    # The code's smallest exponent becomes that of fp16, whose bits then begin with the code.
    half = x.mul_(2.0 ** (-14 - fmt.min_exponent)).to(torch.float16)
    bits = half.view(torch.int16).to(torch.int32).add_(noise.view_as(x))
    magnitude = bits.bitwise_right_shift(fmt.fraction_bits).bitwise_and_(fmt.magnitude_mask)
    sign = bits.bitwise_right_shift_(16 - fmt.bits).bitwise_and_(1 << (fmt.bits - 1))
    return magnitude.bitwise_or_(sign).to(torch.uint8)


def _round_to_float(x: Tensor, code: Code) -> Tensor:
    """Round scaled values to the nearest small float by integers; ``x`` is overwritten."""
    bits = x.view(torch.int32)
    sign = bits.bitwise_right_shift(32 - code.bits).bitwise_and_(1 << (code.bits - 1))
    exponent = bits.bitwise_right_shift(23).bitwise_and_(0xFF)
    exponent = exponent.sub_(127).clamp_(min=code.min_exponent)
    # |x| in units of the last place of its own binade, so rounding is rounding to an integer.
    unit = (127 + code.mantissa_bits - exponent).bitwise_left_shift_(23).view(torch.float32)
    steps = x.abs_().mul_(unit).round_().to(torch.int32)
    # A carry out of the fraction moves into the exponent field by itself.
    steps += exponent.sub_(code.min_exponent).bitwise_left_shift_(code.mantissa_bits)
    return steps.bitwise_or_(sign).to(torch.uint8)


def dequantize_codes(codes: Tensor, fmt: MessageFormat) -> Tensor:
    """Turn uint8 codes into fp32 levels, in units of the scale."""
    if fmt.kind == "integer":
        return codes.to(torch.float32).sub_(fmt.zero_code)
    wide = codes.to(torch.int32)
    if fmt.kind == "table":
        return torch.tensor(fmt.levels, dtype=torch.float32)[wide]
    # Read the code as an fp32 bit pattern with a tiny exponent, then rescale by a power of two.
    magnitude = (wide & fmt.magnitude_mask).bitwise_left_shift_(23 - fmt.mantissa_bits)
    sign = (wide & (1 << (fmt.bits - 1))).bitwise_left_shift_(32 - fmt.bits)
    rescale = 2.0 ** (126 + fmt.min_exponent)
    return magnitude.bitwise_or_(sign).view(torch.float32).mul_(rescale)


# --- whole rows ---

# On a Xeon with 2 MiB of L2 per core, INT4 of 1.6M values takes 9.0 ms; 12.1 at half the size.
CHUNK_NUMEL = 1 << 17


def row_chunks(rows: int, columns: int, multiple: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield ``(row, row_end, column, column_end)`` blocks of about ``CHUNK_NUMEL`` elements.

    ``columns``, and those at which blocks begin, are multiples of ``multiple``.
    """
    if rows == 0 or columns == 0:
        return
    width = min(columns, max(multiple, CHUNK_NUMEL // multiple * multiple))
    height = max(1, CHUNK_NUMEL // width)
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            yield row, min(row + height, rows), column, min(column + width, columns)


def _take_rows(rows: Tensor, start: int, end: int, skip: int | None) -> Tensor:
    """Return rows ``start`` to ``end`` of ``[..., R, N]``, counted without row ``skip``."""
    if skip is None or end <= skip:
        return rows[..., start:end, :]
    if start >= skip:
        return rows[..., start + 1 : end + 1, :]
    return torch.cat((rows[..., start:skip, :], rows[..., skip + 1 : end + 1, :]), dim=-2)


def _padded(values: Tensor, width: int) -> Tensor:
    """Copy ``[R, N]`` to a new ``[R, width]`` fp32 block that ends with zeros."""
    block = torch.zeros(values.shape[0], width, dtype=torch.float32)
    block[:, : values.shape[1]] = values
    return block


def _block_range(x: Tensor, numel: int, column: int, fmt: MessageFormat) -> GroupRange:
    """Find the extremes of the groups of a block; arguments as for ``encode_block``."""
    end = fmt.layout(numel).padded_numel if fmt.hadamard_size else numel
    rows, width = x.shape
    return group_range(x.view(rows, -1, fmt.group_size or width), min(end - column, width), fmt)


def encode_block(
    x: Tensor,
    norm: float,
    out: Tensor,
    numel: int,
    row: int,
    column: int,
    seed: int,
    fmt: MessageFormat,
    row_range: GroupRange | None = None,
) -> None:
    """Quantize one transformed block and write it into its rows.

    Args:
        x: ``[R, N]`` fp32 contiguous, N a multiple of ``fmt.block_multiple``; encodes ``x * norm``.
            Overwritten.
        norm: power of two; ``fmt.forward_norm`` for the output of the butterfly, else 1.
        out: ``[R, B]`` encoded rows that the block belongs to, of ``numel`` values each.
        numel: values in a whole row.
        row: index of the first row of the block.
        column: index of the first column of the block.
        seed: for stochastic rounding.
        fmt: the format.
        row_range: ``[R, 1]`` range of the whole rows, for formats with one scale per row.
    """
    layout = fmt.layout(numel)
    rows, width = x.shape
    noise = None
    if fmt.stochastic:
        noise = rounding_noise(seed, row, rows, column, width, fmt.fraction_bits)
    scaling = scaling_of(row_range or _block_range(x, numel, column, fmt), norm, fmt)
    grouped = x.view(rows, -1, fmt.group_size or width)
    codes = quantize_groups(grouped, scaling, noise, fmt).view_as(x)
    count = min(width, layout.padded_numel - column)
    store_codes(codes[:, :count].contiguous(), out, column, fmt.planes, layout.plane_offsets)
    group = column // fmt.group_size * fmt.scale_nbytes if fmt.group_size else 0
    store_scales(scaling.scale, out, layout.scale_offset + group, fmt)
    if scaling.minimum is not None:
        store_scales(scaling.minimum, out, layout.minimum_offset + group, fmt)


def _encode_rows(
    block_at: Callable[[int, int, int, int], Tensor],
    norm: float,
    out: Tensor,
    numel: int,
    seed: int,
    fmt: MessageFormat,
    multiple: int,
) -> None:
    """Encode rows of ``numel`` values into ``out``, block by block.

    ``block_at`` is given ``(row, row_end, column, column_end)``, columns being multiples of
    ``multiple``, and returns the transformed block, new for every call, and no wider than the
    groups of the row. ``norm`` is that of ``encode_block``.
    """
    layout = fmt.layout(numel)
    # Zeros between the sections, so that equal data gives equal bytes.
    for start, size in zip(section_starts(layout.used), layout.used, strict=False):
        out[:, start + size : start + round_up(size, ALIGNMENT_NBYTES)] = 0
    chunks = list(row_chunks(out.shape[0], round_up(layout.padded_numel, multiple), multiple))
    ranges: dict[int, GroupRange] = {}
    if not fmt.group_size:
        for chunk in chunks:
            extremes = _block_range(block_at(*chunk), numel, chunk[2], fmt)
            row = chunk[0]
            ranges[row] = ranges[row].widened(extremes) if row in ranges else extremes
    for chunk in chunks:
        row, row_end, column, _ = chunk
        block = block_at(*chunk)
        encode_block(block, norm, out[row:row_end], numel, row, column, seed, fmt, ranges.get(row))


def quantize(
    x: Tensor,
    reference: Tensor | None,
    fmt: MessageFormat,
    seed: int,
    out: Tensor,
    skip: int | None = None,
) -> None:
    """Encode ``x`` (or ``x - reference``) into ``out``; see the operator ``quantize_out``."""
    numel = x.shape[-1]
    if out.dim() == 3:
        rows = out.new_empty(out.shape[:2].numel(), out.shape[2])
        other = None if reference is None else reference.flatten(0, 1)
        quantize(x.flatten(0, 1), other, fmt, seed, rows)
        out.copy_(rows.view_as(out))
        return

    def block_at(row: int, row_end: int, column: int, column_end: int) -> Tensor:
        end = min(column_end, numel)
        block = _padded(_take_rows(x, row, row_end, skip)[:, column:end], column_end - column)
        if reference is not None:
            block[:, : max(0, end - column)].sub_(reference[row:row_end, column:end])
        return hadamard_(block, fmt.hadamard_size)

    _encode_rows(block_at, fmt.forward_norm, out, numel, seed, fmt, fmt.block_multiple)


def decode_block(
    message: Tensor, numel: int, column: int, count: int, fmt: MessageFormat
) -> Tensor:
    """Decode ``count`` columns of ``[R, B]`` rows to fp32, without the inverse transform.

    ``column`` is a multiple of ``fmt.block_multiple``, ``count`` of 8.
    """
    layout = fmt.layout(numel)
    size = fmt.group_size or count
    groups = -(-count // size)
    codes = load_codes(message, column, count, fmt.planes, layout.plane_offsets)
    values = _padded(dequantize_codes(codes, fmt), groups * size)
    first = column // fmt.group_size * fmt.scale_nbytes if fmt.group_size else 0
    scale = load_scales(message, layout.scale_offset + first, groups, fmt)
    grouped = values.view(-1, groups, size).mul_(scale.unsqueeze(-1))
    if not fmt.symmetric:
        minimum = load_scales(message, layout.minimum_offset + first, groups, fmt)
        grouped.add_(minimum.unsqueeze(-1))
    return values[:, :count]


def _reduce_block(
    message: Tensor, numel: int, column: int, count: int, fmt: MessageFormat
) -> Tensor:
    """``decode_block`` of each of ``[K, R, B]`` messages, summed in index order."""
    total = decode_block(message[0], numel, column, count, fmt)
    for index in range(1, message.shape[0]):
        total += decode_block(message[index], numel, column, count, fmt)
    return total


def dequantize(
    message: Tensor, numel: int, fmt: MessageFormat, scale: float, add: bool, out: Tensor
) -> None:
    """Decode messages and sum them in fp32; see the operator ``dequantize_out``."""
    if out.dim() == 3:
        for index, rows in enumerate(out):
            dequantize(message[:, index], numel, fmt, scale, add, rows)
        return
    padded = fmt.layout(numel).padded_numel
    # Rounded to fp32 once, on the host, for every device alike.
    factor = torch.tensor(scale * fmt.inverse_norm, dtype=torch.float32)
    total = round_up(padded, fmt.block_multiple)
    for row, row_end, column, column_end in row_chunks(out.shape[0], total, fmt.block_multiple):
        count = min(column_end, padded) - column
        values = _reduce_block(message[:, row:row_end], numel, column, count, fmt)
        values = hadamard_(values.contiguous(), fmt.hadamard_size)
        target = out[row:row_end, column : min(column_end, numel)]
        values = values.mul_(factor)[:, : target.shape[1]]
        target.copy_(values.add_(target) if add else values)


def requantize(
    message: Tensor,
    numel: int,
    source: MessageFormat,
    target: MessageFormat,
    seed: int,
    out: Tensor,
    skip: int | None = None,
    added: Tensor | None = None,
) -> None:
    """Sum messages and encode the sum; see the operator ``requantize_out``.

    With equal ``hadamard_size`` the sum stays in the transformed domain; otherwise it is
    transformed back, cut to ``numel`` and transformed again. ``added`` are ``[R, numel]`` values to
    add, where both formats are the same; ``out`` may then be the message, as every group is read
    before it is written.
    """
    padded = source.layout(numel).padded_numel
    multiple = max(source.block_multiple, target.block_multiple)
    target_total = round_up(target.layout(numel).padded_numel, target.block_multiple)
    same_domain = source.hadamard_size == target.hadamard_size
    norm = 1.0 if same_domain else target.forward_norm
    # Beyond `numel` lie values of the transform, or else padding, which must be zero.
    last = padded if same_domain and source.hadamard_size else numel

    def block_at(row: int, row_end: int, column: int, column_end: int) -> Tensor:
        count = min(column_end, padded) - column
        messages = _take_rows(message, row, row_end, skip)
        values = _reduce_block(messages, numel, column, count, source)
        if added is not None:
            other = _padded(added[row:row_end, column : min(column_end, numel)], count)
            values += hadamard_(other, target.hadamard_size).mul_(target.forward_norm)
        if not same_domain and source.hadamard_size:
            values = hadamard_(values.contiguous(), source.hadamard_size)
            values.mul_(source.inverse_norm)
        width = min(column_end, target_total) - column
        keep = min(column_end, last, target_total) - column
        block = _padded(values[:, :keep], width)
        return block if same_domain else hadamard_(block, target.hadamard_size)

    _encode_rows(block_at, norm, out, numel, seed, target, multiple)
