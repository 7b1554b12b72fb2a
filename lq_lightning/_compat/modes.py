"""Modes that see every function or every operator of torch, and can be taken off their stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, overrides
from torch._C import (
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch._ops import OpOverload as OpOverload
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):
    """Base of modes whose ``__torch_dispatch__`` sees the operators that run inside of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        """Take the subclass's ``__torch_dispatch__``."""
        super().__init_subclass__()  # type: ignore[no-untyped-call]


def operation_name(operation: OpOverload) -> str:
    """Return the name without overload, such as ``"add_"``."""
    return operation._schema.name.rpartition("::")[2]


def written_by(
    operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    """Yield the arguments that an operation changes in place, as its schema says."""
    for place, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            yield from (each for each in values if isinstance(each, Tensor))


@contextmanager
def without_modes(below_autograd: OperatorMode, of_calls: TorchFunctionMode) -> Iterator[None]:
    """Take two active modes off their stacks inside; modes entered after them stay.

    Taken off, not told to do nothing: compiled code is neither used nor made below a mode.
    """
    with (
        _off_stack(of_calls, _pop_torch_function_stack, _push_on_torch_function_stack),
        _off_stack(below_autograd, dispatch._pop_mode, dispatch._push_mode),
    ):
        yield


@contextmanager
def _off_stack(mode: Any, pop: Callable[[], Any], push: Callable[[Any], Any]) -> Iterator[None]:
    above = _take_down_to(mode, pop)
    first = above[-1] if above else None
    _put_back(above, push)
    try:
        yield
    finally:
        above = [] if first is None else [*_take_down_to(first, pop), first]
        _put_back([*above, mode], push)


def _take_down_to(mode: Any, pop: Callable[[], Any]) -> list[Any]:
    """Take a mode and those above it off their stack; returns the latter, the top one first."""
    above = []
    while (top := pop()) is not mode:
        above.append(top)
    return above


def _put_back(modes: list[Any], push: Callable[[Any], Any]) -> None:
    for mode in reversed(modes):
        push(mode)


class StepMode(TorchFunctionMode):
    """A mode that :func:`without_step_mode` takes off."""


@contextmanager
def without_step_mode() -> Iterator[None]:
    """Take off a :class:`StepMode` that is the innermost mode, for layers that may be compiled."""
    mode = overrides._get_current_function_mode()  # type: ignore[no-untyped-call]
    if not isinstance(mode, StepMode):
        yield
        return
    with _off_stack(mode, _pop_torch_function_stack, _push_on_torch_function_stack):
        yield


class SuspendableMode(TorchFunctionMode):
    """A mode that is switched on and off in any order with other modes.

    A mode that is on costs every call of torch some microseconds, and ``torch.compile`` guards on
    it, so it is taken off the stack instead of made idle. Suspended below modes that were entered
    later (such as ``with torch.device(...)``), it returns to its place below them.
    """

    is_on = False  # whether calls of torch are seen
    _modes_above = 0

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
        self.is_on = False  # torch has taken it off the stack for this call
        try:
            return self.call(func, args, kwargs or {})
        finally:
            self.is_on = True

    def resume(self) -> None:
        """Switch the mode on, below the modes that were above it when it was suspended."""
        if self.is_on:
            return
        count = min(self._modes_above, _len_torch_function_stack())
        above = [_pop_torch_function_stack() for _ in range(count)]
        _put_back([*above, self], _push_on_torch_function_stack)
        self.is_on = True
        _watch_custom_functions(self)

    def suspend(self) -> None:
        """Switch the mode off, whatever is above it."""
        if not self.is_on:
            return
        above = _take_down_to(self, _pop_torch_function_stack)
        _put_back(above, _push_on_torch_function_stack)
        self._modes_above = len(above)
        self.is_on = False
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
