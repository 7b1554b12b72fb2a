"""Triton kernel of the requantize operator."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.dequantize.triton_kernels import reduce_tile, unrolled
from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.calls import Launch, encoding_launch, launch_nothing
from lq_lightning.kernels.message.launch import (
    INT_TO_FLOAT,
    UNROLLED_MESSAGES,
    Tile,
    choose_tile,
    row_grid,
    row_stride,
)
from lq_lightning.kernels.message.reference import seed_words
from lq_lightning.kernels.message.triton_blocks import hadamard
from lq_lightning.kernels.message.triton_frame import for_each_tile
from lq_lightning.kernels.message.triton_rows import encode_pass, row_sections


@triton.jit
def _requantize_tile(
    row,
    start,
    numel,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    message_ptr,
    out_ptr,
    range_ptr,
    message_stride,
    row_stride,
    out_stride,
    num_messages,
    skip,
    int_to_float,
    seed_a,
    seed_b,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    UNROLLED: tl.constexpr,
    WIDEN: tl.constexpr,
    RUN: tl.constexpr,
):
    source = row + tl.where(row >= skip, 1, 0)
    x = reduce_tile(
        *(message_ptr + source * row_stride, message_stride, num_messages, start, numel, numel),
        *(int_to_float, BLOCK, RUN, SOURCE, UNROLLED, FULL),
    )
    SAME: tl.constexpr = SOURCE.hadamard_size == TARGET.hadamard_size
    NORM: tl.constexpr = 1.0 if SAME else TARGET.forward_norm
    if not SAME and SOURCE.hadamard_size > 0:
        x = hadamard(x, BLOCK, SOURCE.hadamard_size, RUN) * SOURCE.inverse_norm
    if not FULL:
        last = tl.cast(numel, tl.int64)
        if SAME and SOURCE.hadamard_size > 0:
            last = row_sections(numel, SOURCE)[0]
        x = tl.where(tl.arange(0, BLOCK) < last - start, x, 0.0)
    if not SAME:
        x = hadamard(x, BLOCK, TARGET.hadamard_size, RUN)
    encode_pass(
        *(x, out_ptr + row * out_stride, range_ptr, row, start, numel, numel, seed_a, seed_b),
        *(BLOCK, TARGET, NORM, FULL, WIDEN),
    )


@triton.jit(
    do_not_specialize=[
        *("num_messages", "rows", "skip", "tiles", "int_to_float"),
        *("seed_a", "seed_b"),
    ]
)
def requantize_rows_kernel(
    message_ptr,
    out_ptr,
    range_ptr,
    message_stride,
    row_stride,
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
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    UNROLLED: tl.constexpr,
    WIDEN: tl.constexpr,
    RUN: tl.constexpr,
):
    """Sum ``tiles`` tiles of one row and encode them: unpack -> sum -> scale -> pack."""
    for_each_tile(
        _requantize_tile,
        rows,
        tiles,
        numel,
        BLOCK,
        (message_ptr, out_ptr, range_ptr),
        (message_stride, row_stride, out_stride, num_messages, skip, int_to_float, seed_a, seed_b),
        (SOURCE, TARGET, UNROLLED, WIDEN, RUN),
    )


def launch_requantize(
    message: Tensor,
    numel: int,
    source: MessageFormat,
    target: MessageFormat,
    seed: int,
    out: Tensor,
    skip: int | None = None,
    *,
    tile: Tile | None = None,
) -> Callable[..., None]:
    """Launch the kernel; arguments as for ``reference.requantize``.

    Args:
        tile: overrides the choice from the tables; it changes the speed, not the bits.

    Returns:
        What launches it again, given ``message``, ``out`` and the words of the seed.
    """
    num_messages, rows = message.shape[0], out.shape[0]
    if rows == 0 or numel == 0:
        return launch_nothing
    if tile is None:
        kind = "requantize" if num_messages <= UNROLLED_MESSAGES else "requantize many"
        multiple = max(source.block_multiple, target.block_multiple)
        tile = choose_tile(kind, multiple, rows * numel, message.device)
    chosen = tile

    def make(widen: bool) -> Launch:
        return Launch(
            requantize_rows_kernel,
            row_grid(rows, target.layout(numel).padded_numel, chosen),
            (
                *(row_stride(message, 0), row_stride(message, 1), row_stride(out, 0)),
                *(num_messages, rows, rows if skip is None else skip, chosen.tiles, numel),
                INT_TO_FLOAT,
            ),
            {
                "BLOCK": chosen.block,
                "SOURCE": source,
                "TARGET": target,
                "UNROLLED": unrolled(num_messages),
                "WIDEN": widen,
                "RUN": chosen.run,
                "num_warps": chosen.warps,
                "enable_fp_fusion": False,
            },
        )

    launch = encoding_launch(target, rows, make)
    launch(message, out, words=seed_words(seed))
    return launch
