"""Levels of codes, their values in units of the scale, as Triton device functions."""

from __future__ import annotations

import triton
import triton.language as tl

from lq_lightning.kernels.message.triton_blocks import HAS_PTX, and_or, select_bytes
from lq_lightning.kernels.message.triton_float8 import float8_levels, has_float8_instructions
from lq_lightning.kernels.message.triton_planes import add_plane, load_words, pairs_of_word

# What `launch.INT_TO_FLOAT` holds the bits of.
_TWO_TO_23 = tl.constexpr(8388608.0)


@triton.jit
def pick(index, TABLE: tl.constexpr, FIRST: tl.constexpr, STRIDE: tl.constexpr, BITS: tl.constexpr):
    """fp32 ``TABLE[FIRST + STRIDE * i]`` with ``i`` the low ``BITS`` bits of ``index``."""
    if BITS == 0:
        value = tl.full(index.shape, TABLE[FIRST], tl.float32)
    else:
        HALF: tl.constexpr = 1 << (BITS - 1)
        low = pick(index, TABLE, FIRST, STRIDE, BITS - 1)
        high = pick(index, TABLE, FIRST + STRIDE * HALF, STRIDE, BITS - 1)
        value = tl.where((index & HALF) != 0, high, low)
    return value


@triton.jit
def look_up(
    index, TABLE: tl.constexpr, FIRST: tl.constexpr, STRIDE: tl.constexpr, BITS: tl.constexpr
):
    """``pick``, for many bits with fewer instructions.

    Each thread of a warp knows one number and asks the others: two instructions instead of one per
    number. All threads must be here, which the compiler is told by side effects.
    """
    if HAS_PTX and BITS > 1:
        lane_asm: tl.constexpr = "mov.u32 $0, %laneid; // $1"
        zero = tl.zeros(index.shape, tl.int32)
        lane = tl.inline_asm_elementwise(lane_asm, "=r,r", [zero], tl.int32, True, 1)
        own = pick(lane, TABLE, FIRST, STRIDE, BITS)
        WIDTH: tl.constexpr = ((32 - (1 << BITS)) << 8) | 0x1F
        asm: tl.constexpr = "shfl.sync.idx.b32 $0, $1, $2, $3, 0xffffffff;"
        arguments = [own, index, tl.full(index.shape, WIDTH, tl.int32)]
        value = tl.inline_asm_elementwise(asm, "=f,f,r,r", arguments, tl.float32, False, 1)
    else:
        value = pick(index, TABLE, FIRST, STRIDE, BITS)
    return value


@triton.jit
def _level_of(bits, SHIFT: tl.constexpr, FORMAT: tl.constexpr):
    """Level of the integer code at bit ``SHIFT`` of fp32 bits that count from ``2**23``; exact."""
    wide = bits.to(tl.float32, bitcast=True)
    if SHIFT == 0:
        level = wide - (_TWO_TO_23 + FORMAT.zero_code)
    else:
        factor = tl.full(wide.shape, 2.0**-SHIFT, tl.float32)
        base = tl.full(wide.shape, -(_TWO_TO_23 * 2.0**-SHIFT + FORMAT.zero_code), tl.float32)
        level = tl.fma(wide, factor, base)
    return level


@triton.jit
def _level_at(word, int_to_float, SHIFT: tl.constexpr, FORMAT: tl.constexpr):
    """Level of the code at bit ``SHIFT`` of a word; the code ends below bit 23."""
    BITS: tl.constexpr = FORMAT.bits
    if FORMAT.kind == "integer":
        MASK: tl.constexpr = ((1 << BITS) - 1) << SHIFT
        level = _level_of(and_or(word, MASK, int_to_float), SHIFT, FORMAT)
    elif FORMAT.kind == "float":
        # as fp32 bits with a tiny exponent
        PLACE: tl.constexpr = 23 - FORMAT.mantissa_bits
        MAGNITUDE: tl.constexpr = FORMAT.magnitude_mask << PLACE
        magnitude = (word << (PLACE - SHIFT)) & MAGNITUDE
        bits = magnitude | ((word << (32 - BITS - SHIFT)) & -0x80000000)
        level = bits.to(tl.float32, bitcast=True) * (2.0 ** (126 + FORMAT.min_exponent))
    else:
        LEVELS: tl.constexpr = FORMAT.levels
        level = look_up(word >> SHIFT, LEVELS, 0, 1, BITS)
    return level


@triton.jit
def _level_of_byte(word, int_to_float, INDEX: tl.constexpr, FORMAT: tl.constexpr):
    """Level of the integer code in byte ``INDEX`` of a word."""
    return _level_of(select_bytes(word, int_to_float, 0x7540 + INDEX), 0, FORMAT)


