"""Building blocks of the codec as Triton device functions, bit-identical to ``reference.py``.

Compile kernels that use them with ``enable_fp_fusion=False``: a fused multiply-add would round
once where the reference rounds twice.

Names: a tile is ``BLOCK`` consecutive elements of one row, a power of two and a multiple of
``GROUP``; ``FULL`` says that the whole tile lies inside the row, so that nothing needs a mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# 1.5 * 2**23: adding it rounds an fp32 of small magnitude to an integer (half to even) and leaves
# that integer in the low bits, without a conversion instruction.
_ROUND_MAGIC = tl.constexpr(12582912.0)
# 2**23: or-ing a small integer into its bits (`launch.FLOAT_MAGIC_BITS`) gives the sum of both.
_FLOAT_MAGIC = tl.constexpr(8388608.0)
_ROUND_MAGIC_BITS = tl.constexpr(0x4B400000)
_MIN_SCALE = tl.constexpr(2.0**-126)
_MAX_SCALE = tl.constexpr(2.0**120)
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Instructions that the compiler does not find by itself; what they compute is also written out.
_HAS_PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)


@triton.jit
def _select_bytes(a, b, SELECTOR: tl.constexpr):
    """int32 whose byte i is byte ``SELECTOR >> 4 * i & 7`` of ``a`` (0 to 3) and ``b`` (4 to 7)."""
    if _HAS_PTX:
        asm: tl.constexpr = "prmt.b32 $0, $1, $2, $3;"
        word = tl.inline_asm_elementwise(asm, "=r,r,r,r", [a, b, SELECTOR], tl.int32, True, 1)
    else:
        word = a & 0
        for index in tl.static_range(4):
            place = (SELECTOR >> (4 * index)) & 7
            source = a if place < 4 else b
            word |= ((source >> (8 * (place % 4))) & 0xFF) << (8 * index)
    return word


@triton.jit
def _and_or(a, MASK: tl.constexpr, bits):
    """``a & MASK | bits`` of int32."""
    if _HAS_PTX:
        asm: tl.constexpr = "lop3.b32 $0, $1, $2, $3, 0xEA;"
        word = tl.inline_asm_elementwise(asm, "=r,r,r,r", [a, MASK, bits], tl.int32, True, 1)
    else:
        word = (a & MASK) | bits
    return word


@triton.jit
def program_row():
    """Row of this program in the grid of ``launch.row_grid``, int64."""
    return tl.program_id(1).to(tl.int64) + tl.program_id(2).to(tl.int64) * 65535


@triton.jit
def program_tiles(numel, tiles, BLOCK: tl.constexpr):
    """Tiles of this program in the grid of ``launch.row_grid``.

    Returns:
        The first one; the end of those that lie wholly inside the row; whether the tile at that end
        is the incomplete one at the end of the row, and of this program.
    """
    first = tl.program_id(0) * tiles
    complete = (tl.cast(numel, tl.int64) // BLOCK).to(tl.int32)
    end = tl.maximum(first, tl.minimum(first + tiles, complete))
    last = (end == complete) & (end < first + tiles) & (tl.cast(numel, tl.int64) % BLOCK != 0)
    return first, end, last


@triton.jit
def round_output(x, DTYPE: tl.constexpr):
    """Round fp32 to the dtype of an output, half to even."""
    if _INTERPRETED and DTYPE.is_bf16():
        # Triton's interpreter truncates here (seen with 3.9); a GPU rounds.
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        y = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def _interleave(low, high, SIZE: tl.constexpr, RUN: tl.constexpr):
    """Merge two ``[SIZE]`` tensors by alternating runs of ``RUN`` elements."""
    pairs = tl.reshape(tl.join(low, high), (SIZE // RUN, RUN, 2))
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), (2 * SIZE,))


@triton.jit
def load_run(
    source_ptr,
    limit,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    RUN: tl.constexpr,
    FULL: tl.constexpr,
    SIZE: tl.constexpr = 0,
    FIRST: tl.constexpr = 0,
):
    """Load ``[BLOCK]`` elements so that each thread owns ``RUN`` consecutive ones.

    A plain load gives a thread ``VECTOR`` elements (16 bytes) and leaves the transform, the group
    maximum and the packing to shuffles between threads. Loading the parts of every run apart and
    joining them keeps that work inside a thread; the parts of a run share cache lines. ``SIZE`` and
    ``FIRST`` are for the recursion. Zero beyond ``limit`` unless ``FULL``.
    """
    PART: tl.constexpr = SIZE if SIZE > 0 else RUN
    if PART <= VECTOR:
        offsets = tl.arange(0, BLOCK // RUN * PART)
        if PART < RUN:
            offsets = offsets // PART * RUN + offsets % PART + FIRST
        if FULL:
            values = tl.load(source_ptr + offsets)
        else:
            values = tl.load(source_ptr + offsets, offsets < limit, 0)
    else:
        HALF: tl.constexpr = PART // 2
        low = load_run(source_ptr, limit, BLOCK, VECTOR, RUN, FULL, HALF, FIRST)
        high = load_run(source_ptr, limit, BLOCK, VECTOR, RUN, FULL, HALF, FIRST + HALF)
        values = _interleave(low, high, BLOCK // RUN * HALF, HALF)
    return values


@triton.jit
def _butterfly_within(x, BLOCK: tl.constexpr, DISTANCE: tl.constexpr):
    """Sums and differences of elements ``DISTANCE`` apart that one thread owns."""
    pairs = tl.permute(tl.reshape(x, (BLOCK // (2 * DISTANCE), 2, DISTANCE)), (0, 2, 1))
    low, high = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (BLOCK,))


@triton.jit
def _butterfly_across(x, BLOCK: tl.constexpr, DISTANCE: tl.constexpr):
    """Sums and differences of elements ``DISTANCE`` apart that two threads own.

    Splitting pairs as above would change the layout of the whole tile. The exclusive or over a
    pair, applied to one's own bits, is the partner: one shuffle, same layout.
    """
    values = tl.reshape(x, (BLOCK // (2 * DISTANCE), 2, DISTANCE))
    bits = values.to(tl.int32, bitcast=True)
    partner = bits ^ tl.xor_sum(bits, axis=1, keep_dims=True)
    sign = (1 - 2 * tl.arange(0, 2)).to(tl.float32)[None, :, None]
    # one instruction, and rounded once, since the product is exact
    y = tl.fma(values, tl.broadcast_to(sign, values.shape), partner.to(tl.float32, bitcast=True))
    return tl.reshape(y, (BLOCK,))


@triton.jit
def hadamard(
    x,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    RUN: tl.constexpr,
    DISTANCE: tl.constexpr = 1,
):
    """Unnormalised transform of every ``SIZE`` consecutive elements; ``SIZE`` 0 does nothing.

    ``RUN`` says how many consecutive elements a thread owns; ``DISTANCE`` is for the recursion.
    """
    if DISTANCE < SIZE:
        if DISTANCE < RUN:
            x = _butterfly_within(x, BLOCK, DISTANCE)
        else:
            x = _butterfly_across(x, BLOCK, DISTANCE)
        x = hadamard(x, BLOCK, SIZE, RUN, 2 * DISTANCE)
    return x


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


@triton.jit
def _two(x):
    """The low halves of neighbours ``[N, 2]`` in one ``[N]`` int32."""
    low, high = tl.split(x)
    return _select_bytes(low, high, 0x5410)


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
def _same_in_groups(values, BLOCK: tl.constexpr, GROUP: tl.constexpr):
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
    low = _select_bytes(a, b, BYTES)  # codes 0, 1, 4, 5
    high = _select_bytes(c, d, BYTES)  # codes 2, 3, 6, 7
    words = tl.join(
        _select_bytes(low, high, 0x5410) & keep, _select_bytes(low, high, 0x7632) & keep
    )
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
    return _level_of(_and_or(word, MASK, magic), SHIFT, FORMAT)


@triton.jit
def _level_of_byte(word, magic, INDEX: tl.constexpr, FORMAT: tl.constexpr):
    """Level of the code in byte ``INDEX`` of a word."""
    return _level_of(_select_bytes(word, magic, 0x7540 + INDEX), 0, FORMAT)


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
def _section(numel, BITS: tl.constexpr):
    """Bytes of a section with ``numel`` fields of ``BITS``, a power of two; ``format._layout``."""
    nbytes = numel * (BITS // 8) if BITS >= 8 else numel // (8 // BITS)
    return (nbytes + 15) // 16 * 16


@triton.jit
def row_sections(numel, FORMAT: tl.constexpr):
    """Where the sections of a row lie; ``MessageFormat.layout``.

    Derived here, since a handful of scalar operations costs less than arguments of the launch.

    Returns ``padded_numel``, ``num_groups``, the offsets of planes 1 and 2, of the scales and of
    the minima; all int64.
    """
    MULTIPLE: tl.constexpr = 8 if FORMAT.hadamard_size < 8 else FORMAT.hadamard_size
    padded_numel = (tl.cast(numel, tl.int64) + (MULTIPLE - 1)) // MULTIPLE * MULTIPLE
    num_groups = (padded_numel + (FORMAT.group_size - 1)) // FORMAT.group_size
    BITS: tl.constexpr = FORMAT.bits
    FIRST: tl.constexpr = BITS if BITS == 8 else (2 if BITS <= 3 else 4)
    SECOND: tl.constexpr = 2 if BITS == 6 or BITS == 7 else 1
    plane_1 = _section(padded_numel, FIRST)
    plane_2 = plane_1
    if BITS != FIRST:
        plane_2 += _section(padded_numel, SECOND)
    scales = plane_2
    if BITS == 7:
        scales += _section(padded_numel, 1)
    minima = scales + _section(num_groups, FORMAT.scale_nbytes * 8)
    return padded_numel, num_groups, plane_1, plane_2, scales, minima


@triton.jit
def store_scales(
    values, row_ptr, offset, first, num_groups, GROUPS: tl.constexpr, FORMAT: tl.constexpr
):
    """Write ``[GROUPS]`` values of the scale dtype; the tile of the last group ends the section.

    NaN is written as one fixed bit pattern, whatever the hardware makes of it.
    """
    index = tl.arange(0, GROUPS)
    inside = index < num_groups - first
    number = values == values
    if FORMAT.scale_dtype == "float32":
        target = (row_ptr + offset).to(tl.pointer_type(tl.int32), bitcast=True)
        bits = tl.where(number, values.to(tl.int32, bitcast=True), 0x7FC00000)
        tl.store(target + first + index, bits, inside)
        per_section: tl.constexpr = 4
        zeros = tl.zeros((per_section,), tl.int32)
    else:
        target = (row_ptr + offset).to(tl.pointer_type(tl.int16), bitcast=True)
        if FORMAT.scale_dtype == "bfloat16":
            wide = tl.where(number, values.to(tl.int32, bitcast=True), 0x7FC00000) >> 16
            bits = wide.to(tl.int16)
        else:
            half = values.to(tl.float16).to(tl.int16, bitcast=True)
            bits = tl.where(number, half, 0x7E00).to(tl.int16)
        tl.store(target + first + index, bits, inside)
        per_section: tl.constexpr = 8
        zeros = tl.zeros((per_section,), tl.int16)
    if first + GROUPS >= num_groups:
        beyond = num_groups + tl.arange(0, per_section)
        end = (num_groups + per_section - 1) // per_section * per_section
        tl.store(target + beyond, zeros, beyond < end)


@triton.jit
def load_scales(row_ptr, offset, first, num_groups, GROUPS: tl.constexpr, FORMAT: tl.constexpr):
    """Read ``[GROUPS]`` values of the scale dtype as fp32; ``reference.load_scales``."""
    index = tl.arange(0, GROUPS)
    inside = index < num_groups - first
    if FORMAT.scale_dtype == "float32":
        source = (row_ptr + offset).to(tl.pointer_type(tl.float32), bitcast=True)
        return tl.load(source + first + index, inside, 0.0)
    source = (row_ptr + offset).to(tl.pointer_type(tl.int16), bitcast=True)
    bits = tl.load(source + first + index, inside, 0)
    if FORMAT.scale_dtype == "bfloat16":
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def store_tile(
    x,
    row_ptr,
    row,
    tile,
    numel,
    seed_a,
    seed_b,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    NORM: tl.constexpr,
    FULL: tl.constexpr,
):
    """Quantize a transformed ``[BLOCK]`` tile and write it; ``quantize.reference.store_block``."""
    sections = row_sections(numel, FORMAT)
    padded_numel, num_groups = sections[0], sections[1]
    GROUP: tl.constexpr = FORMAT.group_size
    GROUPS: tl.constexpr = BLOCK // GROUP
    start = tl.cast(tile, tl.int64) * BLOCK
    values = tl.reshape(x, (GROUPS, GROUP))
    valid = padded_numel - start if FORMAT.hadamard_size > 0 else numel - start
    scale, minimum = group_range(values, valid, FORMAT, GROUPS, NORM, FULL)
    fixed = fixed_point(values, scale, minimum, FORMAT, NORM, FULL)
    a, b, c, d = pair_up(tl.reshape(fixed, (BLOCK,)), BLOCK)
    if FORMAT.stochastic:
        # Below a unit, so it cannot carry into the other half.
        MASK: tl.constexpr = FORMAT.noise_mask
        noise = mixed_noise(seed_a, seed_b, row, start, BLOCK, 0)
        a += noise & MASK
        b += _select_bytes(noise, noise, 0x0321) & MASK
        noise = mixed_noise(seed_a, seed_b, row, start, BLOCK, 1)
        c += noise & MASK
        d += _select_bytes(noise, noise, 0x0321) & MASK
    keep = _same_in_groups(tl.where(scale == scale, -1, 0), BLOCK, GROUP)
    store_codes(a, b, c, d, keep, row_ptr, start, sections, BLOCK, FORMAT, FULL)
    first = start // GROUP
    store_scales(scale, row_ptr, sections[4], first, num_groups, GROUPS, FORMAT)
    if not FORMAT.symmetric:
        store_scales(minimum, row_ptr, sections[5], first, num_groups, GROUPS, FORMAT)


@triton.jit
def load_tile(
    row_ptr,
    tile,
    numel,
    magic,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """Decode a ``[BLOCK]`` tile, still transformed; ``dequantize.reference.dequantize_block``.

    ``magic`` is ``launch.FLOAT_MAGIC_BITS``: known to the compiler, it would be moved to a register
    for every code again.
    """
    sections = row_sections(numel, FORMAT)
    num_groups = sections[1]
    # A tile is either several groups or a part of one.
    GROUP: tl.constexpr = FORMAT.group_size if FORMAT.group_size < BLOCK else BLOCK
    GROUPS: tl.constexpr = BLOCK // GROUP
    start = tl.cast(tile, tl.int64) * BLOCK
    first = start // FORMAT.group_size
    levels = load_levels(row_ptr, start, sections, magic, BLOCK, RUN, FORMAT, FULL)
    levels = tl.reshape(levels, (GROUPS, GROUP))
    scale = load_scales(row_ptr, sections[4], first, num_groups, GROUPS, FORMAT)
    values = levels * scale[:, None]
    if not FORMAT.symmetric:
        minimum = load_scales(row_ptr, sections[5], first, num_groups, GROUPS, FORMAT)
        values = values + minimum[:, None]
    return tl.reshape(values, (BLOCK,))
