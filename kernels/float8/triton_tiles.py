"""Tiles of encoded matrices as Triton device functions: some columns of many rows.

A tile is ``[P, N]`` values: N columns, a power of two from 128, of every fourth row. Flattened, so
that each thread owns ``RUN`` consecutive values of a row: decoding and transform then stay in a
thread, as far as they can.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.triton_blocks import (
    HAS_PTX,
    and_or,
    hadamard,
    integer_type,
    interleave,
    select_bytes,
)
from lq_lightning.kernels.message.triton_codes import levels_of_words, pairs_of_word
from lq_lightning.kernels.message.triton_rounding import scales_of_bits
from lq_lightning.kernels.message.triton_rows import row_sections


@triton.jit
def _half(x, HIGH: tl.constexpr):
    """fp32 of one of the two fp16 in int32."""
    bits = (x >> 16) if HIGH else x
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _both_halves(x):
    return tl.join(_half(x, False), _half(x, True))


@triton.jit
def _two_halves(low, high):
    """int32 of two fp16, from fp32 that fp16 holds."""
    bits = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _butterfly(x, y):
    """Sums and differences of two fp16 each."""
    if HAS_PTX:
        add: tl.constexpr = "add.rn.f16x2 $0, $1, $2;"
        sub: tl.constexpr = "sub.rn.f16x2 $0, $1, $2;"
        total = tl.inline_asm_elementwise(add, "=r,r,r", [x, y], tl.int32, True, 1)
        rest = tl.inline_asm_elementwise(sub, "=r,r,r", [x, y], tl.int32, True, 1)
    else:
        low, high = _half(x, False), _half(x, True)
        other, other_high = _half(y, False), _half(y, True)
        total = _two_halves(low + other, high + other_high)
        rest = _two_halves(low - other, high - other_high)
    return total, rest


@triton.jit
def _butterfly_of_halves(x):
    """The sum of the two fp16 in the low half, the low one minus the high one in the high half."""
    if HAS_PTX:
        asm: tl.constexpr = "fma.rn.f16x2 $0, $1, $2, $3;"
        swapped = select_bytes(x, x, 0x1032)
        signs = tl.full(x.shape, -0x43FFC400, tl.int32)  # 1 and -1
        y = tl.inline_asm_elementwise(asm, "=r,r,r,r", [x, signs, swapped], tl.int32, True, 1)
    else:
        low, high = _half(x, False), _half(x, True)
        y = _two_halves(low + high, low - high)
    return y


@triton.jit
def _butterfly_of_words(x, NUM: tl.constexpr, DISTANCE: tl.constexpr):
    """Sums and differences of ``[NUM]`` words ``DISTANCE`` apart."""
    pairs = tl.permute(tl.reshape(x, (NUM // (2 * DISTANCE), 2, DISTANCE)), (0, 2, 1))
    low, high = tl.split(pairs)
    total, rest = _butterfly(low, high)
    return tl.reshape(tl.permute(tl.join(total, rest), (0, 2, 1)), (NUM,))


@triton.jit
def _levels(pair, FORMAT: tl.constexpr):
    """Two codes in the low bits of the halves of a word, as levels in fp16."""
    # 1024 and a code are the bits of 1024 + code
    wide = and_or(pair, 0x10001 * ((1 << FORMAT.bits) - 1), 0x64006400)
    if HAS_PTX:
        asm: tl.constexpr = "sub.rn.f16x2 $0, $1, $2;"
        base = tl.full(pair.shape, 0x10001 * (0x6400 + FORMAT.zero_code), tl.int32)
        levels = tl.inline_asm_elementwise(asm, "=r,r,r", [wide, base], tl.int32, True, 1)
    else:
        base = 1024.0 + FORMAT.zero_code
        levels = _two_halves(_half(wide, False) - base, _half(wide, True) - base)
    return levels


@triton.jit
def _across_words(x, NUM: tl.constexpr, WORDS: tl.constexpr, DISTANCE: tl.constexpr = 1):
    """Transform every ``WORDS`` consecutive words; ``DISTANCE`` is for the recursion."""
    if DISTANCE < WORDS:
        x = _butterfly_of_words(x, NUM, DISTANCE)
        x = _across_words(x, NUM, WORDS, 2 * DISTANCE)
    return x


@triton.jit
def transformed_levels(words, NUM: tl.constexpr, FORMAT: tl.constexpr):
    """fp32 ``[8 * NUM]``: the levels of eight 4-bit codes per word, transformed.

    If a thread owns as many consecutive words as a transform has, nothing moves.
    """
    WORDS: tl.constexpr = FORMAT.hadamard_size // 8
    a, b, c, d = pairs_of_word(words, 4)
    a, b = _butterfly(_levels(a, FORMAT), _levels(b, FORMAT))
    c, d = _butterfly(_levels(c, FORMAT), _levels(d, FORMAT))
    a, c = _butterfly(a, c)
    b, d = _butterfly(b, d)
    a = _across_words(_butterfly_of_halves(a), NUM, WORDS)
    b = _across_words(_butterfly_of_halves(b), NUM, WORDS)
    c = _across_words(_butterfly_of_halves(c), NUM, WORDS)
    d = _across_words(_butterfly_of_halves(d), NUM, WORDS)
    even = tl.join(_both_halves(a), _both_halves(c))
    odd = tl.join(_both_halves(b), _both_halves(d))
    return tl.reshape(tl.join(even, odd), (8 * NUM,))


# Rows of a tile are so far apart.
ROW_STEP = tl.constexpr(4)


@triton.jit
def load_runs(
    source_ptr,
    pitch,
    rows_left,
    words_left,
    P: tl.constexpr,
    WORDS: tl.constexpr,
    VECTOR: tl.constexpr,
    RUN: tl.constexpr,
    EVEN: tl.constexpr,
    SIZE: tl.constexpr = 0,
    FIRST: tl.constexpr = 0,
):
    """``triton_blocks.load_run`` for ``[P, WORDS]`` elements in rows ``pitch`` elements apart.

    A thread owns ``RUN`` consecutive ones. Unless ``EVEN``, those from row ``rows_left`` and column
    ``words_left`` on are zero.
    """
    PART: tl.constexpr = SIZE if SIZE > 0 else RUN
    if PART <= VECTOR:
        index = tl.arange(0, P * WORDS // RUN * PART)
        run = index // PART
        row = run // (WORDS // RUN)
        column = run % (WORDS // RUN) * RUN + index % PART + FIRST
        if EVEN:
            values = tl.load(source_ptr + (row * pitch + column))
        else:
            inside = (row < rows_left) & (column < words_left)
            values = tl.load(source_ptr + (row * pitch + column), inside, 0)
    else:
        HALF: tl.constexpr = PART // 2
        low = load_runs(
            *(source_ptr, pitch, rows_left, words_left, P, WORDS, VECTOR, RUN, EVEN, HALF, FIRST)
        )
        high = load_runs(
            *(source_ptr, pitch, rows_left, words_left, P, WORDS, VECTOR, RUN, EVEN, HALF),
            FIRST + HALF,
        )
        values = interleave(low, high, P * WORDS // RUN * HALF, HALF)
    return values


@dataclass(frozen=True, slots=True)
class Recipe:
    """Constants of the rebuild kernel.

    Attributes:
        flat: ``matrix.is_flat``.
        norm: a kind of norm, or "".
        activation: an activation function, or "".
        up: whether it has a second factor.
        weight: whether the norm has a weight.
        bias: whether the norm has a bias.
        even: whether all rows and columns of all tiles exist.
        unit: a factor of the distance of rows in words, so that the compiler knows of it.
        rows: height of the block from which a tile takes every fourth row.
        columns: columns of a tile.
        run: consecutive values of a row that one thread owns.
    """

    format: MessageFormat
    flat: bool
    norm: str
    activation: str
    up: bool
    weight: bool
    bias: bool
    even: bool
    unit: int
    rows: int
    columns: int
    run: int


@triton.jit
def _load_plane(
    plane_ptr, pitch, row, column, rows_left, columns_left, WIDTH: tl.constexpr, R: tl.constexpr
):
    """Words of a plane of ``WIDTH`` bits per code, as ``triton_codes.load_words`` has them."""
    PER_WORD: tl.constexpr = 4 if WIDTH == 8 else 8
    BITS: tl.constexpr = WIDTH * PER_WORD
    source = plane_ptr.to(tl.pointer_type(integer_type(BITS)), bitcast=True)
    source += row * pitch + column // PER_WORD
    return load_runs(
        *(source, pitch * ROW_STEP, rows_left, columns_left // PER_WORD),
        *(R.rows // ROW_STEP, R.columns // PER_WORD, 128 // BITS, R.run // PER_WORD, R.even),
    )


@triton.jit
def _load_scales(
    section_ptr, pitch, row, column, rows_left, columns_left, GROUP: tl.constexpr, R: tl.constexpr
):
    """Scales or minima of a tile as fp32, one for ``GROUP`` columns of a row."""
    FORMAT: tl.constexpr = R.format
    PER_ROW: tl.constexpr = R.columns // GROUP
    index = tl.arange(0, R.rows // ROW_STEP * PER_ROW)
    down, along = index // PER_ROW, index % PER_ROW
    inside = (down < rows_left) & (along * GROUP < columns_left)
    offsets = down * (pitch * ROW_STEP) + along
    first = row * pitch + column // FORMAT.group_size
    DTYPE: tl.constexpr = integer_type(FORMAT.scale_nbytes * 8)
    source = section_ptr.to(tl.pointer_type(DTYPE), bitcast=True) + first
    bits = tl.load(source + offsets) if R.even else tl.load(source + offsets, inside, 0)
    return scales_of_bits(bits, FORMAT)


@triton.jit
def decode_tile(
    message_ptr, pitches, row, column, rows, numel, factor, int_to_float, R: tl.constexpr
):
    """Decode rows ``row``, ``row + 4``, ... of columns from ``column`` on; ``reference.decode``.

    ``row`` and ``column``, a multiple of the tile's, are int64. ``pitches`` are the words of the
    first plane, and the scales, from one row of the matrix to the next. ``factor`` multiplies all
    values; ``int_to_float`` is ``launch.INT_TO_FLOAT``.

    Returns fp32 ``[R.rows / 4, R.columns]``; values beyond the matrix are undefined.
    """
    FORMAT: tl.constexpr = R.format
    PLANES: tl.constexpr = FORMAT.planes
    BLOCK: tl.constexpr = R.rows // ROW_STEP * R.columns
    word_pitch, scale_pitch = pitches
    length = tl.cast(numel, tl.int64)
    if R.flat:
        length = length * rows
    sections = row_sections(length, FORMAT)
    # Rows end with the codes of padding where each is a message.
    end = tl.cast(numel, tl.int64) if R.flat else sections[0]
    rows_left = (rows - row + (ROW_STEP - 1)) // ROW_STEP
    columns_left = end - column
    words = _load_plane(message_ptr, word_pitch, row, column, rows_left, columns_left, PLANES[0], R)
    second = words
    third = words
    if len(PLANES) > 1:
        # Words are as many in every plane; a row of a matrix in bytes has more of smaller ones.
        SMALLER: tl.constexpr = 1 if R.flat else PLANES[0] // PLANES[1]
        second = _load_plane(
            *(message_ptr + sections[2], word_pitch * SMALLER),
            *(row, column, rows_left, columns_left, PLANES[1], R),
        )
    if len(PLANES) > 2:
        LAST: tl.constexpr = 1 if R.flat else PLANES[0] // PLANES[2]
        third = _load_plane(
            *(message_ptr + sections[3], word_pitch * LAST),
            *(row, column, rows_left, columns_left, PLANES[2], R),
        )
    GROUP: tl.constexpr = FORMAT.group_size if FORMAT.group_size < R.columns else R.columns
    # `reference.transforms_levels`
    EXACT: tl.constexpr = FORMAT.hadamard_size > 0 and FORMAT.bits == 4 and FORMAT.kind == "integer"
    if EXACT:
        values = transformed_levels(words, BLOCK // 8, FORMAT)
    else:
        values = levels_of_words(words, second, third, int_to_float, BLOCK, FORMAT)
    values = tl.reshape(values, (BLOCK // GROUP, GROUP))
    scale = _load_scales(
        message_ptr + sections[4], scale_pitch, row, column, rows_left, columns_left, GROUP, R
    )
    factor = factor * FORMAT.inverse_norm
    scale = tl.broadcast_to((scale * factor)[:, None], values.shape)
    if FORMAT.symmetric:
        values = values * scale
    else:
        minimum = _load_scales(
            message_ptr + sections[5], scale_pitch, row, column, rows_left, columns_left, GROUP, R
        )
        minimum = (minimum * factor)[:, None]
        if EXACT:  # the transform of a constant
            values = values * scale
            first = tl.arange(0, GROUP)[None, :] % FORMAT.hadamard_size == 0
            values = tl.where(first, values + minimum * FORMAT.hadamard_size, values)
        else:
            values = tl.fma(values, scale, tl.broadcast_to(minimum, values.shape))
    if not EXACT:
        values = hadamard(tl.reshape(values, (BLOCK,)), BLOCK, FORMAT.hadamard_size, R.run)
    return tl.reshape(values, (R.rows // ROW_STEP, R.columns))
