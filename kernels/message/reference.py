"""Building blocks of the codec in plain torch: the truth that the Triton kernels must match.

Every function works on contiguous tensors, does the same IEEE fp32 operations in the same order
as its Triton twin in ``triton_*.py``, and may overwrite its input.

A value becomes a level, the value of a code in units of the scale. Symmetric formats divide by a
scale that carries the largest magnitude of a group to the largest level; asymmetric ones subtract
the minimum first.

Finite values stay finite, up to the largest of fp32. Where a scale, a minimum or a decoded value
would not fit into its dtype, the group shrinks: what is decoded is smaller than the group was, by a
factor. That needs values within 2% of the largest of fp32, or beyond 65504 times the largest level
with fp16 scales, or an asymmetric group whose range is as wide as fp32.

Shape legend: R rows, N elements, G groups, S elements of a group, B bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_tensor

from lq_lightning.kernels.message.format import (
    FP32_MAX,
    FloatCode,
    MessageFormat,
    ScaleDtype,
)


def hadamard_(x: Tensor, size: int) -> Tensor:
    """Apply the unnormalised Sylvester transform in place to every ``size`` consecutive elements.

    The butterfly runs over distances 1, 2, 4, ..., ``size / 2``; that order is part of the
    definition, since it decides the rounding. ``x`` is fp32, contiguous.
    """
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
    """Return the two's complement reading of the low 32 bits."""
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
    """Return the random bits that stochastic rounding adds below the unit before truncating.

    Of every eight columns, 0, 1, 4 and 5 share one 32-bit hash of (column, row, seed), and 2, 3, 6
    and 7 the next; each takes ``noise_bits`` of it from another byte on, cyclically. Beyond 8 bits
    the fine bits of one are the coarse bits of another: their correlation is ``2**-8``. The noise
    depends on the position only, not on who computes it.

    The noise is a multiple of ``u = 2**-noise_bits``. A value that is a multiple of ``u`` is
    rounded without bias; others are first rounded to the nearest multiple, so the expectation is
    off by at most ``u / 2`` of the distance between codes, with a sign that depends on the value.

    Returns ``[num_rows, count]`` int32, uniform on ``[0, 2**noise_bits)``, from ``row`` and column
    ``start`` on; ``start`` is a multiple of 16, ``count`` of 8, and there are at most 16 bits.
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


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# Codes that share a byte are packed and unpacked as one integer, a byte each.
_LANES = {4: torch.int16, 2: torch.int32, 1: torch.int64}
_FACTORS = {
    width: sum(1 << (8 - width) * index for index in range(1, 8 // width + 1)) for width in _LANES
}


def pack_plane(codes: Tensor, width: int) -> Tensor:
    """Pack the low ``width`` (1, 2, 4 or 8) bits of uint8 codes, low bits first, to 1-D uint8.

    ``codes`` are contiguous, a multiple of 8, and below ``2**width``.
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
    """Return what each byte is unpacked to: ``[256]`` of the dtype of lanes."""
    byte = torch.arange(256, dtype=torch.uint8, device="cpu").unsqueeze(1)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device="cpu")
    return ((byte >> shifts) & ((1 << width) - 1)).view(_LANES[width]).view(-1)


def store_codes(
    codes: Tensor, out: Tensor, start: int, widths: Sequence[int], offsets: Sequence[int]
) -> None:
    """Write ``[R, N]`` uint8 codes into the planes of ``out`` rows, from column ``start`` on.

    ``start`` is a multiple of 8. Planes of these widths begin at these offsets, low bits first.
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

    NaN is written as one fixed bit pattern: what a cast makes of it depends on the machine.
    """
    bits = values.to(fmt.scale.dtype).contiguous().view(_INTEGERS[fmt.scale_nbytes])
    stored = bits.masked_fill(values.isnan(), fmt.scale.nan_bits).view(torch.uint8)
    out[:, offset : offset + stored.shape[1]] = stored


def load_scales(message: Tensor, offset: int, count: int, fmt: MessageFormat) -> Tensor:
    """Read ``[R, count]`` values of the scale dtype from byte ``offset`` of each row, as fp32."""
    stored = message[:, offset : offset + count * fmt.scale_nbytes].contiguous()
    return stored.view(fmt.scale.dtype).to(torch.float32)


# Groups whose scale would be subnormal are stored as zeros: 1/scale could overflow.
MIN_SCALE = 2.0**-126
# More than what rounding a scale up, to 8 bits, adds to the range of a group.
WIDER = 1.0 + 2.0**-6


class GroupRange(NamedTuple):
    """Extremes of groups, before the norm of a transform.

    Attributes:
        low: ``[R, G]`` fp32, the smallest value; None for symmetric formats.
        high: ``[R, G]`` fp32, the largest value, or magnitude for symmetric formats. Either is NaN
            where the group has a NaN.
    """

    low: Tensor | None
    high: Tensor

    def widened(self, other: GroupRange) -> GroupRange:
        """Return the range of both."""
        high = torch.maximum(self.high, other.high)
        if self.low is None or other.low is None:
            return GroupRange(None, high)
        return GroupRange(torch.minimum(self.low, other.low), high)


