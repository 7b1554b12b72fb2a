"""The operators ``lq_lightning::requantize`` and ``lq_lightning::requantize_out``."""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.message import parse_format
from lq_lightning.kernels.message.checks import check_message

from . import reference as cpu


@torch.library.custom_op(
    "lq_lightning::requantize_out",
    mutates_args=("out",),
    device_types="cpu",
    schema=("(Tensor message, int numel, str source, str target, int seed, Tensor(a!) out) -> ()"),
)
def requantize_out(
    message: Tensor, numel: int, source: str, target: str, seed: int, out: Tensor
) -> None:
    """Sum messages of format ``source`` and encode the sum in format ``target``.

    Args:
        message: ``[K, R, nbytes]`` uint8.
        numel: values in a row.
        source: format of ``message``, a ``MessageFormat`` as a string.
        target: format of ``out``.
        seed: for stochastic rounding in ``target``.
        out: ``[R, nbytes]`` uint8.
    """
    source_format, target_format = parse_format(source), parse_format(target)
    check_message("message", message, source_format.layout(numel).nbytes)
    check_message("out", out, target_format.layout(numel).nbytes)
    cpu.requantize(message, numel, source_format, target_format, seed, out)


@requantize_out.register_kernel("cuda")
def _(message: Tensor, numel: int, source: str, target: str, seed: int, out: Tensor) -> None:
    from .triton_kernels import launch_requantize

    source_format, target_format = parse_format(source), parse_format(target)
    check_message("message", message, source_format.layout(numel).nbytes)
    check_message("out", out, target_format.layout(numel).nbytes)
    launch_requantize(message, numel, source_format, target_format, seed, out)


@requantize_out.register_fake
def _(message: Tensor, numel: int, source: str, target: str, seed: int, out: Tensor) -> None:
    return None


@torch.library.custom_op(
    "lq_lightning::requantize",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema="(Tensor message, int numel, str source, str target, int seed) -> Tensor",
)
def requantize(message: Tensor, numel: int, source: str, target: str, seed: int) -> Tensor:
    """Sum and encode into new rows; arguments as for ``requantize_out``."""
    nbytes = parse_format(target).layout(numel).nbytes
    out = torch.empty(message.shape[1], nbytes, dtype=torch.uint8, device=message.device)
    requantize_out(message, numel, source, target, seed, out)
    return out


@requantize.register_fake
def _(message: Tensor, numel: int, source: str, target: str, seed: int) -> Tensor:
    nbytes = parse_format(target).layout(numel).nbytes
    return message.new_empty(message.shape[1], nbytes, dtype=torch.uint8)
