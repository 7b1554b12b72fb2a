"""Apply FSDP2 to a LightningModule, once, and remember how."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lq_lightning._compat.forwards import (
    gather_normal_tensors,
    hook_hidden_outputs,
    refuse_second_derivatives,
    refuse_writes_before_backward,
)
from lq_lightning._compat.fsdp2 import fsdp_units, offloads_to_cpu
from lq_lightning._compat.lightning import convert_floating
from lq_lightning._compat.modules import prepare_fsdp_class
from lq_lightning.data_parallel import PackedAgreement
from lq_lightning.foundation.agreement import broadcast_module_states, check_alike
from lq_lightning.foundation.meta_start import initialize_meta_tensors
from lq_lightning.plugins import FullyShardedPrecision
from lq_lightning.strategies.checks import check_fully_sharded, check_shardable
from lq_lightning.strategies.root_forward import RootForward
from lq_lightning.strategies.units import ChosenUnits, ShardingPlan, UnitSelector, find_units

__all__ = [
    "ShardedModule",
    "Sharding",
    "already_configured",
    "check_settings",
    "compile_units",
    "remember",
    "shard",
    "shard_module",
    "sharded",
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How a module is to be sharded.

    Attributes:
        units: Which modules are gathered as one piece.
        reshard_after_forward: Free a unit's weights between forward and backward.
        compile_units: ``torch.compile`` the forward of each unit.
        precision: Gives dtypes and the mixed-precision policy.
        mesh: 1-D, over the ranks that share the module.
        device: Where this rank computes.
        layer_sync: Replaces layers by synchronized ones (batch norm), if there is one.
    """

    units: UnitSelector | ChosenUnits
    reshard_after_forward: bool
    compile_units: bool
    precision: FullyShardedPrecision
    mesh: DeviceMesh
    device: torch.device
    layer_sync: LayerSync | None


@dataclass(kw_only=True, slots=True)
class ShardedModule:
    """What is remembered about a module once it is sharded, whichever Trainer runs it next.

    Attributes:
        settings: The options that were baked in.
        plan: Its units.
        forward: Gathers the root's parameters where its code computes with them.
        agreement: Whether ranks have gradients of the same parameters; None on one rank.
        extra: What a subclass of the strategy attached.
    """

    settings: Mapping[str, object]
    plan: ShardingPlan
    forward: RootForward
    agreement: PackedAgreement | None
    extra: Any = None


_RECORD = "_lq_sharded"  # kept in the module, so that both are freed together


def sharded(module: nn.Module | None) -> ShardedModule | None:
    """What is known about a sharded module; ``None`` if it is not sharded."""
    return None if module is None else module.__dict__.get(_RECORD)


def shard(
    module: LightningModule, sharding: Sharding, settings: Mapping[str, object]
) -> ShardedModule:
    """Shard a module in place, with the values of the mesh's first rank.

    Args:
        module: Not sharded, or by the user in ``configure_model``.
        sharding: How.
        settings: What a later Trainer cannot change; kept in the record.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: FSDP2 cannot shard it.
    """
    check_shardable(module)
    several = sharding.mesh.size() > 1
    if sharding.layer_sync is not None and several:
        sharding.layer_sync.apply(module)
    sharding.precision.convert_module(module)
    ranks = sharding.mesh.get_group()
    if several:
        check_alike(module, ranks)
        broadcast_module_states(module, parameters=True, group=ranks)
    plan = find_units(module, sharding.units)
    _make_contiguous(module)
    shard_module(module, plan, sharding.mesh, sharding.precision, sharding.reshard_after_forward)
    for name, unit, group in fsdp_units(module):
        gather_normal_tensors(group)
        refuse_second_derivatives(group, name or "root")
        refuse_writes_before_backward(group, name or "root")
        hook_hidden_outputs(unit)
    _materialize(module, sharding.device)
    if several:
        broadcast_module_states(module, parameters=False, group=ranks)
    if not offloads_to_cpu(module):
        module.to(sharding.device)
    check_fully_sharded(module)
    module.configure_model = already_configured  # type: ignore[method-assign]
    if sharding.compile_units:
        compile_units(module, plan)
    forward = RootForward(module, sharding.precision.forward_context)
    agreement = PackedAgreement(module, ranks, sharding.device) if several else None
    return ShardedModule(settings=settings, plan=plan, forward=forward, agreement=agreement)


def remember(module: LightningModule, record: ShardedModule) -> None:
    """Keep the record in the module, once everything is attached to it."""
    module.__dict__[_RECORD] = record


def check_settings(
    module: LightningModule, known: Mapping[str, object], wanted: Mapping[str, object]
) -> None:
    """Refuse other options than those that are baked into a module.

    Raises:
        ValueError: One of them differs.
    """
    changed = {key: value for key, value in wanted.items() if known.get(key) != value}
    if changed:
        name, value = next(iter(changed.items()))
        raise ValueError(
            f"this `{type(module).__name__}` was already sharded with `{name}="
            f"{known.get(name)!r}` and cannot change to `{name}={value!r}`. Use the same options, "
            "or make a new module and load a checkpoint."
        )


def already_configured() -> None:
    """Stand in for ``configure_model`` of a sharded module, which must not be built again."""


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
    """Apply ``fully_shard`` to the units of ``plan`` and last to ``root``; idempotent.

    Args:
        root: The LightningModule.
        plan: From :func:`find_units`.
        mesh: 1-D, over the ranks that share the module.
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
