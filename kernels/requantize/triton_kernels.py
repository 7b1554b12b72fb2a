"""Triton kernel of the requantize operator."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.dequantize.triton_kernels import reduce_tile
from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.launch import layout_arguments, on_device, row_stride, tile_sizes
from lq_lightning.kernels.message.reference import seed_words
from lq_lightning.kernels.message.triton_blocks import hadamard, store_tile


@triton.jit
def _requantize_tile(
    message_ptr,
    message_stride,
    row_ptr,
    row,
    tile,
    numel,
    source_padded_numel,
    source_num_groups,
    source_plane_1,
    source_plane_2,
    source_scale_offset,
    source_minimum_offset,
    padded_numel,
    num_groups,
    plane_1,
    plane_2,
    scale_offset,
    minimum_offset,
    seed_a,
    seed_b,
    BLOCK: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    NUM_MESSAGES: tl.constexpr,
    FULL: tl.constexpr,
):
    x = reduce_tile(
        message_ptr,
        message_stride,
        tile,
        source_padded_numel,
        source_num_groups,
        source_plane_1,
        source_plane_2,
        source_scale_offset,
        source_minimum_offset,
        BLOCK,
        SOURCE,
        NUM_MESSAGES,
        FULL,
    )
    SAME: tl.constexpr = SOURCE.hadamard_size == TARGET.hadamard_size
    NORM: tl.constexpr = 1.0 if SAME else TARGET.forward_norm
    if not SAME and SOURCE.hadamard_size > 0:
        x = hadamard(x, BLOCK, SOURCE.hadamard_size, 32) * SOURCE.inverse_norm
    if not FULL:
        last = source_padded_numel if SAME and SOURCE.hadamard_size > 0 else numel
        x = tl.where(tl.arange(0, BLOCK) < last - tile * BLOCK, x, 0.0)
    if not SAME:
        x = hadamard(x, BLOCK, TARGET.hadamard_size, 32)
    store_tile(
        x,
        row_ptr,
        row,
        tile,
        numel,
        padded_numel,
        num_groups,
        plane_1,
        plane_2,
        scale_offset,
        minimum_offset,
        seed_a,
        seed_b,
        BLOCK,
        TARGET,
        NORM,
        FULL,
    )


@triton.jit(do_not_specialize=["source_num_groups", "num_groups", "seed_a", "seed_b"])
def requantize_rows_kernel(
    message_ptr,
    out_ptr,
    message_stride,
    row_stride,
    out_stride,
    numel,
    source_padded_numel,
    source_num_groups,
    source_plane_1,
    source_plane_2,
    source_scale_offset,
    source_minimum_offset,
    padded_numel,
    num_groups,
    plane_1,
    plane_2,
    scale_offset,
    minimum_offset,
    seed_a,
    seed_b,
    BLOCK: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    NUM_MESSAGES: tl.constexpr,
):
    """Sum one tile of one row over messages and encode it: unpack -> sum -> scale -> pack."""
    tiles = tl.cdiv(padded_numel, BLOCK).to(tl.int64)
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    tile = program % tiles
    message_row = message_ptr + row * row_stride
    out_row = out_ptr + row * out_stride
    stride = message_stride.to(tl.int64)
    if (tile + 1) * BLOCK <= numel:
        _requantize_tile(
            message_row,
            stride,
            out_row,
            row,
            tile,
            numel,
            source_padded_numel,
            source_num_groups,
            source_plane_1,
            source_plane_2,
            source_scale_offset,
            source_minimum_offset,
            padded_numel,
            num_groups,
            plane_1,
            plane_2,
            scale_offset,
            minimum_offset,
            seed_a,
            seed_b,
            BLOCK,
            SOURCE,
            TARGET,
            NUM_MESSAGES,
            True,
        )
    else:
        _requantize_tile(
            message_row,
            stride,
            out_row,
            row,
            tile,
            numel,
            source_padded_numel,
            source_num_groups,
            source_plane_1,
            source_plane_2,
            source_scale_offset,
            source_minimum_offset,
            padded_numel,
            num_groups,
            plane_1,
            plane_2,
            scale_offset,
            minimum_offset,
            seed_a,
            seed_b,
            BLOCK,
            SOURCE,
            TARGET,
            NUM_MESSAGES,
            False,
        )


def launch_requantize(
    message: Tensor,
    numel: int,
    source: MessageFormat,
    target: MessageFormat,
    seed: int,
    out: Tensor,
) -> None:
    """Launch the kernel; arguments as for ``reference.requantize``."""
    num_messages, rows = message.shape[:2]
    if rows == 0 or numel == 0:
        return
    block, warps = tile_sizes(max(source.group_size, target.group_size), 1024, out.device)
    layout = target.layout(numel)
    with on_device(out):
        requantize_rows_kernel[(rows * triton.cdiv(layout.padded_numel, block),)](
            message,
            out,
            row_stride(message, 0),
            row_stride(message, 1),
            row_stride(out, 0),
            numel,
            *layout_arguments(source.layout(numel)),
            *layout_arguments(layout),
            *seed_words(seed),
            BLOCK=block,
            SOURCE=source,
            TARGET=target,
            NUM_MESSAGES=num_messages,
            num_warps=warps,
            enable_fp_fusion=False,
        )
