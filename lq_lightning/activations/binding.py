"""Forwards that are bound to module instances, and what is attached beside them.

A bound forward computes with the module that it is bound to. ``copy.copy`` and the replicas of
``nn.DataParallel`` copy the dictionary of a module but have parameters of their own: they get back
the forward that the module had before, without codes. ``copy.deepcopy`` binds forwards anew.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from torch import nn
from typing_extensions import Self

from lq_lightning._compat.modules import replicate_for_data_parallel

_KEY = "_lq_binding"
_SPECIAL = {
    "__getstate__": "state",
    "__deepcopy__": "deep_copy",
    "_replicate_for_data_parallel": "replica",
}


class Attached:
    """Base of dataclasses in the dictionaries of quantized modules: deep-copied, never pickled.

    ``pickle`` would write the forward next to it as a name that the class of the module does not
    have: a file that no process can load.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise ``RuntimeError``."""
        raise RuntimeError(
            "A module whose saved activations are quantized cannot be pickled, as "
            "`torch.save(model)` does: no process could load the file. Call `remove()` of the "
            "handle that `quantize_activations` returned first, or save `model.state_dict()`. In a "
            "LightningModule, `save_hyperparameters(ignore=[...])` leaves out modules."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy all fields; modules and methods become those of the copied module."""
        made = object.__new__(type(self))
        memo[id(self)] = made
        for each in fields(self):  # type: ignore[arg-type]
            setattr(made, each.name, copy.deepcopy(getattr(self, each.name), memo))
        return made


@dataclass(slots=True)
class _Copied(Attached):
    """Stands for a binding in shallow copies: their state, too, may have become a file."""


@dataclass(slots=True)
class _Binding(Attached):
    """The bound forwards of a module: for each the instance's own forward before it, and the key of
    the module's dictionary that it needs.
    """

    module: nn.Module
    previous: list[Callable[..., Any] | None]
    keys: list[str]

    def install(self) -> None:
        for name, method in _SPECIAL.items():
            self.module.__dict__[name] = getattr(self, method)
        self.module.__dict__[_KEY] = self

    def _clean(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a module's dictionary without the binding, marked as not to be pickled."""
        state = {k: v for k, v in state.items() if k not in _SPECIAL and k not in self.keys}
        forward = state.get("forward")
        if getattr(forward, "__self__", None) is self.module:  # otherwise a wrapper around it
            del state["forward"]
            if self.previous[0] is not None:
                state["forward"] = self.previous[0]
        state[_KEY] = _Copied()
        return state

    def state(self) -> Any:
        """State for shallow copies, and for files, which are refused."""
        own = getattr(type(self.module), "__getstate__", None)
        if own is None or own is getattr(object, "__getstate__", None):
            return self._clean(self.module.__dict__)
        state = own(self.module)
        return self._clean(state) if isinstance(state, dict) else state

    def deep_copy(self, memo: dict[int, Any]) -> nn.Module:
        own = self.module.__dict__
        special = {name: own.pop(name) for name in _SPECIAL if name in own}
        try:
            made = copy.deepcopy(self.module, memo)
        finally:
            own.update(special)
        binding = made.__dict__.get(_KEY)
        if isinstance(binding, _Binding):
            binding.install()
        return made

    def replica(self) -> nn.Module:
        made = replicate_for_data_parallel(self.module)
        made.__dict__ = self._clean(made.__dict__)
        del made.__dict__[_KEY]
        return made


def bind_forward(module: nn.Module, forward: Callable[..., Any], key: str) -> None:
    """Give an instance a forward that takes the module first and reads its dictionary's ``key``."""
    binding = module.__dict__.get(_KEY)
    if not isinstance(binding, _Binding):
        binding = _Binding(module, [], [])
        binding.install()
    binding.previous.append(module.__dict__.get("forward"))
    binding.keys.append(key)
    module.__dict__["forward"] = types.MethodType(forward, module)


def unbind_forward(module: nn.Module, previous: Callable[..., Any] | None, key: str) -> None:
    """Put back the forward that an instance had, or let it have none of its own."""
    if previous is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = previous
    binding = module.__dict__.get(_KEY)
    if not isinstance(binding, _Binding) or key not in binding.keys:
        return
    index = binding.keys.index(key)
    del binding.keys[index], binding.previous[index]
    if not binding.keys:
        for name in (*_SPECIAL, _KEY):
            module.__dict__.pop(name, None)
