"""Forwards that are bound to instances, and copies of those, which must not have them.

A bound forward computes with the module that it is bound to. ``copy.copy`` and the replicas of
``nn.DataParallel`` take over the dictionary of a module, but have parameters of their own: they get
the forward that there was before, without codes. ``copy.deepcopy`` binds forwards anew.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lq_lightning._compat.modules import replicate_for_data_parallel

from .attached import Attached

__all__ = ["bind_forward", "unbind_forward"]

_KEY = "_lq_binding"
_SPECIAL = {
    "__getstate__": "state",
    "__deepcopy__": "deep_copy",
    "_replicate_for_data_parallel": "replica",
}


@dataclass(slots=True)
class _Copied(Attached):
    """In shallow copies in place of a binding: their state, too, may have become a file."""


@dataclass(slots=True)
class _Binding(Attached):
    """Of a module whose forward is bound.

    Attributes:
        module: the module.
        previous: the instance's own forward before each one that is bound now.
        keys: keys of the module's dictionary that those forwards need.
    """

    module: nn.Module
    previous: list[Callable[..., Any] | None]
    keys: list[str]

    def install(self) -> None:
        for name, method in _SPECIAL.items():
            self.module.__dict__[name] = getattr(self, method)
        self.module.__dict__[_KEY] = self

    def _clean(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a module's dictionary without the binding; it must not be pickled."""
        state = {k: v for k, v in state.items() if k not in _SPECIAL and k not in self.keys}
        forward = state.get("forward")
        if getattr(forward, "__self__", None) is self.module:  # else what was put around it
            del state["forward"]
            if self.previous[0] is not None:
                state["forward"] = self.previous[0]
        state[_KEY] = _Copied()
        return state

    def state(self) -> Any:
        """Of shallow copies, and of files, which are refused."""
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
    """Give an instance a forward, which takes the module first.

    Args:
        module: The module.
        forward: The forward.
        key: Key of the module's dictionary that the forward needs.
    """
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
