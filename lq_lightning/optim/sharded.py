"""Which optimizers can update sharded parameters."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from .base import QuantizedOptimizer


def check_sharded_step(optimizer: Optimizer) -> None:
    """Refuse an optimizer that would fail in its first step, because parameters are DTensors.

    A copy of it updates a small matrix, whole and sharded. Nothing changes in the optimizer. All
    ranks must call it. Optimizers that fail with the whole matrix too, since they need something
    that the copy lacks, are let through.

    Args:
        optimizer: of parameters that may be DTensors.

    Raises:
        NotImplementedError: it updates whole tensors but not sharded ones.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sharded = next((param for param in params if isinstance(param, DTensor)), None)
    if sharded is None or isinstance(optimizer, QuantizedOptimizer):
        return
    local = sharded.to_local()
    mesh = sharded.device_mesh
    rows = 2 * mesh.size()
    whole = torch.ones(rows, 4, dtype=local.dtype, device=local.device)
    try:
        _take_step(optimizer, whole)
    except Exception:
        return  # not because of sharding
    placements = [Shard(0)] * mesh.ndim
    try:
        _take_step(optimizer, distribute_tensor(whole, mesh, placements))
    except Exception as error:
        kind = type(optimizer)
        raise NotImplementedError(
            f"`{kind.__module__}.{kind.__qualname__}` cannot update sharded parameters (DTensors): "
            f"its step fails with {type(error).__name__} ({str(error).splitlines()[0]}). Use one "
            "that can, such as torch.optim.AdamW, Adam or SGD, or lq_lightning.QuantizedAdamW, "
            'QuantizedAdam, QuantizedSGD or QuantizedLion; or train unsharded: strategy="ddp".'
        ) from error


def _take_step(optimizer: Optimizer, values: Tensor) -> None:
    """Let a copy update one parameter, without the hooks of its step."""
    param = nn.Parameter(values.clone())
    param.grad = torch.ones_like(param)
    probe = copy.copy(optimizer)
    probe.param_groups = [{**optimizer.param_groups[0], "params": [param]}]
    probe.state = defaultdict(dict)
    step = inspect.unwrap(type(optimizer).step)
    with torch.no_grad():  # which that is without, too
        step(probe, lambda: torch.zeros((), device=values.device))
