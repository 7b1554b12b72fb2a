"""Triton kernel of the dequantize operator."""

from __future__ import annotations

import ctypes

import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.launch import (
    FLOAT_MAGIC_BITS,
    Tile,
    choose_tile,
    on_device,
    row_grid,
    row_stride,
)
from lq_lightning.kernels.message.triton_blocks import (
    hadamard,
    load_run,
    load_tile,
    program_row,
    program_tiles,
    round_output,
)


@triton.jit
def reduce_tile(
    message_ptr,
    message_stride,
    tile,
    numel,
    magic,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    NUM_MESSAGES: tl.constexpr,
    FULL: tl.constexpr,
):
    """Sum a ``[BLOCK]`` tile over the messages in index order; still transformed."""
    total = load_tile(message_ptr, tile, numel, magic, BLOCK, RUN, FORMAT, FULL)
    for _ in tl.static_range(1, NUM_MESSAGES):
        message_ptr += message_stride
        total += load_tile(message_ptr, tile, numel, magic, BLOCK, RUN, FORMAT, FULL)
    return total


@triton.jit
def _dequantize_tile(
    message_ptr,
    out_ptr,
    message_stride,
    tile,
    factor,
    numel,
    magic,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    NUM_MESSAGES: tl.constexpr,
    ADD: tl.constexpr,
    RUN: tl.constexpr,
    FULL: tl.constexpr,
):
    start = tl.cast(tile, tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    target = out_ptr + start + offsets
    inside = offsets < numel - start
    if ADD:  # before the messages, so that all loads are on their way together
        VECTOR: tl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
        base = load_run(out_ptr + start, numel - start, BLOCK, VECTOR, RUN, FULL)
    total = reduce_tile(
        message_ptr, message_stride, tile, numel, magic, BLOCK, RUN, FORMAT, NUM_MESSAGES, FULL
    )
    values = hadamard(total, BLOCK, FORMAT.hadamard_size, RUN) * factor
    if ADD:
        values = values + base.to(tl.float32)
    result = round_output(values, out_ptr.dtype.element_ty)
    if FULL:
        tl.store(target, result)
    else:
        tl.store(target, result, inside)


@triton.jit(do_not_specialize=["rows", "tiles", "factor", "magic"])
def dequantize_rows_kernel(
    message_ptr,
    out_ptr,
    message_stride,
    row_stride,
    out_stride,
    rows,
    tiles,
    numel,
    factor,
    magic,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    NUM_MESSAGES: tl.constexpr,
    ADD: tl.constexpr,
    RUN: tl.constexpr,
):
    """Decode ``tiles`` tiles of one row: unpack -> sum -> inverse Hadamard [-> add]."""
    row = program_row()
    if row >= rows:
        return
    message = message_ptr + row * row_stride
    out = out_ptr + row * out_stride
    first, end, last = program_tiles(numel, tiles, BLOCK)
    for tile in range(first, end):
        _dequantize_tile(
            message,
            out,
            message_stride,
            tile,
            factor,
            numel,
            magic,
            BLOCK,
            FORMAT,
            NUM_MESSAGES,
            ADD,
            RUN,
            True,
        )
    if last:
        _dequantize_tile(
            message,
            out,
            message_stride,
            end,
            factor,
            numel,
            magic,
            BLOCK,
            FORMAT,
            NUM_MESSAGES,
            ADD,
            RUN,
            False,
        )


def launch_dequantize(
    message: Tensor,
    numel: int,
    fmt: MessageFormat,
    scale: float,
    add: bool,
    out: Tensor,
    *,
    tile: Tile | None = None,
) -> None:
    """Launch the kernel; arguments as for ``reference.dequantize``.

    ``tile`` overrides the choice from the tables; it changes the speed, not the bits.
    """
    num_messages, rows = message.shape[:2]
    if rows == 0 or numel == 0:
        return
    if tile is None:
        kind = f"{'dequantize' if num_messages == 1 else 'reduce'} {8 * out.element_size()}"
        if num_messages == 1:
            kind += " hadamard" if fmt.hadamard_size else " add" if add else ""
        tile = choose_tile(kind, 1, out.numel(), out.device)
    # Rounded to fp32 once, on the host, for every device alike.
    factor = ctypes.c_float(scale * fmt.inverse_norm).value
    with on_device(out):
        dequantize_rows_kernel[row_grid(rows, numel, tile)](
            message,
            out,
            row_stride(message, 0),
            row_stride(message, 1),
            row_stride(out, 0),
            rows,
            tile.tiles,
            numel,
            factor,
            FLOAT_MAGIC_BITS,
            BLOCK=tile.block,
            FORMAT=fmt,
            NUM_MESSAGES=num_messages,
            ADD=add,
            RUN=tile.run,
            num_warps=tile.warps,
            enable_fp_fusion=False,
        )
