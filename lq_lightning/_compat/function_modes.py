"""A mode over torch's functions, custom ones among them, that is switched on and off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import (
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

__all__ = ["SuspendableMode"]


class SuspendableMode(TorchFunctionMode):
    """A mode that is switched on and off in any order with other modes.

    A mode that is on costs every call of torch some microseconds, and ``torch.compile`` guards on
    it, so it is taken off the stack instead of made idle. Suspended below modes that were entered
    later (such as ``with torch.device(...)``), it returns to its place below them.
    """

    _is_on = False
    _modes_above = 0

    @property
    def is_on(self) -> bool:
        """Whether calls of torch are seen."""
        return self._is_on

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of torch while the mode is on."""
        raise NotImplementedError

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with which code that torch's functions cannot see is to run."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Hand a function to :meth:`call`; compiled code runs as it is."""
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        self._is_on = False  # torch has taken it off the stack for this call
        try:
            return self.call(func, args, kwargs or {})
        finally:
            self._is_on = True

    def resume(self) -> None:
        """Switch the mode on, below the modes that were above it when it was suspended."""
        if self._is_on:
            return
        count = min(self._modes_above, _len_torch_function_stack())
        above = [_pop_torch_function_stack() for _ in range(count)]
        _push_on_torch_function_stack(self)
        for mode in reversed(above):
            _push_on_torch_function_stack(mode)
        self._is_on = True
        _watch_custom_functions(self)

    def suspend(self) -> None:
        """Switch the mode off, whatever is above it."""
        if not self._is_on:
            return
        above = []
        while (mode := _pop_torch_function_stack()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_on_torch_function_stack(mode)
        self._modes_above = len(above)
        self._is_on = False
        _watch_custom_functions(None)

    def forget_modes_above(self) -> None:
        """Come back on top of all others next time, as where a new block of code starts."""
        self._modes_above = 0


_apply = Function.__dict__["apply"]


def _watch_custom_functions(mode: SuspendableMode | None) -> None:
    """Let ``Function.apply`` ask a mode for its arguments, which no mode of torch sees."""
    if mode is None:
        Function.apply = _apply  # type: ignore[method-assign]
        return

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):  # DTensor's own operations, among others
            args, kwargs = mode.arguments(args, kwargs)
        return _apply.__get__(None, cls)(*args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
