"""Watch the functions of torch that a step calls, but not those inside of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode,
    _push_mode,
)

__all__ = ["StepMode", "without_step_mode"]


class StepMode(TorchFunctionMode):
    """A mode that :func:`without_step_mode` takes off."""


@contextmanager
def without_step_mode() -> Iterator[None]:
    """Take off a :class:`StepMode` that is the innermost mode, for layers that may be compiled."""
    if not isinstance(_get_current_function_mode(), StepMode):
        yield
        return
    mode = _pop_mode()
    try:
        yield
    finally:
        _push_mode(mode)
