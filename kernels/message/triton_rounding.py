"""Scales, noise and rounding as Triton device functions, bit-identical to ``reference.py``."""

from __future__ import annotations

import triton
import triton.language as tl

# 1.5 * 2**23: adding it rounds an fp32 of small magnitude to an integer (half to even) and leaves
# that integer in the low bits, without a conversion instruction.
_ROUND_MAGIC = tl.constexpr(12582912.0)
_MIN_SCALE = tl.constexpr(2.0**-126)
_MAX_SCALE = tl.constexpr(2.0**120)
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


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
def mixed_noise(seed_a, seed_b, row, start, BLOCK: tl.constexpr, HALF: tl.constexpr):
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
def round_scale_up(scale, FORMAT: tl.constexpr):
    """Round non-negative fp32 up to the scale dtype; ``reference.round_scale_up``."""
    if FORMAT.scale_dtype == "bfloat16":
        bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
        scale = tl.where(scale == scale, bits.to(tl.float32, bitcast=True), scale)
    if FORMAT.scale_dtype == "float16":
        rounded = scale.to(tl.float16)
        bits = rounded.to(tl.int16, bitcast=True).to(tl.int32) + 1
        up = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        nearest = rounded.to(tl.float32)
        scale = tl.where(nearest < scale, up, nearest)
    return scale


@triton.jit
def round_minimum_down(minimum, FORMAT: tl.constexpr):
    """Round fp32 down to the scale dtype, -0 to +0; ``reference.round_minimum_down``."""
    minimum = tl.where(minimum == 0.0, 0.0, minimum)
    if FORMAT.scale_dtype == "bfloat16":
        bits = minimum.to(tl.int32, bitcast=True) + tl.where(minimum < 0.0, 0xFFFF, 0)
        down = (bits & -0x10000).to(tl.float32, bitcast=True)
        minimum = tl.where(minimum == minimum, down, minimum)
    if FORMAT.scale_dtype == "float16":
        rounded = minimum.to(tl.float16)
        nearest = rounded.to(tl.float32)
        bits = rounded.to(tl.int16, bitcast=True).to(tl.int32)
        bits = tl.where(nearest > 0.0, bits - 1, bits + 1)
        bits = tl.where(nearest == 0.0, -0x7FFF, bits)
        down = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        minimum = tl.where(nearest > minimum, down, nearest)
    return minimum


@triton.jit
def _ordered(bits):
    """Map fp32 bits to int32 of the same order (and back); NaN of either sign is extreme."""
    return bits ^ ((bits >> 31) & _MAGNITUDE_BITS)


@triton.jit
def _maximum_or_nan(a, b):
    """Larger of two values, NaN if one of them is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def group_range(
    x,
    valid,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    NORM: tl.constexpr,
    FULL: tl.constexpr,
):
    """Scale and minimum of each group of a ``[GROUPS, GROUP]`` tile; ``reference.group_range``."""
    if FORMAT.symmetric:
        if _INTERPRETED:  # runs any other reduction than its own element by element
            bits = x.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS
            largest = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
        else:
            largest = tl.reduce(tl.abs(x), 1, _maximum_or_nan)
        minimum = tl.zeros((GROUPS,), tl.float32)
        raw = tl.div_rn(largest * NORM, FORMAT.max_level)
    else:
        # Integer comparison of bit patterns: NaN beats everything, which a float minimum drops.
        keys = _ordered(x.to(tl.int32, bitcast=True))
        low_keys = keys
        high_keys = keys
        if not FULL:
            GROUP: tl.constexpr = FORMAT.group_size
            column = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            low_keys = tl.where(column < valid, keys, 0x7FFFFFFF)
            high_keys = tl.where(column < valid, keys, -0x7FFFFFFF)
        low = _ordered(tl.min(low_keys, axis=1)).to(tl.float32, bitcast=True) * NORM
        high = _ordered(tl.max(high_keys, axis=1)).to(tl.float32, bitcast=True) * NORM
        minimum = round_minimum_down(low, FORMAT)
        raw = tl.div_rn(high - minimum, FORMAT.max_level)
    scale = tl.where(raw < _MIN_SCALE, 0.0, round_scale_up(raw, FORMAT))
    finite = scale <= _MAX_SCALE
    scale = tl.where(finite, scale, float("nan"))
    minimum = tl.where(finite, minimum, 0.0)
    return scale, minimum


@triton.jit
def fixed_point(x, scale, minimum, FORMAT: tl.constexpr, NORM: tl.constexpr, FULL: tl.constexpr):
    """Scale a ``[GROUPS, GROUP]`` tile to codes with ``FORMAT.fraction_bits`` binary places.

    Returns int32; the low 16 bits hold the number, those above are arbitrary. The twin of
    ``reference.fixed_point``, except in groups without a scale, where the bits are arbitrary too.
    """
    inverse = tl.where(scale > 0.0, tl.div_rn(1.0, scale), 0.0)
    if FORMAT.symmetric:
        y = x * (inverse * NORM)[:, None]
    else:
        y = (x * NORM - minimum[:, None]) * inverse[:, None]
        if not FULL:  # padding may lie outside the range of the group
            y = tl.minimum(tl.maximum(y, FORMAT.min_level), FORMAT.max_level)
    if FORMAT.mantissa_bits > 0:
        bits = y.to(tl.int32, bitcast=True)
        if not FORMAT.stochastic:
            # Adding and subtracting 1.5 * 2**23 units of the last place of its own binade rounds.
            LOWEST: tl.constexpr = (127 + FORMAT.min_exponent) << 23
            RAISE: tl.constexpr = ((23 - FORMAT.mantissa_bits) << 23) + (1 << 22)
            magic = tl.maximum(bits & 0x7F800000, LOWEST) + RAISE
            magic = magic.to(tl.float32, bitcast=True)
            rounded = ((y + magic) - magic).to(tl.int32, bitcast=True)
            y = (rounded | (bits & -0x80000000)).to(tl.float32, bitcast=True)
        # Its smallest exponent becomes that of fp16, whose bits then begin with those of the code.
        half = (y * 2.0 ** (-14 - FORMAT.min_exponent)).to(tl.float16)
        fixed = half.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        FRACTION: tl.constexpr = FORMAT.fraction_bits
        magic = tl.full(y.shape, _ROUND_MAGIC + FORMAT.zero_code * 2.0**FRACTION, tl.float32)
        if FRACTION > 0:  # one rounding, since the product with a power of two is exact
            y = tl.fma(y, tl.full(y.shape, 2.0**FRACTION, tl.float32), magic)
        else:
            y = y + magic
        fixed = y.to(tl.int32, bitcast=True)
    return fixed
