"""Scales, noise and rounding as Triton device functions, bit-identical to ``reference.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from lq_lightning.kernels.message.format import CELLS_PER_UNIT, MIDDLE_CELL, MessageFormat
from lq_lightning.kernels.message.triton_blocks import integer_type
from lq_lightning.kernels.message.triton_codes import look_up

# 1.5 * 2**23: adding it rounds an fp32 of small magnitude to an integer (half to even) and leaves
# that integer in the low bits, without a conversion instruction.
_ROUNDER = tl.constexpr(12582912.0)
_CELLS_PER_UNIT = tl.constexpr(CELLS_PER_UNIT)
_MIDDLE_CELL = tl.constexpr(MIDDLE_CELL)
_MIN_SCALE = tl.constexpr(2.0**-126)
_FP32_MAX = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)
_WIDER = tl.constexpr(1.0 + 2.0**-6)  # `rounding.WIDER`
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _mix(x):
    """Mix 32 bits; ``reference._mix``."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def noise_keys(seed_a, seed_b, row, quad):
    """Two words for ``mixed_noise`` from the seed, the row and the high bits of the column."""
    quad_high = (quad >> 32).to(tl.uint32)
    row_high = (row >> 32).to(tl.uint32)
    first = _mix(seed_a.to(tl.uint32) + row.to(tl.uint32))
    extra = row_high * 0x85EBCA6B + quad_high * 0xC2B2AE35
    return first, _mix(seed_b.to(tl.uint32) ^ first ^ extra)


