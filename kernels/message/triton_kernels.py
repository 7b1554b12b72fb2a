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
from lq_lightning.kernels.message.triton_rows import decode_tile, encode_tile, row_sections


@triton.jit
def _row_ptr(rows, row):
    """Address of a row, from its matrix's pointer, stride and jump; see ``launch.RowSteps``."""
    return rows[0] + row_offset(row, rows[1], rows[2])


@triton.jit
def _load(source_ptr, count, BLOCK, RUN, FULL):
    VECTOR: tl.constexpr = 128 // source_ptr.dtype.element_ty.primitive_bitwidth
    return load_run(source_ptr, count, BLOCK, VECTOR, RUN, FULL)


# Functions of tiles take tuples, where kernels have an argument for each member: a launch passes
# numbers, and Triton specializes them by name.


@triton.jit
def _quantize_tile(row, start, numel, BLOCK, FULL, matrices, skip, encoding, constants):
    FORMAT: tl.constexpr = constants[0]
    DIFFERENCE: tl.constexpr = constants[1]
    RUN: tl.constexpr = constants[3]
    x, reference, out = matrices
    range_ptr, seed_a, seed_b = encoding
    count = numel - start
    source = row + tl.where(row >= skip, 1, 0)
    values = _load(_row_ptr(x, source) + start, count, BLOCK, RUN, FULL).to(tl.float32)
    if DIFFERENCE:
        other = _load(_row_ptr(reference, row) + start, count, BLOCK, RUN, FULL)
        values = values - other.to(tl.float32)
    values = hadamard(values, BLOCK, FORMAT.hadamard_size, RUN)
    encode_tile(
        *(values, _row_ptr(out, row), range_ptr, row, start, numel, numel, seed_a, seed_b),
        *(BLOCK, FORMAT, FORMAT.forward_norm, FULL, constants[2]),
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
    matrices = (
        (x_ptr, x_stride, x_jump),
        (reference_ptr, reference_stride, reference_jump),
        (out_ptr, out_stride, out_jump),
    )
    for_each_tile(
        *(_quantize_tile, rows, tiles, numel, BLOCK, (matrices,)),
        *((skip, (range_ptr, seed_a, seed_b)), ((FORMAT, DIFFERENCE, WIDEN, RUN),)),
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
    """Launch the kernel; arguments as for ``reference.quantize``, ``tile`` overrides the table.

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
def _reduce_tile(messages, start, numel, BLOCK, FULL, FORMAT, UNROLLED, RUN):
    """Sum a ``[BLOCK]`` tile over the messages in index order; still transformed.

    ``messages`` are the pointer to the first one's row, their stride, their number, and
    ``launch.INT_TO_FLOAT``. ``UNROLLED`` is that of ``unrolled``, which saves small numbers the
    loop.
    """
    message_ptr, message_stride, num_messages, int_to_float = messages
    AT_ONCE: tl.constexpr = _AT_ONCE if FULL else _AT_ONCE_IN_TAIL
    if UNROLLED > 0 and UNROLLED <= AT_ONCE:
        total = decode_tile(
            message_ptr, start, numel, numel, int_to_float, BLOCK, RUN, FORMAT, FULL
        )
        for _ in tl.static_range(1, UNROLLED):
            message_ptr += message_stride
            total += decode_tile(
                message_ptr, start, numel, numel, int_to_float, BLOCK, RUN, FORMAT, FULL
            )
    else:
        # -0.0, which leaves the first summand as it is; `tl.full` makes 0.0 of a -0.0
        total = tl.full((BLOCK,), -0x80000000, tl.int32).to(tl.float32, bitcast=True)
        for _ in tl.range(0, num_messages, loop_unroll_factor=AT_ONCE):
            total += decode_tile(
                message_ptr, start, numel, numel, int_to_float, BLOCK, RUN, FORMAT, FULL
            )
            message_ptr += message_stride
    return total


def unrolled(num_messages: int) -> int:
    """Return ``UNROLLED`` of ``_reduce_tile``: the number of messages, or 0 for any large one."""
    return num_messages if num_messages <= UNROLLED_MESSAGES else 0


@triton.jit
def _dequantize_tile(row, start, numel, BLOCK, FULL, messages, out, factor, constants):
    FORMAT: tl.constexpr = constants[0]
    UNROLLED: tl.constexpr = constants[1]
    ADD: tl.constexpr = constants[2]
    RUN: tl.constexpr = constants[3]
    target = _row_ptr(out, row) + start
    message_ptr = _row_ptr(messages, row)
    if ADD:  # before the messages, so that all loads are on their way together
        base = _load(target, numel - start, BLOCK, RUN, FULL)
    messages = (message_ptr, messages[3], messages[4], messages[5])
    total = _reduce_tile(messages, start, numel, BLOCK, FULL, FORMAT, UNROLLED, RUN)
    values = hadamard(total, BLOCK, FORMAT.hadamard_size, RUN) * factor
    if ADD:
        values = values + base.to(tl.float32)
    result = round_output(values, target.dtype.element_ty)
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
    messages = (message_ptr, row_stride, row_jump, message_stride, num_messages, int_to_float)
    for_each_tile(
        *(_dequantize_tile, rows, tiles, numel, BLOCK),
        *((messages, (out_ptr, out_stride, out_jump)), (factor,), ((FORMAT, UNROLLED, ADD, RUN),)),
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
    """Launch the kernel; arguments as for ``reference.dequantize``, ``tile`` overrides the table.

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
def _requantize_tile(row, start, numel, BLOCK, FULL, messages, matrices, encoding, constants):
    SOURCE: tl.constexpr = constants[0]
    TARGET: tl.constexpr = constants[1]
    UNROLLED: tl.constexpr = constants[2]
    ADD: tl.constexpr = constants[3]
    RUN: tl.constexpr = constants[5]
    message_ptr, row_stride, skip, message_stride, num_messages, int_to_float = messages
    added_ptr, added_stride, out_ptr, out_stride = matrices
    range_ptr, seed_a, seed_b = encoding
    source = row + tl.where(row >= skip, 1, 0)
    messages = (message_ptr + source * row_stride, message_stride, num_messages, int_to_float)
    x = _reduce_tile(messages, start, numel, BLOCK, FULL, SOURCE, UNROLLED, RUN)
    SAME: tl.constexpr = SOURCE.hadamard_size == TARGET.hadamard_size
    NORM: tl.constexpr = 1.0 if SAME else TARGET.forward_norm
    if ADD:
        added = _load(added_ptr + row * added_stride + start, numel - start, BLOCK, RUN, FULL)
        x += hadamard(added.to(tl.float32), BLOCK, TARGET.hadamard_size, RUN) * TARGET.forward_norm
        # The sum may replace its message. Threads share scales: all have read before one writes.
        tl.debug_barrier()
    if not SAME and SOURCE.hadamard_size > 0:
        x = hadamard(x, BLOCK, SOURCE.hadamard_size, RUN) * SOURCE.inverse_norm
    if not FULL:
        last = tl.cast(numel, tl.int64)
        if SAME and SOURCE.hadamard_size > 0:
            last = row_sections(numel, SOURCE)[0]
        x = tl.where(tl.arange(0, BLOCK) < last - start, x, 0.0)
    if not SAME:
        x = hadamard(x, BLOCK, TARGET.hadamard_size, RUN)
    encode_tile(
        *(x, out_ptr + row * out_stride, range_ptr, row, start, numel, numel, seed_a, seed_b),
        *(BLOCK, TARGET, NORM, FULL, constants[4]),
    )


_NOT_SPECIALIZED = ["num_messages", "rows", "skip", "tiles", "int_to_float", "seed_a", "seed_b"]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def requantize_rows_kernel(
    message_ptr,
    added_ptr,
    out_ptr,
    range_ptr,
    message_stride,
    row_stride,
    added_stride,
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
    ADD: tl.constexpr,
    WIDEN: tl.constexpr,
    RUN: tl.constexpr,
):
    """Sum ``tiles`` tiles of one row and encode them: unpack -> sum [-> add] -> scale -> pack."""
    messages = (message_ptr, row_stride, skip, message_stride, num_messages, int_to_float)
    for_each_tile(
        *(_requantize_tile, rows, tiles, numel, BLOCK),
        (messages, (added_ptr, added_stride, out_ptr, out_stride)),
        ((range_ptr, seed_a, seed_b),),
        ((SOURCE, TARGET, UNROLLED, ADD, WIDEN, RUN),),
    )


def launch_requantize(
    message: Tensor,
    numel: int,
    source: MessageFormat,
    target: MessageFormat,
    seed: int,
    out: Tensor,
    skip: int | None = None,
    added: Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> Callable[..., None]:
    """Launch the kernel; arguments as for ``reference.requantize``, ``tile`` overrides the table.

    Returns what launches it again, given ``message``, ``added``, ``out`` and the words of the seed.
    """
    num_messages, rows = message.shape[0], out.shape[0]
    if rows == 0 or numel == 0:
        return launch_nothing
    if tile is None:
        kind = "requantize" if num_messages <= UNROLLED_MESSAGES else "requantize many"
        if added is not None:  # reads and writes as much as a difference does
            kind = f"difference {8 * added.element_size()}"
            kind += " hadamard" if target.hadamard_size else ""
        multiple = max(source.block_multiple, target.block_multiple)
        tile = choose_tile(kind, multiple, rows * numel, message.device)
    chosen = tile

    def make(widen: bool) -> Launch:
        return Launch(
            requantize_rows_kernel,
            row_grid(rows, target.layout(numel).padded_numel, chosen),
            (
                *(row_stride(message, 0), row_stride(message, 1)),
                *(0 if added is None else row_stride(added, 0), row_stride(out, 0)),
                *(num_messages, rows, rows if skip is None else skip, chosen.tiles, numel),
                INT_TO_FLOAT,
            ),
            {
                "BLOCK": chosen.block,
                "SOURCE": source,
                "TARGET": target,
                "UNROLLED": unrolled(num_messages),
                "ADD": added is not None,
                "WIDEN": widen,
                "RUN": chosen.run,
                "num_warps": chosen.warps,
                "enable_fp_fusion": False,
            },
        )

    launch = encoding_launch(target, rows, make)
    launch(message, added, out, words=seed_words(seed))
    return launch
