"""Run code of a sharded LightningModule as forwards of its root unit.

The root's forward gathers the parameters that belong to no other unit. Evaluation steps run as one.
So does a training step, from its first call of a submodule on, but its own code finds shards in the
modules, as in a loop written around FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from lq_lightning._compat.modules import (
    GatheredCopies,
    RootParameters,
    begin_root_forward,
    end_root_forward,
    gathered_values,
    has_unreduced_gradients,
    is_compiled_in_place,
    is_compiled_wrapper,
    is_gathered,
    is_root_idle,
    reset_iteration,
    start_backward_at,
    watch_compiled_calls,
)
from lq_lightning.strategies.direct_uses import DirectUses

_STEPS = ("validation_step", "test_step", "predict_step")
_MARKER = "_lq_forward_methods"


def register_evaluation_steps(module: LightningModule) -> None:
    """Let evaluation steps gather and free the root's parameters as ``forward``; idempotent."""
    done: set[str] = module.__dict__.setdefault(_MARKER, set())
    for name in _STEPS:
        if name not in done and is_overridden(name, module):
            register_fsdp_forward_method(module, name)
            done.add(name)


class RootForward:
    """Gathers the root's parameters where code of a LightningModule computes with them.

    *In a training step* modules hold shards, so that clipping, averages of weights, `p.grad` and
    other writes mean what they mean to an optimizer. The first call of a submodule, or the first
    direct use of a parameter, begins the root's forward, which gathers once. It ends with the step
    or, with manual optimization, with each ``manual_backward``. Modules hold gathered parameters
    while a submodule runs, and shards between calls. A write to shards makes the next call gather
    again.

    *In a hook* a call of a submodule gathers for itself, on all ranks, and frees again.

    Args:
        module: A sharded LightningModule.
        context: Entered around a call from a hook, as the steps enter it (autocast).
    """

    def __init__(
        self, module: LightningModule, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._module = module
        self._root = cast(FSDPModule, module)
        self._context = context
        self._own: RootParameters | None = None
        self._uses = DirectUses(self._gathered, self._note_write, self._name_of, self._backward)
        self._in_step = False
        self._begun = False  # the root's forward, by this object
        self._written = False  # anything since it began
        self._backward_was_called = False  # by the step itself
        self._versions: list[tuple[int, int]] = []  # version counters of the gathered shards
        self._caller: nn.Module | None = None  # the submodule that was called from outside
        self._depth = 0  # recursion depth of the caller
        self._exit = ExitStack()
        module.register_forward_pre_hook(self._before_root, prepend=True)
        units: list[nn.Module] = []
        for child in module.children():
            self._follow(child, units)
        self._lost = LostWrites(module, units)

    def _follow(self, module: nn.Module, units: list[nn.Module]) -> None:
        unit = isinstance(module, FSDPModule)
        if next(module.parameters(), None) is None:
            return
        if is_compiled_in_place(module):
            watch_compiled_calls(module, self._before, self._after)
            return
        if not unit and not is_compiled_wrapper(module):
            for child in module.children():
                self._follow(child, units)
        if unit:
            units.append(module)
        # run before FSDP2's own hooks: the root's forward begins first
        module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after, always_call=True)

    # --- calls of modules -----------------------------------------------------------------------

    def _before_root(self, module: nn.Module, args: Any) -> None:
        if self._uses.is_on:  # FSDP2 finds it gathered
            self._begin()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._caller is not None:
            self._depth += module is self._caller
        elif self._uses.is_on:
            args, kwargs = self._uses.arguments(args, kwargs)
            self._enter()
            self._caller, self._depth = module, 1
            return args, kwargs
        elif _uses_root(module) and self._is_free():
            begin_root_forward(self._root)
            self._exit.enter_context(self._context())
            self._caller, self._depth = module, 1
        return None

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if module is not self._caller:
            return None
        self._depth -= 1
        if self._depth:
            return None
        self._caller = None
        if self._begun:
            self._leave()
            return None
        self._exit.close()
        if output is None:  # an exception may have left units half gathered
            reset_iteration(self._module)
            return None
        output = end_root_forward(self._root, output)
        self._root.reshard()
        return output

    def _is_free(self) -> bool:
        return is_root_idle(self._root) and not is_gathered(self._root)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Show gathered parameters to the code inside; outside of a step without gradients."""
        if self._uses.is_on:
            self._enter()
            try:
                yield
            finally:
                self._leave()
            return
        with torch.no_grad():
            begin_root_forward(self._root)
            try:
                yield
            finally:
                end_root_forward(self._root, None)
                self._root.reshard()

    # --- the forward in a step ------------------------------------------------------------------

    @property
    def _parameters(self) -> RootParameters:
        if self._own is None:
            self._own = RootParameters(self._root)
        return self._own

    def _begin(self) -> None:
        """Gather, unless the gathered parameters are still up to date."""
        own = self._parameters
        here = is_gathered(self._root) if len(own) else not is_root_idle(self._root)
        if self._begun and here:
            if not self._written and own.versions() == self._versions:
                return
            self._end(None)
            self._root.reshard()
        own.gather()
        own.show(gathered=False)
        self._begun, self._written, self._versions = True, False, own.versions()
        self._lost.root_gathered()

    def _end(self, output: Any) -> Any:
        """End the forward; backward starts from ``output``."""
        self._begun = False
        self._lost.root_ends()
        self._lost.check_writes()
        return end_root_forward(self._root, output)

    def _enter(self) -> None:
        """Go from code of the step into a module."""
        self._begin()
        self._uses.suspend()
        self._parameters.show(gathered=True)

    def _leave(self) -> None:
        if self._in_step:
            self._parameters.show(gathered=False)
            self._uses.resume()

    def _show_copies(self) -> None:
        """Show gathered parameters in a backward, which may compute their forward again."""
        if is_gathered(self._root):  # not after `state_dict`; backward gathers then
            self._parameters.show(gathered=True)

    def _gathered(self, tensor: Tensor) -> Tensor | None:
        param = self._parameters.find(tensor)
        if param is None:
            return None
        self._begin()
        return gathered_values(param)

    @contextmanager
    def _backward(self, accumulates: bool) -> Iterator[None]:
        """Run a backward that the step calls itself, not through Lightning."""
        self._backward_was_called |= accumulates and not self._module.automatic_optimization
        if self._begun:
            self._show_copies()
        try:
            yield
        finally:
            self._parameters.show(gathered=False)

    def _note_write(self, *unused: Any) -> None:
        self._written = True

    def _name_of(self, tensor: Tensor) -> str:
        named = self._module.named_parameters()
        return next((name for name, p in named if p is tensor), "?")

    # --- training steps -------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[Callable[[Any], Any]]:
        """Run ``training_step``; gives a function that takes and returns its output."""
        if is_root_idle(self._root) and is_gathered(self._root):
            self._root.reshard()  # the last step had no backward
        self._lost.check_hooks()
        self._in_step, self._begun, self._caller = True, False, None
        self._backward_was_called = False
        self._lost.start_step()
        # optimizers may write by kernels of their own
        handle = register_optimizer_step_post_hook(self._note_write)
        self._uses.forget_modes_above()
        self._uses.resume()
        try:
            yield self._finish
        finally:
            handle.remove()
            self._lost.finish_step()
            self._uses.suspend()
            self._in_step = self._begun = False
            self._caller = None

    def _finish(self, output: Any) -> Any:
        self._uses.suspend()
        self._lost.check_hooks()
        if self._backward_was_called:
            self._check_reduced("ends")
        if not self._begun:
            return output
        if self._module.automatic_optimization:
            output = self._end(output)
            self._show_copies()
            return output
        self._end(None)
        self._root.reshard()
        return output

    def before_backward(self, loss: Tensor) -> None:
        """End the forward with ``loss``, if the step calls backward."""
        if not self._in_step:
            return
        self._uses.suspend()
        self._lost.check_hooks()
        if self._begun:
            self._end(loss)
            self._show_copies()
        else:
            start_backward_at(self._root, loss)

    def after_backward(self) -> None:
        """Show the shards, which have gradients now."""
        if self._in_step:
            self._root.reshard()
            self._uses.resume()

    def before_update(self) -> None:
        """Free parameters that an update makes stale; refuse gradients not reduced yet."""
        if not self._in_step:
            return
        self._check_reduced("steps an optimizer")
        self._uses.suspend()
        if self._begun:
            self._end(None)
            self._root.reshard()

    def _check_reduced(self, doing: str) -> None:
        if has_unreduced_gradients(self._root):
            raise RuntimeError(
                f"`{type(self._module).__name__}.training_step` {doing} although "
                "gradients were not reduced over the ranks. Call `self.manual_backward(loss)` "
                "instead of `loss.backward()`, the last time before an optimizer's step outside "
                "of `self.trainer.strategy.block_backward_sync()`."
            )

    def after_update(self) -> None:
        """Go on in the step's own code."""
        if self._in_step:
            self._uses.resume()


