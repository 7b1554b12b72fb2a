"""Triton kernels that encode rows, decode and sum them, and both at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.launch import (
    INT_TO_FLOAT,
    UNROLLED_IN_TAIL,
    UNROLLED_MESSAGES,
    RowSteps,
    Tile,
    choose_tile,
    row_grid,
    row_stride,
)
from lq_lightning.kernels.message.launch_cache import Launch, encoding_launch, launch_nothing
from lq_lightning.kernels.message.reference import seed_words
from lq_lightning.kernels.message.triton_blocks import (
    for_each_tile,
    hadamard,
    load_run,
    round_output,
    row_offset,
)
from lq_lightning.kernels.message.triton_rows import decode_tile, encode_pass, row_sections


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
    """Launch the kernel; arguments as for ``rows.quantize``, ``tile`` overrides the table.

    Returns what launches it again, given ``x``, ``reference``, ``out`` and the words of the seed.
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
    """Launch the kernel; arguments as for ``rows.dequantize``, ``tile`` overrides the table.

    Returns what launches it again, given ``message`` and ``out``.
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
    """Launch the kernel; arguments as for ``rows.requantize``, ``tile`` overrides the table.

    Returns what launches it again, given ``message``, ``out`` and the words of the seed.
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
