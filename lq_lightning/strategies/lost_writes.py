"""Refuse writes into gathered copies and hooks on shards: neither would have any effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lq_lightning._compat.parameter_forms import GatheredCopies

__all__ = ["LostWrites"]

_WATCHED_STEPS = 2


class _Sums(NamedTuple):
    """Sums over the bits of a unit's gathered parameters, before and after a forward."""

    names: list[str]
    before: Tensor
    after: Tensor


class LostWrites:
    """Notices writes into gathered parameters, which FSDP2 frees.

    torch counts all but those through ``parameter.data``. For these the values before and after the
    forward of each unit are compared, in the first steps only.

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
        self._sums: list[_Sums] = []

    # --- values ---------------------------------------------------------------------------------

    def start_step(self) -> None:
        """Watch the forwards of units, if the run has just begun."""
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
        """The root's forward begins."""
        if self._watches and self._copies.names(self._root):
            self._open.append((self._root, self._copies.sums(self._root)))

    def root_ends(self) -> None:
        """The root's forward is over."""
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
            self._sums.append(_Sums(self._copies.names(unit), before, after))

    # --- checks ---------------------------------------------------------------------------------

    def check_writes(self) -> None:
        """Refuse writes that would be lost.

        Raises:
            RuntimeError: A gathered parameter was written.
        """
        name = self._copies.find_written()
        if name is None and self._sums:
            names = [name for sums in self._sums for name in sums.names]
            before = torch.cat([sums.before for sums in self._sums])
            after = torch.cat([sums.after for sums in self._sums])
            changed = (before != after).tolist()
            name = next((n for n, differs in zip(names, changed, strict=True) if differs), None)
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
        """Refuse hooks that would never be called.

        Raises:
            RuntimeError: A shard has one.
        """
        name = self._copies.find_hooked()
        if name is not None:
            raise RuntimeError(
                f"the parameter `{name}` has a hook of `register_hook`, which is never called on a "
                "shard: its gradient does not come from autograd. Use `parameter."
                "register_post_accumulate_grad_hook(hook)`, which gets the parameter when its "
                "`grad` is there, averaged over the ranks."
            )
