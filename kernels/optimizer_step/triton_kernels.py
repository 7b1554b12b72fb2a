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
from .triton_codes import round_to_codes

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SMALLEST_BITS = tl.constexpr(SMALLEST_BITS)
_LARGEST_SCALE_BITS = tl.constexpr(LARGEST_SCALE_BITS)
_SMALLEST_SQUARE = tl.constexpr(2.0**-100)  # 0f0D800000 below
_GROUP = tl.constexpr(GROUP_SIZE)
# Of a row of the table, see `launch.py`: its length, and where the scalars begin, in fp32 words.
TABLE_WIDTH = 18
_TABLE_WIDTH = tl.constexpr(TABLE_WIDTH)
_SCALARS_AT = tl.constexpr(28)
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
    codes = round_to_codes(x, scale, power, row_ptr, keep, FORMAT)
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
