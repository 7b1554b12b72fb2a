"""Triton kernel of the optimizer step, bit-identical to ``reference.py``.

One launch updates many tensors, as ``launch.py`` says. A program is one warp, which works on groups
of 128 elements: four per thread, so that all tensors have the same layout, the extrema of a group
are one reduction over the warp, and its constants are scalars.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lq_lightning.kernels.message.triton_blocks import round_output

from .formats import GROUP_SIZE, LARGEST_SCALE_BITS, SMALLEST_BITS

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SMALLEST_BITS = tl.constexpr(SMALLEST_BITS)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_LARGEST_SCALE_BITS = tl.constexpr(LARGEST_SCALE_BITS)
_SMALLEST_SQUARE = tl.constexpr(2.0**-100)  # 0f0D800000 below
_GROUP = tl.constexpr(GROUP_SIZE)
# Of a row of the table, see `launch.py`: its length, and where the scalars begin, in fp32 words.
TABLE_WIDTH = 18
_TABLE_WIDTH = tl.constexpr(TABLE_WIDTH)
_SCALARS_AT = tl.constexpr(28)
_LOG2_E4M3_MAX = tl.constexpr(8.807354922057604)
# Codes are predicted, in units of 2**-20, and a threshold is looked up only within this distance.
# A logarithm of |x| / scale is off by up to 2**-21 (division included) and 2**-22 of itself; up to
# 16 times that counts, for 18.8 octaves at most: beyond, the code is 0. With the exponential it
# makes 1.2e-5 octaves or 140 units; rounded thresholds add 40.
DOUBT = 512
_DOUBT = tl.constexpr(DOUBT)


def _for_each(*template: str) -> list[str]:
    """Lines of PTX for four elements: ``#`` stands for a letter, ``$#`` for the operand x."""
    return [
        line.replace("$#", f"${1 + index}").replace("#", "abcd"[index])
        for index in range(4)
        for line in template
    ]


def _packing(signed: bool, keep: int) -> list[str]:
    """PTX that packs codes a to d with the signs of x into operand 0; ``keep`` is the mask."""
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
    return [*lines, f"and.b32 $0, a, ${keep};"]


def _codes_assembly(signed: bool) -> str:
    """PTX of ``_round_floating``; operands: codes; x, inverse, power, scale, row, keep (4 each)."""
    lines = [
        ".reg .pred any, pa, pb, pc, pd;",
        ".reg .b32 a, b, c, d, ta, tb, tc, td, xa, xb, xc, xd, sa, sb, sc, sd;",
        ".reg .f32 fa, fb, fc, fd, ya, yb, yc, yd;",
        ".reg .u64 ra, rb, rc, rd;",
        *_for_each("mul.ftz.f32 f#, $#, $5;", "abs.f32 f#, f#;", "lg2.approx.ftz.f32 f#, f#;"),
        *_for_each("fma.rn.f32 f#, f#, $9, 0f410CEAED;", "ex2.approx.ftz.f32 f#, f#;"),
        *_for_each("mul.rn.f32 f#, f#, 0f03800000;", "mov.b32 #, f#;"),
        *_for_each(
            f"add.u32 #, #, {(1 << 19) + DOUBT};", f"and.b32 t#, #, {-2 * DOUBT & 0xFFFFF};"
        ),
        *_for_each("shr.u32 #, #, 20;"),
        *_for_each("setp.eq.u32 p#, t#, 0;"),
        "min.u32 ta, ta, tb;",
        "min.u32 tc, tc, td;",
        "min.u32 ta, ta, tc;",
        "setp.ne.u32 any, ta, 0;",
        "@any bra TRUSTED;",
        # Where not, it is the code before, plus one if |x| is beyond the threshold between them.
        *_for_each("sub.u32 x#, #, 1;", "max.s32 x#, x#, 0;", "mad.wide.u32 r#, x#, 4, $17;"),
        *_for_each("ld.global.nc.f32 f#, [r#];"),
        *_for_each("mul.rn.f32 f#, f#, $13;", "abs.f32 y#, $#;", "set.gt.u32.f32 s#, y#, f#;"),
        *_for_each("sub.u32 x#, x#, s#;", "selp.b32 #, x#, #, p#;"),  # s is -1 if so
        "TRUSTED:",
        *_packing(signed, keep=21),
    ]
    return "{ " + " ".join(lines) + " }"


