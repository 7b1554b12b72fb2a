"""Make the ranks of a model start alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["broadcast_module_states"]


def broadcast_module_states(root: nn.Module, *, parameters: bool) -> None:
    """Copy buffers, and with ``parameters`` also unsharded parameters, from rank 0 to all ranks.

    As DDP does, so that ranks that initialised the model differently train one model. Tensors on
    the meta device and DTensors are left alone.
    """
    device = None
    if dist.get_backend() == "nccl":
        device = "cuda"
    tensors = list(root.buffers()) + (list(root.parameters()) if parameters else [])
    for tensor in tensors:
        if tensor.is_meta or isinstance(tensor, DTensor):
            continue
        staged = tensor.detach().to(device) if device else tensor.detach()
        staged = staged.contiguous()
        dist.broadcast(staged.view(-1).view(torch.uint8), src=0)  # gloo knows no float8
        if staged.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(staged)
