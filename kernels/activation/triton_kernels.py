"""Triton kernels of the operators of activation functions, and their launchers."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.activation.triton_arithmetic import (
    activate,
    encoded_input,
    value_and_derivative,
)
from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.launch import (
    INT_TO_FLOAT,
    Tile,
    choose_tile,
    row_grid,
    row_stride,
)
from lq_lightning.kernels.message.launch_cache import Launch, launch_nothing
from lq_lightning.kernels.message.matrix import is_flat
from lq_lightning.kernels.message.triton_blocks import (
    for_each_tile,
    hadamard,
    load_run,
    round_output,
)
from lq_lightning.kernels.message.triton_rounding import largest_magnitude
from lq_lightning.kernels.message.triton_rows import (
    decode_loaded,
    encode_tile,
    encoded_columns,
    load_encoded,
    raise_to,
)


@triton.jit
def _load(ptr, count, BLOCK: tl.constexpr, RUN: tl.constexpr, FULL: tl.constexpr):
    VECTOR: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    return load_run(ptr, count, BLOCK, VECTOR, RUN, FULL)


@triton.jit
def _store(
    ptr,
    values,
    count,
    amax_ptr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    AMAX: tl.constexpr,
    FULL: tl.constexpr,
):
    """Round, write and, if ``AMAX``, let the fp32 at ``amax_ptr`` hold the largest magnitude.

    Beyond the end of a row all values are 0, since what was loaded is, or NaN where the next row,
    whose scale is seen there, has NaN too.
    """
    DTYPE: tl.constexpr = ptr.dtype.element_ty
    offsets = tl.arange(0, BLOCK)
    if FULL:
        tl.store(ptr + offsets, round_output(values, DTYPE))
    else:
        tl.store(ptr + offsets, round_output(values, DTYPE), offsets < count)
    if AMAX:
        parts = largest_magnitude(tl.reshape(values, (BLOCK // RUN, RUN)))
        largest = tl.max(parts, 0).to(tl.float32, bitcast=True)
        # Rounding keeps the order, so that one value is rounded instead of all.
        rounded = round_output(largest, DTYPE).to(tl.float32)
        keys = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        raise_to(keys, rounded.to(tl.int32, bitcast=True))


@triton.jit
def _encode(
    x,
    message_ptr,
    message_stride,
    row,
    start,
    rows,
    numel,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    FLAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """Write the codes of a tile of row ``row`` of a matrix."""
    MULTIPLE: tl.constexpr = BLOCK if FORMAT.block_multiple > BLOCK else FORMAT.block_multiple
    row_ptr, first, length = encoded_columns(message_ptr, message_stride, row, rows, numel, FLAT)
    column = tl.multiple_of(first + start, MULTIPLE)
    encode_tile(
        *(hadamard(x, BLOCK, FORMAT.hadamard_size, RUN), row_ptr, row_ptr, row),
        *(column, first + numel, length, 0, 0, BLOCK, FORMAT, FORMAT.forward_norm, FULL),
    )


@triton.jit
def _load_encoded(
    message_ptr,
    message_stride,
    row,
    start,
    rows,
    numel,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    FLAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """Read what a tile of row ``row`` of a matrix is encoded to."""
    MULTIPLE: tl.constexpr = BLOCK if FORMAT.block_multiple > BLOCK else FORMAT.block_multiple
    row_ptr, first, length = encoded_columns(message_ptr, message_stride, row, rows, numel, FLAT)
    column = tl.multiple_of(first + start, MULTIPLE)
    return load_encoded(row_ptr, column, first + numel, length, BLOCK, RUN, FORMAT, FULL)


@triton.jit
def _decode(loaded, int_to_float, BLOCK: tl.constexpr, RUN: tl.constexpr, FORMAT: tl.constexpr):
    """The fp32 values of what ``_load_encoded`` returned."""
    values = decode_loaded(loaded, int_to_float, BLOCK, FORMAT)
    return hadamard(values, BLOCK, FORMAT.hadamard_size, RUN) * FORMAT.inverse_norm


@triton.jit
def _quantize_tile(
    row,
    start,
    numel,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    x_ptr,
    up_ptr,
    y_ptr,
    message_ptr,
    up_message_ptr,
    amax_ptr,
    x_stride,
    up_stride,
    message_stride,
    up_message_stride,
    rows,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    FLAT: tl.constexpr,
    GATED: tl.constexpr,
    AMAX: tl.constexpr,
    RUN: tl.constexpr,
):
    count = numel - start
    # All loads before anything else, so that they are on their way together.
    x = _load(x_ptr + row * x_stride + start, count, BLOCK, RUN, FULL)
    if GATED:
        up = _load(up_ptr + row * up_stride + start, count, BLOCK, RUN, FULL)
    x = x.to(tl.float32)
    y = activate(x, ACTIVATION)
    if GATED:
        y = y * up.to(tl.float32)
    _store(y_ptr + row * numel + start, y, count, amax_ptr, BLOCK, RUN, AMAX, FULL)
    _encode(
        encoded_input(x, count, BLOCK, ACTIVATION, FORMAT, FULL),
        *(message_ptr, message_stride, row, start, rows, numel),
        *(BLOCK, RUN, FORMAT, FLAT, FULL),
    )
    if GATED:
        _encode(
            *(up.to(tl.float32), up_message_ptr, up_message_stride, row, start, rows, numel),
            *(BLOCK, RUN, FORMAT, FLAT, FULL),
        )


@triton.jit(do_not_specialize=["rows", "tiles"])
def activation_quantize_kernel(
    x_ptr,
    up_ptr,
    y_ptr,
    message_ptr,
    up_message_ptr,
    amax_ptr,
    x_stride,
    up_stride,
    message_stride,
    up_message_stride,
    rows,
    tiles,
    numel,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    FLAT: tl.constexpr,
    GATED: tl.constexpr,
    AMAX: tl.constexpr,
    RUN: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write ``tiles`` tiles of a row of ``act(x) [* up]`` and the codes of both inputs."""
    for_each_tile(
        _quantize_tile,
        rows,
        tiles,
        numel,
        BLOCK,
        (x_ptr, up_ptr, y_ptr, message_ptr, up_message_ptr, amax_ptr),
        (x_stride, up_stride, message_stride, up_message_stride, rows),
        (ACTIVATION, FORMAT, FLAT, GATED, AMAX, RUN),
        WHOLE,
    )


