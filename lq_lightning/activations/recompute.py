"""Modules that keep only their inputs and run again in backward."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lq_lightning.foundation.layer_stack import repeated_blocks

from .binding import Attached, bind_forward, unbind_forward
from .policy import ActivationPolicy

_KEY = "_lq_recomputation"
# Caches of keys and values would be filled a second time; Hugging Face's own checkpointing drops
# them under the same names.
_CACHES = ("past_key_value", "past_key_values", "layer_past")


@dataclass(slots=True)
class _Recomputation(Attached):
    """Marks a recomputed module; ``previous`` is the instance's own forward, to be put back."""

    previous: Callable[..., Any] | None


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    recomputation: _Recomputation = module.__dict__[_KEY]
    if recomputation.previous is not None:
        return recomputation.previous(*args, **kwargs)
    return type(module).forward(module, *args, **kwargs)


def _recompute_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return _run(module, *args, **kwargs)
    kwargs = {name: None if name in _CACHES else value for name, value in kwargs.items()}
    names, count = tuple(kwargs), len(args)

    def again(*values: Any) -> Any:
        return _run(module, *values[:count], **dict(zip(names, values[count:], strict=True)))

    # all by position: autograd saves only positional tensor arguments
    return checkpoint(again, *args, *kwargs.values(), use_reentrant=False)


def install_recomputation(model: nn.Module, policy: ActivationPolicy) -> list[nn.Module]:
    """Recompute the modules that rules say, of nested ones the outermost; return them.

    Random numbers are the same in both runs. It goes around the forwards of sites. A cache of keys
    and values is not passed to such a module while it trains.
    """
    chosen: list[tuple[str, nn.Module]] = []
    if any(rule.recompute for rule in policy.rules):
        for name, module in model.named_modules():
            outer = name.rpartition(".")[0]
            if name and policy.is_recomputed(name) and not policy.is_recomputed(outer):
                chosen.append((name, module))
    for name, module in chosen:
        if type(module).forward is nn.Module.forward:
            raise ValueError(
                f"`ActivationRule(recompute=True)` names `{name}`, a {type(module).__name__} that "
                "has no forward to run again: name the modules in it, as with "
                f"`module={name + '.*'!r}`."
            )
        if is_recomputed(module):
            raise RuntimeError(
                f"`{name}` is recomputed already: apply a policy without `recompute` rules first, "
                "or call `remove()` of the handle."
            )
    for _, module in chosen:
        module.__dict__[_KEY] = _Recomputation(module.__dict__.get("forward"))
        bind_forward(module, _recompute_forward, _KEY)
    return [module for _, module in chosen]


def is_recomputed(module: nn.Module) -> bool:
    """Return whether a module keeps only its inputs."""
    return _KEY in module.__dict__


def remove_recomputation(modules: list[nn.Module]) -> None:
    """Give modules their forwards back; idempotent."""
    for module in modules:
        if not is_recomputed(module):
            continue
        unbind_forward(module, module.__dict__.pop(_KEY).previous, _KEY)


def _is_composed(module: nn.Module) -> bool:
    return (
        type(module).forward is not nn.Module.forward
        and next(module.children(), None) is not None
        and next(module.parameters(), None) is not None
    )


def whole_blocks(units: Collection[str]) -> list[str]:
    """Return the units of ``find_recompute_units`` that are whole blocks, not halves."""
    return [name for name in units if name.rpartition(".")[0] not in units]


def find_recompute_units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that are worth recomputing: repeated blocks, each before its halves.

    A block is one of several modules of a class in a ``ModuleList``, ``ModuleDict`` or
    ``Sequential``; its halves are its children that have submodules themselves, such as the
    attention and the MLP.
    """
    units: dict[str, nn.Module] = {}
    for name, block in repeated_blocks(model, _is_composed):
        units[name] = block
        halves = {f"{name}.{n}": half for n, half in block.named_children() if _is_composed(half)}
        units.update(halves)
    return units
