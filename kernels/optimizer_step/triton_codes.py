"""Codes of groups of values in Triton, bit-identical to ``reference.py``.

The codes of the split are integer arithmetic. In the codebook the level below a value is predicted:
a function maps ``|x| / scale`` to the number of that level. It is computed approximately, to 2.7e-4
of the distance between levels or better, and may choose the wrong side of a level that is next to
the value. The value is then compared with a point between the two levels around it, which lies at
least ``LEAST_NOISE`` = 4.9e-4 of the way from either, so that both choices lead to the same code.

A program is one warp, which holds ``AT_ONCE`` groups of ``GROUP`` elements in a tile ``[32 //
AT_ONCE, AT_ONCE, GROUP * AT_ONCE // 128, 4]``: lane, group, part of a group and element. So many
lanes share a group and own four consecutive elements of each of its parts. All tensors have that
layout, whatever their dtype: every load of a lane is a vector of four, and lanes of a group are
neighbours in memory. Numbers of a group are ``[1, AT_ONCE, 1, 1]``: the more groups at once, the
fewer lanes compute them for themselves, and the more elements they use them for.

Triton spreads a tensor over the lanes of a warp dimension by dimension, after the one in which its
elements are consecutive: with lanes and groups first, that is what is meant above.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from lq_lightning.kernels.activation.triton_arithmetic import exp2, log2, reciprocal
from lq_lightning.kernels.optimizer_step.formats import (
    LARGEST_SCALE_BITS,
    LEAST_MANTISSA_BITS,
    MOST_MANTISSA_BITS,
    SIGNED_CODES,
    SMALLEST_BITS,
    UNSIGNED_CODES,
    StateFormat,
    widest_spans,
)
from lq_lightning.kernels.optimizer_step.reference import (
    LEAST_NOISE,
    ONE_CODE,
    ROUNDER,
    STREAMS,
    STRIDE,
)

_WARP = tl.constexpr(32)
_STREAMS = tl.constexpr(STREAMS)
_STRIDE = tl.constexpr(STRIDE)


@triton.jit
def groups_of_lanes(AT_ONCE: tl.constexpr):
    """Group of each lane, ``[32 // AT_ONCE, AT_ONCE, 1, 1]``.

    Not ``arange`` along the dimension of groups: the compiler would see neighbours in memory, let
    one lane load or store what belongs to several groups, and move it from there.
    """
    return tl.reshape(tl.arange(0, _WARP) % AT_ONCE, (_WARP // AT_ONCE, AT_ONCE, 1, 1))


@triton.jit
def lane_columns(AT_ONCE: tl.constexpr):
    """Column in its group of the first element of each lane, as ``groups_of_lanes``."""
    return tl.reshape(tl.arange(0, _WARP) // AT_ONCE, (_WARP // AT_ONCE, AT_ONCE, 1, 1)) * 4


@triton.jit
def inner_columns(AT_ONCE: tl.constexpr, GROUP: tl.constexpr):
    """Columns of the elements of a lane after its first one, ``[1, 1, parts, 4]``."""
    part = tl.arange(0, GROUP * AT_ONCE // (4 * _WARP))[None, None, :, None]
    return part * (4 * _WARP // AT_ONCE) + tl.arange(0, 4)[None, None, None, :]


@triton.jit
def largest_of_groups(x):
    """Largest of each group, ``[1, AT_ONCE, 1, 1]``; first among the elements of a lane."""
    x = tl.max(tl.max(x, axis=3, keep_dims=True), axis=2, keep_dims=True)
    return tl.max(x, axis=0, keep_dims=True)


@triton.jit
def smallest_of_groups(x):
    """Smallest of each group, ``[1, AT_ONCE, 1, 1]``; first among the elements of a lane."""
    x = tl.min(tl.min(x, axis=3, keep_dims=True), axis=2, keep_dims=True)
    return tl.min(x, axis=0, keep_dims=True)


@triton.jit
def group_noise(seed_a, seed_b, group):
    """The random word of a group; ``reference.rounding_noise``."""
    low = group.to(tl.uint32)
    high = (group >> 32).to(tl.uint32)
    x = low ^ seed_a.to(tl.uint32)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D + (high * 0xC2B2AE35 ^ seed_b.to(tl.uint32))
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def element_noise(word, STREAM: tl.constexpr, AT_ONCE: tl.constexpr, GROUP: tl.constexpr):
    """32 random bits of each element of a tile, uint32."""
    # Products with constants apart from each other: one addition is left for each element.
    first = word * _STREAMS[STREAM] + lane_columns(AT_ONCE).to(tl.uint32) * _STRIDE
    return first + inner_columns(AT_ONCE, GROUP).to(tl.uint32) * _STRIDE


_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SMALLEST_BITS = tl.constexpr(SMALLEST_BITS)
_LARGEST_SCALE_BITS = tl.constexpr(LARGEST_SCALE_BITS)
_SIGNED_CODES = tl.constexpr(SIGNED_CODES)
_UNSIGNED_CODES = tl.constexpr(UNSIGNED_CODES)
_LEAST_MANTISSA_BITS = tl.constexpr(LEAST_MANTISSA_BITS)
_WIDEST_SPANS = tl.constexpr(widest_spans())
_LEAST_SHIFT = tl.constexpr(23 - MOST_MANTISSA_BITS)
_MOST_SHIFT = tl.constexpr(23 - LEAST_MANTISSA_BITS)
_LEAST_NOISE = tl.constexpr(LEAST_NOISE)
# Below every level but zero, in units of the scale, and with a logarithm.
_LEAST_RATIO = tl.constexpr(2.0**-23)
_ONE_CODE = tl.constexpr(ONE_CODE)
_ROUNDER = tl.constexpr(ROUNDER)
_ROUNDER_BITS = tl.constexpr(0x4B400000)
_ROUNDER_PAIRS = tl.constexpr(0x4B400000 * 8 % (1 << 32))
# Of the dynamic map: log10(2); the binary logarithm of what turns |x| / scale of decade 0 into
# parts of a decade, and how much it falls from one decade to the next.
_LOG10_2 = tl.constexpr(math.log10(2.0))
_LOWEST_DECADE = tl.constexpr(6 * math.log2(10.0) - math.log2(0.9))
_NEXT_DECADE = tl.constexpr(1.0 - math.log2(10.0))


# --- levels of the codebook -----------------------------------------------------------------------


@triton.constexpr_function
def _copying(fmt: StateFormat) -> str:
    """PTX by which a warp copies pairs of levels to shared memory, then the lower ones alone."""
    count = fmt.num_levels
    copies = "".join(
        f"ld.global.nc.v2.f32 {{low, high}}, [from + {256 * part}];"
        f"st.shared.v2.f32 [to + {256 * part}], {{low, high}};"
        f"st.shared.f32 [alone + {8 * count + 128 * part}], low;"
        for part in range(count // 32)
    )
    return (
        f"{{ .shared .align 16 .b8 levels[{12 * count}];"
        ".reg .u32 lane, to, alone; .reg .u64 from; .reg .f32 low, high;"
        "mov.u32 lane, %laneid; mad.wide.u32 from, lane, 8, $1; mov.u32 $0, levels;"
        "mad.lo.u32 to, lane, 8, $0; mad.lo.u32 alone, lane, 4, $0;"
        f"{copies} bar.warp.sync 0xffffffff; }}"
    )


@triton.jit
def nearby_levels(levels_ptr, FORMAT: tl.constexpr):
    """Where the program, one warp, looks up levels of ``formats.level_pairs``: shared memory.

    There an address takes one instruction instead of three, and a look-up does not wait for the
    tags of as many cache lines as the lanes need.
    """
    if not FORMAT.has_codebook or _INTERPRETED:
        levels = levels_ptr
    else:
        ASM: tl.constexpr = _copying(FORMAT)
        levels = tl.inline_asm_elementwise(
            *(ASM, "=r,l", [levels_ptr.to(tl.int64)], tl.int32, False, 1)
        )
    return levels


@triton.jit
def _level(number, levels, FORMAT: tl.constexpr):
    """The level of that number, in units of the scale; ``formats.codebook``."""
    if _INTERPRETED:
        level = tl.load(levels + 2 * number)
    else:
        level = tl.inline_asm_elementwise(
            "{ .reg .u32 a; mad.lo.u32 a, $1, 4, $2; ld.shared.f32 $0, [a]; }",
            *("=f,r,r", [number, levels + 8 * FORMAT.num_levels], tl.float32, True, 1),
        )
    return level


@triton.jit
def _two_levels(number, levels):
    """The level of that number of ``_level_below`` and the next one."""
    if _INTERPRETED:
        low = tl.load(levels + 2 * (number - _ROUNDER_BITS))
        high = tl.load(levels + 2 * (number - _ROUNDER_BITS) + 1)
    else:
        pairs = levels.to(tl.uint32, bitcast=True) - _ROUNDER_PAIRS
        low, high = tl.inline_asm_elementwise(
            "{ .reg .u32 a; mad.lo.u32 a, $2, 8, $3; ld.shared.v2.f32 {$0, $1}, [a]; }",
            *("=f,=f,r,r", [number, pairs], (tl.float32, tl.float32), True, 1),
        )
    return low, high


# --- decoding -------------------------------------------------------------------------------------


@triton.jit
def _numbers_and_signs(codes):
    """Low seven bits of codes, and int32 with bit 7 of them in bit 31."""
    if _INTERPRETED:
        number = codes.to(tl.int32)
        sign = number << 24
        number &= _SIGNED_CODES
    else:  # of four codes in a register, all at once
        number, sign = tl.inline_asm_elementwise(
            """{
            .reg .b32 numbers;
            and.b32 numbers, $8, 0x7F7F7F7F;
            prmt.b32 $0, numbers, 0, 0x4440;
            prmt.b32 $1, numbers, 0, 0x4441;
            prmt.b32 $2, numbers, 0, 0x4442;
            prmt.b32 $3, numbers, 0, 0x4443;
            shl.b32 $4, $8, 24;
            shl.b32 $5, $8, 16;
            shl.b32 $6, $8, 8;
            mov.b32 $7, $8;
            }""",
            *("=r,=r,=r,=r,=r,=r,=r,=r,r", [codes], (tl.int32, tl.int32), True, 4),
        )
    return number, sign


@triton.jit
def decode_groups(codes, scale, exponent, levels, FORMAT: tl.constexpr):
    """Values of a tile; ``reference.decode_groups``."""
    if FORMAT.even:
        base = scale.to(tl.bfloat16, bitcast=True).to(tl.float32)
        return codes.to(tl.int8, bitcast=True).to(tl.float32) * base
    base_bits = (scale.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.int32, bitcast=True)
    base = base_bits.to(tl.float32, bitcast=True)
    if FORMAT.signed:
        number, sign = _numbers_and_signs(codes)
    else:
        number = codes.to(tl.int32)
    if FORMAT.expanded:
        # 1 << (23 - exponent), written so that a product with it stays one instruction
        unit = 0x800000 >> exponent.to(tl.int32)
        if FORMAT.signed:
            values = (number * unit + base_bits).to(tl.float32, bitcast=True) - base
        else:
            bits = number * unit + (base_bits - _UNSIGNED_CODES * unit)
            # NaN where the group was not finite: its codes are zero
            values = tl.where(number == 0, base * 0.0, bits.to(tl.float32, bitcast=True))
    else:
        values = _level(number, levels, FORMAT) * base
    if FORMAT.signed:
        bits = values.to(tl.int32, bitcast=True) ^ (sign & -0x80000000)
        values = bits.to(tl.float32, bitcast=True)
    return values


# --- encoding -------------------------------------------------------------------------------------


@triton.jit
def _signed_split(bits, largest, span, noise):
    """Codes without signs, scale bits and mantissa bits; ``reference._signed_split``."""
    kept = tl.where(span <= _WIDEST_SPANS[0], 3, _LEAST_MANTISSA_BITS)
    kept = tl.where(span <= _WIDEST_SPANS[1], 4, kept)
    kept = tl.where(span <= _WIDEST_SPANS[2], 5, kept)
    kept = tl.where(span <= _WIDEST_SPANS[3], 6, kept)
    kept = tl.where(span <= _WIDEST_SPANS[4], 7, kept)
    shift = 23 - kept
    reach = ((1 << shift) * _SIGNED_CODES + 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    scale_bits = largest - reach.to(tl.int32, bitcast=True) + (0x3F800000 + 0x7FFFFF)
    scale_bits = tl.maximum(scale_bits & -0x800000, _SMALLEST_BITS)
    shifted = bits.to(tl.float32, bitcast=True) + scale_bits.to(tl.float32, bitcast=True)
    rounding = (noise >> (kept + 9).to(tl.uint32)).to(tl.int32)
    codes = shifted.to(tl.int32, bitcast=True) - scale_bits + rounding
    return codes >> shift, scale_bits, kept


@triton.jit
def _skewed(noise, skew):
    """``noise + (noise * (1 - noise) * skew)`` of 32-bit fractions, uint32; it stays below 1."""
    if _INTERPRETED:
        y = tl.umulhi(tl.umulhi(noise, ~noise), skew) + noise
    else:
        y = tl.inline_asm_elementwise(
            """{
            .reg .u32 c;
            not.b32 c, $1;
            mul.hi.u32 c, c, $1;
            mad.hi.u32 $0, c, $2, $1;
            }""",
            *("=r,r,r", [noise, skew], tl.uint32, True, 1),
        )
    return y


@triton.jit
def _unsigned_split(bits, largest, span, special, noise):
    """Codes, scale bits and mantissa bits; ``reference._unsigned_split``."""
    octaves = (span + (span >> 6)).to(tl.float32).to(tl.int32, bitcast=True) >> 23
    shift = tl.minimum(tl.maximum(octaves - (126 + 8), _LEAST_SHIFT), _MOST_SHIFT)
    unit = 1 << shift
    top = (largest + unit - 1) & -unit
    # The high half of a product is that shifted right by kept + 3.
    skew = (3 << (shift + 6)).to(tl.uint32, bitcast=True)
    rounding = (_skewed(noise, skew) >> (32 - shift).to(tl.uint32)).to(tl.int32)
    codes = (bits - (top - _UNSIGNED_CODES * unit) + rounding) >> shift
    zeros = tl.where(special, 0x7FFFFFFF, _SMALLEST_BITS - 1)
    return tl.where(bits <= zeros, 0, tl.maximum(codes, 1)), top, 23 - shift


@triton.jit
def _level_below(ratio, FORMAT: tl.constexpr):
    """Number of the level at or below ``ratio``, which is at least 2**-23, or next to that.

    More by ``_ROUNDER_BITS``, of which the low byte is zero.
    """
    # Decades d = 0 to 6, each cut in P = 2**d parts (twice as many without signs), at
    # (ratio * 10**(6 - d) - 0.1) / 0.9 * P. Levels are at the middles of the parts; the number of a
    # decade's first level is P, less one without signs. A ratio just above a power of ten may count
    # for the decade below: the level below it is the same.
    WIDER: tl.constexpr = 0 if FORMAT.signed else 1
    decade = tl.fma(log2(ratio), _LOG10_2, 6.499) + _ROUNDER
    parts = (decade.to(tl.int32, bitcast=True) << 23) + ((127 + WIDER) << 23)
    decade = tl.fma(decade - _ROUNDER, _NEXT_DECADE, _LOWEST_DECADE + WIDER)
    z = tl.fma(parts.to(tl.float32, bitcast=True), 8.0 / 9.0, -1.0 - WIDER)
    z = tl.fma(ratio, exp2(decade), z)
    # Rounded half a level below what is meant, which never ends below zero.
    LAST: tl.constexpr = FORMAT.num_levels - 2
    z = tl.minimum(z, LAST) + _ROUNDER
    return z.to(tl.int32, bitcast=True)


@triton.jit
def _level_codes(bits, scale_bits, special, levels, noise, FORMAT: tl.constexpr):
    """Codes without signs, in the low byte; ``reference._level_codes``."""
    scale = scale_bits.to(tl.float32, bitcast=True)
    size = bits.to(tl.float32, bitcast=True)
    chance = ((noise >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    chance = tl.minimum(chance, 1.0 - _LEAST_NOISE)
    if FORMAT.signed:
        ratio = tl.maximum(size * reciprocal(scale), _LEAST_RATIO)
        number = _level_below(ratio, FORMAT)
        low, high = _two_levels(number, levels)
        low = low * scale
        chance = tl.maximum(chance, tl.where(number == _ROUNDER_BITS, 0.5, _LEAST_NOISE))
        codes = number + (chance * (high * scale - low) < size - low).to(tl.int32)
    else:
        # The scale is a power of two: exact. What is raised is still below the first level above
        # zero, to which the comparison takes all that is not zero.
        ratio = size * (0x7F000000 - scale_bits).to(tl.float32, bitcast=True)
        ratio = tl.maximum(ratio, _LEAST_RATIO)
        number = _level_below(ratio, FORMAT)
        low, high = _two_levels(number, levels)
        chance = tl.maximum(chance, _LEAST_NOISE)
        upper = chance * ((high - low) * (ratio + low)) < (ratio - low) * (high + low)
        zeros = tl.where(special, 0x7FFFFFFF, _SMALLEST_BITS - 1)
        codes = tl.where(bits <= zeros, 0, number + upper.to(tl.int32))
    return codes


@triton.jit
def _even_codes(x, old, largest, special, noise):
    """Signed integers as uint8, and scale bits; ``reference._even_codes``."""
    scale_bits = (largest.to(tl.float32, bitcast=True) * _ONE_CODE).to(tl.int32, bitcast=True)
    scale_bits = tl.maximum((scale_bits + 0xFFFF) & -0x10000, _SMALLEST_BITS)
    scale = scale_bits.to(tl.float32, bitcast=True)
    chance = ((noise >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.5
    levels = x * tl.div_rn(1.0, scale) + tl.where(tl.abs(x - old) >= scale, 0.0, chance)
    codes = (levels + _ROUNDER).to(tl.int32, bitcast=True)
    return tl.where(special, 0, codes).to(tl.uint8), scale_bits


@triton.jit
def _with_signs(codes, x, special):
    """uint8 codes with the sign of ``x`` in bit 7; 0 where ``special``."""
    if _INTERPRETED:
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        joined = tl.where(special, 0, (codes & 0x7F) | sign).to(tl.uint8)
    else:  # of four in a register, which are of several groups in some layouts
        joined = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, codes;
            prmt.b32 low, $1, $2, 0x0040;
            prmt.b32 high, $3, $4, 0x0040;
            prmt.b32 codes, low, high, 0x5410;
            prmt.b32 low, $5, $6, 0x0073;
            prmt.b32 high, $7, $8, 0x0073;
            prmt.b32 low, low, high, 0x5410;
            lop3.b32 codes, codes, low, 0x80808080, 0xD8;  // from the second where the mask is 1
            prmt.b32 low, $9, $10, 0x0040;
            prmt.b32 high, $11, $12, 0x0040;
            prmt.b32 low, low, high, 0x5410;
            and.b32 $0, codes, low;
            }""",
            "=r,r,r,r,r,r,r,r,r,r,r,r,r",
            *([codes, x.to(tl.int32, bitcast=True), tl.where(special, 0, -1)], tl.uint8, True, 4),
        )
    return joined


