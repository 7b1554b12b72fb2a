"""Gradients on their way to the optimizer: when they are reduced, and whether they are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lq_lightning._compat.lightning import accumulation_window
from lq_lightning._compat.modules import discard_unreduced_gradients
from lq_lightning._compat.tensors import local_tensor

__all__ = ["DeferredReduction", "FiniteGradients"]


class DeferredReduction:
    """Keeps gradients of a sharded module unreduced in all but the last backward of a window.

    Args:
        module: Sharded.
    """

    def __init__(self, module: LightningModule) -> None:
        """Drop what an interrupted run left in the module."""
        self._module = module
        self._pending = False  # gradients that no backward has reduced yet, so no `zero_grad` finds
        discard_unreduced_gradients(module)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward after which another one of the same window follows."""
        root = cast(FSDPModule, self._module)
        root.set_requires_gradient_sync(False)
        self._pending = True
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def start_batch(self, trainer: Trainer) -> None:
        """Drop what an interrupted window left, as ``zero_grad`` does without sharding."""
        automatic = self._module.automatic_optimization
        if self._pending and automatic and accumulation_window(trainer).first:
            discard_unreduced_gradients(self._module)
            self._pending = False

    def finish_window(self) -> None:
        """Note that an optimizer step used the gradients."""
        self._pending = False


class FiniteGradients:
    """Whether the gradients of an optimizer are finite, before hooks and clipping as well as after.

    Clipping by value, or a hook that clamps, makes an infinite gradient finite but not right.
    """

    def __init__(self) -> None:
        """Start without a finding."""
        self._largest: WeakKeyDictionary[Optimizer, list[Tensor]] = WeakKeyDictionary()

    def look(self, optimizer: Optimizer | LightningOptimizer) -> None:
        """Note this rank's gradients as they are now; does not wait for the device."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"]]
        local = [local_tensor(g) for g in gradients if g is not None]
        largest = torch.nn.utils.get_total_norm([g for g in local if g.numel()], float("inf"))
        self._largest.setdefault(optimizer, []).append(largest)

    def forget(self) -> None:
        """Drop records of gradients that no step followed."""
        self._largest.clear()

    def decide(
        self, optimizer: Optimizer, device: torch.device, group: dist.ProcessGroup | None
    ) -> bool:
        """Return whether all ranks of a group (None: all) found finite gradients every time.

        Args:
            optimizer: about to step.
            device: where the ranks exchange their findings.
            group: ranks that take or leave out the step together.
        """
        self.look(optimizer)
        largest = torch.stack([value.to(device) for value in self._largest.pop(optimizer)])
        bad = (~torch.isfinite(largest)).any().to(torch.int32)
        if dist.is_initialized() and dist.get_world_size(group) > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX, group=group)
        return not bad.item()
