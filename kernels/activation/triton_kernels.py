"""Triton kernels of the operators of activation functions, and their launchers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

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


@dataclass(frozen=True, slots=True)
class Recipe:
    """Constants of a kernel: what a program computes, and the tile that it works on.

    Attributes:
        flat: ``matrix.is_flat``.
        gated: whether there is a second factor.
        amax: whether the largest magnitudes of the results are found, too.
    """

    activation: str
    format: MessageFormat
    flat: bool
    gated: bool
    amax: bool
    block: int
    run: int


@triton.jit
def _load(ptr, count, R: tl.constexpr, FULL: tl.constexpr):
    VECTOR: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    return load_run(ptr, count, R.block, VECTOR, R.run, FULL)


@triton.jit
def _store(ptr, values, count, amax_ptr, R: tl.constexpr, AMAX: tl.constexpr, FULL: tl.constexpr):
    """Round, write and, if ``AMAX``, let the fp32 at ``amax_ptr`` hold the largest magnitude.

    Beyond the end of a row all values are 0, since what was loaded is, or NaN where the next row,
    whose scale is seen there, has NaN too.
    """
    DTYPE: tl.constexpr = ptr.dtype.element_ty
    offsets = tl.arange(0, R.block)
    if FULL:
        tl.store(ptr + offsets, round_output(values, DTYPE))
    else:
        tl.store(ptr + offsets, round_output(values, DTYPE), offsets < count)
    if AMAX:
        parts = largest_magnitude(tl.reshape(values, (R.block // R.run, R.run)))
        largest = tl.max(parts, 0).to(tl.float32, bitcast=True)
        # Rounding keeps the order, so that one value is rounded instead of all.
        rounded = round_output(largest, DTYPE).to(tl.float32)
        keys = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        raise_to(keys, rounded.to(tl.int32, bitcast=True))


@triton.jit
def _encoded_place(message_ptr, stride, row, start, rows, numel, R: tl.constexpr):
    """Encoded row of a tile, its column there, that of the matrix's row, and the values in all."""
    MULTIPLE: tl.constexpr = min(R.block, R.format.block_multiple)
    row_ptr, first, length = encoded_columns(message_ptr, stride, row, rows, numel, R.flat)
    return row_ptr, tl.multiple_of(first + start, MULTIPLE), first, length


@triton.jit
def _encode(x, message_ptr, stride, row, start, rows, numel, R: tl.constexpr, FULL: tl.constexpr):
    """Write the codes of a tile of row ``row`` of a matrix."""
    FORMAT: tl.constexpr = R.format
    row_ptr, column, first, length = _encoded_place(message_ptr, stride, row, start, rows, numel, R)
    encode_tile(
        *(hadamard(x, R.block, FORMAT.hadamard_size, R.run), row_ptr, row_ptr, row),
        *(column, first + numel, length, 0, 0, R.block, FORMAT, FORMAT.forward_norm, FULL),
    )


@triton.jit
def _load_encoded(
    message_ptr, stride, row, start, rows, numel, R: tl.constexpr, FULL: tl.constexpr
):
    """Read what a tile of row ``row`` of a matrix is encoded to."""
    FORMAT: tl.constexpr = R.format
    row_ptr, column, first, length = _encoded_place(message_ptr, stride, row, start, rows, numel, R)
    return load_encoded(row_ptr, column, first + numel, length, R.block, R.run, FORMAT, FULL)


@triton.jit
def _decode(loaded, int_to_float, R: tl.constexpr):
    """The fp32 values of what ``_load_encoded`` returned."""
    FORMAT: tl.constexpr = R.format
    values = decode_loaded(loaded, int_to_float, R.block, FORMAT)
    return hadamard(values, R.block, FORMAT.hadamard_size, R.run) * FORMAT.inverse_norm


@triton.jit
def _quantize_tile(
    row, start, numel, BLOCK: tl.constexpr, FULL: tl.constexpr, pointers, sizes, R: tl.constexpr
):
    FORMAT: tl.constexpr = R.format
    ACTIVATION: tl.constexpr = R.activation
    x_ptr, up_ptr, y_ptr, message_ptr, up_message_ptr, amax_ptr = pointers
    x_stride, up_stride, message_stride, up_message_stride, rows = sizes
    count = numel - start
    # All loads before anything else, so that they are on their way together.
    x = _load(x_ptr + row * x_stride + start, count, R, FULL)
    if R.gated:
        up = _load(up_ptr + row * up_stride + start, count, R, FULL)
    x = x.to(tl.float32)
    y = activate(x, ACTIVATION)
    if R.gated:
        y = y * up.to(tl.float32)
    _store(y_ptr + row * numel + start, y, count, amax_ptr, R, R.amax, FULL)
    x = encoded_input(x, count, BLOCK, ACTIVATION, FORMAT, FULL)
    _encode(x, message_ptr, message_stride, row, start, rows, numel, R, FULL)
    if R.gated:
        up = up.to(tl.float32)
        _encode(up, up_message_ptr, up_message_stride, row, start, rows, numel, R, FULL)


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
    R: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write ``tiles`` tiles of a row of ``act(x) [* up]`` and the codes of both inputs."""
    pointers = (x_ptr, up_ptr, y_ptr, message_ptr, up_message_ptr, amax_ptr)
    sizes = (x_stride, up_stride, message_stride, up_message_stride, rows)
    for_each_tile(_quantize_tile, rows, tiles, numel, R.block, (pointers,), (sizes,), (R,), WHOLE)


@triton.jit
def _dequantize_tile(
    row, start, numel, BLOCK: tl.constexpr, FULL: tl.constexpr, pointers, sizes, R: tl.constexpr
):
    ACTIVATION: tl.constexpr = R.activation
    message_ptr, up_message_ptr, y_ptr = pointers
    message_stride, up_message_stride, rows, int_to_float = sizes
    # All loads before anything else, so that they are on their way together.
    loaded = _load_encoded(message_ptr, message_stride, row, start, rows, numel, R, FULL)
    up_loaded = loaded
    if R.gated:
        up_loaded = _load_encoded(
            up_message_ptr, up_message_stride, row, start, rows, numel, R, FULL
        )
    y = activate(_decode(loaded, int_to_float, R), ACTIVATION)
    if R.gated:
        y = y * _decode(up_loaded, int_to_float, R)
    _store(y_ptr + row * numel + start, y, numel - start, y_ptr, R, False, FULL)


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
    R: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write ``tiles`` tiles of a row of ``act(x) [* up]`` from the codes of both inputs."""
    pointers = (message_ptr, up_message_ptr, y_ptr)
    sizes = (message_stride, up_message_stride, rows, int_to_float)
    for_each_tile(_dequantize_tile, rows, tiles, numel, R.block, (pointers,), (sizes,), (R,), WHOLE)


