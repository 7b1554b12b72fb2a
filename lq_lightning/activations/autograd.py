"""What the autograd functions of this package share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_matrix", "matmul_dtype", "refuse_second_derivative", "without_autocast"]


def as_matrix(x: Tensor) -> Tensor:
    """View (or copy) a tensor as ``[T, N]`` with a contiguous last dimension."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def matmul_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer multiplies: autocast's, or that of its operands."""
    device = x.device.type
    if device == "meta":  # knows no autocast
        return torch.promote_types(x.dtype, weight.dtype)
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(x.dtype, weight.dtype)


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Return a context in which operations on the device of ``x`` run as written."""
    if x.device.type == "meta":
        return nullcontext()
    context: AbstractContextManager[None] = torch.autocast(x.device.type, enabled=False)
    return context


def refuse_second_derivative(ctx: Any, name: str) -> None:
    """Raise in a backward whose result is to be differentiated again.

    Raises:
        RuntimeError: ``create_graph=True``.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"The backward of {name} was called with `create_graph=True`, but its saved "
            "activations are codes, which have no derivative. Leave the modules as they are that "
            "need second derivatives (`ActivationPolicy(rules=[ActivationRule(module=...)])`), or "
            "call `remove()` of the handle before."
        )
