"""The operators ``lq_lightning::dequantize`` and ``lq_lightning::dequantize_out``."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from lq_lightning.kernels.message import parse_format
from lq_lightning.kernels.message.calls import facts, find_call, keep_call
from lq_lightning.kernels.message.checks import check_message, check_rows
from lq_lightning.kernels.message.operators import count_write, define_operator

from . import reference as cpu


def repeat_dequantize(
    message: Tensor, numel: int, format: str, scale: float, add: bool, out: Tensor
) -> bool:
    """Do again what ``dequantize_out`` did for tensors with the same ``facts``; False if never."""
    call = find_call(_key(message, numel, format, scale, add, out))
    if call is None:
        return False
    call.launch(message, out)
    count_write(out)
    return True


def _key(
    message: Tensor, numel: int, format: str, scale: float, add: bool, out: Tensor
) -> Hashable:
    return "dequantize", facts(message), numel, format, scale, add, facts(out)


def _dequantize_out(
    message: Tensor, numel: int, format: str, scale: float, add: bool, out: Tensor
) -> None:
    """Decode messages, sum them and write or add ``scale`` times the sum to ``out``.

    Args:
        message: ``[K, R, nbytes]`` or ``[K, P, Q, nbytes]`` uint8.
        numel: values in a row.
        format: a ``MessageFormat`` as a string.
        scale: factor of the sum.
        add: add to ``out`` in fp32, rounded once, instead of overwriting it.
        out: ``[R, numel]`` or ``[P, Q, numel]`` fp32, bf16 or fp16, last dimension contiguous.
    """
    if repeat_dequantize(message, numel, format, scale, add, out):
        return
    fmt = parse_format(format)
    check_message("message", message, fmt.layout(numel).nbytes)
    check_rows("out", out)
    if message.is_cuda:
        from .triton_kernels import launch_dequantize

        launch = launch_dequantize(message, numel, fmt, scale, add, out)
        keep_call(_key(message, numel, format, scale, add, out), (), launch)
    else:
        cpu.dequantize(message, numel, fmt, scale, add, out)
    count_write(out)


def _dequantize(
    message: Tensor, numel: int, format: str, scale: float, dtype: torch.dtype
) -> Tensor:
    """Decode and sum messages into a new ``[R, numel]`` tensor; see ``dequantize_out``."""
    out = _fake_dequantize(message, numel, format, scale, dtype)
    _dequantize_out(message, numel, format, scale, False, out)
    return out


def _fake_dequantize_out(
    message: Tensor, numel: int, format: str, scale: float, add: bool, out: Tensor
) -> None:
    return None


def _fake_dequantize(
    message: Tensor, numel: int, format: str, scale: float, dtype: torch.dtype
) -> Tensor:
    return torch.empty(message.shape[1], numel, dtype=dtype, device=message.device)


dequantize_out = define_operator(
    "dequantize_out(Tensor message, int numel, str format, float scale, bool add, Tensor(a!) out)"
    " -> ()",
    _dequantize_out,
    _fake_dequantize_out,
)
dequantize = define_operator(
    "dequantize(Tensor message, SymInt numel, str format, float scale, ScalarType dtype) -> Tensor",
    _dequantize,
    _fake_dequantize,
)