@triton.jit
def _join_eight(a, b, c, d, e, f, g, h, BLOCK: tl.constexpr):
    """Interleave eight ``[BLOCK // 8]`` tensors to ``[BLOCK]``, the inverse of cutting it."""
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.join(even, odd), (BLOCK,))


@triton.jit
def load_codes(
    row_ptr,
    start,
    span,
    sections,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """Read the words of ``[BLOCK]`` codes: those of three planes, of which as many mean something.

    ``planes.load_codes``, not unpacked.
    """
    PLANES: tl.constexpr = FORMAT.planes
    first = load_words(row_ptr, start, span, BLOCK, PLANES[0], RUN, FULL)
    second = first
    third = first
    if len(PLANES) > 1:
        second = load_words(row_ptr + sections[2], start, span, BLOCK, PLANES[1], RUN, FULL)
    if len(PLANES) > 2:
        third = load_words(row_ptr + sections[3], start, span, BLOCK, PLANES[2], RUN, FULL)
    return first, second, third


@triton.jit
def levels_of_words(words, second, third, int_to_float, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """``[BLOCK]`` levels in units of the scale from ``load_codes``; ``rounding.dequantize_codes``.

    Whatever lies beyond the row decodes to some finite level.
    """
    BITS: tl.constexpr = FORMAT.bits
    if BITS == 8:
        if FORMAT.kind == "float":
            levels = _float_levels(words, BLOCK, FORMAT)
        else:
            even = tl.join(
                _level_of_byte(words, int_to_float, 0, FORMAT),
                _level_of_byte(words, int_to_float, 2, FORMAT),
            )
            odd = tl.join(
                _level_of_byte(words, int_to_float, 1, FORMAT),
                _level_of_byte(words, int_to_float, 3, FORMAT),
            )
            levels = tl.reshape(tl.join(even, odd), (BLOCK,))
    elif BITS == 4:
        upper = words >> 16
        levels = _join_eight(
            _level_at(words, int_to_float, 0, FORMAT),
            _level_at(words, int_to_float, 4, FORMAT),
            _level_at(words, int_to_float, 8, FORMAT),
            _level_at(words, int_to_float, 12, FORMAT),
            _level_at(upper, int_to_float, 0, FORMAT),
            _level_at(upper, int_to_float, 4, FORMAT),
            _level_at(upper, int_to_float, 8, FORMAT),
            _level_at(upper, int_to_float, 12, FORMAT),
            BLOCK,
        )
    else:
        levels = _levels_of_planes(words, second, third, int_to_float, BLOCK, FORMAT)
    return levels


@triton.jit
def _float_levels(words, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """Levels of four floating-point codes of 8 bits per word."""
    if has_float8_instructions(FORMAT, False):
        levels = float8_levels(words, BLOCK, FORMAT)
    else:  # by way of a tiny exponent
        codes = tl.reshape(tl.join(words, words >> 16), (BLOCK // 4, 2))
        codes = tl.reshape(tl.join(codes, codes >> 8), (BLOCK,))
        bits = ((codes & 0x7F) << (23 - FORMAT.mantissa_bits)) | ((codes & 0x80) << 24)
        levels = bits.to(tl.float32, bitcast=True) * (2.0 ** (126 + FORMAT.min_exponent))
    return levels


@triton.jit
def _levels_of_planes(
    words, second, third, int_to_float, BLOCK: tl.constexpr, FORMAT: tl.constexpr
):
    """``levels_of_words`` for codes of 2 bits or of several planes."""
    PLANES: tl.constexpr = FORMAT.planes
    pairs = pairs_of_word(words, PLANES[0])
    if len(PLANES) > 1:
        pairs = add_plane(pairs, second, PLANES[1], PLANES[0])
    if len(PLANES) > 2:
        pairs = add_plane(pairs, third, PLANES[2], PLANES[0] + PLANES[1])
    a, b, c, d = pairs
    return _join_eight(
        _level_at(a, int_to_float, 0, FORMAT),
        _level_at(b, int_to_float, 0, FORMAT),
        _level_at(c, int_to_float, 0, FORMAT),
        _level_at(d, int_to_float, 0, FORMAT),
        _level_at(a >> 16, int_to_float, 0, FORMAT),
        _level_at(b >> 16, int_to_float, 0, FORMAT),
        _level_at(c >> 16, int_to_float, 0, FORMAT),
        _level_at(d >> 16, int_to_float, 0, FORMAT),
        BLOCK,
    )
