"""Codes of a group of values, predicted instead of searched for; bit-identical to ``reference.py``.

Every codebook has a function that maps ``|x| / scale`` to the code and how far it is from the next
one, in units of 2**-20. It is computed approximately. Only where it comes out near a threshold,
``|x|`` is compared with that; rarely by any lane of a warp, so a branch skips the look-ups. On CUDA
all of it is PTX for four elements, on Triton's interpreter the same in its own operations.
"""

from __future__ import annotations

import math
import struct

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_UNIT = 1 << 20
_HALF = 1 << 19
# How near, in units. |x| / scale is off by a factor of up to 1 + 2**-21, division included.
# Powers of E4M3: the logarithm is off by 2**-22 more; up to 16 times that counts, for 18.8 octaves
# at most: beyond, the code is 0. With the exponential it makes 1.2e-5 octaves or 140 units.
# Linear codes: 255 * 2**-21 or 130 units, and 16 for rounding. Dynamic map: the factor of a decade
# is off by 2**-20 more, and 4/3 * 142 times all that makes 280 units. Rounded thresholds add 40.
_DOUBT = 512


def _line(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """Slope and offset of the line through two points."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return slope, first[1] - slope * first[0]


def _dynamic_constants(signed: bool) -> tuple[float, ...]:
    """Constants of :func:`_dynamic_lines`, fp32 after rounding."""
    parts = 1 if signed else 2  # of the lowest decade
    # Thresholds are at whole z but for the first of a decade, which is midway from the last level
    # of the decade below, or from 0; and but for the last, midway to the level 1.
    lowest = ((0.1 + 0.45 / parts) / 2 - 0.1) / 0.9 * parts
    last = _line((62.0, 62.0), (63.25, 63.0)) if signed else _line((127.0, 127.0), (127.75, 128.0))
    factor = 6 * math.log2(10.0) - math.log2(0.9) + math.log2(parts)
    return (
        *(math.log10(2.0), factor, 1.0 - math.log2(10.0)),
        *(*_line((lowest, 0.0), (1.0, 1.0)), *_line((0.2, 0.0), (1.0, 1.0)), *last),
    )


_SIGNED_CONSTANTS = tl.constexpr(_dynamic_constants(True))
_UNSIGNED_CONSTANTS = tl.constexpr(_dynamic_constants(False))
_POSITION_UNIT = tl.constexpr(float(_UNIT))
_POSITION_HALF = tl.constexpr(_HALF)
_POSITION_DOUBT = tl.constexpr(_DOUBT)
_LOG2_E4M3_MAX = tl.constexpr(math.log2(448.0))


# --- PTX ------------------------------------------------------------------------------------------


def _for_each(*template: str) -> list[str]:
    """Lines of PTX for four elements: ``#`` stands for a letter, ``$#`` for the operand x."""
    return [
        line.replace("$#", f"${1 + index}").replace("#", "abcd"[index])
        for index in range(4)
        for line in template
    ]


def _float(value: float) -> str:
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"


def _floating_lines() -> list[str]:
    """Levels that are powers of E4M3's.

    The bits of ``448 (|x| / scale)**k * 2**-120``, which has the exponents of E4M3, show the code
    from bit 20 on, and below how far away the next level is.
    """
    return [
        *_for_each("lg2.approx.ftz.f32 f#, f#;"),
        *_for_each(f"fma.rn.f32 f#, f#, $9, {_float(math.log2(448.0))};"),
        *_for_each("ex2.approx.ftz.f32 f#, f#;", "mul.rn.f32 f#, f#, 0f03800000;"),
        *_for_each("mov.b32 #, f#;", f"add.u32 #, #, {_HALF + _DOUBT};"),
    ]


def _linear_lines(signed: bool) -> list[str]:
    """Levels at equal distances."""
    steps = _float((127 if signed else 255) * float(_UNIT))
    return _for_each(
        f"fma.rn.f32 f#, f#, {steps}, {_float(_HALF + _DOUBT)};", "cvt.rzi.s32.f32 #, f#;"
    )


def _dynamic_lines(signed: bool) -> list[str]:
    """Decades d = 0 to 6, each cut in P = 2**d parts (twice as many without signs).

    Levels are at the middles of the parts, thresholds therefore at their edges
    ``z = (|x| / scale * 10**(6 - d) - 0.1) / 0.9 * P``, but for the first and the last; straight
    lines put these at whole numbers too. The number of a decade's first level is P, less one
    without signs.
    """
    log10, factor, octaves, *lines = (_float(c) for c in _dynamic_constants(signed))
    low_slope, low_offset, slope, offset, last_slope, last_offset = lines
    base, one = (_UNIT, 0x3F800000) if signed else (2 * _UNIT, 0x40000000)
    bound = "min" if signed else "max"
    return [
        *_for_each("lg2.approx.ftz.f32 y#, f#;", f"fma.rn.f32 y#, y#, {log10}, 0f40E00000;"),
        *_for_each("cvt.rmi.s32.f32 #, y#;", "max.s32 #, #, 0;", "min.s32 #, #, 6;"),
        *_for_each("cvt.rn.f32.s32 y#, #;", f"fma.rn.f32 y#, y#, {octaves}, {factor};"),
        *_for_each("ex2.approx.ftz.f32 y#, y#;"),
        *_for_each("shl.b32 x#, #, 23;", f"add.u32 x#, x#, {one};", "mov.b32 z#, x#;"),
        *_for_each(f"mul.rn.f32 z#, z#, {_float(-1 / 9)};", "fma.rn.f32 z#, f#, y#, z#;"),
        *_for_each("setp.eq.s32 p#, #, 0;"),
        *_for_each(f"selp.f32 y#, {low_slope}, {slope}, p#;"),
        *_for_each(f"selp.f32 f#, {low_offset}, {offset}, p#;"),
        *_for_each("fma.rn.f32 y#, z#, y#, f#;", "min.f32 y#, y#, z#;"),
        *_for_each(f"fma.rn.f32 f#, z#, {last_slope}, {last_offset};", f"{bound}.f32 y#, y#, f#;"),
        *_for_each(f"mul.rn.f32 y#, y#, {_float(_UNIT)};", "cvt.rni.s32.f32 x#, y#;"),
        *_for_each(f"mov.b32 s#, {base};", "shl.b32 #, s#, #;"),
        # Saturated, so that infinities stay inside the memory of the table.
        *_for_each(f"add.s32 #, #, {_DOUBT - (0 if signed else _UNIT)};", "add.sat.s32 #, #, x#;"),
    ]


def _packing(signed: bool) -> list[str]:
    """PTX that packs codes a to d with the signs of x, masked by ``keep``."""
    lines = [
        "prmt.b32 a, a, b, 0x0040;",
        "prmt.b32 c, c, d, 0x0040;",
        "prmt.b32 a, a, c, 0x5410;",
    ]
    if signed:
        lines += [
            "prmt.b32 b, $1, $2, 0x0073;",
            "prmt.b32 d, $3, $4, 0x0073;",
            "prmt.b32 b, b, d, 0x5410;",
            "lop3.b32 a, a, b, 0x80808080, 0xF8;",
        ]
    return [*lines, "and.b32 $0, a, $21;"]


def _assembly(position: list[str], signed: bool) -> str:
    """PTX of :func:`round_to_codes`; operands: codes; x, inverse, power, scale, row, keep (4 each).

    ``position`` turns ``|x| / scale`` in f into the position plus ``_DOUBT``, in a to d.
    """
    lines = [
        ".reg .pred any, pa, pb, pc, pd;",
        ".reg .b32 a, b, c, d, ta, tb, tc, td, xa, xb, xc, xd, sa, sb, sc, sd;",
        ".reg .f32 fa, fb, fc, fd, ya, yb, yc, yd, za, zb, zc, zd;",
        ".reg .u64 ra, rb, rc, rd;",
        *_for_each("mul.ftz.f32 f#, $#, $5;", "abs.f32 f#, f#;"),
        *position,
        *_for_each(f"and.b32 t#, #, {-2 * _DOUBT & (_UNIT - 1)};", "shr.u32 #, #, 20;"),
        *_for_each("setp.eq.u32 p#, t#, 0;"),
        "min.u32 ta, ta, tb;",
        "min.u32 tc, tc, td;",
        "min.u32 ta, ta, tc;",
        "setp.ne.u32 any, ta, 0;",
        "@any bra TRUSTED;",
        # Where not, it is the code before, plus one if |x| is beyond the threshold between them.
        *_for_each("sub.u32 x#, #, 1;", "max.s32 x#, x#, 0;", "mad.wide.u32 r#, x#, 4, $17;"),
        *_for_each("ld.global.nc.f32 f#, [r#];"),
        *_for_each("mul.rn.f32 f#, f#, $13;", "abs.f32 y#, $#;"),
        *_for_each("set.gt.u32.f32 s#, y#, f#;"),
        *_for_each("sub.u32 x#, x#, s#;", "selp.b32 #, x#, #, p#;"),  # s is -1 if so
        "TRUSTED:",
        *_packing(signed),
    ]
    return "{ " + " ".join(lines) + " }"


_SIGNED_FLOATING = tl.constexpr(_assembly(_floating_lines(), True))
_UNSIGNED_FLOATING = tl.constexpr(_assembly(_floating_lines(), False))
_SIGNED_LINEAR = tl.constexpr(_assembly(_linear_lines(True), True))
_UNSIGNED_LINEAR = tl.constexpr(_assembly(_linear_lines(False), False))
_SIGNED_DYNAMIC = tl.constexpr(_assembly(_dynamic_lines(True), True))
_UNSIGNED_DYNAMIC = tl.constexpr(_assembly(_dynamic_lines(False), False))


# --- Triton ---------------------------------------------------------------------------------------


@triton.jit
def _dynamic_position(ratio, SIGNED: tl.constexpr):
    """The same as :func:`_dynamic_lines`."""
    C: tl.constexpr = _SIGNED_CONSTANTS if SIGNED else _UNSIGNED_CONSTANTS
    decade = tl.floor(tl.log2(ratio) * C[0] + 7.0)
    decade = tl.minimum(tl.maximum(decade, 0.0), 6.0)
    parts = tl.exp2(decade) * (1.0 if SIGNED else 2.0)
    z = ratio * tl.exp2(decade * C[2] + C[1]) - parts * (1.0 / 9.0)
    slope = tl.where(decade == 0.0, C[3], C[5])
    offset = tl.where(decade == 0.0, C[4], C[6])
    y = tl.minimum(z * slope + offset, z)
    last = z * C[7] + C[8]
    y = tl.minimum(y, last) if SIGNED else tl.maximum(y, last)
    y = tl.minimum(y, 1024.0)
    base = parts if SIGNED else parts - 1.0
    return (y * _POSITION_UNIT).to(tl.int32) + base.to(tl.int32) * (1 << 20) + _POSITION_DOUBT


@triton.jit
def round_to_codes(x, scale, power, row_ptr, keep, FORMAT: tl.constexpr):
    """Codes with the sign of x where the format has signs, masked by ``keep``; bytes.

    Magnitudes below 2**-126 count as zero. Codes of what is not finite are anything.
    """
    SIGNED: tl.constexpr = FORMAT.signed
    if _INTERPRETED:
        size = tl.abs(x)
        size = tl.where(size < _SMALLEST_NORMAL, 0.0, size)
        ratio = size * tl.div_rn(1.0, scale)
        if FORMAT.spacing == "floating":
            y = tl.exp2(tl.log2(ratio) * power + _LOG2_E4M3_MAX) * (2.0**-120)
            position = y.to(tl.int32, bitcast=True) + (_POSITION_HALF + _POSITION_DOUBT)
        elif FORMAT.spacing == "linear":
            y = tl.minimum(ratio, 2.0) * ((FORMAT.num_levels - 1) * _POSITION_UNIT)
            position = (y + (_POSITION_HALF + _POSITION_DOUBT)).to(tl.int32)
        else:
            position = _dynamic_position(ratio, SIGNED)
        codes = position >> 20
        below = tl.maximum(codes - 1, 0) & 0x7FF  # NaN's is inside the memory of the table
        exact = tl.where(size > tl.load(row_ptr + below) * scale, below + 1, below)
        codes = tl.where((position & 0xFFFFF) < 2 * _POSITION_DOUBT, exact, codes)
        if SIGNED:
            codes = codes | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
        codes = (codes & keep).to(tl.uint8)
    else:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
        )
        if FORMAT.spacing == "floating":
            ASSEMBLY: tl.constexpr = _SIGNED_FLOATING if SIGNED else _UNSIGNED_FLOATING
        elif FORMAT.spacing == "linear":
            ASSEMBLY: tl.constexpr = _SIGNED_LINEAR if SIGNED else _UNSIGNED_LINEAR
        else:
            ASSEMBLY: tl.constexpr = _SIGNED_DYNAMIC if SIGNED else _UNSIGNED_DYNAMIC
        codes = tl.inline_asm_elementwise(
            ASSEMBLY,
            "=r,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,l,l,l,l,r,r,r,r",
            [x, inverse, power, scale, row_ptr.to(tl.int64), keep],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return codes
