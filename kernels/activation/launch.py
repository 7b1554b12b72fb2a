"""Launchers of the Triton kernels of activation functions."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.calls import Launch, launch_nothing
from lq_lightning.kernels.message.launch import (
    INT_TO_FLOAT,
    Tile,
    choose_tile,
    row_grid,
    row_stride,
)
from lq_lightning.kernels.message.matrix import is_flat

from .triton_kernels import (
    activation_backward_kernel,
    activation_dequantize_kernel,
    activation_quantize_kernel,
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