@triton.jit
def _backward_tile(
    row, start, numel, BLOCK: tl.constexpr, FULL: tl.constexpr, pointers, sizes, R: tl.constexpr
):
    ACTIVATION: tl.constexpr = R.activation
    message_ptr, up_message_ptr, dy_ptr, dx_ptr, dup_ptr, amax_ptr = pointers
    dy_stride, message_stride, up_message_stride, rows, int_to_float = sizes
    count = numel - start
    target = row * numel + start
    # All loads before anything else, so that they are on their way together.
    dy = _load(dy_ptr + row * dy_stride + start, count, R, FULL)
    loaded = _load_encoded(message_ptr, message_stride, row, start, rows, numel, R, FULL)
    up_loaded = loaded
    if R.gated:
        up_loaded = _load_encoded(
            up_message_ptr, up_message_stride, row, start, rows, numel, R, FULL
        )
    value, derivative = value_and_derivative(_decode(loaded, int_to_float, R), ACTIVATION)
    dy = dy.to(tl.float32)
    dx = dy
    if R.gated:
        dx = dx * _decode(up_loaded, int_to_float, R)
        _store(dup_ptr + target, dy * value, count, amax_ptr + 1, R, R.amax, FULL)
    _store(dx_ptr + target, dx * derivative, count, amax_ptr, R, R.amax, FULL)


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
    R: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write ``tiles`` tiles of a row of both gradients at decoded inputs."""
    pointers = (message_ptr, up_message_ptr, dy_ptr, dx_ptr, dup_ptr, amax_ptr)
    sizes = (dy_stride, message_stride, up_message_stride, rows, int_to_float)
    for_each_tile(_backward_tile, rows, tiles, numel, R.block, (pointers,), (sizes,), (R,), WHOLE)


_KERNELS = {
    "quantize": activation_quantize_kernel,
    "dequantize": activation_dequantize_kernel,
    "backward": activation_backward_kernel,
}


def launch(
    name: str,
    tensors: tuple[Any, ...],
    activation: str,
    fmt: MessageFormat,
    tile: Tile | None = None,
) -> Callable[..., None]:
    """Launch a kernel on its pointers; the largest magnitudes are zeros, or ``[0]``.

    ``name`` is a key of ``_KERNELS``, ``activation`` that of the function. ``tile`` overrides the
    choice from the table; it changes the speed, not the bits. Returns a launch on other tensors
    alike.
    """
    encodes, up = name == "quantize", tensors[1]
    dense = [tensors[0 if encodes else 2]]  # the grid covers the first one
    messages = [*(tensors[3:5] if encodes else tensors[:2])]
    if encodes:
        dense.append(dense[0] if up is None else up)
    elif up is None:
        messages[1] = messages[0]
    rows, numel = dense[0].shape
    if rows * numel == 0:
        return launch_nothing
    if tile is None:
        kind = f"activation {name}" + (" hadamard" if fmt.hadamard_size else "")
        group_size = fmt.block_multiple if encodes else 1
        tile = choose_tile(kind, group_size, rows * numel, dense[0].device)
    flat = is_flat(fmt, numel)
    if flat and all(t.is_contiguous() for t in dense):  # all is one row, in memory and in messages
        rows, numel = 1, rows * numel
    strided = messages if name == "dequantize" else (*dense, *messages)
    amax = name != "dequantize" and tensors[-1].numel() > 0
    prepared = Launch(
        _KERNELS[name],
        row_grid(rows, numel, tile),
        (
            *(row_stride(t, 0) for t in strided),
            *(rows, tile.tiles, numel, *(() if encodes else (INT_TO_FLOAT,))),
        ),
        {
            "R": Recipe(activation, fmt, flat, up is not None, amax, tile.block, tile.run),
            "WHOLE": numel % tile.block == 0,
            "num_warps": tile.warps,
            "enable_fp_fusion": False,
        },
    )
    prepared(*tensors)
    return prepared
