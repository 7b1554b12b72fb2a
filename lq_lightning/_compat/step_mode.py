"""Watch the functions of torch that a step calls, but not those inside of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import overrides
from torch.overrides import TorchFunctionMode

__all__ = ["StepMode", "without_step_mode"]


class StepMode(TorchFunctionMode):
    """A mode that :func:`without_step_mode` takes off."""


@contextmanager
def without_step_mode() -> Iterator[None]:
    """Take off a :class:`StepMode` that is the innermost mode, for layers that may be compiled."""
    if not isinstance(overrides._get_current_function_mode(), StepMode):  # type: ignore[no-untyped-call]
        yield
        return
    mode = overrides._pop_mode()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        overrides._push_mode(mode)  # type: ignore[no-untyped-call]
