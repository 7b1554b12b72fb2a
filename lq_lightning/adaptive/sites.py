"""Places in a model where activations are quantized, and the hooks that do it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lq_lightning.foundation.layer_stack import LayerStack, find_layer_stack, is_silent_container

from .gate import BitGate, adaptive_quantize

__all__ = ["AttachedSites", "Quantizer", "attach", "find_sites"]

Quantizer = Callable[[Tensor], Tensor]

_ENDS = ("output", "input")
_GROUPS = ("boundaries", "layers")
_SAYS_HEAD = "get_output_embeddings"


def find_sites(module: nn.Module, sites: str | Sequence[str] = "boundaries") -> tuple[str, ...]:
    """Find places where hidden states can be quantized.

    ``"boundaries"`` are the hidden states before the first of the model's repeated blocks (the
    output of the embeddings) and before the LM head; where the head is no module, as with a tied
    matrix that is multiplied in ``forward``, after the last module. ``"layers"`` adds the output
    of every block.

    Other sites are named as by ``named_modules()``, with the end of the module:
    ``"model.layers.3:output"`` (also without ``:output``) or ``"lm_head:input"``. In a pattern
    such as ``"model.layers.*:output"`` each ``*`` stands for a part between dots.

    Returns:
        Names, in the order in which the model reaches them as far as that is known.

    Raises:
        ValueError: A name or pattern that matches nothing or names a container that is never
            called, or groups for a model without one list of blocks.
    """
    given = [sites] if isinstance(sites, str) else list(sites)
    if not given:
        raise ValueError(f"`sites` is empty: give one of {', '.join(map(repr, _GROUPS))} or names.")
    found: dict[str, None] = {}
    for site in given:
        names = _group(module, site) if site in _GROUPS else _named(module, site)
        found.update(dict.fromkeys(names))
    return tuple(found)


def _group(module: nn.Module, group: str) -> list[str]:
    try:
        stack = find_layer_stack(module)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"`sites={group!r}` needs a model with one list of repeated blocks, which "
            f"`{type(module).__name__}` is not: {error} Name the sites instead, such as "
            f"`sites=['{_example(module)}:output']`."
        ) from error
    outputs = [f"{layer}:output" for layer in stack.layers] if group == "layers" else []
    return [f"{stack.layers[0]}:input", *outputs, _head(module, stack)]


def _head(module: nn.Module, stack: LayerStack) -> str:
    """Return the input of the LM head, or, if it is no module, the output of the last module.

    The head is the module that the model itself names (as Hugging Face's do), or the last one with
    a matrix around the blocks, of the innermost parent that has one: a LightningModule may have
    others.
    """
    parts = {name: module.get_submodule(name) for name in stack.after}
    owners: list[Any] = [getattr(m, _SAYS_HEAD, None) for m in module.modules()]
    heads = [says() for says in owners if says is not None]
    if known := [name for name, part in parts.items() if any(part is head for head in heads)]:
        return f"{known[0]}:input"
    levels: dict[str, list[str]] = {}
    for name in parts:
        levels.setdefault(name.rpartition(".")[0], []).append(name)
    for names in levels.values():
        if found := [n for n in names if any(p.dim() > 1 for p in parts[n].parameters())]:
            return f"{found[-1]}:input"
    innermost = next(iter(levels.values()), [stack.layers[-1]])
    return f"{innermost[-1]}:output"


def _named(module: nn.Module, site: str) -> list[str]:
    path, colon, end = site.rpartition(":")
    if not colon:
        path, end = site, "output"
    if end not in _ENDS:
        raise ValueError(
            f"`sites={site!r}` ends in `:{end}`: a module has the ends `:output` and `:input`."
        )
    modules = dict(module.named_modules())
    names = [name for name in modules if name and _matches(name, path)]  # not the whole model
    called = [name for name in names if not is_silent_container(modules[name])]
    if not called:
        known = [name for name, part in modules.items() if name and not is_silent_container(part)]
        near = difflib.get_close_matches(path, known, n=3, cutoff=0.5)
        shown = ", ".join(f"`{name}`" for name in near or known[:5])
        list_of_modules = f"never calls `{names[0]}`, which is a list of modules" if names else ""
        why = list_of_modules or "has no module of that name"
        raise ValueError(
            f"`sites={site!r}`: `{type(module).__name__}` {why}. There are {', '.join(_GROUPS)} "
            f"and the names of `named_modules()`, such as {shown}."
        )
    return [f"{name}:{end}" for name in called]


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _example(module: nn.Module) -> str:
    """An element of a list of modules, or else any module that is called."""
    modules = dict(module.named_modules())
    called = [name for name in modules if name and not is_silent_container(modules[name])]
    listed = [n for n in called if isinstance(modules[n.rpartition(".")[0]], nn.ModuleList)]
    return next(iter(listed or called), "")


class AttachedSites:
    """Handle of the quantizers that are installed in a module."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove the quantizers; idempotent."""
        for handle in self._handles:
            handle.remove()


def attach(module: nn.Module, gates: Mapping[str, BitGate]) -> AttachedSites:
    """Quantize hidden states of a module by gates.

    Where a module returns a tuple or list, its first element is the hidden state; where it is
    called by keywords alone, ``hidden_states`` or else the first floating-point tensor.

    Args:
        module: Module whose forward passes change; names, parameters and state dict do not.
            Compile or shard it afterwards.
        gates: Gates by site, as ``find_sites`` names them.

    Raises:
        ValueError: A site that does not exist.
    """
    modules = dict(module.named_modules())
    for site in gates:
        path, _, end = site.rpartition(":")
        if end not in _ENDS or path not in modules:
            raise ValueError(
                f"`{site}` is no site of `{type(module).__name__}`: give what `find_sites` returns."
            )
    handles = []
    for site, gate in gates.items():
        path, _, end = site.rpartition(":")
        quantizer = partial(adaptive_quantize, gate=gate)
        if end == "output":
            hook = _output_hook(site, quantizer)
            handles.append(modules[path].register_forward_hook(hook))
        else:
            hook = _input_hook(site, quantizer)
            handles.append(modules[path].register_forward_pre_hook(hook, with_kwargs=True))
    return AttachedSites(handles)


def _output_hook(site: str, quantizer: Quantizer) -> Callable[..., Any]:
    def quantize_output(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return quantizer(_floating(output, site))
        if not isinstance(output, (tuple, list)) or not output:
            raise _no_tensor(site, output)
        hidden = quantizer(_floating(output[0], site))
        if hasattr(output, "_fields"):  # a named tuple takes its fields one by one
            return type(output)(hidden, *output[1:])
        return type(output)([hidden, *output[1:]])

    return quantize_output


def _input_hook(site: str, quantizer: Quantizer) -> Callable[..., Any]:
    def quantize_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (quantizer(_floating(args[0], site)), *args[1:]), kwargs
        floating = [k for k, v in kwargs.items() if isinstance(v, Tensor) and v.is_floating_point()]
        if not floating:
            raise _no_tensor(site, kwargs)
        name = "hidden_states" if "hidden_states" in floating else floating[0]
        return args, {**kwargs, name: quantizer(kwargs[name])}

    return quantize_input


def _floating(value: Any, site: str) -> Tensor:
    if not isinstance(value, Tensor) or not torch.is_floating_point(value):
        raise _no_tensor(site, value)
    return value


def _no_tensor(site: str, value: Any) -> ValueError:
    got = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"`{type(value).__name__}`"
    return ValueError(
        f"the site `{site}` has {got} where hidden states are expected: a floating-point tensor, "
        "or a tuple that begins with one. Choose another site."
    )
