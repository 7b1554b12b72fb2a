"""The frame of all kernels that work on rows tile by tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def program_row(across=65535):
    """Row of this program in the grid of ``launch.row_grid``, int64; ``across`` are its columns."""
    return tl.program_id(1).to(tl.int64) + tl.program_id(2).to(tl.int64) * across


@triton.jit
def row_offset(row, stride, jump):
    """Where the row of this program lies, int64; ``stride`` and ``jump`` of ``launch.RowSteps``."""
    return row * stride + tl.program_id(2).to(tl.int64) * jump


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
def for_each_tile(
    TILE: tl.constexpr,
    rows,
    tiles,
    numel,
    BLOCK: tl.constexpr,
    pointers,
    scalars,
    constants,
    WHOLE: tl.constexpr = False,
    across=65535,
):
    """Call ``TILE`` for every tile of this program.

    As ``TILE(row, start, numel, BLOCK, FULL, *pointers, *scalars, *constants)``. ``row`` and
    ``start``, its first column, are int64; the row ends at column ``numel``. ``FULL`` is a
    constant, True but for the incomplete tile at the end of a row: the function is compiled twice,
    and what runs in the loop has no masks. The three tuples are written in the call: in a variable,
    constants would become tensors. ``across`` is that of ``program_row``.
    """
    row = program_row(across)
    if row < rows:
        first, end, last = program_tiles(numel, tiles, BLOCK)
        for tile in range(first, end):
            start = tl.cast(tile, tl.int64) * BLOCK
            TILE(row, start, numel, BLOCK, True, *pointers, *scalars, *constants)
        if not WHOLE:  # noqa: SIM102 (a constant, so that nothing below is compiled)
            if last:
                start = tl.cast(end, tl.int64) * BLOCK
                TILE(row, start, numel, BLOCK, False, *pointers, *scalars, *constants)
