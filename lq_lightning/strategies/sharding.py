"""Apply FSDP2 to a LightningModule, once, and remember how."""

from __future__ import annotations

import types
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lq_lightning._compat.fsdp2 import (
    fsdp_units,
    gather_normal_tensors,
    hook_hidden_outputs,
    offloads_to_cpu,
    refuse_second_derivatives,
    refuse_writes_before_backward,
)
from lq_lightning._compat.lightning import convert_floating
from lq_lightning._compat.modules import prepare_fsdp_class
from lq_lightning._compat.pending_inputs import wait_before_compiled
from lq_lightning._compat.tensor_parallel import DATA, TENSOR, share_tensor_shards
from lq_lightning.data_parallel import PackedAgreement
from lq_lightning.foundation.agreement import (
    broadcast_module_states,
    buffers_of_numbers,
    check_alike,
)
from lq_lightning.foundation.groups import world_group
from lq_lightning.foundation.layer_stack import (
    has_parameters,
    is_silent_container,
    repeated_blocks,
)
from lq_lightning.foundation.meta_start import initialize_meta_tensors
from lq_lightning.plugins import FullyShardedPrecision
from lq_lightning.strategies.checks import check_fully_sharded, check_shardable
from lq_lightning.strategies.options import FSDPOptions, UnitSelector, check_selector
from lq_lightning.strategies.root_forward import RootForward

_WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


@dataclass(slots=True)
class ShardedModule:
    """Record of a sharded module, whichever Trainer runs it next.

    Attributes:
        agreement: Checks that ranks have gradients of the same parameters; None on one rank.
        settings: Options that sharding baked in, which a later Trainer cannot change.
        extra: Return value of the strategy's ``on_sharded``.
    """

    plan: ShardingPlan
    forward: RootForward
    agreement: PackedAgreement | None
    settings: Mapping[str, object] = field(default_factory=dict)
    extra: Any = None


def shard(
    module: LightningModule,
    units: UnitSelector | ChosenUnits,
    options: FSDPOptions,
    precision: FullyShardedPrecision,
    mesh: DeviceMesh,
    ranks: dist.ProcessGroup | None,
    device: torch.device,
    layer_sync: LayerSync | None,
) -> ShardedModule:
    """Shard a module in place, with the values of the mesh's first rank.

    Only buffers that ``configure_model`` made for a tensor-parallel rank keep those of that one.

    The user may have sharded it or parts of it in ``configure_model``. The mesh has the axes
    ``data_parallel`` and ``tensor_parallel``; ``ranks`` are all of it (None: the world).
    """
    several, tensor, mesh = mesh.size() > 1, mesh[TENSOR], mesh[DATA]
    check_shardable(module, tensor)
    if layer_sync is not None and several:
        layer_sync.apply(module)
    precision.convert_module(module)
    if several:  # first compare: broadcasts of different shapes would hang or mix tensors
        check_alike(module, ranks)
        own = _own_buffers(module, tensor, ranks)
        broadcast_module_states(module, parameters=True, group=ranks, skip=own)
        share_tensor_shards(module, tensor, mesh.get_group())
    plan = find_units(module, units)
    _make_contiguous(module)
    shard_module(module, plan, mesh, precision, options.reshard_after_forward)
    for name, unit, group in fsdp_units(module):
        gather_normal_tensors(group)
        refuse_second_derivatives(group, name or "root")
        refuse_writes_before_backward(group, name or "root")
        hook_hidden_outputs(unit)
    _materialize(module, device)
    if several:  # buffers of the meta device have values only now
        broadcast_module_states(module, parameters=False, group=ranks, skip=own)
    if not offloads_to_cpu(module):
        module.to(device)
    check_fully_sharded(module)
    module.configure_model = already_configured  # type: ignore[method-assign]
    if options.compile_units:
        compile_units(module, plan)
    if tensor.size() > 1:
        wait_before_compiled(module)
    forward = RootForward(module, precision.forward_context)
    agreement = PackedAgreement(module, ranks or world_group(), device) if several else None
    return ShardedModule(plan, forward, agreement)


def _own_buffers(
    module: nn.Module, tensor: DeviceMesh, ranks: dist.ProcessGroup | None
) -> set[str]:
    """Names of buffers of which tensor-parallel ranks have made different ones on purpose."""
    if tensor.size() == 1:
        return set()
    own = buffers_of_numbers(module, tensor.get_local_rank(), ranks)
    if own:
        rank_zero_warn(
            f"buffers differ between tensor-parallel ranks, and each rank keeps its own: "
            f"{', '.join(sorted(own))}. If they are random, call `seed_everything` before."
        )
    return own


