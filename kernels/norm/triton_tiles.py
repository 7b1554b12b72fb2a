"""Tiles of several short rows or one long one, and sums over rows, as Triton device functions.

A tile is ``[BLOCK]`` with ``BLOCK = ROWS * WIDTH``; see ``tiles.Geometry``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lq_lightning.kernels.message.triton_blocks import load_run, round_output


@triton.jit
def factor_of(weight, KIND: tl.constexpr):
    """Factor of ``x_hat`` in fp32; ``reference.factor_of``."""
    factor = weight.to(tl.float32)
    if KIND == "rms_offset":
        factor = 1.0 + factor
    return factor


@triton.jit
def normalize(
    centred,
    rstd,
    weight,
    bias,
    KIND: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    X_DTYPE: tl.constexpr,
):
    """Output of a norm in fp32, not rounded yet; ``reference.normalize``.

    ``weight`` and ``bias``, of the columns and any float dtype, are used if ``WEIGHT`` and
    ``BIAS``.
    """
    y = centred * rstd
    if KIND == "rms_cast":
        y = round_output(y, X_DTYPE).to(tl.float32)
    if WEIGHT:
        y = y * factor_of(weight, KIND)
    if BIAS:
        y = y + bias.to(tl.float32)
    return y


@triton.jit
def tile_count(row, rows, numel, ROWS: tl.constexpr):
    """Elements of the tile that begins with row ``row``."""
    count = numel
    if ROWS > 1:
        count = tl.minimum(rows - row, ROWS).to(tl.int32) * numel
    return count


@triton.jit
def load_columns(
    source_ptr,
    numel,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    FULL: tl.constexpr,
):
    """``[N]`` parameters as ``[BLOCK]``, the same for every row of a tile; not converted."""
    VECTOR: tl.constexpr = 128 // source_ptr.dtype.element_ty.primitive_bitwidth
    WIDTH: tl.constexpr = BLOCK // ROWS
    if ROWS == 1:
        values = load_run(source_ptr, numel, BLOCK, VECTOR, RUN, FULL)
    else:
        row = tl.load(source_ptr + tl.arange(0, WIDTH))
        values = tl.reshape(tl.broadcast_to(row[None, :], (ROWS, WIDTH)), (BLOCK,))
    return values


@triton.jit
def tile_rows(row, ROWS: tl.constexpr):
    """Rows of a tile: a number, or ``[ROWS]``."""
    if ROWS > 1:
        row = row + tl.arange(0, ROWS)
    return row


@triton.jit
def store_of_rows(target_ptr, values, row, rows, ROWS: tl.constexpr):
    """Write a value per row."""
    index = tile_rows(row, ROWS)
    if ROWS > 1:
        tl.store(target_ptr + index, values, index < rows)
    else:
        tl.store(target_ptr + index, values)


@triton.jit
def sum_rows(values, ROWS: tl.constexpr):
    """Sum of each row: a number, or ``[ROWS]``."""
    if ROWS > 1:
        total = tl.sum(tl.reshape(values, (ROWS, values.shape[0] // ROWS)), axis=1)
    else:
        total = tl.sum(values, axis=0)
    return total


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def sum_rows_of_two(first, second, ROWS: tl.constexpr):
    """``sum_rows`` of two tiles, with one exchange between the warps."""
    if ROWS > 1:
        WIDTH: tl.constexpr = first.shape[0] // ROWS
        pair = tl.reshape(first, (ROWS, WIDTH)), tl.reshape(second, (ROWS, WIDTH))
        sums = tl.reduce(pair, 1, _add_two)
    else:
        sums = tl.reduce((first, second), 0, _add_two)
    return sums


@triton.jit
def spread(values, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Sums of ``sum_rows`` for every element of the tile; a number stays one."""
    if ROWS > 1:
        wide = tl.broadcast_to(values[:, None], (ROWS, BLOCK // ROWS))
        values = tl.reshape(wide, (BLOCK,))
    return values


@triton.jit
def store_tile(target_ptr, values, count, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """Write the first ``count`` elements."""
    offsets = tl.arange(0, BLOCK)
    if FULL:
        tl.store(target_ptr + offsets, values)
    else:
        tl.store(target_ptr + offsets, values, offsets < count)
