"""Find the units of a model and apply FSDP2 to them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from lq_lightning._compat.fsdp2 import fsdp_units, uses_hsdp
from lq_lightning._compat.lightning import convert_floating
from lq_lightning._compat.modules import prepare_fsdp_class
from lq_lightning.plugins import FullyShardedPrecision

__all__ = [
    "ShardingPlan",
    "UnitSelector",
    "check_fully_sharded",
    "check_shardable",
    "find_units",
    "shard_module",
]

_WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)

UnitSelector = Sequence[str] | Callable[[nn.Module], bool] | None
"""Class names of the units, or a predicate over modules, or ``None`` to find repeated blocks."""


class ShardingPlan(NamedTuple):
    """Which modules are gathered and freed as one piece.

    Attributes:
        units: Names of the units, innermost first; the root comes on top of them.
        source: How they were found.
        kept_in_root: ``(name, reason)`` of modules that looked like units but stay in the root.
    """

    units: tuple[str, ...]
    source: str
    kept_in_root: tuple[tuple[str, str], ...] = ()

    def summary(self) -> str:
        """A few lines for people."""
        shown = ", ".join(self.units[:4]) + (", ..." if len(self.units) > 4 else "")
        lines = [f"{len(self.units)} units from {self.source}" + (f": {shown}" if shown else "")]
        lines += [f"`{name}` stays in the root: {reason}" for name, reason in self.kept_in_root]
        return "\n".join(lines)


def find_units(root: nn.Module, units: UnitSelector = None) -> ShardingPlan:
    """Choose the modules of ``root`` that become FSDP2 units.

    In order: modules that already are FSDP2 units; what ``units`` selects; the
    ``_no_split_modules`` of Hugging Face models inside; repeated blocks, which are the direct
    children of a ``ModuleList``, ``ModuleDict`` or ``Sequential`` that have parameters in
    submodules of their own, two or more of a class. A module without such submodules (a lone
    ``Linear``) is never found automatically, and one that shares a parameter with something outside
    stays in the root.

    Raises:
        ValueError: ``units`` selects nothing, a container without ``forward``, or the root itself.
        TypeError: ``units`` is neither a sequence of names nor a callable.
    """
    named = {name: module for name, module in root.named_modules() if name}
    existing = tuple(name for name, module in named.items() if isinstance(module, FSDPModule))
    if existing or isinstance(root, FSDPModule):
        return ShardingPlan(_innermost_first(existing), "`configure_model`")
    if units is not None:
        chosen, source = _select(root, named, units), "the `units` option"
    elif classes := _no_split_classes(root):
        chosen = [n for n, m in named.items() if type(m).__name__ in classes]
        source = f"`_no_split_modules` ({', '.join(sorted(classes))})"
        if not chosen:
            chosen, source = list(_repeated_blocks(root, "")), "repeated blocks"
    else:
        chosen, source = list(_repeated_blocks(root, "")), "repeated blocks"
    kept = _sharing(root, chosen)
    chosen = [name for name in chosen if name not in kept and _has_parameters(named[name])]
    return ShardingPlan(_innermost_first(chosen), source, tuple(kept.items()))


def _innermost_first(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: -name.count(".")))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_silent_container(module: nn.Module) -> bool:
    return (
        isinstance(module, (nn.ModuleList, nn.ModuleDict))
        and type(module).forward is nn.Module.forward
    )


def _select(root: nn.Module, named: dict[str, nn.Module], units: UnitSelector) -> list[str]:
    if isinstance(units, str) or not (callable(units) or isinstance(units, Sequence)):
        raise TypeError(
            f"`units={units!r}` is not supported: give a list of class names such as ['Block'], or "
            "a function that takes a module and returns whether it is a unit."
        )
    present = Counter(type(m).__name__ for m in named.values() if _has_parameters(m))
    known = ", ".join(sorted(present))
    if callable(units):
        chosen = [name for name, module in named.items() if units(module)]
        if not chosen:
            raise ValueError(
                f"`units` selects no module of `{type(root).__name__}`. Its submodules have the "
                f"classes: {known}."
            )
    else:
        unknown = [name for name in units if name not in present]
        if unknown:
            raise ValueError(
                f"`units={list(units)}`: `{type(root).__name__}` has no submodule of class "
                f"{unknown}. Its submodules have the classes: {known}."
            )
        chosen = [name for name, module in named.items() if type(module).__name__ in units]
    for name in chosen:
        if _is_silent_container(named[name]):
            raise ValueError(
                f"`units` selects `{name}`, a {type(named[name]).__name__} without `forward`, "
                "which cannot be a unit because nothing calls it. Select its children."
            )
    return chosen


def _no_split_classes(root: nn.Module) -> set[str]:
    classes: set[str] = set()
    for module in root.modules():
        names = getattr(module, "_no_split_modules", None)
        if isinstance(names, (list, tuple, set)):
            classes.update(str(name) for name in names)
    return classes


def _repeated_blocks(module: nn.Module, name: str) -> Iterator[str]:
    children = dict(module.named_children())
    found: set[str] = set()
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        by_class: dict[type, list[str]] = defaultdict(list)
        for key, child in children.items():
            if _is_block(child):
                by_class[type(child)].append(key)
        for keys in by_class.values():
            if len(keys) > 1:
                found.update(keys)
    for key, child in children.items():
        full = f"{name}.{key}" if name else key
        if key in found:
            yield full
        else:
            yield from _repeated_blocks(child, full)


def _is_block(module: nn.Module) -> bool:
    return not _is_silent_container(module) and any(_has_parameters(c) for c in module.children())


def _sharing(root: nn.Module, chosen: Sequence[str]) -> dict[str, str]:
    """Chosen units that share a parameter with a module outside of them, and with which.

    A second name for a whole unit is no sharing: whoever calls it calls the unit.
    """
    unit_names = {id(root.get_submodule(name)): name for name in chosen}
    modules = dict(root.named_modules(remove_duplicate=False))
    homes: dict[int, dict[str, str]] = defaultdict(dict)  # parameter -> {unit name: parameter name}
    for path, module in modules.items():
        for key, parameter in module.named_parameters(recurse=False):
            unit = _innermost_unit(path, modules, unit_names)
            homes[id(parameter)].setdefault(unit, f"{path}.{key}" if path else key)
    kept: dict[str, str] = {}
    for places in homes.values():
        for unit, name in places.items():
            other = next((n for u, n in places.items() if u != unit), None)
            if unit and other is not None:
                kept.setdefault(unit, f"`{name}` is shared with `{other}`")
    return kept


def _innermost_unit(path: str, modules: dict[str, nn.Module], unit_names: dict[int, str]) -> str:
    while path:
        if id(modules[path]) in unit_names:
            return unit_names[id(modules[path])]
        path = path.rpartition(".")[0]
    return ""


def check_shardable(root: nn.Module) -> None:
    """Refuse, before anything is changed, what FSDP2 cannot shard.

    Raises:
        TypeError: A submodule is wrapped by FSDP1.
        ValueError: A parameter is a scalar or lazily initialised.
        NotImplementedError: A unit is sharded over a 2-D mesh (HSDP), or a parameter by tensor
            parallelism.
    """
    for name, module in root.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise TypeError(
                f"`{name or 'the LightningModule'}` is wrapped by FSDP1 "
                "(`FullyShardedDataParallel`), which cannot be combined with FSDP2. Remove the "
                "wrapper: the strategy shards the model itself, or use "
                "`torch.distributed.fsdp.fully_shard` in `configure_model`."
            )
    managed: set[int] = set()
    for name, _, group in fsdp_units(root):
        if uses_hsdp(group):
            raise NotImplementedError(
                f"unit `{name or 'root'}` was sharded with a 2-D mesh (HSDP, or tensor "
                "parallelism), which this strategy does not offer. Allowed is the 1-D mesh: "
                "`fully_shard(module, mesh=self.device_mesh['data_parallel'])`; `node_size` gives "
                "the two levels of communication."
            )
        managed.update(id(p.sharded_param) for p in group.fsdp_params)
    for name, parameter in root.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"parameter `{name}` is lazily initialised and has no shape yet. Run the model on "
                "a small input in `configure_model`, or give the layer its input size."
            )
        if isinstance(parameter, DTensor) and id(parameter) not in managed:
            raise NotImplementedError(
                f"parameter `{name}` is a DTensor with placements {parameter.placements} that "
                "`fully_shard` did not make; tensor parallelism is not offered by this strategy. "
                "Use `ModelParallelStrategy`, or leave the parameter to the strategy."
            )
        if parameter.dim() == 0:
            raise ValueError(
                f"parameter `{name}` is a scalar, which FSDP2 cannot shard. Make it a tensor of "
                "shape (1,), for example `nn.Parameter(torch.ones(1))`."
            )


def shard_module(
    root: nn.Module,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    precision: FullyShardedPrecision,
    reshard_after_forward: bool,
) -> None:
    """Apply ``fully_shard`` to the units of ``plan`` and last to ``root``; idempotent.

    Args:
        root: The LightningModule.
        plan: From :func:`find_units`.
        mesh: 1-D, over all ranks.
        precision: Gives the mixed-precision policy of units that are not sharded yet.
        reshard_after_forward: Free a unit's weights between forward and backward. The root keeps
            its own (they are needed first in backward).
    """
    if precision.precision == "bf16-mixed":
        _keep_norms_working(root, mesh)
    for name in plan.units:
        module = root.get_submodule(name)
        if not isinstance(module, FSDPModule):
            prepare_fsdp_class(type(module))
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=reshard_after_forward,
                mp_policy=precision.policy(root=False),
            )
    if not isinstance(root, FSDPModule):
        prepare_fsdp_class(type(root))
        fully_shard(
            root,
            mesh=mesh,
            reshard_after_forward=None if reshard_after_forward else False,
            mp_policy=precision.policy(root=True),
        )


def _keep_norms_working(root: nn.Module, mesh: DeviceMesh) -> None:
    """Give normalisation layers the dtypes that their kernels take when parameters become bf16.

    Batch norm needs its parameters in the dtype of its running statistics, so each one is a unit of
    its own in fp32 (FSDP1 did the same). CPU kernels of the other norms refuse fp32 input with bf16
    parameters, which autocast on CUDA allows.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule) or not _has_own_parameters(module):
            continue
        if isinstance(module, _WITH_STATISTICS):
            prepare_fsdp_class(type(module))
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy())
        elif mesh.device_type == "cpu" and isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
            module.register_forward_pre_hook(_cast_to_weight)


def _has_own_parameters(module: nn.Module) -> bool:
    parameters = list(module.parameters(recurse=False))
    return bool(parameters) and not any(isinstance(p, DTensor) for p in parameters)


def _cast_to_weight(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = next(module.parameters(recurse=False)).dtype
    return tuple(convert_floating(arg, dtype) for arg in args)


def check_fully_sharded(root: nn.Module) -> None:
    """Make sure that nothing is left that ranks would update differently.

    Raises:
        RuntimeError: A parameter belongs to no unit, so its gradient is never reduced.
    """
    left = [n for n, p in root.named_parameters() if not isinstance(p, DTensor)]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise RuntimeError(
            f"parameter `{left[0]}`{more} was not sharded, so its values would drift apart between "
            "ranks. This happens with `fully_shard(..., ignored_params=...)` and with parameters "
            "added after sharding; create all parameters in `__init__` or `configure_model`."
        )