def _comparing_assembly(signed: bool) -> str:
    """PTX of ``_finish_codes``; operands: codes; x, number, limit, keep (4 each)."""
    lines = [
        ".reg .pred pa, pb, pc, pd;",
        ".reg .b32 a, b, c, d;",
        ".reg .f32 fa, fb, fc, fd;",
        *_for_each("abs.f32 f#, $#;"),
        *(f"setp.gt.f32 p{letter}, f{letter}, ${9 + i};" for i, letter in enumerate("abcd")),
        *(f"mov.b32 {letter}, ${5 + i};" for i, letter in enumerate("abcd")),
        *_for_each("@p# add.u32 #, #, 1;"),
        *_packing(signed, keep=13),
    ]
    return "{ " + " ".join(lines) + " }"


# Operands: four levels, the codes, and four each of the table and of the row's offset in bytes.
_LEVELS = tl.constexpr(
    "{ .reg .b32 ta, tb, tc, td; .reg .u64 ra, rb, rc, rd; "
    + " ".join(
        [
            *(f"prmt.b32 t{letter}, $4, 0, {0x4440 + i};" for i, letter in enumerate("abcd")),
            *(f"mad.lo.u32 t{letter}, t{letter}, 4, $9;" for letter in "abcd"),
            *(f"cvt.u64.u32 r{letter}, t{letter};" for letter in "abcd"),
            *(f"add.u64 r{letter}, r{letter}, $5;" for letter in "abcd"),
            *(f"ld.global.nc.f32 ${i}, [r{letter}];" for i, letter in enumerate("abcd")),
        ]
    )
    + " }"
)
_SIGNED_CODES = tl.constexpr(_codes_assembly(True))
_UNSIGNED_CODES = tl.constexpr(_codes_assembly(False))
_SIGNED_COMPARED = tl.constexpr(_comparing_assembly(True))
_UNSIGNED_COMPARED = tl.constexpr(_comparing_assembly(False))


