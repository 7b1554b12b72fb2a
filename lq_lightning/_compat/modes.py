"""Modes that see every operation: torch offers the one below autograd only in private."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, overrides
from torch._ops import OpOverload
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OpOverload", "TorchDispatchMode", "operation_name", "without_modes", "written_by"]


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
def without_modes(
    below_autograd: TorchDispatchMode, of_calls: overrides.TorchFunctionMode
) -> Iterator[None]:
    """Take two active modes off their stacks inside; what was entered after them stays.

    Taken off, not told to do nothing: compiled code is neither used nor made below a mode.
    """
    with (
        _off_stack(of_calls, overrides._pop_mode, overrides._push_mode),
        _off_stack(below_autograd, dispatch._pop_mode, dispatch._push_mode),
    ):
        yield


@contextmanager
def _off_stack(mode: Any, pop: Callable[[], Any], push: Callable[[Any], Any]) -> Iterator[None]:
    above: list[Any] = []

    def lift(down_to: Callable[[Any], bool]) -> None:
        while not down_to(top := pop()):
            above.append(top)

    def lower() -> None:
        while above:
            push(above.pop())

    lift(lambda top: top is mode)
    first = above[-1] if above else None
    lower()
    try:
        yield
    finally:
        if first is not None:
            lift(lambda top: top is first)
            above.append(first)
        push(mode)
        lower()
