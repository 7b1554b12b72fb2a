"""Optimizer steps, as the exchange of weights sees them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["OptimizerHooks"]


class OptimizerHooks:
    """Calls functions around each step of the optimizers that are registered.

    Args:
        before_update: Called before the weights are changed. A closure runs forward and backward
            first, which need not wait for what this waits for.
        after_step: Called with the optimizer after its step.
    """

    def __init__(
        self,
        before_update: Callable[[], None],
        after_step: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._before_update = before_update
        self._after_step = after_step
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """Hook into the steps of this optimizer. Idempotent."""
        if optimizer in self._optimizers:
            return
        self._optimizers.add(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda opt, *unused: self._after_step(opt))

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        position = next((i for i, value in enumerate(args[1:], 1) if callable(value)), None)
        closure = kwargs.get("closure") if position is None else args[position]
        if closure is None:
            self._before_update()
            return args, kwargs

        def joined() -> Any:
            result = closure()
            self._before_update()
            return result

        if position is None:
            return args, {**kwargs, "closure": joined}
        return (*args[:position], joined, *args[position + 1 :]), kwargs
