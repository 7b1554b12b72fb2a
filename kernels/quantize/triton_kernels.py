"""Triton kernel of the quantize operator."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.launch import Tile, choose_tile, on_device, row_grid, row_stride
from lq_lightning.kernels.message.reference import seed_words
from lq_lightning.kernels.message.triton_blocks import (
    hadamard,
    load_run,
    program_row,
    program_tiles,
    store_tile,
)


@triton.jit
def _quantize_tile(
    x_ptr,
    reference_ptr,
    row_ptr,
    row,
    tile,
    numel,
    seed_a,
    seed_b,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    DIFFERENCE: tl.constexpr,
    RUN: tl.constexpr,
    FULL: tl.constexpr,
):
    start = tl.cast(tile, tl.int64) * BLOCK
    limit = numel - start
    VECTOR: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    x = load_run(x_ptr + start, limit, BLOCK, VECTOR, RUN, FULL).to(tl.float32)
    if DIFFERENCE:
        OTHER: tl.constexpr = 128 // reference_ptr.dtype.element_ty.primitive_bitwidth
        other = load_run(reference_ptr + start, limit, BLOCK, OTHER, RUN, FULL)
        x = x - other.to(tl.float32)
    x = hadamard(x, BLOCK, FORMAT.hadamard_size, RUN)
    NORM: tl.constexpr = FORMAT.forward_norm
    store_tile(x, row_ptr, row, tile, numel, seed_a, seed_b, BLOCK, FORMAT, NORM, FULL)


@triton.jit(do_not_specialize=["rows", "tiles", "seed_a", "seed_b"])
def quantize_rows_kernel(
    x_ptr,
    reference_ptr,
    out_ptr,
    x_stride,
    reference_stride,
    out_stride,
    rows,
    tiles,
    numel,
    seed_a,
    seed_b,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    DIFFERENCE: tl.constexpr,
    RUN: tl.constexpr,
):
    """Encode ``tiles`` tiles of one row: [difference ->] Hadamard -> scale -> round -> pack."""
    row = program_row()
    if row >= rows:
        return
    x = x_ptr + row * x_stride
    other = reference_ptr + row * reference_stride
    out = out_ptr + row * out_stride
    first, end, last = program_tiles(numel, tiles, BLOCK)
    for tile in range(first, end):
        _quantize_tile(
            x,
            other,
            out,
            row,
            tile,
            numel,
            seed_a,
            seed_b,
            BLOCK,
            FORMAT,
            DIFFERENCE,
            RUN,
            True,
        )
    if last:
        _quantize_tile(
            x,
            other,
            out,
            row,
            end,
            numel,
            seed_a,
            seed_b,
            BLOCK,
            FORMAT,
            DIFFERENCE,
            RUN,
            False,
        )


def launch_quantize(
    x: Tensor,
    reference: Tensor | None,
    fmt: MessageFormat,
    seed: int,
    out: Tensor,
    *,
    tile: Tile | None = None,
) -> None:
    """Launch the kernel; arguments as for ``reference.quantize``.

    ``tile`` overrides the choice from the tables; it changes the speed, not the bits.
    """
    rows, numel = x.shape
    if rows == 0 or numel == 0:
        return
    if tile is None:
        kind = f"{'quantize' if reference is None else 'difference'} {8 * x.element_size()}"
        kind += " hadamard" if fmt.hadamard_size else ""
        tile = choose_tile(kind, fmt.group_size, x.numel(), x.device)
    other = x if reference is None else reference
    with on_device(x):
        quantize_rows_kernel[row_grid(rows, fmt.layout(numel).padded_numel, tile)](
            x,
            other,
            out,
            row_stride(x, 0),
            row_stride(other, 0),
            row_stride(out, 0),
            rows,
            tile.tiles,
            numel,
            *seed_words(seed),
            BLOCK=tile.block,
            FORMAT=fmt,
            DIFFERENCE=reference is not None,
            RUN=tile.run,
            num_warps=tile.warps,
            enable_fp_fusion=False,
        )