@triton.jit
def encode_groups(x, old, levels, noise, FORMAT: tl.constexpr):
    """Codes, scale bits and exponents of a tile; ``reference.encode_groups``."""
    bits = x.to(tl.int32, bitcast=True)
    if FORMAT.signed or _INTERPRETED:  # nothing else has a sign, not even a GPU's NaN
        bits &= _MAGNITUDE
    # Less than zero for what counts as zero; as unsigned then larger than everything else.
    above = bits - _SMALLEST_BITS
    largest = largest_of_groups(above)
    zero = largest < 0
    broken = largest > _LARGEST_SCALE_BITS - _SMALLEST_BITS
    special = zero | broken
    safe = tl.where(special, 0, largest) + _SMALLEST_BITS
    exponent = safe
    if FORMAT.even:
        codes, scale_bits = _even_codes(x, old, safe, special, noise)
    elif FORMAT.expanded:
        smallest = smallest_of_groups(above.to(tl.uint32, bitcast=True))
        span = tl.where(special, 0, largest - smallest.to(tl.int32, bitcast=True))
        if FORMAT.signed:
            codes, scale_bits, exponent = _signed_split(bits, safe, span, noise)
        else:
            codes, scale_bits, exponent = _unsigned_split(bits, safe, span, special, noise)
    else:
        STEP: tl.constexpr = 0xFFFF if FORMAT.signed else 0x7FFFFF
        scale_bits = (safe + STEP) & (-STEP - 1)
        codes = _level_codes(bits, scale_bits, special, levels, noise, FORMAT)
    if not FORMAT.even:
        codes = _with_signs(codes, x, special) if FORMAT.signed else codes.to(tl.uint8)
    stored = tl.where(zero, 0, tl.where(broken, 0x7FC0, scale_bits >> 16)).to(tl.uint16)
    return codes, stored, exponent.to(tl.uint8)
