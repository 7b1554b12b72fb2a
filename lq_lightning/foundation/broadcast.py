"""Make the ranks of a model start alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lq_lightning.foundation.agreement import check_same_entries, describe

__all__ = ["broadcast_module_states", "check_same_model"]


def broadcast_module_states(
    root: nn.Module, *, parameters: bool, group: dist.ProcessGroup | None = None
) -> None:
    """Copy buffers, and with ``parameters`` also unsharded parameters, from rank 0 to all ranks.

    As DDP does, so that ranks that initialised the model differently train one model. Tensors on
    the meta device and DTensors are left alone. ``group`` are the ranks that hold this module;
    ``None`` is the world.

    Raises:
        ValueError: See :func:`check_same_model`.
    """
    states = _states(root, parameters)
    if states:
        check_same_model(root, parameters=parameters, group=group)
    device = _device(group)
    for _, tensor in sorted(states.items()):
        if tensor.is_meta or isinstance(tensor, DTensor):
            continue
        staged = tensor.detach().to(device) if device else tensor.detach()
        staged = staged.contiguous()
        flat = staged.view(-1).view(torch.uint8)  # gloo knows no float8
        dist.broadcast(flat, group=group, group_src=0)
        if staged.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(staged)


def check_same_model(
    root: nn.Module, *, parameters: bool, group: dist.ProcessGroup | None = None
) -> None:
    """Refuse models that are not built alike on the ranks of a group, all of which call this.

    Args:
        root: Whose buffers, and with ``parameters`` also parameters, are compared.
        parameters: Whether parameters are compared.
        group: Ranks that hold this module; ``None`` is the world.

    Raises:
        ValueError: On all ranks: names, shapes or dtypes differ; the first difference by name.
    """
    check_same_entries(
        {name: describe(tensor) for name, tensor in _states(root, parameters).items()},
        group,
        torch.device(_device(group) or "cpu"),
        differ="ranks do not have the same model",
        advice="Build it alike on all of them: names, shapes and dtypes of parameters and buffers "
        "must not depend on the rank, its node or its data.",
    )


def _states(root: nn.Module, parameters: bool) -> dict[str, Tensor]:
    return {**dict(root.named_buffers()), **dict(root.named_parameters() if parameters else ())}


def _device(group: dist.ProcessGroup | None) -> str | None:
    """Where tensors must be to be sent; None: anywhere."""
    return "cuda" if dist.get_backend(group) == "nccl" else None
