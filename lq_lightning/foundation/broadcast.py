"""Make the ranks of a model start alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["broadcast_module_states"]


def broadcast_module_states(
    root: nn.Module, *, parameters: bool, group: dist.ProcessGroup | None = None
) -> None:
    """Copy buffers, and with ``parameters`` also unsharded parameters, from rank 0 to all ranks.

    As DDP does, so that ranks that initialised the model differently train one model. Tensors on
    the meta device and DTensors are left alone. ``group`` are the ranks that hold this module;
    ``None`` is the world.
    """
    device = None
    if dist.get_backend(group) == "nccl":
        device = "cuda"
    named = [*sorted(root.named_buffers()), *sorted(root.named_parameters() if parameters else ())]
    for _, tensor in named:  # by name, whatever the order of modules
        if tensor.is_meta or isinstance(tensor, DTensor):
            continue
        staged = tensor.detach().to(device) if device else tensor.detach()
        staged = staged.contiguous()
        flat = staged.view(-1).view(torch.uint8)  # gloo knows no float8
        dist.broadcast(flat, group=group, group_src=0)
        if staged.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(staged)
