"""Codes as planes of words and as levels, in units of the scale, as Triton device functions.

Codes are treated in pairs: two in the halves of an int32, of every eight columns j and j + 4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.triton_blocks import (
    HAS_PTX,
    and_or,
    integer_type,
    load_run,
    select_bytes,
)


@triton.jit
def _two(x):
    """The low halves of neighbours ``[N, 2]`` in one ``[N]`` int32."""
    low, high = tl.split(x)
    return select_bytes(low, high, 0x5410)


@triton.jit
def pair_up(x, BLOCK):
    """Cut ``[BLOCK]`` into ``[BLOCK // 8]`` pairs: of every eight, columns j and j + 4 of 0 to 3.

    The low 16 bits of the former are the low half of a pair. If a thread owns eight consecutive
    columns, no data moves between threads.
    """
    even, odd = tl.split(tl.reshape(x, (BLOCK // 8, 2, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return _two(first), _two(second), _two(third), _two(fourth)


@triton.jit
def same_in_groups(values, BLOCK, GROUP):
    """Spread ``[BLOCK // GROUP]`` values to ``[BLOCK // 8]`` without leaving a thread."""
    spread = tl.broadcast_to(values[:, None], (BLOCK // GROUP, GROUP))
    first, _ = tl.split(tl.reshape(spread, (BLOCK // 8, 2, 2, 2)))
    first, _ = tl.split(first)
    first, _ = tl.split(first)
    return first


@triton.jit
def store_words(words, plane_ptr, start, span, BLOCK, WIDTH, FULL):
    """Write a plane of ``WIDTH`` bits per code, with the zeros that end it.

    ``words`` are ``[BLOCK // 8]`` of ``WIDTH`` bytes, or twice as many int32 for 8 bits; ``span``
    is that of ``triton_rows.code_span``.
    """
    PER_WORD: tl.constexpr = BLOCK // words.shape[0]
    PER_SECTION: tl.constexpr = 128 // (WIDTH * PER_WORD)
    pointer = tl.pointer_type(words.dtype)
    first = start // PER_WORD
    target = plane_ptr.to(pointer, bitcast=True) + first
    offsets = tl.arange(0, words.shape[0])
    if FULL:
        tl.store(target + offsets, words)
    else:
        end, last = span
        end = end // PER_WORD
        aligned = (end + PER_SECTION - 1) // PER_SECTION * PER_SECTION
        aligned = tl.where(last, aligned, end)
        values = tl.where(offsets < end - first, words, 0)
        tl.store(target + offsets, values, offsets < aligned - first)


@triton.jit
def plane_of_pairs(a, b, c, d, SHIFT, WIDTH):
    """Bits from ``SHIFT`` of eight codes in pairs, as one word of ``WIDTH`` bytes."""
    MASK: tl.constexpr = ((1 << WIDTH) - 1) * 0x10001
    low = ((a >> SHIFT) & MASK) | (((b >> SHIFT) & MASK) << WIDTH)
    high = ((c >> SHIFT) & MASK) | (((d >> SHIFT) & MASK) << WIDTH)
    both = low | (high << (2 * WIDTH))
    if WIDTH == 4:
        word = both
    elif WIDTH == 2:
        word = ((both & 0xFF) | (both >> 8)).to(tl.int16)
    else:
        word = ((both & 0xF) | (both >> 12)).to(tl.int8)
    return word


@triton.jit
def _code_of_half(word, FORMAT):
    """Codes of fewer than 8 bits in the low bits of both halves, from ``fixed_point``'s numbers."""
    if FORMAT.stochastic:
        MASK: tl.constexpr = 0x10001 * ((1 << FORMAT.bits) - 1)
        word = (word >> FORMAT.fraction_bits) & MASK
    return word


@triton.jit
def store_codes(a, b, c, d, keep, row_ptr, start, span, sections, BLOCK, FORMAT, FULL):
    """Truncate pairs of numbers of ``fixed_point`` to codes and write ``[BLOCK]`` of them.

    ``reference.store_codes``; ``keep`` is -1, or 0 where codes are to be 0.
    """
    if FORMAT.bits == 8:
        if FORMAT.mantissa_bits == 3:  # sign, one unused bit of the exponent, code
            a = (a & -0x7FFF8000) | ((a << 1) & 0x7FFF7FFF)
            b = (b & -0x7FFF8000) | ((b << 1) & 0x7FFF7FFF)
            c = (c & -0x7FFF8000) | ((c << 1) & 0x7FFF7FFF)
            d = (d & -0x7FFF8000) | ((d << 1) & 0x7FFF7FFF)
        BYTES: tl.constexpr = 0x6240 if FORMAT.fraction_bits == 0 else 0x7351
        low = select_bytes(a, b, BYTES)  # codes 0, 1, 4, 5
        high = select_bytes(c, d, BYTES)  # codes 2, 3, 6, 7
        low, high = select_bytes(low, high, 0x5410) & keep, select_bytes(low, high, 0x7632) & keep
        words = tl.reshape(tl.join(low, high), (BLOCK // 4,))
        store_words(words, row_ptr, start, span, BLOCK, 8, FULL)
    else:
        a = _code_of_half(a, FORMAT) & keep
        b = _code_of_half(b, FORMAT) & keep
        c = _code_of_half(c, FORMAT) & keep
        d = _code_of_half(d, FORMAT) & keep
        PLANES: tl.constexpr = FORMAT.planes
        words = plane_of_pairs(a, b, c, d, 0, PLANES[0])
        store_words(words, row_ptr, start, span, BLOCK, PLANES[0], FULL)
        if len(PLANES) > 1:
            words = plane_of_pairs(a, b, c, d, PLANES[0], PLANES[1])
            store_words(words, row_ptr + sections[2], start, span, BLOCK, PLANES[1], FULL)
        if len(PLANES) > 2:
            words = plane_of_pairs(a, b, c, d, PLANES[0] + PLANES[1], PLANES[2])
            store_words(words, row_ptr + sections[3], start, span, BLOCK, PLANES[2], FULL)


@triton.jit
def load_words(plane_ptr, start, span, BLOCK, WIDTH, RUN, FULL):
    """Read a plane as ``[BLOCK // 8]`` words of ``WIDTH`` bytes, twice as many int32 for 8 bits."""
    PER_WORD: tl.constexpr = 4 if WIDTH == 8 else 8
    BITS: tl.constexpr = WIDTH * PER_WORD
    source = plane_ptr.to(tl.pointer_type(integer_type(BITS)), bitcast=True) + start // PER_WORD
    count = (span[0] - start) // PER_WORD
    return load_run(source, count, BLOCK // PER_WORD, 128 // BITS, RUN // PER_WORD, FULL)


@triton.jit
def pairs_of_word(word, WIDTH):
    """Undo ``plane_of_pairs`` for ``SHIFT`` 0."""
    MASK: tl.constexpr = ((1 << WIDTH) - 1) * 0x10001
    both = word.to(tl.int32)
    if WIDTH == 2:
        both = (both & 0xFF) | ((both & 0xFF00) << 8)
    if WIDTH == 1:
        both = (both & 0xF) | ((both & 0xF0) << 12)
    return (
        both & MASK,
        (both >> WIDTH) & MASK,
        (both >> (2 * WIDTH)) & MASK,
        (both >> (3 * WIDTH)) & MASK,
    )


@triton.jit
def add_plane(pairs, word, WIDTH, shift):
    """Put a plane of ``WIDTH`` bits into pairs of codes, from bit ``shift`` on."""
    a, b, c, d = pairs
    e, f, g, h = pairs_of_word(word, WIDTH)
    return a | (e << shift), b | (f << shift), c | (g << shift), d | (h << shift)


@triton.constexpr_function
def has_float8_instructions(fmt: MessageFormat, rounds: bool) -> bool:
    """Return whether the GPU converts a format; ``rounds`` if values are to become codes."""
    if triton.knobs.runtime.interpret or torch.version.hip is not None:
        return False
    fits = fmt.code == "fp8_e4m3" and not (rounds and fmt.stochastic)
    return fits and bool(cuda_capability_geq(8, 9))


_ENCODING = tl.constexpr(
    "{ .reg .b16 low, high; .reg .b32 first, second;"
    "cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
    # not {low, high}: see `float8_word` in `kernels/float8/triton_kernels.py`
    "mov.b32 first, {low, 0}; mov.b32 second, {high, 0};"
    "prmt.b32 first, first, second, 0x5410; and.b32 $0, first, $5; }"
)
_DECODING = tl.constexpr(
    "{ .reg .b16 low, high, a, b, c, d; .reg .b32 first, second;"
    "mov.b32 {low, high}, $4; cvt.rn.f16x2.e4m3x2 first, low;"
    "cvt.rn.f16x2.e4m3x2 second, high; mov.b32 {a, b}, first; mov.b32 {c, d}, second;"
    "cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }"
)


@triton.jit
def _four(x):
    """Cut ``[N]`` into four ``[N // 4]`` by the columns of every four."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0] // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def float8_words(y, keep):
    """Codes of a ``[GROUPS, GROUP]`` tile of fp32 as int32 of four.

    ``keep`` is ``[GROUPS]`` int32: -1, or 0 where codes are to be 0.
    """
    BLOCK: tl.constexpr = y.shape[0] * y.shape[1]
    a, b, c, d = _four(tl.reshape(y, (BLOCK,)))
    keep, _, _, _ = _four(tl.reshape(tl.broadcast_to(keep[:, None], y.shape), (BLOCK,)))
    return tl.inline_asm_elementwise(
        _ENCODING, "=r,f,f,f,f,r", [a, b, c, d, keep], tl.int32, True, 1
    )


@triton.jit
def float8_levels(words, BLOCK):
    """``[BLOCK]`` fp32 of the codes in ``[BLOCK // 4]`` int32."""
    first, second, third, fourth = tl.inline_asm_elementwise(
        *(_DECODING, "=f,=f,=f,=f,r", [words]),
        *((tl.float32, tl.float32, tl.float32, tl.float32), True, 1),
    )
    even = tl.join(first, third)
    odd = tl.join(second, fourth)
    return tl.reshape(tl.join(even, odd), (BLOCK,))


# `launch.INT_TO_FLOAT` holds its bits.
_TWO_TO_23 = tl.constexpr(8388608.0)


@triton.jit
def pick(index, TABLE, FIRST, BITS):
    """fp32 ``TABLE[FIRST + i]`` with ``i`` the low ``BITS`` bits of ``index``."""
    if BITS == 0:
        value = tl.full(index.shape, TABLE[FIRST], tl.float32)
    else:
        HALF: tl.constexpr = 1 << (BITS - 1)
        low = pick(index, TABLE, FIRST, BITS - 1)
        high = pick(index, TABLE, FIRST + HALF, BITS - 1)
        value = tl.where((index & HALF) != 0, high, low)
    return value


@triton.jit
def look_up(index, TABLE, BITS):
    """``pick`` from the first number on, for many bits with fewer instructions.

    Each thread of a warp knows one number and asks the others: two instructions instead of one per
    number. All threads must be here, which the compiler is told by side effects.
    """
    if HAS_PTX and BITS > 1:
        lane_asm: tl.constexpr = "mov.u32 $0, %laneid; // $1"
        zero = tl.zeros(index.shape, tl.int32)
        lane = tl.inline_asm_elementwise(lane_asm, "=r,r", [zero], tl.int32, True, 1)
        own = pick(lane, TABLE, 0, BITS)
        WIDTH: tl.constexpr = ((32 - (1 << BITS)) << 8) | 0x1F
        asm: tl.constexpr = "shfl.sync.idx.b32 $0, $1, $2, $3, 0xffffffff;"
        arguments = [own, index, tl.full(index.shape, WIDTH, tl.int32)]
        value = tl.inline_asm_elementwise(asm, "=f,f,r,r", arguments, tl.float32, False, 1)
    else:
        value = pick(index, TABLE, 0, BITS)
    return value


@triton.jit
def _level_of(bits, SHIFT, FORMAT):
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
def _level_at(word, int_to_float, SHIFT, FORMAT):
    """Level of the code at bit ``SHIFT`` of a word; the code ends below bit 23."""
    BITS: tl.constexpr = FORMAT.bits
    if FORMAT.kind == "integer":
        MASK: tl.constexpr = ((1 << BITS) - 1) << SHIFT
        level = _level_of(and_or(word, MASK, int_to_float), SHIFT, FORMAT)
    else:
        LEVELS: tl.constexpr = FORMAT.levels
        level = look_up(word >> SHIFT, LEVELS, BITS)
    return level


@triton.jit
def _level_of_byte(word, int_to_float, INDEX, FORMAT):
    """Level of the integer code in byte ``INDEX`` of a word."""
    return _level_of(select_bytes(word, int_to_float, 0x7540 + INDEX), 0, FORMAT)


@triton.jit
def _join_eight(a, b, c, d, e, f, g, h, BLOCK):
    """Interleave eight ``[BLOCK // 8]`` tensors to ``[BLOCK]``, the inverse of cutting it."""
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.join(even, odd), (BLOCK,))


@triton.jit
def load_codes(row_ptr, start, span, sections, BLOCK, RUN, FORMAT, FULL):
    """Read the words of ``[BLOCK]`` codes, three planes; missing ones repeat the first.

    ``reference.load_codes``, not unpacked.
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
def levels_of_words(words, second, third, int_to_float, BLOCK, FORMAT):
    """``[BLOCK]`` levels in units of the scale from ``load_codes``; ``reference.dequantize_codes``.

    Codes beyond the row decode to some finite level.
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
def _float_levels(words, BLOCK, FORMAT):
    """Levels of four floating-point codes of 8 bits per word."""
    if has_float8_instructions(FORMAT, False):
        levels = float8_levels(words, BLOCK)
    else:  # by way of a tiny exponent
        codes = tl.reshape(tl.join(words, words >> 16), (BLOCK // 4, 2))
        codes = tl.reshape(tl.join(codes, codes >> 8), (BLOCK,))
        bits = ((codes & 0x7F) << (23 - FORMAT.mantissa_bits)) | ((codes & 0x80) << 24)
        levels = bits.to(tl.float32, bitcast=True) * (2.0 ** (126 + FORMAT.min_exponent))
    return levels


@triton.jit
def _levels_of_planes(words, second, third, int_to_float, BLOCK, FORMAT):
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
