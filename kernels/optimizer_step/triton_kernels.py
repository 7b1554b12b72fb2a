"""Triton kernel of the optimizer step, bit-identical to ``reference.py``.

One launch updates many tensors, as ``launch.py`` says. A program is one warp, which works on groups
of 128 elements: four per thread, so that all tensors have the same layout, the extrema of a group
are one reduction over the warp, and its constants are scalars.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lq_lightning.kernels.message.triton_blocks import round_output

from .formats import GROUP_SIZE
from .triton_codes import decode_group, element_noise, encode_group, group_noise

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SMALLEST_SQUARE = tl.constexpr(2.0**-100)  # 0f0D800000 below
_GROUP = tl.constexpr(GROUP_SIZE)
# Of a row of the table, see `launch.py`: its length, and where the scalars begin, in fp32 words.
TABLE_WIDTH = 18
_TABLE_WIDTH = tl.constexpr(TABLE_WIDTH)
_SCALARS_AT = tl.constexpr(28)


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
def round_stochastically(x, noise):
    """Round fp32 to bf16; ``reference.round_stochastically``."""
    bits = x.to(tl.int32, bitcast=True)
    finite = (bits & _MAGNITUDE) < 0x7F800000
    noise = (noise >> 16).to(tl.int32)
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
    levels_ptr,
    word,
    STREAM: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    if FORMAT.quantized:
        if not ALIGNED:
            x = tl.where(mask, x, 0.0)
        noise = element_noise(word, STREAM)
        stored = encode_group(x, levels_ptr, noise, FORMAT)
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
    second_levels_ptr,
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
    noise_group = tl.load(table + 12) + first_group
    seed = tl.load(table + 13)
    seed_a, seed_b = seed.to(tl.int32), (seed >> 32).to(tl.int32)
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
            word = group_noise(seed_a, seed_b, noise_group + start + index)
            if STOCHASTIC:
                p = round_stochastically(p, element_noise(word, 0))
            else:
                p = round_output(p, P_DTYPE)
            m = _encode_state(m, mask, first_levels_ptr, word, 1, FIRST, ALIGNED)
            v = _encode_state(v, mask, second_levels_ptr, word, 2, SECOND, ALIGNED) if TWO else m
            results = results + ((p, m, v),)
        for index in tl.static_range(UNROLL):
            p, m, v = results[index]
            group = first_group + start + index
            offsets, mask, inside = _locate(group, num_groups, length, row_groups, ALIGNED)
            tl.store(p_ptr + offsets, p, mask)
            _store_state(m, m_ptrs, group, offsets, mask, inside, FIRST)
            if TWO:
                _store_state(v, v_ptrs, group, offsets, mask, inside, SECOND)
