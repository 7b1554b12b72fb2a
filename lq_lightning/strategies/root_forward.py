"""Run the step methods of a sharded LightningModule as forwards of its root unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from lq_lightning._compat.modules import (
    begin_root_forward,
    end_root_forward,
    has_unreduced_gradients,
    propagate_requires_grad,
)

__all__ = ["ManualForward", "register_step_methods"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_MARKER = "_lq_forward_methods"


def register_step_methods(module: LightningModule) -> None:
    """Let the step methods gather and free the root's parameters as ``forward`` does; idempotent.

    With manual optimization ``training_step`` runs backward itself, which :class:`ManualForward`
    handles.
    """
    done: set[str] = module.__dict__.setdefault(_MARKER, set())
    for name in _STEPS:
        manual = name == "training_step" and not module.automatic_optimization
        if name not in done and not manual and is_overridden(name, module):
            register_fsdp_forward_method(module, name)
            done.add(name)


class ManualForward:
    """Root forward of a ``training_step`` that calls backward and optimizers itself.

    Each stretch of code up to a ``manual_backward`` is one forward of the root: its parameters are
    gathered before and, as the optimizer works on shards, gathered again after an optimizer step.

    Args:
        module: A sharded LightningModule with ``automatic_optimization=False``.
    """

    def __init__(self, module: LightningModule) -> None:
        """Wrap the module's optimizer toggles."""
        self._module = module
        self._active = False
        self._follow_toggles()

    @property
    def _root(self) -> FSDPModule:
        return cast(FSDPModule, self._module)

    def _follow_toggles(self) -> None:
        for name in ("toggle_optimizer", "untoggle_optimizer"):
            setattr(self._module, name, self._then_propagate(getattr(self._module, name)))

    def _then_propagate(self, toggle: Callable[..., None]) -> Callable[..., None]:
        def toggle_and_propagate(*args: Any, **kwargs: Any) -> None:
            toggle(*args, **kwargs)
            if self._active:
                propagate_requires_grad(self._root)

        return toggle_and_propagate

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around ``training_step``."""
        self._active = True
        begin_root_forward(self._root)
        try:
            yield
        finally:
            self._active = False
        end_root_forward(self._root, None)
        self._root.reshard()

    def before_backward(self, loss: Tensor) -> None:
        """The forward ends with ``loss``."""
        if self._active:
            end_root_forward(self._root, loss)

    def after_backward(self) -> None:
        """Code that follows may use the parameters again."""
        if self._active:
            begin_root_forward(self._root)

    def before_update(self) -> None:
        """Show the shards and their gradients to hooks, and check that backward reduced them.

        Raises:
            RuntimeError: Gradients were computed without ``manual_backward``.
        """
        if not self._active:
            return
        if has_unreduced_gradients(self._root):
            raise RuntimeError(
                f"`{type(self._module).__name__}.training_step` steps an optimizer although "
                "gradients were not reduced over the ranks. Call `self.manual_backward(loss)` "
                "instead of `loss.backward()`, the last time before a step outside of "
                "`self.trainer.strategy.block_backward_sync()`."
            )
        end_root_forward(self._root, None)
        self._root.reshard()

    def after_update(self) -> None:
        """Gather the updated parameters."""
        if self._active:
            self._root.reshard()
            begin_root_forward(self._root)
