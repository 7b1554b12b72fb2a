"""Codes of what a checkpointed layer keeps, where the layer is checkpointed around its call.

Hugging Face's layers did so up to transformers 5.17 at least; those of 5.23 do it in ``forward``. A
forward that was changed runs inside of such a region, where nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .hooks import run_packed
from .sites import HookSite

__all__ = ["pack_around_checkpoint", "unpack_around_checkpoint"]

_FUNCTION = "_gradient_checkpointing_func"


class _PackingCheckpoint:
    """Calls a layer's checkpoint function while what that saves is packed."""

    def __init__(self, module: nn.Module, site: HookSite, original: Callable[..., Any]) -> None:
        self.module, self.site, self.original = module, site, original

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.site.enabled or not torch.is_grad_enabled():
            return self.original(function, *args, **kwargs)
        held = function.keywords if isinstance(function, partial) else {}
        return run_packed(
            self.module,
            self.site,
            lambda: self.original(function, *args, **kwargs),
            (args, held, kwargs),
        )


def pack_around_checkpoint(module: nn.Module, site: HookSite) -> None:
    """Pack what the module's checkpoint function saves, if that is called around the forward.

    Checkpointing may be switched on later, which replaces the function: call it again then.
    """
    function = module.__dict__.get(_FUNCTION)
    around = type(module).__call__ is not nn.Module.__call__
    if function is not None and around and not isinstance(function, _PackingCheckpoint):
        module.__dict__[_FUNCTION] = _PackingCheckpoint(module, site, function)


def unpack_around_checkpoint(module: nn.Module) -> None:
    """Put the module's checkpoint function back."""
    function = module.__dict__.get(_FUNCTION)
    if isinstance(function, _PackingCheckpoint):
        module.__dict__[_FUNCTION] = function.original