@triton.jit
def _dequantize_tile(
    row,
    start,
    numel,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    message_ptr,
    up_message_ptr,
    y_ptr,
    message_stride,
    up_message_stride,
    rows,
    int_to_float,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    FLAT: tl.constexpr,
    GATED: tl.constexpr,
    RUN: tl.constexpr,
):
    # All loads before anything else, so that they are on their way together.
    loaded = _load_encoded(
        *(message_ptr, message_stride, row, start, rows, numel, BLOCK, RUN, FORMAT, FLAT, FULL),
    )
    up_loaded = loaded
    if GATED:
        up_loaded = _load_encoded(
            *(up_message_ptr, up_message_stride, row, start, rows, numel),
            *(BLOCK, RUN, FORMAT, FLAT, FULL),
        )
    y = activate(_decode(loaded, int_to_float, BLOCK, RUN, FORMAT), ACTIVATION)
    if GATED:
        y = y * _decode(up_loaded, int_to_float, BLOCK, RUN, FORMAT)
    _store(y_ptr + row * numel + start, y, numel - start, y_ptr, BLOCK, RUN, False, FULL)


@triton.jit(do_not_specialize=["rows", "tiles", "int_to_float"])
def activation_dequantize_kernel(
    message_ptr,
    up_message_ptr,
    y_ptr,
    message_stride,
    up_message_stride,
    rows,
    tiles,
    numel,
    int_to_float,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    FLAT: tl.constexpr,
    GATED: tl.constexpr,
    RUN: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write ``tiles`` tiles of a row of ``act(x) [* up]`` from the codes of both inputs."""
    for_each_tile(
        _dequantize_tile,
        rows,
        tiles,
        numel,
        BLOCK,
        (message_ptr, up_message_ptr, y_ptr),
        (message_stride, up_message_stride, rows, int_to_float),
        (ACTIVATION, FORMAT, FLAT, GATED, RUN),
        WHOLE,
    )


@triton.jit
def _backward_tile(
    row,
    start,
    numel,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    message_ptr,
    up_message_ptr,
    dy_ptr,
    dx_ptr,
    dup_ptr,
    amax_ptr,
    dy_stride,
    message_stride,
    up_message_stride,
    rows,
    int_to_float,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    FLAT: tl.constexpr,
    GATED: tl.constexpr,
    AMAX: tl.constexpr,
    RUN: tl.constexpr,
):
    count = numel - start
    target = row * numel + start
    # All loads before anything else, so that they are on their way together.
    dy = _load(dy_ptr + row * dy_stride + start, count, BLOCK, RUN, FULL)
    loaded = _load_encoded(
        *(message_ptr, message_stride, row, start, rows, numel, BLOCK, RUN, FORMAT, FLAT, FULL),
    )
    up_loaded = loaded
    if GATED:
        up_loaded = _load_encoded(
            *(up_message_ptr, up_message_stride, row, start, rows, numel),
            *(BLOCK, RUN, FORMAT, FLAT, FULL),
        )
    x = _decode(loaded, int_to_float, BLOCK, RUN, FORMAT)
    value, derivative = value_and_derivative(x, ACTIVATION)
    dy = dy.to(tl.float32)
    dx = dy
    if GATED:
        dx = dx * _decode(up_loaded, int_to_float, BLOCK, RUN, FORMAT)
        _store(dup_ptr + target, dy * value, count, amax_ptr + 1, BLOCK, RUN, AMAX, FULL)
    _store(dx_ptr + target, dx * derivative, count, amax_ptr, BLOCK, RUN, AMAX, FULL)


@triton.jit(do_not_specialize=["rows", "tiles", "int_to_float"])
def activation_backward_kernel(
    message_ptr,
    up_message_ptr,
    dy_ptr,
    dx_ptr,
    dup_ptr,
    amax_ptr,
    dy_stride,
    message_stride,
    up_message_stride,
    rows,
    tiles,
    numel,
    int_to_float,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    FLAT: tl.constexpr,
    GATED: tl.constexpr,
    AMAX: tl.constexpr,
    RUN: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write ``tiles`` tiles of a row of both gradients at decoded inputs."""
    for_each_tile(
        _backward_tile,
        rows,
        tiles,
        numel,
        BLOCK,
        (message_ptr, up_message_ptr, dy_ptr, dx_ptr, dup_ptr, amax_ptr),
        (dy_stride, message_stride, up_message_stride, rows, int_to_float),
        (ACTIVATION, FORMAT, FLAT, GATED, AMAX, RUN),
        WHOLE,
    )


def _encoded_rows(values: Tensor, flat: bool, *others: Tensor) -> tuple[int, int]:
    """Rows and columns to work on: one row where all of it is one in memory and in the messages."""
    rows, numel = values.shape
    whole = flat and all(t.is_contiguous() for t in (values, *others))
    return (1, rows * numel) if whole else (rows, numel)


def _tile(kind: str, fmt: MessageFormat, group_size: int, y: Tensor) -> Tile:
    kind = f"activation {kind}" + (" hadamard" if fmt.hadamard_size else "")
    return choose_tile(kind, group_size, y.numel(), y.device)


def _constants(
    tile: Tile, numel: int, activation: str, fmt: MessageFormat, flat: bool, gated: bool
) -> dict[str, object]:
    """Constants that all kernels of activations take."""
    return {
        "BLOCK": tile.block,
        "ACTIVATION": activation,
        "FORMAT": fmt,
        "FLAT": flat,
        "GATED": gated,
        "RUN": tile.run,
        "WHOLE": numel % tile.block == 0,
        "num_warps": tile.warps,
        "enable_fp_fusion": False,
    }


def launch_quantize(
    x: Tensor,
    up: Tensor | None,
    activation: str,
    fmt: MessageFormat,
    y: Tensor,
    message: Tensor,
    up_message: Tensor,
    amax: Tensor,
    *,
    tile: Tile | None = None,
) -> Callable[..., None]:
    """Launch the kernel; arguments and results as for the operator, ``amax`` zero or ``[0]``.

    ``tile`` overrides the choice from the tables; it changes the speed, not the bits. Returns what
    does the same with other tensors alike.
    """
    if x.numel() == 0:
        return launch_nothing
    flat = is_flat(fmt, x.shape[1])
    other = x if up is None else up
    rows, numel = _encoded_rows(x, flat, other)
    tile = tile or _tile("quantize", fmt, fmt.block_multiple, x)
    strides = [row_stride(rows_of, 0) for rows_of in (x, other, message, up_message)]
    launch = Launch(
        activation_quantize_kernel,
        row_grid(rows, numel, tile),
        (*strides, rows, tile.tiles, numel),
        _constants(tile, numel, activation, fmt, flat, up is not None) | {"AMAX": amax.numel() > 0},
    )
    launch(x, up, y, message, up_message, amax)
    return launch


def launch_dequantize(
    message: Tensor,
    up_message: Tensor | None,
    activation: str,
    fmt: MessageFormat,
    y: Tensor,
    *,
    tile: Tile | None = None,
) -> Callable[..., None]:
    """Launch the kernel, which writes ``y``, ``[T, N]`` contiguous; otherwise as the operator.

    Returns what does the same with other tensors alike.
    """
    if y.numel() == 0:
        return launch_nothing
    up = message if up_message is None else up_message
    flat = is_flat(fmt, y.shape[1])
    rows, numel = _encoded_rows(y, flat)
    tile = tile or _tile("dequantize", fmt, 1, y)
    launch = Launch(
        activation_dequantize_kernel,
        row_grid(rows, numel, tile),
        (row_stride(message, 0), row_stride(up, 0), rows, tile.tiles, numel, INT_TO_FLOAT),
        _constants(tile, numel, activation, fmt, flat, up_message is not None),
    )
    launch(message, up_message, y)
    return launch


def launch_backward(
    message: Tensor,
    up_message: Tensor | None,
    dy: Tensor,
    activation: str,
    fmt: MessageFormat,
    dx: Tensor,
    dup: Tensor,
    amax: Tensor,
    *,
    tile: Tile | None = None,
) -> Callable[..., None]:
    """Launch the kernel, which writes what the operator returns; arguments as for the operator.

    ``amax`` is zero or ``[0]``. Returns what does the same with other tensors alike.
    """
    if dy.numel() == 0:
        return launch_nothing
    up = message if up_message is None else up_message
    flat = is_flat(fmt, dy.shape[1])
    rows, numel = _encoded_rows(dy, flat)
    tile = tile or _tile("backward", fmt, 1, dy)
    strides = [row_stride(rows_of, 0) for rows_of in (dy, message, up)]
    launch = Launch(
        activation_backward_kernel,
        row_grid(rows, numel, tile),
        (*strides, rows, tile.tiles, numel, INT_TO_FLOAT),
        _constants(tile, numel, activation, fmt, flat, up_message is not None)
        | {"AMAX": amax.numel() > 0},
    )
    launch(message, up_message, dy, dx, dup, amax)
    return launch
