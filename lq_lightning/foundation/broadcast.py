"""Make the ranks of a model start alike."""

from __future__ import annotations

from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lq_lightning.foundation.agreement import first_other

__all__ = ["broadcast_module_states", "check_alike"]


def check_alike(root: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Make sure that ranks have the same parameters and buffers, in one order. All call this.

    Values are sent and gradients reduced by position: a difference would mix them up, or hang.

    Args:
        root: The module.
        group: Ranks that hold it; ``None`` is the world.

    Raises:
        ValueError: On all ranks: they differ in a name, shape, dtype, in what is trained, or in
            what is on the meta device.
    """
    named = (*root.named_parameters(), *root.named_buffers())
    mine = [
        f"`{name}` of shape {tuple(tensor.shape)}, {tensor.dtype}, "
        f"{'trained' if tensor.requires_grad else 'not trained'}"
        f"{' and on the meta device' if tensor.is_meta else ''}"
        for name, tensor in named
    ]
    found = first_other(mine, group)
    if found is None:
        return
    *both, rank = found
    pairs = zip_longest(*both, fillvalue="nothing more")
    place, (first, other) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    raise ValueError(
        f"ranks have built different modules: number {place + 1} of the parameters and buffers of "
        f"`{type(root).__name__}` is {first} on the first rank, but {other} on rank {rank} of "
        f"{dist.get_world_size(group)}. Ranks send values and add up gradients by position. Build "
        "the same module on all of them, with its parts in the same order and the same ones frozen."
    )


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