@triton.jit
def _sqrt(x):
    """Correctly rounded square root of ``max(x, 2**-100)``, NaN for infinity; without branches."""
    if _INTERPRETED:
        x = tl.where(x < _SMALLEST_SQUARE, _SMALLEST_SQUARE, x)
        y = tl.where(x < float("inf"), tl.sqrt(x), float("nan"))
    else:
        y = tl.inline_asm_elementwise(
            """{
            .reg .f32 x, y, n, h;
            max.NaN.f32 x, $1, 0f0D800000;
            rsqrt.approx.ftz.f32 h, x;
            mul.f32 y, x, h;
            mul.f32 h, h, 0f3F000000;
            neg.f32 n, y;
            fma.rn.f32 n, n, y, x;
            fma.rn.f32 $0, n, h, y;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return y


@triton.jit
def _reciprocal(x):
    """Correctly rounded 1/x for normal results, without branches."""
    if _INTERPRETED:
        y = tl.div_rn(1.0, x)
    else:
        y = tl.inline_asm_elementwise(
            """{
            .reg .f32 y, n;
            rcp.approx.ftz.f32 y, $1;
            neg.f32 n, $1;
            fma.rn.f32 n, n, y, 0f3F800000;
            fma.rn.f32 $0, n, y, y;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return y


@triton.jit
def _look_up(row_ptr, number):
    """Entries of a row of a constant fp32 table.

    Not a load of Triton's, which would choose a layout of its own and exchange everything that
    depends on it through shared memory.
    """
    if _INTERPRETED:
        y = tl.load(row_ptr + number)
    else:
        y = tl.inline_asm_elementwise(
            "{ .reg .u64 a; mad.wide.u32 a, $2, 4, $1; ld.global.nc.f32 $0, [a]; }",
            "=f,l,r",
            [row_ptr.to(tl.int64), number],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return y


@triton.jit
def decode_group(codes, scale, exponent, levels_ptr, FORMAT: tl.constexpr):
    """Values of a group; ``reference.decode_groups``."""
    offset = 0
    if FORMAT.expanded:
        offset = exponent.to(tl.int32) * FORMAT.num_codes
    bits = scale.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    if _INTERPRETED:
        levels = tl.load(levels_ptr + offset + codes.to(tl.int32))
    else:
        levels = tl.inline_asm_elementwise(
            _LEVELS,
            "=f,=f,=f,=f,r,l,l,l,l,r,r,r,r",
            [codes, levels_ptr.to(tl.int64), offset * 4],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
    return levels * bits.to(tl.float32, bitcast=True)


@triton.jit
def _round_floating(x, scale, power, row_ptr, keep, SIGNED: tl.constexpr):
    """Codes where levels are powers of E4M3's, with the sign of x; masked by ``keep``; bytes.

    The bits of ``448 (|x| / scale)**k * 2**-120``, which has the exponents of E4M3, show the code
    from bit 20 on, and below how far away the next level is. All of it is approximate, so near to a
    threshold ``|x|`` is compared with that: rarely by any lane of a warp.
    """
    if _INTERPRETED:
        size = tl.abs(x)
        ratio = tl.where(size < _SMALLEST_NORMAL, 0.0, size) * tl.div_rn(1.0, scale)
        y = tl.exp2(tl.log2(ratio) * power + _LOG2_E4M3_MAX) * (2.0**-120)
        bits = y.to(tl.int32, bitcast=True) + ((1 << 19) + _DOUBT)
        codes = bits >> 20
        below = tl.maximum(codes - 1, 0) & 0x7FF  # NaN's is inside the table, which has room for it
        exact = tl.where(size > tl.load(row_ptr + below) * scale, below + 1, below)
        codes = tl.where((bits & 0xFFFFF) < 2 * _DOUBT, exact, codes)
        if SIGNED:
            codes = codes | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
        codes = (codes & keep).to(tl.uint8)
    else:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
        )
        codes = tl.inline_asm_elementwise(
            _SIGNED_CODES if SIGNED else _UNSIGNED_CODES,
            "=r,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,l,l,l,l,r,r,r,r",
            [x, inverse, power, scale, row_ptr.to(tl.int64), keep],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return codes


@triton.jit
def _finish_codes(number, limit, x, keep, SIGNED: tl.constexpr):
    """``number``, plus one where ``|x| > limit``, and the sign of x; masked by ``keep``; bytes."""
    if _INTERPRETED:
        codes = tl.where(tl.abs(x) > limit, number + 1, number)
        if SIGNED:
            codes = codes | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
        codes = (codes & keep).to(tl.uint8)
    else:
        codes = tl.inline_asm_elementwise(
            _SIGNED_COMPARED if SIGNED else _UNSIGNED_COMPARED,
            "=r,f,f,f,f,r,r,r,r,f,f,f,f,r,r,r,r",
            [x, number, limit, keep],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return codes


@triton.jit
def encode_group(x, thresholds_ptr, exponent_table_ptr, FORMAT: tl.constexpr):
    """Codes, scale bits and exponent of a group; ``reference.encode_groups``."""
    bits = x.to(tl.int32, bitcast=True)
    # Less than zero for what counts as zero; as unsigned then larger than everything else.
    above = (bits & _MAGNITUDE if FORMAT.signed or _INTERPRETED else bits) - _SMALLEST_BITS
    largest = tl.max(above, axis=0)
    zero = largest < 0
    broken = largest > _LARGEST_SCALE_BITS - _SMALLEST_BITS
    safe = tl.where(zero | broken, 0, largest)
    scale_bits = (safe + (_SMALLEST_BITS + 0xFFFF)) & -0x10000
    scale = scale_bits.to(tl.float32, bitcast=True)
    exponent = largest
    row_ptr = thresholds_ptr
    keep = tl.where(zero | broken, 0, -1)
    power = 1.0
    if FORMAT.expanded:
        smallest = tl.min(above.to(tl.uint32, bitcast=True), axis=0).to(tl.int32, bitcast=True)
        octaves = tl.where(zero | broken, 0, safe - smallest) >> 19
        exponent = tl.load(exponent_table_ptr + octaves).to(tl.int32)
        exponent = tl.where(zero | broken, 16, exponent)
        row_ptr += exponent * FORMAT.num_levels
        power = exponent.to(tl.float32) * 0.0625
    if FORMAT.floating:
        codes = _round_floating(x, scale, power, row_ptr, keep, FORMAT.signed)
    else:
        # Bisection but for its last step.
        number = tl.zeros(x.shape, tl.int32)
        BITS: tl.constexpr = 7 if FORMAT.num_levels == 128 else 8
        for bit in tl.static_range(1, BITS):
            limit = _look_up(row_ptr, number + ((FORMAT.num_levels >> bit) - 1)) * scale
            number = tl.where(tl.abs(x) > limit, number + (FORMAT.num_levels >> bit), number)
        limit = _look_up(row_ptr, number) * scale
        codes = _finish_codes(number, limit, x, keep, FORMAT.signed)
    stored = tl.where(zero, 0, tl.where(broken, 0x7FC0, scale_bits >> 16)).to(tl.uint16)
    return codes, stored, exponent.to(tl.uint8)


@triton.jit
def rounding_noise(seed_a, seed_b, position):
    """16 random bits of each element, int32; ``reference.rounding_noise``."""
    low = position.to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    x = low ^ seed_a.to(tl.uint32)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D + (high * 0xC2B2AE35 ^ seed_b.to(tl.uint32))
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    return (x & 0xFFFF).to(tl.int32)


@triton.jit
def round_stochastically(x, noise):
    """Round fp32 to bf16; ``reference.round_stochastically``."""
    bits = x.to(tl.int32, bitcast=True)
    finite = (bits & _MAGNITUDE) < 0x7F800000
    rounded = (tl.where(finite, bits + noise, bits) & -0x10000).to(tl.float32, bitcast=True)
    rounded = tl.where(x == x, rounded, float("nan"))
    return round_output(rounded, tl.bfloat16)


@triton.jit
def _update(p, g, first, second, s, RULE: tl.constexpr):
    """New parameter and states; ``reference.update``. ``s`` holds the scalars."""
    if RULE == "lion":
        mixed = first * s[0] + g * s[1]
        direction = tl.where(mixed > 0.0, 1.0, tl.where(mixed < 0.0, -1.0, mixed))
        p = p * s[6] - direction * s[7]
        first = first * s[2] + g * s[3]
    elif RULE == "sgd" or RULE == "nesterov":
        g = g + p * s[6]
        first = first * s[0] + g * s[1]
        direction = g * s[2] + first * s[0] if RULE == "nesterov" else first
        p = p - direction * s[7]
    else:
        if RULE == "adam":
            g = g + p * s[6]
        first = first * s[0] + g * s[1]
        second = second * s[2] + (g * g) * s[3]
        step = first * _reciprocal(_sqrt(second) + s[4]) * s[7]
        p = p - step if RULE == "adam" else p * s[6] - step
    return p, first, second


@triton.jit
def _pointer(table, INDEX: tl.constexpr, DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr):
    address = tl.load(table + INDEX)
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), ALIGNMENT)


@triton.jit
def _state_pointers(table, INDEX: tl.constexpr, FORMAT: tl.constexpr, ALIGNMENT: tl.constexpr):
    DTYPE: tl.constexpr = tl.uint8 if FORMAT.quantized else tl.float32
    return (
        _pointer(table, INDEX, DTYPE, ALIGNMENT),
        _pointer(table, INDEX + 1, tl.uint16, 1),
        _pointer(table, INDEX + 2, tl.uint8, 1),
    )


@triton.jit
def _load_state(pointers, group, offsets, mask, inside, FORMAT: tl.constexpr):
    """Codes (or values), scale and exponent as they are stored; anything beyond the end."""
    codes = tl.load(pointers[0] + offsets, mask)
    scale = group
    exponent = group
    if FORMAT.quantized:
        scale = tl.load(pointers[1] + group, inside)
        if FORMAT.expanded:
            exponent = tl.load(pointers[2] + group, inside)
    return codes, scale, exponent


@triton.jit
def _decode_state(stored, levels_ptr, FORMAT: tl.constexpr):
    values = stored[0]
    if FORMAT.quantized:
        values = decode_group(stored[0], stored[1], stored[2], levels_ptr, FORMAT)
    return values


@triton.jit
def _encode_state(
    x,
    mask,
    thresholds_ptr,
    exponent_table_ptr,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    if FORMAT.quantized:
        if not ALIGNED:
            x = tl.where(mask, x, 0.0)
        stored = encode_group(x, thresholds_ptr, exponent_table_ptr, FORMAT)
    else:
        stored = (x, 0, 0)
    return stored


@triton.jit
def _store_state(stored, pointers, group, offsets, mask, inside, FORMAT: tl.constexpr):
    tl.store(pointers[0] + offsets, stored[0], mask)
    if FORMAT.quantized:
        tl.store(pointers[1] + group, stored[1], inside)
        if FORMAT.expanded:
            tl.store(pointers[2] + group, stored[2], inside)


@triton.jit
def _locate(group, num_groups, length, row_groups, ALIGNED: tl.constexpr):
    """Offsets of the elements of a group, which of them exist, and whether it does."""
    column = tl.arange(0, _GROUP)
    inside = group < num_groups
    if ALIGNED:
        offsets = group.to(tl.int64) * _GROUP + column
        mask = column < tl.where(inside, _GROUP, 0) if _INTERPRETED else inside
    else:
        start = (group % row_groups).to(tl.int64) * _GROUP
        offsets = (group // row_groups).to(tl.int64) * length + start + column
        mask = column < tl.where(inside, length - start, 0)
    return offsets, mask, inside


@triton.jit
def _load_groups(
    pointers,
    first_group,
    num_groups,
    length,
    row_groups,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TWO: tl.constexpr,
    ALIGNED: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Parameter, gradient and stored states of ``COUNT`` groups; anything beyond ``num_groups``."""
    p_ptr, g_ptr, m_ptrs, v_ptrs = pointers
    loaded = ()
    for index in tl.static_range(COUNT):
        group = first_group + index
        offsets, mask, inside = _locate(group, num_groups, length, row_groups, ALIGNED)
        m = _load_state(m_ptrs, group, offsets, mask, inside, FIRST)
        v = m
        if TWO:
            v = _load_state(v_ptrs, group, offsets, mask, inside, SECOND)
        p = tl.load(p_ptr + offsets, mask)
        g = tl.load(g_ptr + offsets, mask)
        loaded = loaded + ((p, g, m, v),)
    return loaded


@triton.jit
def optimizer_step_kernel(
    table_ptr,
    scalars_ptr,
    tensor_of_program_ptr,
    first_levels_ptr,
    first_thresholds_ptr,
    second_levels_ptr,
    second_thresholds_ptr,
    exponent_table_ptr,
    RULE: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    P_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    GROUPS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Update ``GROUPS`` groups of one tensor, ``UNROLL`` at a time: decode -> update -> encode."""
    program = tl.program_id(0)
    tensor = tl.load(tensor_of_program_ptr + program)
    table = table_ptr + tensor * _TABLE_WIDTH
    scalars = scalars_ptr + tensor * (2 * _TABLE_WIDTH) + _SCALARS_AT
    TWO: tl.constexpr = RULE == "adamw" or RULE == "adam"
    ALIGNMENT: tl.constexpr = 16 if ALIGNED else 1
    p_ptr = _pointer(table, 0, P_DTYPE, ALIGNMENT)
    g_ptr = _pointer(table, 1, G_DTYPE, ALIGNMENT)
    m_ptrs = _state_pointers(table, 2, FIRST, ALIGNMENT)
    v_ptrs = _state_pointers(table, 5, SECOND, ALIGNMENT)
    num_groups = tl.load(table + 8).to(tl.int32)
    first_group = (program - tl.load(table + 9).to(tl.int32)) * GROUPS
    length = tl.load(table + 10)
    row_groups = tl.load(table + 11).to(tl.int32)
    s = (
        tl.load(scalars),
        tl.load(scalars + 1),
        tl.load(scalars + 2),
        tl.load(scalars + 3),
        tl.load(scalars + 4),
        tl.load(scalars + 5),
        tl.load(scalars + 6),
        tl.load(scalars + 7),
    )
    pointers = (p_ptr, g_ptr, m_ptrs, v_ptrs)
    stop = tl.minimum(GROUPS, num_groups - first_group)
    limit = first_group + stop
    ahead = _load_groups(
        pointers, first_group, limit, length, row_groups, FIRST, SECOND, TWO, ALIGNED, UNROLL
    )
    for start in range(0, stop, UNROLL):
        # The loads of the next groups, then all arithmetic, then all stores.
        loaded = ahead
        ahead = _load_groups(
            pointers,
            first_group + start + UNROLL,
            limit,
            length,
            row_groups,
            FIRST,
            SECOND,
            TWO,
            ALIGNED,
            UNROLL,
        )
        results = ()
        for index in tl.static_range(UNROLL):
            p, g, m, v = loaded[index]
            group = first_group + start + index
            offsets, mask, inside = _locate(group, num_groups, length, row_groups, ALIGNED)
            m = _decode_state(m, first_levels_ptr, FIRST)
            v = _decode_state(v, second_levels_ptr, SECOND) if TWO else m
            p, m, v = _update(p.to(tl.float32), g.to(tl.float32), m, v, s, RULE)
            if STOCHASTIC:
                seed = tl.load(table + 13)
                position = tl.load(table + 12) + offsets
                noise = rounding_noise(seed.to(tl.int32), (seed >> 32).to(tl.int32), position)
                p = round_stochastically(p, noise)
            else:
                p = round_output(p, P_DTYPE)
            m = _encode_state(m, mask, first_thresholds_ptr, exponent_table_ptr, FIRST, ALIGNED)
            if TWO:
                v = _encode_state(
                    v, mask, second_thresholds_ptr, exponent_table_ptr, SECOND, ALIGNED
                )
            else:
                v = m
            results = results + ((p, m, v),)
        for index in tl.static_range(UNROLL):
            p, m, v = results[index]
            group = first_group + start + index
            offsets, mask, inside = _locate(group, num_groups, length, row_groups, ALIGNED)
            tl.store(p_ptr + offsets, p, mask)
            _store_state(m, m_ptrs, group, offsets, mask, inside, FIRST)
            if TWO:
                _store_state(v, v_ptrs, group, offsets, mask, inside, SECOND)