class Scaling(NamedTuple):
    """Factors that turn values into levels: ``(x * norm - minimum) * inverse``.

    Attributes:
        scale: ``[R, G]`` fp32 that the scale dtype holds; 0 where the range is too small to divide
            by, NaN where anything in the group is not finite.
        minimum: ``[R, G]`` fp32 that the scale dtype holds, 0 where the scale is NaN; None for
            symmetric formats.
        norm: ``[R, G]`` fp32, a power of two; None for symmetric formats, where it is a part of
            ``inverse``.
        inverse: ``[R, G]`` fp32; 0 where the scale is 0 or NaN.
    """

    scale: Tensor
    minimum: Tensor | None
    norm: Tensor | None
    inverse: Tensor


def round_scale_up(scale: Tensor, dtype: ScaleDtype) -> Tensor:
    """Round non-negative fp32 to a value of ``dtype`` that is not smaller, kept as fp32.

    Rounding up means that dividing by the scale never leaves the range of the code.
    """
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
    """Round fp32 to a value of ``dtype`` that is not greater, kept as fp32; -0 becomes +0."""
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
    """Find the extremes of each group.

    Args:
        x: ``[R, G, S]`` fp32.
        valid: elements of a row that count for the minimum (padding must not widen the range).
        fmt: the format.
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
    """Turn the extremes of groups into what scales their values.

    Args:
        extremes: range of the values before ``norm``.
        norm: power of two; ``fmt.forward_norm`` for the output of ``hadamard_``, else 1.
        fmt: the format.
    """
    low, high = extremes
    if low is None:
        raw = (high * norm).div_(fmt.max_level)
        scale = round_scale_up(raw, fmt.scale).clamp(max=fmt.max_scale)
        scale = torch.where(raw < MIN_SCALE, 0.0, scale)
        scale = scale.masked_fill_(~raw.isfinite(), float("nan"))
        # Below `raw` only where it was limited: the group shrinks.
        inverse = torch.where(scale > 0, 1.0 / torch.maximum(scale, raw), 0.0)
        return Scaling(scale, None, None, inverse.mul_(norm))
    return asymmetric_scaling(low, high, norm, fmt.max_level, fmt)


def asymmetric_scaling(
    low: Tensor, high: Tensor, norm: float, max_level: float | Tensor, fmt: MessageFormat
) -> Scaling:
    """``scaling_of`` for asymmetric formats; the largest level may differ by group.

    The format's code does not matter except for limits of fp16 scales.
    """
    low, high = low * norm, high * norm
    # With room for the scale to be rounded up. Groups that do not fit shrink by a power of two.
    minimum = round_minimum_down(low, fmt.scale)
    width = (high - minimum).mul_(WIDER)
    fits = (width <= fmt.max_width) & (width + minimum <= FP32_MAX)
    largest = torch.maximum(low.abs(), high.abs()).view(torch.int32)
    exponent = (254 + fmt.shrunk_exponent) - (largest >> 23)
    shrink = torch.where(fits, 1.0, (exponent << 23).view(torch.float32))
    minimum = round_minimum_down(low.mul_(shrink), fmt.scale)
    raw = high.mul_(shrink).sub_(minimum).div_(max_level)
    finite = raw <= FP32_MAX
    scale = torch.where(raw < MIN_SCALE, 0.0, round_scale_up(raw, fmt.scale))
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
    if isinstance(code, FloatCode):
        return _round_to_float(x, code)
    return x.round_().add_(fmt.zero_code).to(torch.uint8)


def _round_stochastic(x: Tensor, noise: Tensor, fmt: MessageFormat) -> Tensor:
    """Round to ``fraction_bits`` places, add the noise and truncate; ``x`` is overwritten.

    What is a code already stays itself.
    """
    if fmt.kind == "integer":
        fixed = x.mul_(2.0**fmt.fraction_bits).round_().to(torch.int32)
        fixed += noise.view_as(x)
        fixed += fmt.zero_code << fmt.fraction_bits
        return fixed.bitwise_right_shift_(fmt.fraction_bits).to(torch.uint8)
    # Its smallest exponent becomes that of fp16, whose bits then begin with those of the code.
    half = x.mul_(2.0 ** (-14 - fmt.min_exponent)).to(torch.float16)
    bits = half.view(torch.int16).to(torch.int32).add_(noise.view_as(x))
    magnitude = bits.bitwise_right_shift(fmt.fraction_bits).bitwise_and_(fmt.magnitude_mask)
    sign = bits.bitwise_right_shift_(16 - fmt.bits).bitwise_and_(1 << (fmt.bits - 1))
    return magnitude.bitwise_or_(sign).to(torch.uint8)


def _round_to_float(x: Tensor, code: FloatCode) -> Tensor:
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
