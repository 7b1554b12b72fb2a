"""Triton kernel of the quantize operator."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.calls import Launch, encoding_launch, launch_nothing
from lq_lightning.kernels.message.launch import RowSteps, Tile, choose_tile
from lq_lightning.kernels.message.reference import seed_words
from lq_lightning.kernels.message.triton_blocks import hadamard, load_run
from lq_lightning.kernels.message.triton_frame import for_each_tile, row_offset
from lq_lightning.kernels.message.triton_rows import encode_pass


@triton.jit
def _quantize_tile(
    row,
    start,
    numel,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    x_ptr,
    reference_ptr,
    out_ptr,
    range_ptr,
    x_stride,
    x_jump,
    reference_stride,
    reference_jump,
    out_stride,
    out_jump,
    skip,
    seed_a,
    seed_b,
    FORMAT: tl.constexpr,
    DIFFERENCE: tl.constexpr,
    WIDEN: tl.constexpr,
    RUN: tl.constexpr,
):
    count = numel - start
    VECTOR: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    source = row + tl.where(row >= skip, 1, 0)
    x_ptr += row_offset(source, x_stride, x_jump)
    x = load_run(x_ptr + start, count, BLOCK, VECTOR, RUN, FULL).to(tl.float32)
    if DIFFERENCE:
        OTHER: tl.constexpr = 128 // reference_ptr.dtype.element_ty.primitive_bitwidth
        reference_ptr += row_offset(row, reference_stride, reference_jump)
        other = load_run(reference_ptr + start, count, BLOCK, OTHER, RUN, FULL)
        x = x - other.to(tl.float32)
    x = hadamard(x, BLOCK, FORMAT.hadamard_size, RUN)
    out_ptr += row_offset(row, out_stride, out_jump)
    encode_pass(
        *(x, out_ptr, range_ptr, row, start, numel, numel, seed_a, seed_b),
        *(BLOCK, FORMAT, FORMAT.forward_norm, FULL, WIDEN),
    )


@triton.jit(do_not_specialize=["rows", "across", "skip", "tiles", "seed_a", "seed_b"])
def quantize_rows_kernel(
    x_ptr,
    reference_ptr,
    out_ptr,
    range_ptr,
    x_stride,
    x_jump,
    reference_stride,
    reference_jump,
    out_stride,
    out_jump,
    rows,
    across,
    skip,
    tiles,
    numel,
    seed_a,
    seed_b,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    DIFFERENCE: tl.constexpr,
    WIDEN: tl.constexpr,
    RUN: tl.constexpr,
):
    """Encode ``tiles`` tiles of one row: [difference ->] Hadamard -> scale -> round -> pack."""
    for_each_tile(
        _quantize_tile,
        rows,
        tiles,
        numel,
        BLOCK,
        (x_ptr, reference_ptr, out_ptr, range_ptr),
        (
            x_stride,
            x_jump,
            reference_stride,
            reference_jump,
            out_stride,
            out_jump,
            skip,
            seed_a,
            seed_b,
        ),
        (FORMAT, DIFFERENCE, WIDEN, RUN),
        across=across,
    )


def launch_quantize(
    x: Tensor,
    reference: Tensor | None,
    fmt: MessageFormat,
    seed: int,
    out: Tensor,
    skip: int | None = None,
    *,
    tile: Tile | None = None,
) -> Callable[..., None]:
    """Launch the kernel; arguments as for ``reference.quantize``.

    Args:
        tile: overrides the choice from the tables; it changes the speed, not the bits.

    Returns:
        What launches it again, given ``x``, ``reference``, ``out`` and the words of the seed.
    """
    numel = x.shape[-1]
    if out.numel() == 0 or numel == 0:
        return launch_nothing
    if tile is None:
        kind = f"{'quantize' if reference is None else 'difference'} {8 * x.element_size()}"
        kind += " hadamard" if fmt.hadamard_size else ""
        tile = choose_tile(kind, fmt.block_multiple, x.numel(), x.device)
    chosen, steps = tile, RowSteps.of(out, x, x if reference is None else reference)
    out_strides, x_strides, other_strides = steps.strides

    def make(widen: bool) -> Launch:
        return Launch(
            quantize_rows_kernel,
            steps.grid(fmt.layout(numel).padded_numel, chosen),
            (
                *(*x_strides, *other_strides, *out_strides, steps.rows, steps.across),
                *(steps.rows if skip is None else skip, chosen.tiles, numel),
            ),
            {
                "BLOCK": chosen.block,
                "FORMAT": fmt,
                "DIFFERENCE": reference is not None,
                "WIDEN": widen,
                "RUN": chosen.run,
                "num_warps": chosen.warps,
                "enable_fp_fusion": False,
            },
        )

    launch = encoding_launch(fmt, steps.rows, make)
    launch(x, reference, out, words=seed_words(seed))
    return launch
