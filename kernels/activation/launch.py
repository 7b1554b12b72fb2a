"""Launchers of the Triton kernels of activation functions."""

from __future__ import annotations

from torch import Tensor

from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.launch import (
    INT_TO_FLOAT,
    Tile,
    choose_tile,
    on_device,
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
) -> None:
    """Launch the kernel; arguments and results as for the operator.

    ``tile`` overrides the choice from the tables; it changes the speed, not the bits.
    """
    if x.numel() == 0:
        return
    flat = is_flat(fmt, x.shape[1])
    other = x if up is None else up
    rows, numel = _encoded_rows(x, flat, other)
    tile = tile or _tile("quantize", fmt, fmt.block_multiple, x)
    with on_device(x):
        activation_quantize_kernel[row_grid(rows, numel, tile)](
            x,
            other,
            y,
            message,
            up_message,
            amax,
            row_stride(x, 0),
            row_stride(other, 0),
            row_stride(message, 0),
            row_stride(up_message, 0),
            rows,
            tile.tiles,
            numel,
            BLOCK=tile.block,
            ACTIVATION=activation,
            FORMAT=fmt,
            FLAT=flat,
            GATED=up is not None,
            AMAX=amax.numel() > 0,
            RUN=tile.run,
            WHOLE=numel % tile.block == 0,
            num_warps=tile.warps,
            enable_fp_fusion=False,
        )


def launch_dequantize(
    message: Tensor,
    up_message: Tensor | None,
    activation: str,
    fmt: MessageFormat,
    y: Tensor,
    *,
    tile: Tile | None = None,
) -> None:
    """Launch the kernel, which writes ``y``, ``[T, N]`` contiguous; otherwise as the operator."""
    if y.numel() == 0:
        return
    up = message if up_message is None else up_message
    flat = is_flat(fmt, y.shape[1])
    rows, numel = _encoded_rows(y, flat)
    tile = tile or _tile("dequantize", fmt, 1, y)
    with on_device(y):
        activation_dequantize_kernel[row_grid(rows, numel, tile)](
            message,
            up,
            y,
            row_stride(message, 0),
            row_stride(up, 0),
            rows,
            tile.tiles,
            numel,
            INT_TO_FLOAT,
            BLOCK=tile.block,
            ACTIVATION=activation,
            FORMAT=fmt,
            FLAT=flat,
            GATED=up_message is not None,
            RUN=tile.run,
            WHOLE=numel % tile.block == 0,
            num_warps=tile.warps,
            enable_fp_fusion=False,
        )


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
) -> None:
    """Launch the kernel, which writes what the operator returns; arguments as for the operator."""
    if dy.numel() == 0:
        return
    up = message if up_message is None else up_message
    flat = is_flat(fmt, dy.shape[1])
    rows, numel = _encoded_rows(dy, flat)
    tile = tile or _tile("backward", fmt, 1, dy)
    with on_device(dy):
        activation_backward_kernel[row_grid(rows, numel, tile)](
            message,
            up,
            dy,
            dx,
            dup,
            amax,
            row_stride(dy, 0),
            row_stride(message, 0),
            row_stride(up, 0),
            rows,
            tile.tiles,
            numel,
            INT_TO_FLOAT,
            BLOCK=tile.block,
            ACTIVATION=activation,
            FORMAT=fmt,
            FLAT=flat,
            GATED=up_message is not None,
            AMAX=amax.numel() > 0,
            RUN=tile.run,
            WHOLE=numel % tile.block == 0,
            num_warps=tile.warps,
            enable_fp_fusion=False,
        )
