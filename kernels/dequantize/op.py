"""The operators ``lq_lightning::dequantize`` and ``lq_lightning::dequantize_out``."""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.message import parse_format
from lq_lightning.kernels.message.checks import check_message, check_rows

from . import reference as cpu


@torch.library.custom_op(
    "lq_lightning::dequantize_out",
    mutates_args=("out",),
    device_types="cpu",
    schema="(Tensor message, int numel, str format, float scale, bool add, Tensor(a!) out) -> ()",
)
def dequantize_out(
    message: Tensor, numel: int, format: str, scale: float, add: bool, out: Tensor
) -> None:
    """Decode messages, sum them and write or add ``scale`` times the sum to ``out``.

    Args:
        message: ``[K, R, nbytes]`` uint8.
        numel: values in a row.
        format: a ``MessageFormat`` as a string.
        scale: factor of the sum.
        add: add to ``out`` in fp32, rounded once, instead of overwriting it.
        out: ``[R, numel]`` fp32, bf16 or fp16, last dimension contiguous.
    """
    fmt = parse_format(format)
    check_message("message", message, fmt.layout(numel).nbytes)
    check_rows("out", out)
    cpu.dequantize(message, numel, fmt, scale, add, out)


@dequantize_out.register_kernel("cuda")
def _(message: Tensor, numel: int, format: str, scale: float, add: bool, out: Tensor) -> None:
    from .triton_kernels import launch_dequantize

    fmt = parse_format(format)
    check_message("message", message, fmt.layout(numel).nbytes)
    check_rows("out", out)
    launch_dequantize(message, numel, fmt, scale, add, out)


@dequantize_out.register_fake
def _(message: Tensor, numel: int, format: str, scale: float, add: bool, out: Tensor) -> None:
    return None


@torch.library.custom_op(
    "lq_lightning::dequantize",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema="(Tensor message, int numel, str format, float scale, ScalarType dtype) -> Tensor",
)
def dequantize(
    message: Tensor, numel: int, format: str, scale: float, dtype: torch.dtype
) -> Tensor:
    """Decode and sum messages into a new ``[R, numel]`` tensor; see ``dequantize_out``."""
    out = torch.empty(message.shape[1], numel, dtype=dtype, device=message.device)
    dequantize_out(message, numel, format, scale, False, out)
    return out


@dequantize.register_fake
def _(message: Tensor, numel: int, format: str, scale: float, dtype: torch.dtype) -> Tensor:
    return message.new_empty(message.shape[1], numel, dtype=dtype)
