"""Gradient norms of sharded models, also through ``lightning.pytorch.utilities.grad_norm``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

__all__ = ["PlainNorms", "grad_norm"]

_NORMS: frozenset[Callable[..., Any]] = frozenset(
    {torch.Tensor.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm}
)


class PlainNorms(TorchFunctionMode):
    """Makes norms of sharded tensors plain numbers, the same on every rank.

    Without it such a norm is a DTensor scalar, which ``torch.tensor([...])`` (so Lightning's
    ``grad_norm``) and metric logging do not accept. All ranks have to compute the same norms.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` and replace a DTensor norm by its value."""
        result = func(*args, **(kwargs or {}))
        if func in _NORMS and isinstance(result, DTensor):
            return result.full_tensor()
        return result


def grad_norm(
    module: nn.Module, norm_type: float | str = 2.0, group_separator: str = "/"
) -> dict[str, Tensor]:
    """Norm of every parameter's gradient and of all of them together, for any sharding.

    Works in every hook between backward and the optimizer step. Every rank must call it.

    Args:
        module: Sharded or plain.
        norm_type: The p of the p-norm, or ``"inf"``.
        group_separator: Separates the prefix from the parameter name in the keys.

    Returns:
        ``{"grad_2.0_norm/<name>": ..., "grad_2.0_norm_total": ...}``, scalar tensors, the same on
        every rank; empty if nothing has a gradient.

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"`norm_type={norm_type!r}` is not valid: a positive number or 'inf'.")
    norms: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad.detach(), p)
            value = norm.full_tensor() if isinstance(norm, DTensor) else norm
            norms[f"grad_{p}_norm{group_separator}{name}"] = value
    if norms:
        norms[f"grad_{p}_norm_total"] = torch.linalg.vector_norm(
            torch.stack([n.float() for n in norms.values()]), p
        )
    return norms
