"""Tiles of encoded matrices as Triton device functions: some columns of many rows.

A tile is ``[P, N]`` values: N columns, a power of two from 128, of every fourth row. Flattened, so
that each thread owns ``RUN`` consecutive values of a row: decoding and transform then stay in a
thread, as far as they can.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lq_lightning.kernels.float8.triton_codes import transformed_levels
from lq_lightning.kernels.message.triton_blocks import hadamard, integer_type, interleave
from lq_lightning.kernels.message.triton_levels import levels_of_words
from lq_lightning.kernels.message.triton_rounding import scales_of_bits
from lq_lightning.kernels.message.triton_rows import row_sections

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


@triton.jit
def _load_plane(
    plane_ptr,
    pitch,
    row,
    column,
    rows_left,
    columns_left,
    WIDTH: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUN: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Words of a plane of ``WIDTH`` bits per code, as ``triton_planes.load_words`` has them."""
    PER_WORD: tl.constexpr = 4 if WIDTH == 8 else 8
    BITS: tl.constexpr = WIDTH * PER_WORD
    source = plane_ptr.to(tl.pointer_type(integer_type(BITS)), bitcast=True)
    source += row * pitch + column // PER_WORD
    return load_runs(
        *(source, pitch * ROW_STEP, rows_left, columns_left // PER_WORD),
        *(P, BLOCK_N // PER_WORD, 128 // BITS, RUN // PER_WORD, EVEN),
    )


@triton.jit
def _load_scales(
    section_ptr,
    pitch,
    row,
    column,
    rows_left,
    columns_left,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FORMAT: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Scales or minima of a tile as fp32, ``[P * BLOCK_N // GROUP]``."""
    PER_ROW: tl.constexpr = BLOCK_N // GROUP
    index = tl.arange(0, P * PER_ROW)
    down, along = index // PER_ROW, index % PER_ROW
    inside = (down < rows_left) & (along * GROUP < columns_left)
    offsets = down * (pitch * ROW_STEP) + along
    first = row * pitch + column // FORMAT.group_size
    DTYPE: tl.constexpr = integer_type(FORMAT.scale_nbytes * 8)
    source = section_ptr.to(tl.pointer_type(DTYPE), bitcast=True) + first
    bits = tl.load(source + offsets) if EVEN else tl.load(source + offsets, inside, 0)
    return scales_of_bits(bits, FORMAT)


@triton.jit
def decode_tile(
    message_ptr,
    word_pitch,
    scale_pitch,
    row,
    column,
    rows,
    numel,
    factor,
    int_to_float,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    FLAT: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Decode rows ``row``, ``row + 4``, ... of columns from ``column`` on; ``reference.decode``.

    Args:
        message_ptr: of the matrix.
        word_pitch: words of the first plane from one row of the matrix to the next.
        scale_pitch: the same in scales.
        row: the first one, int64.
        column: a multiple of ``BLOCK_N``, int64.
        rows: of the matrix.
        numel: columns of the matrix.
        factor: fp32, of all values.
        int_to_float: ``launch.INT_TO_FLOAT``.
        P: rows of the tile.
        BLOCK_N: columns of the tile.
        RUN: consecutive values of a thread, a power of two from 8 that divides ``BLOCK_N``.
        FORMAT: of the message.
        FLAT: ``matrix.is_flat``.
        EVEN: whether all rows and columns of the tile exist.

    Returns:
        fp32 ``[P, BLOCK_N]``; those beyond the matrix are any.
    """
    PLANES: tl.constexpr = FORMAT.planes
    BLOCK: tl.constexpr = P * BLOCK_N
    length = tl.cast(numel, tl.int64)
    if FLAT:
        length = length * rows
    sections = row_sections(length, FORMAT)
    # Rows end with the codes of padding where each is a message.
    end = tl.cast(numel, tl.int64) if FLAT else sections[0]
    rows_left = (rows - row + (ROW_STEP - 1)) // ROW_STEP
    columns_left = end - column
    words = _load_plane(
        *(message_ptr, word_pitch, row, column, rows_left, columns_left),
        *(PLANES[0], P, BLOCK_N, RUN, EVEN),
    )
    second = words
    third = words
    if len(PLANES) > 1:
        # Words are as many in every plane; a row of a matrix in bytes has more of smaller ones.
        SMALLER: tl.constexpr = 1 if FLAT else PLANES[0] // PLANES[1]
        second = _load_plane(
            *(message_ptr + sections[2], word_pitch * SMALLER),
            *(row, column, rows_left, columns_left, PLANES[1], P, BLOCK_N, RUN, EVEN),
        )
    if len(PLANES) > 2:
        LAST: tl.constexpr = 1 if FLAT else PLANES[0] // PLANES[2]
        third = _load_plane(
            *(message_ptr + sections[3], word_pitch * LAST),
            *(row, column, rows_left, columns_left, PLANES[2], P, BLOCK_N, RUN, EVEN),
        )
    GROUP: tl.constexpr = FORMAT.group_size if FORMAT.group_size < BLOCK_N else BLOCK_N
    # `reference.transforms_levels`
    EXACT: tl.constexpr = FORMAT.hadamard_size > 0 and FORMAT.bits == 4 and FORMAT.kind == "integer"
    if EXACT:
        values = transformed_levels(words, BLOCK // 8, FORMAT)
    else:
        values = levels_of_words(words, second, third, int_to_float, BLOCK, FORMAT)
    values = tl.reshape(values, (BLOCK // GROUP, GROUP))
    scale = _load_scales(
        *(message_ptr + sections[4], scale_pitch, row, column, rows_left, columns_left),
        *(P, GROUP, BLOCK_N, FORMAT, EVEN),
    )
    factor = factor * FORMAT.inverse_norm
    scale = tl.broadcast_to((scale * factor)[:, None], values.shape)
    if FORMAT.symmetric:
        values = values * scale
    else:
        minimum = _load_scales(
            *(message_ptr + sections[5], scale_pitch, row, column, rows_left, columns_left),
            *(P, GROUP, BLOCK_N, FORMAT, EVEN),
        )
        minimum = (minimum * factor)[:, None]
        if EXACT:  # the transform of a constant
            values = values * scale
            first = tl.arange(0, GROUP)[None, :] % FORMAT.hadamard_size == 0
            values = tl.where(first, values + minimum * FORMAT.hadamard_size, values)
        else:
            values = tl.fma(values, scale, tl.broadcast_to(minimum, values.shape))
    if not EXACT:
        values = hadamard(tl.reshape(values, (BLOCK,)), BLOCK, FORMAT.hadamard_size, RUN)
    return tl.reshape(values, (P, BLOCK_N))
