"""Packing and unpacking of codes as Triton device functions.

Codes are treated in pairs: two in the halves of an int32, of every eight columns j and j + 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lq_lightning.kernels.message.triton_blocks import and_or, load_run, select_bytes

# 2**23: or-ing a small integer into its bits (`launch.FLOAT_MAGIC_BITS`) gives the sum of both.
_FLOAT_MAGIC = tl.constexpr(8388608.0)


@triton.jit
def _two(x):
    """The low halves of neighbours ``[N, 2]`` in one ``[N]`` int32."""
    low, high = tl.split(x)
    return select_bytes(low, high, 0x5410)


@triton.jit
def pair_up(x, BLOCK: tl.constexpr):
    """Cut ``[BLOCK]`` into ``[BLOCK // 8]`` pairs: of every eight, columns j and j + 4 of 0 to 3.

    The low 16 bits of the former are the low half of a pair. If a thread owns eight consecutive
    columns, nothing moves.
    """
    even, odd = tl.split(tl.reshape(x, (BLOCK // 8, 2, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return _two(first), _two(second), _two(third), _two(fourth)


@triton.jit
def same_in_groups(values, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Spread ``[BLOCK // GROUP]`` values to ``[BLOCK // 8]`` without leaving a thread."""
    spread = tl.broadcast_to(values[:, None], (BLOCK // GROUP, GROUP))
    first, _ = tl.split(tl.reshape(spread, (BLOCK // 8, 2, 2, 2)))
    first, _ = tl.split(first)
    first, _ = tl.split(first)
    return first


@triton.jit
def store_words(
    words,
    plane_ptr,
    start,
    padded_numel,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    FULL: tl.constexpr,
):
    """Write a plane of ``WIDTH`` bits per code, with the zeros that end it.

    ``words`` are ``[BLOCK // 8]`` of ``WIDTH`` bytes, or twice as many int32 for 8 bits.
    """
    PER_WORD: tl.constexpr = BLOCK // words.shape[0]
    PER_SECTION: tl.constexpr = 128 // (WIDTH * PER_WORD)
    pointer = tl.pointer_type(words.dtype)
    target = plane_ptr.to(pointer, bitcast=True) + start // PER_WORD
    offsets = tl.arange(0, words.shape[0])
    if FULL:
        tl.store(target + offsets, words)
    else:
        limit = (padded_numel - start) // PER_WORD
        aligned = (limit + PER_SECTION - 1) // PER_SECTION * PER_SECTION
        tl.store(target + offsets, tl.where(offsets < limit, words, 0), offsets < aligned)


@triton.jit
def _plane_of_pairs(a, b, c, d, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
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
def _store_bytes(
    a,
    b,
    c,
    d,
    keep,
    row_ptr,
    start,
    sections,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """``store_codes`` for codes of 8 bits."""
    if FORMAT.fraction_bits == 7:  # sign, one unused bit of the exponent, code
        a = (a & -0x7FFF8000) | ((a << 1) & 0x7FFF7FFF)
        b = (b & -0x7FFF8000) | ((b << 1) & 0x7FFF7FFF)
        c = (c & -0x7FFF8000) | ((c << 1) & 0x7FFF7FFF)
        d = (d & -0x7FFF8000) | ((d << 1) & 0x7FFF7FFF)
    BYTES: tl.constexpr = 0x6240 if FORMAT.fraction_bits == 0 else 0x7351
    low = select_bytes(a, b, BYTES)  # codes 0, 1, 4, 5
    high = select_bytes(c, d, BYTES)  # codes 2, 3, 6, 7
    words = tl.join(select_bytes(low, high, 0x5410) & keep, select_bytes(low, high, 0x7632) & keep)
    store_words(tl.reshape(words, (BLOCK // 4,)), row_ptr, start, sections[0], BLOCK, 8, FULL)


@triton.jit
def store_codes(
    a,
    b,
    c,
    d,
    keep,
    row_ptr,
    start,
    sections,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """Truncate pairs of numbers of ``fixed_point`` to codes and write ``[BLOCK]`` of them.

    ``reference.store_codes``; ``keep`` is -1, or 0 where codes are to be 0.
    """
    BITS: tl.constexpr = FORMAT.bits
    if BITS == 8:
        _store_bytes(a, b, c, d, keep, row_ptr, start, sections, BLOCK, FORMAT, FULL)
    else:
        if FORMAT.stochastic:
            MASK: tl.constexpr = 0x10001 * ((1 << BITS) - 1)
            a = (a >> FORMAT.fraction_bits) & MASK
            b = (b >> FORMAT.fraction_bits) & MASK
            c = (c >> FORMAT.fraction_bits) & MASK
            d = (d >> FORMAT.fraction_bits) & MASK
        FIRST: tl.constexpr = 2 if BITS <= 3 else 4
        words = _plane_of_pairs(a & keep, b & keep, c & keep, d & keep, 0, FIRST)
        store_words(words, row_ptr, start, sections[0], BLOCK, FIRST, FULL)
        if BITS == 6 or BITS == 7:
            words = _plane_of_pairs(a & keep, b & keep, c & keep, d & keep, 4, 2)
            store_words(words, row_ptr + sections[2], start, sections[0], BLOCK, 2, FULL)
        if BITS == 3 or BITS == 5:
            words = _plane_of_pairs(a & keep, b & keep, c & keep, d & keep, FIRST, 1)
            store_words(words, row_ptr + sections[2], start, sections[0], BLOCK, 1, FULL)
        if BITS == 7:
            words = _plane_of_pairs(a & keep, b & keep, c & keep, d & keep, 6, 1)
            store_words(words, row_ptr + sections[3], start, sections[0], BLOCK, 1, FULL)


@triton.jit
def load_words(
    plane_ptr,
    start,
    padded_numel,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    RUN: tl.constexpr,
    FULL: tl.constexpr,
):
    """Read a plane as ``[BLOCK // 8]`` words of ``WIDTH`` bytes, twice as many int32 for 8 bits."""
    PER_WORD: tl.constexpr = 4 if WIDTH == 8 else 8
    BITS: tl.constexpr = WIDTH * PER_WORD
    DTYPE: tl.constexpr = tl.int32 if BITS == 32 else (tl.int16 if BITS == 16 else tl.int8)
    source = plane_ptr.to(tl.pointer_type(DTYPE), bitcast=True) + start // PER_WORD
    limit = (padded_numel - start) // PER_WORD
    return load_run(source, limit, BLOCK // PER_WORD, 128 // BITS, RUN // PER_WORD, FULL)


@triton.jit
def _level_of(bits, SHIFT: tl.constexpr, FORMAT: tl.constexpr):
    """Level of the code at bit ``SHIFT`` of fp32 bits that count from ``_FLOAT_MAGIC``; exact."""
    wide = bits.to(tl.float32, bitcast=True)
    if SHIFT == 0:
        level = wide - (_FLOAT_MAGIC + FORMAT.zero_code)
    else:
        factor = tl.full(wide.shape, 2.0**-SHIFT, tl.float32)
        base = tl.full(wide.shape, -(_FLOAT_MAGIC * 2.0**-SHIFT + FORMAT.zero_code), tl.float32)
        level = tl.fma(wide, factor, base)
    return level


@triton.jit
def _level_at(word, magic, SHIFT: tl.constexpr, FORMAT: tl.constexpr):
    """Level of the code at bit ``SHIFT`` of a word; the code ends below bit 23."""
    MASK: tl.constexpr = ((1 << FORMAT.bits) - 1) << SHIFT
    return _level_of(and_or(word, MASK, magic), SHIFT, FORMAT)


@triton.jit
def _level_of_byte(word, magic, INDEX: tl.constexpr, FORMAT: tl.constexpr):
    """Level of the code in byte ``INDEX`` of a word."""
    return _level_of(select_bytes(word, magic, 0x7540 + INDEX), 0, FORMAT)


@triton.jit
def _join_eight(a, b, c, d, e, f, g, h, BLOCK: tl.constexpr):
    """Interleave eight ``[BLOCK // 8]`` tensors to ``[BLOCK]``, the inverse of cutting it."""
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.join(even, odd), (BLOCK,))


@triton.jit
def load_levels(
    row_ptr,
    start,
    sections,
    magic,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """Read ``[BLOCK]`` codes as levels in units of the scale; ``reference.dequantize_codes``.

    Whatever lies beyond the row decodes to some finite level.
    """
    padded_numel = sections[0]
    BITS: tl.constexpr = FORMAT.bits
    if BITS == 8:
        words = load_words(row_ptr, start, padded_numel, BLOCK, 8, RUN, FULL)
        if FORMAT.mantissa_bits > 0:
            levels = _float_levels(words, BLOCK, FORMAT)
        else:
            even = tl.join(
                _level_of_byte(words, magic, 0, FORMAT), _level_of_byte(words, magic, 2, FORMAT)
            )
            odd = tl.join(
                _level_of_byte(words, magic, 1, FORMAT), _level_of_byte(words, magic, 3, FORMAT)
            )
            levels = tl.reshape(tl.join(even, odd), (BLOCK,))
    elif BITS == 4:
        words = load_words(row_ptr, start, padded_numel, BLOCK, 4, RUN, FULL)
        upper = words >> 16
        levels = _join_eight(
            _level_at(words, magic, 0, FORMAT),
            _level_at(words, magic, 4, FORMAT),
            _level_at(words, magic, 8, FORMAT),
            _level_at(words, magic, 12, FORMAT),
            _level_at(upper, magic, 0, FORMAT),
            _level_at(upper, magic, 4, FORMAT),
            _level_at(upper, magic, 8, FORMAT),
            _level_at(upper, magic, 12, FORMAT),
            BLOCK,
        )
    else:
        levels = _levels_of_planes(row_ptr, start, sections, magic, BLOCK, RUN, FORMAT, FULL)
    return levels


@triton.jit
def _float_levels(words, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """Levels of four floating-point codes per word, by way of fp32 with a tiny exponent."""
    codes = tl.reshape(tl.join(words, words >> 16), (BLOCK // 4, 2))
    codes = tl.reshape(tl.join(codes, codes >> 8), (BLOCK,))
    bits = ((codes & 0x7F) << (23 - FORMAT.mantissa_bits)) | ((codes & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * (2.0 ** (126 + FORMAT.min_exponent))


@triton.jit
def _pairs_of_word(word, WIDTH: tl.constexpr):
    """Undo ``_plane_of_pairs`` for ``SHIFT`` 0."""
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
def _levels_of_planes(
    row_ptr,
    start,
    sections,
    magic,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """``load_levels`` for codes of 2 bits or of several planes."""
    padded_numel = sections[0]
    BITS: tl.constexpr = FORMAT.bits
    FIRST: tl.constexpr = 2 if BITS <= 3 else 4
    words = load_words(row_ptr, start, padded_numel, BLOCK, FIRST, RUN, FULL)
    a, b, c, d = _pairs_of_word(words, FIRST)
    if BITS == 6 or BITS == 7:
        words = load_words(row_ptr + sections[2], start, padded_numel, BLOCK, 2, RUN, FULL)
        e, f, g, h = _pairs_of_word(words, 2)
        a, b, c, d = a | (e << 4), b | (f << 4), c | (g << 4), d | (h << 4)
    if BITS == 3 or BITS == 5:
        words = load_words(row_ptr + sections[2], start, padded_numel, BLOCK, 1, RUN, FULL)
        e, f, g, h = _pairs_of_word(words, 1)
        a, b, c, d = a | (e << FIRST), b | (f << FIRST), c | (g << FIRST), d | (h << FIRST)
    if BITS == 7:
        words = load_words(row_ptr + sections[3], start, padded_numel, BLOCK, 1, RUN, FULL)
        e, f, g, h = _pairs_of_word(words, 1)
        a, b, c, d = a | (e << 6), b | (f << 6), c | (g << 6), d | (h << 6)
    return _levels_of_codes(a, b, c, d, magic, BLOCK, FORMAT)


@triton.jit
def _levels_of_codes(a, b, c, d, magic, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    return _join_eight(
        _level_at(a, magic, 0, FORMAT),
        _level_at(b, magic, 0, FORMAT),
        _level_at(c, magic, 0, FORMAT),
        _level_at(d, magic, 0, FORMAT),
        _level_at(a >> 16, magic, 0, FORMAT),
        _level_at(b >> 16, magic, 0, FORMAT),
        _level_at(c >> 16, magic, 0, FORMAT),
        _level_at(d >> 16, magic, 0, FORMAT),
        BLOCK,
    )


@triton.jit
def levels_of_pairs(a, b, c, d, magic, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """``[BLOCK]`` levels of the pairs that ``store_codes`` takes, of integer codes."""
    SHIFT: tl.constexpr = FORMAT.fraction_bits
    return _levels_of_codes(a >> SHIFT, b >> SHIFT, c >> SHIFT, d >> SHIFT, magic, BLOCK, FORMAT)
