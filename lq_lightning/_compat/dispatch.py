"""Operators as the dispatcher runs them, and hooks that run at every module."""

from __future__ import annotations

from torch.nn.modules import module as _module
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OperatorMode", "has_global_hooks"]


class OperatorMode(TorchDispatchMode):
    """Base of modes whose ``__torch_dispatch__`` sees the operators that run inside of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        """Take the subclass's ``__torch_dispatch__``."""
        super().__init_subclass__()  # type: ignore[no-untyped-call]


def has_global_hooks() -> bool:
    """Whether ``register_module_forward_hook`` or a function like it has registered anything."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )
