"""Triton kernel of the dequantize operator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.calls import Launch, launch_nothing
from lq_lightning.kernels.message.launch import (
    INT_TO_FLOAT,
    UNROLLED_IN_TAIL,
    UNROLLED_MESSAGES,
    RowSteps,
    Tile,
    choose_tile,
    row_stride,
)
from lq_lightning.kernels.message.triton_blocks import hadamard, load_run, round_output
from lq_lightning.kernels.message.triton_frame import for_each_tile, row_offset
from lq_lightning.kernels.message.triton_rows import decode_tile

_AT_ONCE = tl.constexpr(UNROLLED_MESSAGES)
_AT_ONCE_IN_TAIL = tl.constexpr(UNROLLED_IN_TAIL)


@triton.jit
def reduce_tile(
    message_ptr,
    message_stride,
    num_messages,
    start,
    limit,
    numel,
    int_to_float,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    UNROLLED: tl.constexpr,
    FULL: tl.constexpr,
):
    """Sum a ``[BLOCK]`` tile over the messages in index order; still transformed.

    ``UNROLLED`` is that of ``unrolled``, which saves small numbers the loop.
    """
    AT_ONCE: tl.constexpr = _AT_ONCE if FULL else _AT_ONCE_IN_TAIL
    if UNROLLED > 0 and UNROLLED <= AT_ONCE:
        total = decode_tile(
            message_ptr, start, limit, numel, int_to_float, BLOCK, RUN, FORMAT, FULL
        )
        for _ in tl.static_range(1, UNROLLED):
            message_ptr += message_stride
            total += decode_tile(
                message_ptr, start, limit, numel, int_to_float, BLOCK, RUN, FORMAT, FULL
            )
    else:
        # -0.0, which leaves the first summand as it is; `tl.full` makes 0.0 of a -0.0
        total = tl.full((BLOCK,), -0x80000000, tl.int32).to(tl.float32, bitcast=True)
        for _ in tl.range(0, num_messages, loop_unroll_factor=AT_ONCE):
            total += decode_tile(
                message_ptr, start, limit, numel, int_to_float, BLOCK, RUN, FORMAT, FULL
            )
            message_ptr += message_stride
    return total


def unrolled(num_messages: int) -> int:
    """Return ``UNROLLED`` of ``reduce_tile``: the number of messages, or 0 for any large one."""
    return num_messages if num_messages <= UNROLLED_MESSAGES else 0


@triton.jit
def _dequantize_tile(
    row,
    start,
    numel,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    message_ptr,
    out_ptr,
    message_stride,
    row_stride,
    row_jump,
    out_stride,
    out_jump,
    num_messages,
    factor,
    int_to_float,
    FORMAT: tl.constexpr,
    UNROLLED: tl.constexpr,
    ADD: tl.constexpr,
    RUN: tl.constexpr,
):
    target = out_ptr + row_offset(row, out_stride, out_jump) + start
    message_ptr += row_offset(row, row_stride, row_jump)
    if ADD:  # before the messages, so that all loads are on their way together
        VECTOR: tl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
        base = load_run(target, numel - start, BLOCK, VECTOR, RUN, FULL)
    total = reduce_tile(
        *(message_ptr, message_stride, num_messages, start, numel, numel),
        *(int_to_float, BLOCK, RUN, FORMAT, UNROLLED, FULL),
    )
    values = hadamard(total, BLOCK, FORMAT.hadamard_size, RUN) * factor
    if ADD:
        values = values + base.to(tl.float32)
    result = round_output(values, out_ptr.dtype.element_ty)
    offsets = tl.arange(0, BLOCK)
    if FULL:
        tl.store(target + offsets, result)
    else:
        tl.store(target + offsets, result, offsets < numel - start)


@triton.jit(do_not_specialize=["num_messages", "rows", "across", "tiles", "factor", "int_to_float"])
def dequantize_rows_kernel(
    message_ptr,
    out_ptr,
    message_stride,
    row_stride,
    row_jump,
    out_stride,
    out_jump,
    num_messages,
    rows,
    across,
    tiles,
    numel,
    factor,
    int_to_float,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    UNROLLED: tl.constexpr,
    ADD: tl.constexpr,
    RUN: tl.constexpr,
):
    """Decode ``tiles`` tiles of one row: unpack -> sum -> inverse Hadamard [-> add]."""
    for_each_tile(
        _dequantize_tile,
        rows,
        tiles,
        numel,
        BLOCK,
        (message_ptr, out_ptr),
        (
            message_stride,
            row_stride,
            row_jump,
            out_stride,
            out_jump,
            num_messages,
            factor,
            int_to_float,
        ),
        (FORMAT, UNROLLED, ADD, RUN),
        across=across,
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
) -> Callable[..., None]:
    """Launch the kernel; arguments as for ``reference.dequantize``.

    Args:
        tile: overrides the choice from the tables; it changes the speed, not the bits.

    Returns:
        What launches it again, given ``message`` and ``out``.
    """
    num_messages = message.shape[0]
    if out.numel() == 0:
        return launch_nothing
    if tile is None:
        kind = f"{'dequantize' if num_messages == 1 else 'reduce'} {8 * out.element_size()}"
        if num_messages == 1:
            kind += " hadamard" if fmt.hadamard_size else " add" if add else ""
        tile = choose_tile(kind, 1, out.numel(), out.device)
    steps = RowSteps.of(out, message)
    out_strides, row_strides = steps.strides
    launch = Launch(
        dequantize_rows_kernel,
        steps.grid(numel, tile),
        (
            *(row_stride(message, 0), *row_strides, *out_strides),
            *(num_messages, steps.rows, steps.across, tile.tiles, numel),
            # Rounded to fp32 once, on the host, for every device alike.
            ctypes.c_float(scale * fmt.inverse_norm).value,
            INT_TO_FLOAT,
        ),
        {
            "BLOCK": tile.block,
            "FORMAT": fmt,
            "UNROLLED": unrolled(num_messages),
            "ADD": add,
            "RUN": tile.run,
            "num_warps": tile.warps,
            "enable_fp_fusion": False,
        },
    )
    launch(message, out)
    return launch
