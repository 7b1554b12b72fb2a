"""Triton kernels of ``float8_cast`` and ``float8_quantize``."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.float8.reference import MAX_VALUES, MIN_SCALE, ROW_MULTIPLE
from lq_lightning.kernels.float8.tiles import CAST_TILE, CastTile
from lq_lightning.kernels.float8.triton_blocks import (
    float8_word,
    inverse_of,
    join_four,
    split_four,
    store_transposed,
    transpose_bytes,
)
from lq_lightning.kernels.float8.triton_tiles import load_runs
from lq_lightning.kernels.message.calls import Launch, launch_nothing
from lq_lightning.kernels.message.launch import MAX_GRID_Y, row_stride
from lq_lightning.kernels.message.triton_frame import program_row

_MIN_SCALE = tl.constexpr(MIN_SCALE)
# Elements of a row that a program of `amax_kernel` reads at once, and how often.
_AMAX_BLOCK, _AMAX_TILES = 4096, 4


@triton.jit
def amax_kernel(x_ptr, out_ptr, stride, rows, numel, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """Raise ``out`` to the largest magnitude of ``TILES`` blocks of a row.

    As bits, whose order is that of magnitudes, with NaN above infinity. The result does not depend
    on the order of programs.
    """
    row = program_row()
    if row < rows:
        start = tl.program_id(0).to(tl.int64) * (BLOCK * TILES)
        source = x_ptr + row * stride + start
        offsets = tl.arange(0, BLOCK)
        largest = tl.zeros((BLOCK,), tl.int32)
        for tile in tl.static_range(TILES):
            at = offsets + tile * BLOCK
            x = tl.load(source + at, at < numel - start, 0.0).to(tl.float32)
            largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        largest = tl.max(largest, 0)
        target = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        # Most programs change nothing: a look, even at an old value, saves their atomics.
        if largest > tl.load(target):
            tl.atomic_max(target, largest, sem="relaxed")


def launch_amax(x: Tensor, out: Tensor) -> Callable[..., None]:
    """Raise fp32 ``[1]`` ``out``, which holds 0, to the largest magnitude of ``[R, N]`` ``x``.

    Returns what does the same with other tensors alike.
    """
    if x.numel() == 0:
        return launch_nothing
    if x.is_contiguous():
        x = x.view(1, -1)
    rows, numel = x.shape
    grid = (
        triton.cdiv(numel, _AMAX_BLOCK * _AMAX_TILES),
        min(rows, MAX_GRID_Y),
        triton.cdiv(rows, MAX_GRID_Y),
    )
    sizes = (row_stride(x, 0), rows, numel)
    tile = {"BLOCK": _AMAX_BLOCK, "TILES": _AMAX_TILES, "num_warps": 8}
    launch = Launch(amax_kernel, grid, sizes, tile)
    launch(x, out)
    return launch


@triton.jit
def cast_kernel(
    x_ptr,
    amax_ptr,
    q_ptr,
    q_t_ptr,
    scale_ptr,
    stride,
    rows,
    numel,
    q_stride,
    q_t_stride,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Cast a ``[BLOCK_R, BLOCK_N]`` tile, and write it as it is and transposed.

    The strides of the results are in 16 bytes. Four rows are loaded apart, so that each thread has
    blocks of four by four codes: words of four columns become words of four rows in registers, and
    words are what moves between threads.
    """
    E5M2: tl.constexpr = LARGEST > 448.0
    QUARTER: tl.constexpr = BLOCK_R // 4
    scale = tl.div_rn(tl.load(amax_ptr), LARGEST)
    scale = tl.where(scale < _MIN_SCALE, _MIN_SCALE, scale)  # NaN stays
    inverse = inverse_of(scale)
    column, row = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_R
    if (column == 0) & (row == 0):
        tl.store(scale_ptr, scale)
    VECTOR: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    index = tl.arange(0, QUARTER * BLOCK_N)
    down = tl.arange(0, QUARTER)[:, None]
    word = column // 4 + tl.arange(0, BLOCK_N // 4)[None, :]
    for part in tl.static_range(4):
        rows_left = (rows - row - part + 3) // 4
        source = x_ptr + (row + part).to(tl.int64) * stride + column
        x = load_runs(
            *(source, stride * 4, rows_left, numel - column),
            *(QUARTER, BLOCK_N, VECTOR, 16, EVEN),
        )
        y = x.to(tl.float32) * inverse
        y = tl.fma(y, tl.zeros_like(y), y)  # infinities become NaN
        if not EVEN:  # also where the scale is NaN
            inside = (index // BLOCK_N < rows_left) & (index % BLOCK_N < numel - column)
            y = tl.where(inside, y, 0.0)
        codes = float8_word(*split_four(y, QUARTER * BLOCK_N), E5M2)
        if ROWS:
            at = (row + part).to(tl.int64) + down * 4
            target = q_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
            target += at * (q_stride * 4) + word
            values = tl.reshape(codes, (QUARTER, BLOCK_N // 4))
            if EVEN:
                tl.store(target, values)
            else:
                tl.store(target, values, (down < rows_left) & (word < q_stride * 4))
        if part == 0:
            first = codes
        elif part == 1:
            second = codes
        elif part == 2:
            third = codes
        else:
            words = transpose_bytes(first, second, third, codes)
    if COLUMNS:
        words = tl.reshape(join_four(*words, QUARTER * BLOCK_N), (QUARTER, BLOCK_N))
        store_transposed(
            *(words, q_t_ptr, q_t_stride, column.to(tl.int64), row),
            *(q_t_stride * 16 - row, numel - column, EVEN),
        )


def launch_cast(
    x: Tensor,
    amax: Tensor,
    q: Tensor,
    q_t: Tensor,
    scale: Tensor,
    *,
    tile: CastTile | None = None,
) -> Callable[..., None]:
    """Launch the kernel; arguments as the operator's, with its results.

    Args:
        x: ``[R, N]``.
        amax: fp32 of one element.
        q: ``[R, round16(N)]``, or ``[0, 0]`` for none.
        q_t: ``[N, round16(R)]``, or ``[0, 0]`` for none.
        scale: fp32 ``[1]``.
        tile: overrides the choice from the table.

    Returns:
        What does the same with other tensors alike.
    """
    tile = tile or CAST_TILE
    rows, numel = x.shape
    grid = (1, 1)  # for the scale alone
    if q.numel() or q_t.numel():
        grid = (triton.cdiv(numel, tile.columns), triton.cdiv(rows, tile.rows))
    strides = (row_stride(x, 0), q.shape[1] // ROW_MULTIPLE, q_t.shape[1] // ROW_MULTIPLE)
    launch = Launch(
        cast_kernel,
        grid,
        (strides[0], rows, numel, *strides[1:]),
        {
            "LARGEST": MAX_VALUES[q.dtype],
            "ROWS": q.numel() > 0,
            "COLUMNS": q_t.numel() > 0,
            "EVEN": x.numel() > 0 and rows % tile.rows == 0 and numel % tile.columns == 0,
            "BLOCK_R": tile.rows,
            "BLOCK_N": tile.columns,
            "num_warps": tile.warps,
            "enable_fp_fusion": False,
        },
    )
    launch(x, amax, q, q_t, scale)
    return launch


def launch_quantize(
    x: Tensor, q: Tensor, q_t: Tensor, scale: Tensor, amax: Tensor
) -> Callable[..., None]:
    """Launch both kernels; arguments as of ``launch_cast``, ``amax`` zero before."""
    find = launch_amax(x, amax)
    cast = launch_cast(x, amax, q, q_t, scale)

    def launch(x: Tensor, q: Tensor, q_t: Tensor, scale: Tensor, amax: Tensor) -> None:
        find(x, amax)
        cast(x, amax, q, q_t, scale)

    return launch
