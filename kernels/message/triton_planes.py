"""Packing of codes into planes as Triton device functions.

Codes are treated in pairs: two in the halves of an int32, of every eight columns j and j + 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lq_lightning.kernels.message.triton_blocks import integer_type, load_run, select_bytes


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
    span,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    FULL: tl.constexpr,
):
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
def plane_of_pairs(a, b, c, d, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
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
    span,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """``store_codes`` for codes of 8 bits."""
    if FORMAT.mantissa_bits == 3:  # sign, one unused bit of the exponent, code
        a = (a & -0x7FFF8000) | ((a << 1) & 0x7FFF7FFF)
        b = (b & -0x7FFF8000) | ((b << 1) & 0x7FFF7FFF)
        c = (c & -0x7FFF8000) | ((c << 1) & 0x7FFF7FFF)
        d = (d & -0x7FFF8000) | ((d << 1) & 0x7FFF7FFF)
    BYTES: tl.constexpr = 0x6240 if FORMAT.fraction_bits == 0 else 0x7351
    low = select_bytes(a, b, BYTES)  # codes 0, 1, 4, 5
    high = select_bytes(c, d, BYTES)  # codes 2, 3, 6, 7
    words = tl.join(select_bytes(low, high, 0x5410) & keep, select_bytes(low, high, 0x7632) & keep)
    store_words(tl.reshape(words, (BLOCK // 4,)), row_ptr, start, span, BLOCK, 8, FULL)


@triton.jit
def _code_of_half(word, FORMAT: tl.constexpr):
    """Codes of fewer than 8 bits in the low bits of both halves, from ``fixed_point``'s numbers."""
    MASK: tl.constexpr = 0x10001 * ((1 << FORMAT.bits) - 1)
    if FORMAT.kind == "float":
        MAGNITUDE: tl.constexpr = 0x10001 * FORMAT.magnitude_mask
        magnitude = (word >> FORMAT.fraction_bits) & MAGNITUDE
        word = magnitude | ((word >> (16 - FORMAT.bits)) & (MASK - MAGNITUDE))
    elif FORMAT.stochastic:
        word = (word >> FORMAT.fraction_bits) & MASK
    return word


@triton.jit
def store_codes(
    a,
    b,
    c,
    d,
    keep,
    row_ptr,
    start,
    span,
    sections,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """Truncate pairs of numbers of ``fixed_point`` to codes and write ``[BLOCK]`` of them.

    ``planes.store_codes``; ``keep`` is -1, or 0 where codes are to be 0.
    """
    if FORMAT.bits == 8:
        _store_bytes(a, b, c, d, keep, row_ptr, start, span, BLOCK, FORMAT, FULL)
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
def load_words(
    plane_ptr,
    start,
    span,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    RUN: tl.constexpr,
    FULL: tl.constexpr,
):
    """Read a plane as ``[BLOCK // 8]`` words of ``WIDTH`` bytes, twice as many int32 for 8 bits."""
    PER_WORD: tl.constexpr = 4 if WIDTH == 8 else 8
    BITS: tl.constexpr = WIDTH * PER_WORD
    source = plane_ptr.to(tl.pointer_type(integer_type(BITS)), bitcast=True) + start // PER_WORD
    count = (span[0] - start) // PER_WORD
    return load_run(source, count, BLOCK // PER_WORD, 128 // BITS, RUN // PER_WORD, FULL)


@triton.jit
def pairs_of_word(word, WIDTH: tl.constexpr):
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
def add_plane(pairs, word, WIDTH: tl.constexpr, shift):
    """Put a plane of ``WIDTH`` bits into pairs of codes, from bit ``shift`` on."""
    a, b, c, d = pairs
    e, f, g, h = pairs_of_word(word, WIDTH)
    return a | (e << shift), b | (f << shift), c | (g << shift), d | (h << shift)
