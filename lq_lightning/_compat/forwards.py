"""FSDP2's forward passes: their number, and the mode in which weights are gathered in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["ForwardCounter", "gather_normal_tensors"]


class ForwardCounter:
    """Numbers the forward passes of a model sharded by FSDP2, the same on every rank.

    A pass is that of the outermost sharded module: the root, or a submodule that is called by
    itself. Calling the object gives the number of the pass that runs now, None outside of any.

    Args:
        root: Module whose sharded submodules (and itself) are watched.
    """

    def __init__(self, root: nn.Module) -> None:
        self._number = 0
        modules = (m for m in root.modules() if isinstance(m, FSDPModule))
        self._states: list[Any] = [m._get_fsdp_state() for m in modules]
        for state in self._states:
            state._root_pre_forward = self._counting(state, state._root_pre_forward)

    def __call__(self) -> int | None:
        """Return the number of the pass that runs now."""
        running = any(s._state_ctx.iter_forward_root is not None for s in self._states)
        return self._number if running else None

    def _counting(self, state: Any, root_pre_forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(root_pre_forward)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if state._state_ctx.iter_forward_root is None:
                self._number += 1
            return root_pre_forward(*args, **kwargs)

        return counted


def gather_normal_tensors(group: Any) -> None:
    """Let a unit's gathers make normal tensors under ``torch.inference_mode`` too. Idempotent.

    FSDP2 allocates the gathered parameters once, at the first gather. Made in inference mode, they
    could not be written by a gather outside of it, nor used by a forward that is differentiated.

    Args:
        group: FSDP2's parameter group of the unit.
    """
    for name in ("unshard", "wait_for_unshard"):
        if name not in vars(group):
            setattr(group, name, _outside_inference_mode(getattr(group, name)))


def _outside_inference_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return outside
