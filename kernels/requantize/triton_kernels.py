"""Triton kernel of the requantize operator."""

from __future__ import annotations

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
    program_row,
    program_tiles,
    row_sections,
    store_tile,
)


@triton.jit
def _requantize_tile(
    message_ptr,
    message_stride,
    row_ptr,
    row,
    tile,
    numel,
    seed_a,
    seed_b,
    magic,
    BLOCK: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    NUM_MESSAGES: tl.constexpr,
    RUN: tl.constexpr,
    FULL: tl.constexpr,
):
    x = reduce_tile(
        message_ptr, message_stride, tile, numel, magic, BLOCK, RUN, SOURCE, NUM_MESSAGES, FULL
    )
    SAME: tl.constexpr = SOURCE.hadamard_size == TARGET.hadamard_size
    NORM: tl.constexpr = 1.0 if SAME else TARGET.forward_norm
    if not SAME and SOURCE.hadamard_size > 0:
        x = hadamard(x, BLOCK, SOURCE.hadamard_size, RUN) * SOURCE.inverse_norm
    if not FULL:
        last = tl.cast(numel, tl.int64)
        if SAME and SOURCE.hadamard_size > 0:
            last = row_sections(numel, SOURCE)[0]
        x = tl.where(tl.arange(0, BLOCK) < last - tl.cast(tile, tl.int64) * BLOCK, x, 0.0)
    if not SAME:
        x = hadamard(x, BLOCK, TARGET.hadamard_size, RUN)
    store_tile(x, row_ptr, row, tile, numel, seed_a, seed_b, BLOCK, TARGET, NORM, FULL)


@triton.jit(do_not_specialize=["rows", "tiles", "seed_a", "seed_b", "magic"])
def requantize_rows_kernel(
    message_ptr,
    out_ptr,
    message_stride,
    row_stride,
    out_stride,
    rows,
    tiles,
    numel,
    seed_a,
    seed_b,
    magic,
    BLOCK: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    NUM_MESSAGES: tl.constexpr,
    RUN: tl.constexpr,
):
    """Sum ``tiles`` tiles of one row and encode them: unpack -> sum -> scale -> pack."""
    row = program_row()
    if row >= rows:
        return
    message = message_ptr + row * row_stride
    out = out_ptr + row * out_stride
    first, end, last = program_tiles(numel, tiles, BLOCK)
    for tile in range(first, end):
        _requantize_tile(
            message,
            message_stride,
            out,
            row,
            tile,
            numel,
            seed_a,
            seed_b,
            magic,
            BLOCK,
            SOURCE,
            TARGET,
            NUM_MESSAGES,
            RUN,
            True,
        )
    if last:
        _requantize_tile(
            message,
            message_stride,
            out,
            row,
            end,
            numel,
            seed_a,
            seed_b,
            magic,
            BLOCK,
            SOURCE,
            TARGET,
            NUM_MESSAGES,
            RUN,
            False,
        )


def launch_requantize(
    message: Tensor,
    numel: int,
    source: MessageFormat,
    target: MessageFormat,
    seed: int,
    out: Tensor,
    *,
    tile: Tile | None = None,
) -> None:
    """Launch the kernel; arguments as for ``reference.requantize``.

    ``tile`` overrides the choice from the tables; it changes the speed, not the bits.
    """
    num_messages, rows = message.shape[:2]
    if rows == 0 or numel == 0:
        return
    if tile is None:
        kind = "requantize" if num_messages <= 4 else "requantize many"
        group_size = max(source.group_size, target.group_size)
        tile = choose_tile(kind, group_size, rows * numel, message.device)
    with on_device(out):
        requantize_rows_kernel[row_grid(rows, target.layout(numel).padded_numel, tile)](
            message,
            out,
            row_stride(message, 0),
            row_stride(message, 1),
            row_stride(out, 0),
            rows,
            tile.tiles,
            numel,
            *seed_words(seed),
            FLOAT_MAGIC_BITS,
            BLOCK=tile.block,
            SOURCE=source,
            TARGET=target,
            NUM_MESSAGES=num_messages,
            RUN=tile.run,
            num_warps=tile.warps,
            enable_fp_fusion=False,
        )
