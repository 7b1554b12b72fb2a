"""Hooks of torch's tensor-parallel styles, and what a DTensor holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from lq_lightning._compat.pending_inputs import ready
from lq_lightning._compat.tensors import local_tensor, waited
from lq_lightning._compat.torch import all_gather_flat

_STYLES = "torch.distributed.tensor.parallel.style"
_REPLACED = "_lq_replaced_hook"
_PRE, _POST = "_forward_pre_hooks", "_forward_hooks"

# By position or name of an argument, or 0 for a result: placement of a plain tensor, and of what
# the hook makes of it; None where that is the placement before.
Moves = Mapping[int | str, tuple[Placement | None, Placement | None]]


class LayoutHook(NamedTuple):
    """A hook by which a style places the arguments or the result of a module."""

    registry: dict[int, Callable[..., Any]]  # of the module, that holds it
    key: int  # there
    hook: Callable[..., Any]
    before: bool  # whether it runs before forward
    mesh: DeviceMesh  # of the DTensors that it makes
    moves: Moves  # it changes no value, and no other argument


def layout_hooks(module: nn.Module) -> Iterator[LayoutHook]:
    """Yield the hooks of a module that torch's own styles have registered, as they are."""
    for name in (_PRE, _POST):
        registry = getattr(module, name)
        for key, hook in list(registry.items()):
            known = _read(hook, name == _PRE)
            if known is not None:
                yield LayoutHook(registry, key, hook, name == _PRE, *known)


def replace_hook(known: LayoutHook, hook: Callable[..., Any]) -> None:
    """Let another function run in place of a hook, which it calls."""
    setattr(hook, _REPLACED, known.hook)
    known.registry[known.key] = hook


def restore_hooks(module: nn.Module) -> None:
    """Put back the hooks of a module that were replaced."""
    for registry in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in registry.items():
            registry[key] = getattr(hook, _REPLACED, hook)


def _read(hook: Any, before: bool) -> tuple[DeviceMesh, Moves] | None:
    code, cells = getattr(hook, "__code__", None), getattr(hook, "__closure__", None) or ()
    if code is None or not str(getattr(hook, "__module__", "")).startswith("torch.distributed."):
        return None
    held = {n: cell.cell_contents for n, cell in zip(code.co_freevars, cells, strict=True)}
    mesh, style = held.get("device_mesh"), held.get("self")
    function = held.get("input_fn" if before else "output_fn")
    if not isinstance(mesh, DeviceMesh):
        return None
    if isinstance(function, partial) and getattr(function.func, "__module__", "") == _STYLES:
        return mesh, {0: _of_function(function.func.__qualname__, function.args, before)}
    if style is None or type(style).__module__ != _STYLES:
        return None
    return mesh, _of_style(style, before)


def _of_function(name: str, args: tuple[Any, ...], before: bool) -> tuple[Any, Any]:
    """Placements in a hook that ``distribute_module`` registered for a style."""
    if name.startswith("SequenceParallel."):
        return (args[0][0], None) if before else (None, None)
    return _move(args[0][0], args[1][0]) if before else (None, args[0][0])


def _move(placed: Any, wanted: Any) -> tuple[Any, Any]:
    """A DTensor that comes in another placement than ``placed`` keeps it if both are the same."""
    return placed, None if placed == wanted else wanted


def _of_style(style: Any, before: bool) -> Moves:
    """Placements in a hook of ``PrepareModuleInput`` or ``PrepareModuleOutput``."""
    kind = "input" if before else "output"
    given, wanted = getattr(style, f"{kind}_layouts"), getattr(style, f"desired_{kind}_layouts")
    pairs: dict[int | str, tuple[Any, Any]] = dict(
        enumerate(zip(given or (), wanted or (), strict=True))
    )
    if before:
        named = style.desired_input_kwarg_layouts
        pairs |= {n: (placed, named.get(n)) for n, placed in style.input_kwarg_layouts.items()}
    return {key: _move(*pair) for key, pair in pairs.items()}


def held_by(tensor: Tensor) -> Tensor:
    """Return the memory behind a DTensor, any other tensor itself; apart from autograd."""
    if isinstance(tensor, (DTensor, AsyncCollectiveTensor)):
        return waited(local_tensor(tensor))
    return tensor  # of every saved tensor without tensor parallelism: no calls


def local_of(x: DTensor, gradient: Placement | None) -> Tensor:
    """Return the local tensor, whose gradient is placed as ``gradient`` or as ``x`` is."""
    made = x.to_local() if gradient is None else x.to_local(grad_placements=(gradient,))
    return made if torch.compiler.is_compiling() else ready(made)


# One operator, so that compilers neither compute it again nor look into it: they cannot tell from
# dynamic shapes where in a message a tensor may begin.
@torch.library.custom_op(
    "lq_lightning::gather_tensors",
    mutates_args=(),
    schema="(Tensor[] tensors, str group, int size) -> Tensor[]",
)
def gather_tensors(tensors: Sequence[Tensor], group: str, size: int) -> list[Tensor]:
    """Gather tensors of each rank of a group, by its name: ``[size, *shape]`` each.

    Shapes and dtypes are those of all ranks; one collective.
    """
    mine = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    message = torch.cat(mine)
    out = message.new_empty(size * message.numel())
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    all_gather_flat(out, message, resolve(group))
    parts = torch.split(out.view(size, -1), [part.numel() for part in mine], dim=1)
    return [
        part.contiguous().view(-1).view(tensor.dtype).view(size, *tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


@gather_tensors.register_fake
def _(tensors: Sequence[Tensor], group: str, size: int) -> list[Tensor]:
    return [tensor.new_empty(size, *tensor.shape) for tensor in tensors]
