"""Triton kernel of the feedback operator."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.dequantize.triton_kernels import reduce_tile
from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.launch import (
    FLOAT_MAGIC_BITS,
    Tile,
    choose_tile,
    on_device,
    row_grid,
    row_stride,
)
from lq_lightning.kernels.message.reference import seed_words
from lq_lightning.kernels.message.triton_blocks import (
    hadamard,
    load_run,
    program_row,
    program_tiles,
)
from lq_lightning.kernels.message.triton_rows import left_out, load_tile, row_sections, store_tile


@triton.jit
def _feedback_tile(
    x_ptr,
    message_stride,
    residual_ptr,
    row_ptr,
    row,
    tile,
    numel,
    seed_a,
    seed_b,
    magic,
    BLOCK: tl.constexpr,
    STORED: tl.constexpr,
    TARGET: tl.constexpr,
    NUM_MESSAGES: tl.constexpr,
    RUN: tl.constexpr,
    FULL: tl.constexpr,
):
    if NUM_MESSAGES > 0:
        x = reduce_tile(
            x_ptr, message_stride, tile, numel, magic, BLOCK, RUN, STORED, NUM_MESSAGES, FULL
        )
    else:
        start = tl.cast(tile, tl.int64) * BLOCK
        VECTOR: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
        x = load_run(x_ptr + start, numel - start, BLOCK, VECTOR, RUN, FULL).to(tl.float32)
        x = hadamard(x, BLOCK, TARGET.hadamard_size, RUN) * TARGET.forward_norm
    x = x + load_tile(residual_ptr, tile, numel, magic, BLOCK, RUN, STORED, FULL)
    if not FULL:
        last = tl.cast(numel, tl.int64)
        if TARGET.hadamard_size > 0:
            last = row_sections(numel, TARGET)[0]
        x = tl.where(tl.arange(0, BLOCK) < last - tl.cast(tile, tl.int64) * BLOCK, x, 0.0)
    stored = store_tile(x, row_ptr, row, tile, numel, seed_a, seed_b, BLOCK, TARGET, 1.0, FULL)
    rest = left_out(x, stored, magic, BLOCK, TARGET)
    store_tile(rest, residual_ptr, row, tile, numel, 0, 0, BLOCK, STORED, 1.0, FULL)


@triton.jit(do_not_specialize=["rows", "tiles", "seed_a", "seed_b", "magic"])
def feedback_rows_kernel(
    x_ptr,
    residual_ptr,
    out_ptr,
    message_stride,
    row_stride,
    residual_stride,
    out_stride,
    rows,
    tiles,
    numel,
    seed_a,
    seed_b,
    magic,
    BLOCK: tl.constexpr,
    STORED: tl.constexpr,
    TARGET: tl.constexpr,
    NUM_MESSAGES: tl.constexpr,
    RUN: tl.constexpr,
):
    """Encode ``tiles`` tiles of one row and of its residual: sum -> codes, rest -> codes."""
    row = program_row()
    if row >= rows:
        return
    x = x_ptr + row * row_stride
    residual = residual_ptr + row * residual_stride
    out = out_ptr + row * out_stride
    first, end, last = program_tiles(numel, tiles, BLOCK)
    for tile in range(first, end):
        _feedback_tile(
            x,
            message_stride,
            residual,
            out,
            row,
            tile,
            numel,
            seed_a,
            seed_b,
            magic,
            BLOCK,
            STORED,
            TARGET,
            NUM_MESSAGES,
            RUN,
            True,
        )
    if last:
        _feedback_tile(
            x,
            message_stride,
            residual,
            out,
            row,
            end,
            numel,
            seed_a,
            seed_b,
            magic,
            BLOCK,
            STORED,
            TARGET,
            NUM_MESSAGES,
            RUN,
            False,
        )


def launch_feedback(
    x: Tensor,
    numel: int,
    stored: MessageFormat,
    target: MessageFormat,
    seed: int,
    residual: Tensor,
    out: Tensor,
    *,
    tile: Tile | None = None,
) -> None:
    """Launch the kernel; arguments as for ``reference.feedback``.

    ``tile`` overrides the choice from the tables; it changes the speed, not the bits.
    """
    rows = out.shape[0]
    if rows == 0 or numel == 0:
        return
    is_sum = x.dtype == torch.uint8
    if tile is None:
        kind = "feedback sum" if is_sum else f"feedback {8 * x.element_size()}"
        tile = choose_tile(kind, target.group_size, rows * numel, x.device)
    with on_device(out):
        feedback_rows_kernel[row_grid(rows, target.layout(numel).padded_numel, tile)](
            x,
            residual,
            out,
            row_stride(x, 0) if is_sum else 0,
            row_stride(x, 1 if is_sum else 0),
            row_stride(residual, 0),
            row_stride(out, 0),
            rows,
            tile.tiles,
            numel,
            *seed_words(seed),
            FLOAT_MAGIC_BITS,
            BLOCK=tile.block,
            STORED=stored,
            TARGET=target,
            NUM_MESSAGES=x.shape[0] if is_sum else 0,
            RUN=tile.run,
            num_warps=tile.warps,
            enable_fp_fusion=False,
        )
