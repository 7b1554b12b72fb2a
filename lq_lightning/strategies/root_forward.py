"""Run code of a sharded LightningModule as forwards of its root unit.

The root's forward gathers the parameters that belong to no other unit. The step methods run as one,
and so does a call of a submodule from a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from lq_lightning._compat.modules import (
    begin_root_forward,
    end_root_forward,
    has_unreduced_gradients,
    is_compiled_in_place,
    is_compiled_wrapper,
    is_gathered,
    is_root_idle,
    propagate_requires_grad,
    reset_iteration,
)

__all__ = ["ManualForward", "SubmoduleCalls", "register_step_methods", "root_forward"]

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


@contextmanager
def root_forward(root: FSDPModule) -> Iterator[None]:
    """Gather the root's own parameters for the code inside, which computes no gradients."""
    with torch.no_grad():
        begin_root_forward(root)
        try:
            yield
        finally:
            end_root_forward(root, None)
            root.reshard()


class SubmoduleCalls:
    """Gathers the root's parameters for a call of a submodule outside of the root's forward.

    A hook may then call ``self.net(x)`` as on a single device, on all ranks. Nothing is done while
    they are gathered, as in a step, nor for modules inside of a unit, which gathers what they need
    when it is called.

    Args:
        root: A sharded LightningModule.
        context: Entered around such a call, as the steps enter it (autocast).
    """

    def __init__(
        self, root: LightningModule, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """Register hooks on the submodules that use parameters of the root."""
        self._root = cast(FSDPModule, root)
        self._context = context
        self._caller: nn.Module | None = None  # the submodule that was called from outside
        self._depth = 0  # of the caller calling itself
        self._exit = ExitStack()
        for child in root.children():
            self._follow(child)

    def _follow(self, module: nn.Module) -> None:
        if is_compiled_in_place(module) or not _uses_root(module):
            return
        if not is_compiled_wrapper(module):
            for child in module.children():
                self._follow(child)
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, args: Any) -> None:
        if self._caller is not None:
            self._depth += module is self._caller
        elif is_root_idle(self._root) and not is_gathered(self._root):
            begin_root_forward(self._root)
            self._exit.enter_context(self._context())
            self._caller, self._depth = module, 1

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if module is not self._caller:
            return None
        self._depth -= 1
        if self._depth:
            return None
        self._caller = None
        self._exit.close()
        if output is None:  # as after an exception, which leaves units half way
            reset_iteration(cast(nn.Module, self._root))
            return None
        output = end_root_forward(self._root, output)
        self._root.reshard()
        return output


def _uses_root(module: nn.Module) -> bool:
    """Whether a module or one inside of it, units left out, has parameters."""
    if isinstance(module, FSDPModule):
        return False
    own = next(module.parameters(recurse=False), None)
    return own is not None or any(map(_uses_root, module.children()))


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