def check_settings(
    module: LightningModule, known: Mapping[str, object], wanted: Mapping[str, object]
) -> None:
    """Refuse options that differ from those that sharding baked into a module."""
    for name, value in wanted.items():
        if known.get(name) != value:
            raise ValueError(
                f"this `{type(module).__name__}` was already sharded with `{name}="
                f"{known.get(name)!r}` and cannot change to `{name}={value!r}`. Use the same "
                "options, or make a new module and load a checkpoint."
            )


def already_configured() -> None:
    """Stands in for ``configure_model`` of a sharded module, which must not be built again."""


def _make_contiguous(module: nn.Module) -> None:
    """Give transposed parameters and those in ``channels_last`` the layout that FSDP2 shards."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _materialize(module: LightningModule, device: torch.device) -> None:
    on_cpu = device.type == "cpu"
    with torch.random.fork_rng([], enabled=on_cpu):
        if on_cpu:  # DTensor's own generator is for GPUs only
            torch.manual_seed(torch.initial_seed() + dist.get_rank())
        initialize_meta_tensors(module, device)


def compile_units(module: nn.Module, plan: ShardingPlan) -> None:
    """``torch.compile`` the forward of every unit; idempotent."""
    for unit in map(module.get_submodule, plan.units):
        own = unit.__dict__.get("forward")
        if own is None or isinstance(own, types.MethodType):  # not compiled in an earlier stage
            unit.forward = torch.compile(unit.forward)


def shard_module(
    root: nn.Module,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    precision: FullyShardedPrecision,
    reshard_after_forward: bool,
) -> None:
    """Apply ``fully_shard`` to the units of ``plan`` and last to ``root``; idempotent."""
    if precision.precision == "bf16-mixed":
        _keep_norms_working(root, mesh)
    for module in (*map(root.get_submodule, plan.units), root):
        if isinstance(module, FSDPModule):
            continue
        prepare_fsdp_class(type(module))
        # None: the root keeps its weights, which backward needs first
        reshard = None if module is root and reshard_after_forward else reshard_after_forward
        policy = precision.policy(root=module is root)
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)


def _keep_norms_working(root: nn.Module, mesh: DeviceMesh) -> None:
    """Give normalisation layers the dtypes that their kernels take when parameters become bf16.

    Batch norm needs its parameters in the dtype of its running statistics, so each is a unit of its
    own in fp32 (as in FSDP1). CPU kernels of the other norms refuse fp32 input with bf16
    parameters, which autocast on CUDA allows.
    """
    for module in root.modules():
        own = list(module.parameters(recurse=False))
        if isinstance(module, FSDPModule) or not own or any(isinstance(p, DTensor) for p in own):
            continue
        if isinstance(module, _WITH_STATISTICS):
            prepare_fsdp_class(type(module))
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy())
        elif mesh.device_type == "cpu" and isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
            module.register_forward_pre_hook(_cast_to_weight)


def _cast_to_weight(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = next(module.parameters(recurse=False)).dtype
    return tuple(convert_floating(arg, dtype) for arg in args)


class ChosenUnits(NamedTuple):
    """Modules of a whole model that are units wherever a part of it is sharded."""

    names: frozenset[str]
    source: str


class ShardingPlan(NamedTuple):
    """Modules that are gathered and freed as one piece.

    Attributes:
        units: Names of the units, innermost first; the root comes on top of them.
        source: Origin of the units, for messages.
        kept_in_root: ``(name, reason)`` of modules that looked like units but stay in the root.
        candidates: Classes that ``units`` could name, largest modules first, if there are no units.
    """

    units: tuple[str, ...]
    source: str
    kept_in_root: tuple[tuple[str, str], ...] = ()
    candidates: tuple[str, ...] = ()

    def summary(self) -> str:
        """A few lines for people."""
        kept = (f"`{name}` stays in the root: {reason}" for name, reason in self.kept_in_root)
        return "\n".join([self._found(), *kept])

    def _found(self) -> str:
        if self.units:
            shown = ", ".join(self.units[:4]) + (", ..." if len(self.units) > 4 else "")
            return f"{len(self.units)} units from {self.source}: {shown}"
        advice = "no module of it could be a unit"
        if self.candidates:
            advice = f"name the classes of its large parts, such as `units={[self.candidates[0]]}`"
            if len(self.candidates) > 1:
                advice += f" (there are: {', '.join(self.candidates[:8])})"
        return (
            f"0 units from {self.source}: the whole model is gathered at once, which takes its "
            f"full size in memory and overlaps with nothing. If that is too much, {advice}."
        )


def find_units(root: nn.Module, units: UnitSelector | ChosenUnits = None) -> ShardingPlan:
    """Choose the modules of ``root`` that become FSDP2 units.

    These are modules that already are FSDP2 units, or else those of :func:`choose_units` that have
    parameters. A module that shares a parameter with something outside stays in the root.

    Args:
        root: The model, or a part of it in which modules have kept their names.
        units: Selector, or units of the whole model, of which ``root`` may hold none.
    """
    named = _submodules(root)
    existing = tuple(name for name, module in named.items() if isinstance(module, FSDPModule))
    if existing or isinstance(root, FSDPModule):
        return ShardingPlan(_innermost_first(existing), "`configure_model`")
    names, source = units if isinstance(units, ChosenUnits) else choose_units(root, units)
    chosen = [name for name in named if name in names]
    kept = _sharing(root, chosen)
    chosen = [name for name in chosen if name not in kept and has_parameters(named[name])]
    candidates = () if chosen else _candidates(root, named)
    return ShardingPlan(_innermost_first(chosen), source, tuple(kept.items()), candidates)


def choose_units(root: nn.Module, units: UnitSelector = None) -> ChosenUnits:
    """Choose modules of a whole model.

    In order: modules that ``units`` selects; the ``_no_split_modules`` of Hugging Face models
    inside; repeated blocks, two or more of a class: direct children of a ``ModuleList``,
    ``ModuleDict`` or ``Sequential`` with parameters in submodules of their own. A module without
    such submodules (a lone ``Linear``) is never found automatically, nor one inside another unit.
    """
    named = _submodules(root)
    if units is not None:
        return ChosenUnits(frozenset(_select(root, named, units)), "the `units` option")
    if classes := _no_split_classes(root):
        names = _outermost([n for n, m in named.items() if type(m).__name__ in classes])
        source = f"`_no_split_modules` ({', '.join(sorted(classes))})"
        if names:
            return ChosenUnits(frozenset(names), source)
    blocks = {module for _, module in repeated_blocks(root)}
    return ChosenUnits(frozenset(n for n, m in named.items() if m in blocks), "repeated blocks")


def _submodules(root: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in root.named_modules() if name}


def _outermost(names: Sequence[str]) -> list[str]:
    """Leave out modules inside others, such as the mixers that Mamba lists beside its blocks."""
    return [n for n in names if not any(n.startswith(f"{other}.") for other in names)]


def _candidates(root: nn.Module, named: dict[str, nn.Module]) -> tuple[str, ...]:
    half = sum(p.numel() for p in root.parameters()) / 2
    sizes: dict[str, int] = {}
    for module in named.values():
        numel = sum(p.numel() for p in module.parameters())
        if 0 < numel <= half and not is_silent_container(module):
            name = type(module).__name__
            sizes[name] = max(sizes.get(name, 0), numel)
    return tuple(sorted(sizes, key=lambda name: -sizes[name]))


def _innermost_first(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: -name.count(".")))


def _select(
    root: nn.Module,
    named: dict[str, nn.Module],
    units: Sequence[str] | Callable[[nn.Module], bool],
) -> list[str]:
    check_selector(units)
    full = {name: module for name, module in named.items() if has_parameters(module)}
    present = Counter(type(m).__name__ for m in full.values())
    known = ", ".join(sorted(present))
    if callable(units):
        chosen = [name for name, module in named.items() if units(module)]
        if not chosen:
            raise ValueError(
                f"`units` selects no module of `{type(root).__name__}`. Its submodules have the "
                f"classes: {known}."
            )
    else:
        unknown = [name for name in units if name not in present and name not in full]
        if unknown:
            ends = tuple(f".{name}" for name in unknown)
            similar = [name for name in full if name.endswith(ends)][:3]
            raise ValueError(
                f"`units={list(units)}`: `{type(root).__name__}` has no submodule of class "
                f"{unknown}, nor one of that name"
                + (f" (there is {similar})" if similar else "")
                + f". Its submodules have the classes: {known}."
            )
        chosen = [n for n, m in named.items() if n in units or type(m).__name__ in units]
    for name in chosen:
        if is_silent_container(named[name]):
            raise ValueError(
                f"`units` selects `{name}`, a {type(named[name]).__name__} without `forward`, "
                "which cannot be a unit because nothing calls it. Select its children."
            )
    return chosen


def _no_split_classes(root: nn.Module) -> set[str]:
    named = (getattr(module, "_no_split_modules", None) for module in root.modules())
    return {str(n) for names in named if isinstance(names, (list, tuple, set)) for n in names}


def _sharing(root: nn.Module, chosen: Sequence[str]) -> dict[str, str]:
    """Chosen units that share a parameter with a module outside, and with which.

    A second name for a whole unit is not sharing: a call of it is a call of the unit.
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
