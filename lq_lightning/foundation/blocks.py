"""What counts as a block of a model: a layer of the kind that is repeated."""

from __future__ import annotations

from torch import nn

__all__ = ["has_parameters", "is_block", "is_silent_container"]


def has_parameters(module: nn.Module) -> bool:
    """Whether the module or one inside of it has parameters."""
    return next(module.parameters(), None) is not None


def is_silent_container(module: nn.Module) -> bool:
    """Whether nothing calls the module itself, only what is in it."""
    return (
        isinstance(module, (nn.ModuleList, nn.ModuleDict))
        and type(module).forward is nn.Module.forward
    )


def is_block(module: nn.Module) -> bool:
    """Whether the module can be called and has parameters in submodules of its own."""
    return not is_silent_container(module) and any(has_parameters(c) for c in module.children())
