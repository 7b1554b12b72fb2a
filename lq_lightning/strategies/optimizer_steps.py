"""When gradients are reduced in gradient accumulation, and whether an optimizer step uses them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import LBFGS, Optimizer

from lq_lightning._compat.lightning import accumulation_window
from lq_lightning._compat.modules import discard_unreduced_gradients
from lq_lightning._compat.tensors import local_tensor
from lq_lightning.checkpoint.checkpointer import StrategyPart


def warn_on_first(group: dist.ProcessGroup | None, message: str) -> None:
    """Warn on the first rank of a group only; None is the group of all ranks."""
    if group is None:
        rank_zero_warn(message)
    elif group.rank() == 0:
        warnings.warn(f"node of rank {dist.get_rank()}: {message}", stacklevel=2)


class OptimizerSteps(StrategyPart):
    """Defers gradient reduction in gradient accumulation, and skips steps that are not finite.

    Gradients are examined before hooks and clipping as well as after: clipping by value, or a hook
    that clamps, makes an infinite gradient finite but not right.

    Attributes:
        num_skipped: Number of skipped steps.
        skips: Whether steps with infinite or NaN gradients are skipped.
        defers: Whether backward passes but the last of a window leave gradients unreduced.
    """

    def __init__(self, skip_nonfinite: bool, reduce_every_microbatch: bool) -> None:
        self.num_skipped = 0
        self.skips = skip_nonfinite
        self.defers = not reduce_every_microbatch
        self._module: LightningModule | None = None  # sharded
        self._pending = False  # gradients not reduced yet, which no `zero_grad` finds
        self._largest: dict[Optimizer, list[Tensor]] = {}

    def set_up(self, module: LightningModule, optimizers: list[Optimizer]) -> None:
        """Start a run of ``fit``; drop gradients that an interrupted one has left in the module."""
        if self.skips and any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
            raise NotImplementedError(
                "`skip_nonfinite_steps=True` does not work with `LBFGS`, which evaluates the "
                "loss several times in a step: set it to False or use another optimizer."
            )
        self.num_skipped, self._pending = 0, False
        self._largest.clear()
        self._module = module if isinstance(module, FSDPModule) else None
        if self._module is not None:
            discard_unreduced_gradients(self._module)

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Run a backward that is not the last of its accumulation window."""
        if self._module is None or not self.defers:
            yield
            return
        root = cast(FSDPModule, self._module)
        root.set_requires_gradient_sync(False)  # FSDP2 then sums unsharded gradients
        self._pending = True
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def start_batch(self) -> None:
        """Drop gradients of an interrupted window, as ``zero_grad`` does without sharding."""
        self._largest.clear()
        module = self._module
        if module is None or not self._pending or not module.automatic_optimization:
            return
        if accumulation_window(module.trainer).first:
            discard_unreduced_gradients(module)
            self._pending = False

    def after_optimizer_step(self, stepped: bool) -> None:
        """Note that the gradients are used."""
        self._pending = False

    def examine(self, optimizer: Optimizer | LightningOptimizer) -> None:
        """Record the largest of this rank's gradients now; does not wait for the device."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"]]
        local = [local_tensor(g) for g in gradients if g is not None]
        largest = torch.nn.utils.get_total_norm([g for g in local if g.numel()], float("inf"))
        self._largest.setdefault(optimizer, []).append(largest)

    def step_if_finite(
        self,
        optimizer: Optimizer,
        run_closure: Callable[[], Any],
        device: torch.device,
        group: dist.ProcessGroup | None,
        **kwargs: Any,
    ) -> tuple[Any, bool]:
        """Step unless a rank of the group (None: of all) has found a gradient that is not finite.

        Args:
            optimizer: Takes the step, with ``kwargs``.
            run_closure: Runs forward, backward, hooks and clipping.
            device: Where the ranks exchange their findings.

        Returns:
            The closure's result, and whether the optimizer stepped.
        """
        result = run_closure()
        self.examine(optimizer)
        largest = torch.stack([value.to(device) for value in self._largest.pop(optimizer)])
        bad = (~torch.isfinite(largest)).any().to(torch.int32)
        if dist.is_initialized() and dist.get_world_size(group) > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX, group=group)
        if not bad.item():  # waits for the device: all ranks have to take the same branch
            optimizer.step(**kwargs)
            return result, True
        self.num_skipped += 1
        optimizer.zero_grad()
        warn_on_first(
            group,
            "optimizer step skipped because of infinite or NaN gradients "
            f"({self.num_skipped} so far); disable with `skip_nonfinite_steps=False`",
        )
        return result, False

    def extra_state(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """The number of skipped steps."""
        return {"num_skipped_steps": self.num_skipped} if self.num_skipped else {}, {}

    def load_extra_state(
        self, values: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Continue counting."""
        self.num_skipped = int(values.get("num_skipped_steps", 0))