def check_loss(loss: Tensor) -> None:
    """Refuse a loss computed from shards."""
    if isinstance(loss, DTensor):
        raise RuntimeError(
            "the loss is a DTensor: something like `sum(p.pow(2).sum() for p in self.parameters())`"
            " entered it, but where a step computes with parameters, only those that belong to no "
            "unit are whole, all others are shards. Give the optimizer `weight_decay`; any other "
            "penalty on weights enters through its gradient, in the hook "
            "`on_before_optimizer_step`, where parameters and gradients are shards alike: "
            "`p.grad.add_(p.detach(), alpha=2 * strength)` for every `p` of "
            "`self.parameters()` that has a `p.grad`."
        )


def _uses_root(module: nn.Module) -> bool:
    if isinstance(module, FSDPModule):
        return False
    own = next(module.parameters(recurse=False), None)
    return own is not None or any(map(_uses_root, module.children()))


_WATCHED_STEPS = 2


class LostWrites:
    """Notices writes into gathered parameters, which FSDP2 frees.

    torch counts all but those through ``parameter.data``. To find these, sums over the bits of a
    unit's parameters before and after its forward are compared, in the first steps only.

    Args:
        module: A sharded LightningModule.
        units: Its units whose hooks run eagerly.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module]) -> None:
        self._copies = GatheredCopies(module)
        self._units = [unit for unit in units if self._copies.names(unit)]
        self._root = module
        self._steps = 0
        self._watches = False
        self._handles: list[RemovableHandle] = []
        self._open: list[tuple[Any, Tensor | None]] = []  # forwards that run now
        self._sums: list[tuple[list[str], Tensor, Tensor]] = []  # names, before, after a forward

    def start_step(self) -> None:
        """Watch the forwards of units in the first steps of a run."""
        self._sums.clear()
        self._open.clear()
        self._watches = self._steps < _WATCHED_STEPS
        if self._watches:
            self._steps += 1
            for unit in self._units:  # within FSDP2's hooks
                self._handles.append(unit.register_forward_pre_hook(self._before))
                self._handles.append(unit.register_forward_hook(self._after, prepend=True))

    def finish_step(self) -> None:
        """Stop watching."""
        self._watches = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def root_gathered(self) -> None:
        """Note the root's parameters at the beginning of its forward."""
        if self._watches and self._copies.names(self._root):
            self._open.append((self._root, self._copies.sums(self._root)))

    def root_ends(self) -> None:
        """Compare the root's parameters at the end of its forward."""
        while self._open:  # including forwards that an exception has ended
            unit, before = self._open.pop()
            if unit is self._root:
                self._close(unit, before)

    def _before(self, unit: nn.Module, args: Any) -> None:
        self._open.append((unit, self._copies.sums(unit)))

    def _after(self, unit: nn.Module, args: Any, output: Any) -> None:
        while self._open and self._open[-1][0] is not self._root:
            opened, before = self._open.pop()
            if opened is unit:
                self._close(unit, before)
                return

    def _close(self, unit: nn.Module, before: Tensor | None) -> None:
        after = self._copies.sums(unit)
        if before is not None and after is not None:
            self._sums.append((self._copies.names(unit), before, after))

    def check_writes(self) -> None:
        """Refuse writes that would be lost."""
        name = self._copies.find_written()
        if name is None and self._sums:
            names, before, after = zip(*self._sums, strict=True)
            changed = (torch.cat(before) != torch.cat(after)).tolist()  # waits for the device
            pairs = zip(chain(*names), changed, strict=True)
            name = next((n for n, differs in pairs if differs), None)
            self._sums.clear()
        if name is not None:
            raise RuntimeError(
                f"the parameter `{name}` was written while a module ran that uses it, or through a "
                "view of its values. There it is a gathered copy, which is freed, and the write "
                "would be lost. Write to parameters in `training_step`, between the calls of "
                "modules, or in a hook such as `on_train_batch_start`: `with torch.no_grad(): "
                "parameter.clamp_(...)`."
            )

    def check_hooks(self) -> None:
        """Refuse gradient hooks, which are never called on shards."""
        name = self._copies.find_hooked()
        if name is not None:
            raise RuntimeError(
                f"the parameter `{name}` has a hook of `register_hook`, which is never called on a "
                "shard: its gradient does not come from autograd. Use `parameter."
                "register_post_accumulate_grad_hook(hook)`, which gets the parameter when its "
                "`grad` is there, averaged over the ranks."
            )