@triton.jit
def mixed_noise(seed_a, seed_b, row, start, BLOCK, HALF):
    """Random ``[BLOCK // 8]`` int32, one for four columns; ``reference.rounding_noise``.

    ``HALF`` 0 is for columns 0, 1, 4 and 5 of every eight, 1 for columns 2, 3, 6 and 7.
    """
    quad = start // 4
    key_a, key_b = noise_keys(seed_a, seed_b, row, quad)
    x = tl.arange(0, BLOCK // 8).to(tl.uint32) * 2 + (quad.to(tl.uint32) + key_a + HALF)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D + key_b
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return (x ^ (x >> 16)).to(tl.int32, bitcast=True)


@triton.jit
def round_scale_up(scale, FORMAT):
    """Round non-negative fp32 up to the scale dtype; ``reference.round_scale_up``."""
    if FORMAT.scale.truncated is None:
        rounded = scale.to(tl.float16)
        bits = rounded.to(tl.int16, bitcast=True).to(tl.int32) + 1
        up = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        nearest = rounded.to(tl.float32)
        scale = tl.where(nearest < scale, up, nearest)
    elif FORMAT.scale.truncated > 0:
        BELOW: tl.constexpr = (1 << FORMAT.scale.truncated) - 1
        bits = (scale.to(tl.int32, bitcast=True) + BELOW) & (-1 - BELOW)
        scale = tl.where(scale == scale, bits.to(tl.float32, bitcast=True), scale)
    return scale


@triton.jit
def round_minimum_down(minimum, FORMAT):
    """Round fp32 down to the scale dtype, -0 to +0; ``reference.round_minimum_down``."""
    minimum = tl.where(minimum == 0.0, 0.0, minimum)
    if FORMAT.scale.truncated is None:
        rounded = minimum.to(tl.float16)
        nearest = rounded.to(tl.float32)
        bits = rounded.to(tl.int16, bitcast=True).to(tl.int32)
        bits = tl.where(nearest > 0.0, bits - 1, bits + 1)
        bits = tl.where(nearest == 0.0, -0x7FFF, bits)
        down = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        minimum = tl.where(nearest > minimum, down, nearest)
    elif FORMAT.scale.truncated > 0:
        BELOW: tl.constexpr = (1 << FORMAT.scale.truncated) - 1
        bits = minimum.to(tl.int32, bitcast=True) + tl.where(minimum < 0.0, BELOW, 0)
        down = (bits & (-1 - BELOW)).to(tl.float32, bitcast=True)
        minimum = tl.where(minimum == minimum, down, minimum)
    return minimum


@triton.jit
def bits_of_scales(values, FORMAT):
    """Stored integers of fp32 values that are exact in the scale dtype."""
    DTYPE: tl.constexpr = integer_type(FORMAT.scale_nbytes * 8)
    number = values == values
    if FORMAT.scale.truncated is None:
        half = values.to(tl.float16).to(tl.int16, bitcast=True)
        bits = tl.where(number, half, FORMAT.scale.nan_bits).to(tl.int16)
    else:
        wide = tl.where(number, values.to(tl.int32, bitcast=True), 0x7FC00000)
        bits = (wide >> FORMAT.scale.truncated).to(DTYPE)
    return bits


@triton.jit
def scales_of_bits(bits, FORMAT):
    """fp32 values of stored integers; ``reference.load_scales``."""
    if FORMAT.scale.truncated is None:
        values = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = (bits.to(tl.int32) << FORMAT.scale.truncated).to(tl.float32, bitcast=True)
    return values


@triton.jit
def ordered(bits):
    """Map fp32 bits to int32 of the same order (and back); NaN of either sign is extreme."""
    return bits ^ ((bits >> 31) & _MAGNITUDE_BITS)


@triton.jit
def _maximum_or_nan(a, b):
    """Larger of two values, NaN if one of them is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _minimum_or_nan(a, b):
    """Smaller of two values, NaN if one of them is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_magnitude(x):
    """Bits of the largest magnitude of each row of a 2-D fp32 tile, int32; NaN is the largest."""
    return tl.reduce(tl.abs(x), 1, _maximum_or_nan).to(tl.int32, bitcast=True)


@triton.jit
def group_range(x, valid, FORMAT, FULL):
    """Extremes of each group of a ``[GROUPS, GROUP]`` tile, as ordered int32 keys.

    ``reference.group_range``; of symmetric formats both are the largest magnitude. ``valid``
    elements of the tile count for the minimum.
    """
    if FORMAT.symmetric:
        high = largest_magnitude(x)
        low = high
    else:
        low_values = x
        high_values = x
        if not FULL:
            GROUP: tl.constexpr = x.shape[1]
            column = tl.arange(0, x.shape[0])[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            low_values = tl.where(column < valid, x, float("inf"))
            high_values = tl.where(column < valid, x, float("-inf"))
        low = ordered(tl.reduce(low_values, 1, _minimum_or_nan).to(tl.int32, bitcast=True))
        high = ordered(tl.reduce(high_values, 1, _maximum_or_nan).to(tl.int32, bitcast=True))
    return low, high


@triton.jit
def asymmetric_scaling(low, high, max_level, max_width, FORMAT, NORM):
    """``scaling_of`` for asymmetric formats, whose largest level and width may differ by group."""
    low = ordered(low).to(tl.float32, bitcast=True) * NORM
    high = ordered(high).to(tl.float32, bitcast=True) * NORM
    minimum = round_minimum_down(low, FORMAT)
    width = (high - minimum) * _WIDER
    fits = (width <= max_width) & (width + minimum <= _FP32_MAX)
    largest = tl.maximum(
        low.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS,
        high.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS,
    )
    exponent = (254 + FORMAT.shrunk_exponent) - (largest >> 23)
    shrink = tl.where(fits, 1.0, (exponent << 23).to(tl.float32, bitcast=True))
    minimum = round_minimum_down(low * shrink, FORMAT)
    raw = tl.div_rn(high * shrink - minimum, max_level)
    finite = raw <= _FP32_MAX
    scale = tl.where(raw < _MIN_SCALE, 0.0, round_scale_up(raw, FORMAT))
    scale = tl.where(finite, scale, float("nan"))
    minimum = tl.where(finite, minimum, 0.0)
    inverse = tl.where(scale > 0.0, tl.div_rn(1.0, scale), 0.0)
    return scale, minimum, shrink * NORM, inverse


@triton.jit
def scaling_of(low, high, FORMAT, NORM):
    """``reference.scaling_of`` for the keys of ``group_range``.

    Returns scale, minimum, norm and inverse; of symmetric formats minimum and norm mean nothing.
    """
    if FORMAT.symmetric:
        minimum = tl.zeros(high.shape, tl.float32)
        norm = minimum
        raw = tl.div_rn(high.to(tl.float32, bitcast=True) * NORM, FORMAT.max_level)
        limited = tl.minimum(round_scale_up(raw, FORMAT), FORMAT.max_scale)
        scale = tl.where(raw < _MIN_SCALE, 0.0, limited)
        scale = tl.where(raw <= _FP32_MAX, scale, float("nan"))
        inverse = tl.where(scale > 0.0, tl.div_rn(1.0, tl.maximum(scale, raw)), 0.0) * NORM
    else:
        scale, minimum, norm, inverse = asymmetric_scaling(
            low, high, FORMAT.max_level, FORMAT.max_width, FORMAT, NORM
        )
    return scale, minimum, norm, inverse


@triton.constexpr_function
def _next_thresholds(fmt: MessageFormat) -> tuple[float, ...]:
    """By cell, see ``format.cells_of``, the first threshold in it or above."""
    return tuple((*fmt.thresholds, float("inf"))[first] for first in fmt.cells)


@triton.constexpr_function
def _thresholds_below(fmt: MessageFormat) -> tuple[float, ...]:
    """By cell how many thresholds are below it, in the low bits of fp32."""
    return tuple(_ROUNDER.value + first for first in fmt.cells)


@triton.jit
def _nearest_level(y, FORMAT):
    """Codes of a table in the low 16 bits; ``torch.bucketize`` of the reference.

    There is one comparison, with the only threshold that may be next to a value.
    """
    BELOW: tl.constexpr = _thresholds_below(FORMAT)
    NEXT: tl.constexpr = _next_thresholds(FORMAT)
    factor = tl.full(y.shape, _CELLS_PER_UNIT, tl.float32)
    cell = tl.fma(y, factor, tl.full(y.shape, _ROUNDER + _MIDDLE_CELL, tl.float32))
    cell = cell.to(tl.int32, bitcast=True)
    code = look_up(cell, BELOW, 5).to(tl.int32, bitcast=True)
    return code + (y > look_up(cell, NEXT, 5)).to(tl.int32)


@triton.jit
def _round_to_float(y, FORMAT):
    """fp16 bits, as int32, that begin with those of the code; ``reference._round_to_float``."""
    bits = y.to(tl.int32, bitcast=True)
    if not FORMAT.stochastic:
        # Adding and subtracting 1.5 * 2**23 units of the last place of its own binade rounds.
        LOWEST: tl.constexpr = (127 + FORMAT.min_exponent) << 23
        RAISE: tl.constexpr = ((23 - FORMAT.mantissa_bits) << 23) + (1 << 22)
        rounder = tl.maximum(bits & 0x7F800000, LOWEST) + RAISE
        rounder = rounder.to(tl.float32, bitcast=True)
        rounded = ((y + rounder) - rounder).to(tl.int32, bitcast=True)
        y = (rounded | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    # Its smallest exponent becomes that of fp16.
    half = (y * 2.0 ** (-14 - FORMAT.min_exponent)).to(tl.float16)
    return half.to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def _round_to_integer(y, FORMAT):
    """Codes with ``FORMAT.fraction_bits`` binary places in the low bits of int32."""
    FRACTION: tl.constexpr = FORMAT.fraction_bits
    rounder = tl.full(y.shape, _ROUNDER + FORMAT.zero_code * 2.0**FRACTION, tl.float32)
    if FRACTION > 0:  # one rounding, since the product with a power of two is exact
        y = tl.fma(y, tl.full(y.shape, 2.0**FRACTION, tl.float32), rounder)
    else:
        y = y + rounder
    return y.to(tl.int32, bitcast=True)


@triton.jit
def scaled(x, scaling, FORMAT, FULL):
    """Values of a ``[GROUPS, GROUP]`` tile in units of the scale."""
    _, minimum, norm, inverse = scaling
    if FORMAT.symmetric:
        y = x * inverse[:, None]
    else:
        # one rounding either way, since the product with a power of two is exact
        y = tl.fma(x, norm[:, None], -minimum[:, None]) * inverse[:, None]
        if not FULL:  # padding may lie outside the range of the group
            y = tl.minimum(tl.maximum(y, FORMAT.min_level), FORMAT.max_level)
    return y


@triton.jit
def fixed_point(y, FORMAT):
    """Codes of what ``scaled`` returns, with ``FORMAT.fraction_bits`` binary places.

    Returns int32; the low 16 bits hold the number, those above are arbitrary. The twin of
    ``reference.quantize_groups``, except in groups without a scale, where all bits are arbitrary.
    """
    if FORMAT.kind == "table":
        fixed = _nearest_level(y, FORMAT)
    elif FORMAT.kind == "float":
        fixed = _round_to_float(y, FORMAT)
    else:
        fixed = _round_to_integer(y, FORMAT)
    return fixed
