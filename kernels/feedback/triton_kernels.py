"""Triton kernel of the feedback operator."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.dequantize.triton_kernels import reduce_tile, unrolled
from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.calls import Launch, launch_nothing
from lq_lightning.kernels.message.launch import (
    INT_TO_FLOAT,
    Tile,
    choose_tile,
    row_grid,
    row_stride,
)
from lq_lightning.kernels.message.reference import seed_words
from lq_lightning.kernels.message.triton_blocks import hadamard, load_run
from lq_lightning.kernels.message.triton_frame import for_each_tile
from lq_lightning.kernels.message.triton_rows import (
    decode_tile,
    encode_tile,
    quantization_error,
    row_sections,
)


@triton.jit
def _feedback_tile(
    row,
    start,
    numel,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    x_ptr,
    residual_ptr,
    out_ptr,
    message_stride,
    row_stride,
    residual_stride,
    out_stride,
    num_messages,
    skip,
    int_to_float,
    seed_a,
    seed_b,
    STORED: tl.constexpr,
    TARGET: tl.constexpr,
    SUM: tl.constexpr,
    UNROLLED: tl.constexpr,
    RUN: tl.constexpr,
):
    x_ptr += (row + tl.where(row >= skip, 1, 0)) * row_stride
    residual_ptr += row * residual_stride
    out_ptr += row * out_stride
    if SUM:
        x = reduce_tile(
            *(x_ptr, message_stride, num_messages, start, numel, numel, int_to_float),
            *(BLOCK, RUN, STORED, UNROLLED, FULL),
        )
    else:
        VECTOR: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
        x = load_run(x_ptr + start, numel - start, BLOCK, VECTOR, RUN, FULL).to(tl.float32)
        x = hadamard(x, BLOCK, TARGET.hadamard_size, RUN) * TARGET.forward_norm
    x = x + decode_tile(residual_ptr, start, numel, numel, int_to_float, BLOCK, RUN, STORED, FULL)
    if not FULL:
        last = tl.cast(numel, tl.int64)
        if TARGET.hadamard_size > 0:
            last = row_sections(numel, TARGET)[0]
        x = tl.where(tl.arange(0, BLOCK) < last - start, x, 0.0)
    encoded = encode_tile(
        *(x, out_ptr, out_ptr, row, start, numel, numel, seed_a, seed_b),
        *(BLOCK, TARGET, 1.0, FULL),
    )
    error = quantization_error(x, encoded, int_to_float, BLOCK, TARGET)
    encode_tile(
        *(error, residual_ptr, residual_ptr, row, start, numel, numel, 0, 0),
        *(BLOCK, STORED, 1.0, FULL),
    )


@triton.jit(
    do_not_specialize=[
        *("num_messages", "rows", "skip", "tiles", "int_to_float"),
        *("seed_a", "seed_b"),
    ]
)
def feedback_rows_kernel(
    x_ptr,
    residual_ptr,
    out_ptr,
    message_stride,
    row_stride,
    residual_stride,
    out_stride,
    num_messages,
    rows,
    skip,
    tiles,
    numel,
    int_to_float,
    seed_a,
    seed_b,
    BLOCK: tl.constexpr,
    STORED: tl.constexpr,
    TARGET: tl.constexpr,
    SUM: tl.constexpr,
    UNROLLED: tl.constexpr,
    RUN: tl.constexpr,
):
    """Encode ``tiles`` tiles of one row and of its residual: sum -> codes, error -> codes."""
    for_each_tile(
        _feedback_tile,
        rows,
        tiles,
        numel,
        BLOCK,
        (x_ptr, residual_ptr, out_ptr),
        (
            message_stride,
            row_stride,
            residual_stride,
            out_stride,
            num_messages,
            skip,
            int_to_float,
            seed_a,
            seed_b,
        ),
        (STORED, TARGET, SUM, UNROLLED, RUN),
    )


def launch_feedback(
    x: Tensor,
    numel: int,
    stored: MessageFormat,
    target: MessageFormat,
    seed: int,
    residual: Tensor,
    out: Tensor,
    skip: int | None = None,
    *,
    tile: Tile | None = None,
) -> Callable[..., None]:
    """Launch the kernel; arguments as for ``reference.feedback``.

    Args:
        tile: overrides the choice from the tables; it changes the speed, not the bits.

    Returns:
        What launches it again, given ``x``, ``residual``, ``out`` and the words of the seed.
    """
    rows = out.shape[0]
    if rows == 0 or numel == 0:
        return launch_nothing
    is_sum = x.dtype == torch.uint8
    num_messages = x.shape[0] if is_sum else 1
    if tile is None:
        kind = "feedback sum" if is_sum else f"feedback {8 * x.element_size()}"
        tile = choose_tile(kind, target.group_size, rows * numel, x.device)
    launch = Launch(
        feedback_rows_kernel,
        row_grid(rows, target.layout(numel).padded_numel, tile),
        (
            *(row_stride(x, 0) if is_sum else 0, row_stride(x, 1 if is_sum else 0)),
            *(row_stride(residual, 0), row_stride(out, 0)),
            *(num_messages, rows, rows if skip is None else skip, tile.tiles, numel),
            INT_TO_FLOAT,
        ),
        {
            "BLOCK": tile.block,
            "STORED": stored,
            "TARGET": target,
            "SUM": is_sum,
            "UNROLLED": unrolled(num_messages),
            "RUN": tile.run,
            "num_warps": tile.warps,
            "enable_fp_fusion": False,
        },
    )
    launch(x, residual, out, words=seed_words(seed))
    return launch
