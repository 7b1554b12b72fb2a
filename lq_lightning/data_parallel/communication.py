"""Install quantized collectives on a model sharded by FSDP2, and keep them consistent."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lq_lightning._compat.fsdp2 import (
    GroupParam,
    GroupParams,
    fsdp_units,
    record_reduced_params,
    uses_hsdp,
)
from lq_lightning._compat.tensors import local_tensor
from lq_lightning._compat.torch import inherit_timeout
from lq_lightning.data_parallel.all_gather import WeightAllGather
from lq_lightning.data_parallel.config import GradientQuantization, WeightQuantization
from lq_lightning.data_parallel.exchange import ExchangeSchedule
from lq_lightning.data_parallel.plan import (
    CommunicationPlan,
    TensorPlan,
    describe_gradients,
    describe_weights,
    tensor_plans,
)
from lq_lightning.data_parallel.reduce_scatter import TwoLevelReduceScatter
from lq_lightning.data_parallel.unit import UnitContext
from lq_lightning.data_parallel.vocabulary import vocabulary_weights
from lq_lightning.data_parallel.weight_difference import WeightDifferenceAllGather
from lq_lightning.foundation.parameters import clean_name
from lq_lightning.foundation.topology import Topology
from lq_lightning.foundation.traffic import Traffic

__all__ = ["QuantizationErrors", "QuantizedCommunication", "quantize_communication"]

_STATE_VERSION = 2


class QuantizationErrors(NamedTuple):
    """Sums behind the relative L2 errors of this rank since they were last asked for.

    The relative error over ranks is ``sqrt(sum(squared_error) / sum(squared_norm))``.
    """

    weights_squared_error: float
    weights_squared_norm: float
    gradients_squared_error: float
    gradients_squared_norm: float


@dataclass(slots=True)
class _Unit:
    name: str
    names: tuple[str, ...]
    params: Callable[[], list[GroupParam]]
    gather: WeightAllGather | None
    scatter: TwoLevelReduceScatter | None


class QuantizedCommunication:
    """Handle on the quantized collectives of one model; made by :func:`quantize_communication`.

    Attributes:
        plan: How every parameter travels.
        topology: Ranks and nodes.
        outside_writes: Names of units whose weights were written by something other than an
            optimizer step, with the number of times; each such write costs a full-precision gather.
    """

    def __init__(
        self,
        units: list[_Unit],
        context: UnitContext,
        plan: CommunicationPlan,
        device: torch.device,
    ) -> None:
        self._units = units
        self._context = context
        self.plan = plan
        self.topology = context.topology
        self.outside_writes: dict[str, int] = {}
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._exchanges = ExchangeSchedule(device)
        context.on_outside_write = self._count_outside_write

    # --- steps ------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps seen so far."""
        return self._context.step

    def register_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange weights after each of this optimizer's steps. Idempotent."""
        if optimizer in self._optimizers:
            return
        self._optimizers.add(optimizer)
        optimizer.register_step_pre_hook(self._wait_before_update)
        optimizer.register_step_post_hook(lambda opt, *unused: self.note_optimizer_step(opt))

    def _wait_before_update(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let an update wait for the exchanges, which read the main weights on their own streams.

        A closure runs forward and backward first, which need not wait.
        """
        position = next((i for i, value in enumerate(args[1:], 1) if callable(value)), None)
        closure = kwargs.get("closure") if position is None else args[position]
        if closure is None:
            self._exchanges.join()
            return args, kwargs

        def joined() -> Any:
            result = closure()
            self._exchanges.join()
            return result

        if position is None:
            return args, {**kwargs, "closure": joined}
        return (*args[:position], joined, *args[position + 1 :]), kwargs

    def join(self) -> None:
        """Let the current CUDA stream wait for everything on its way; call it after an error."""
        self._exchanges.join()
        self._context.reductions.join()

    def note_optimizer_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Say that the weights were updated by an optimizer on every rank; exchanges them.

        Args:
            optimizer: The one that stepped; units without any of its parameters are left alone.
        """
        self._context.step += 1
        stepped = None
        if optimizer is not None:
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._exchanges.run(
            gather for gather in self._difference_gathers() if gather.holds_any(stepped)
        )

    def invalidate(self) -> None:
        """Let the next gathers refresh the replicas in full precision (after any outside write)."""
        for gather in self._difference_gathers():
            gather.invalidate()

    def _count_outside_write(self, name: str) -> None:
        self.outside_writes[name] = self.outside_writes.get(name, 0) + 1

    def _difference_gathers(self) -> list[WeightDifferenceAllGather]:
        gathers = [u.gather for u in self._units]
        return [g for g in gathers if isinstance(g, WeightDifferenceAllGather)]

    # --- drift ------------------------------------------------------------------------------

    def check_replicas(self, on_drift: Literal["resync", "raise"] = "resync") -> list[str]:
        """Compare the replicas of all ranks by checksum. Every rank must call this.

        Args:
            on_drift: ``"resync"`` refreshes drifted units in full precision at their next gather.

        Returns:
            Names of the units that differ, the same list on every rank.

        Raises:
            RuntimeError: A unit differs and ``on_drift="raise"``.
            ValueError: ``on_drift`` is something else.
        """
        if on_drift not in ("resync", "raise"):
            raise ValueError(f"`on_drift={on_drift!r}` is not supported: 'resync' or 'raise'.")
        gathers = self._difference_gathers()
        sums = [gather.checksum() for gather in gathers]
        known = [(g, s) for g, s in zip(gathers, sums, strict=True) if s is not None]
        if not known:
            return []
        mine = torch.cat([s for _, s in known])
        every = mine.new_empty(self.topology.world_size, mine.numel())
        dist.all_gather(list(every), mine)
        drifted = []
        for column, (gather, _) in enumerate(known):
            if self._differs(every[:, column], gather):
                drifted.append(gather.name)
                gather.invalidate()
        if drifted and on_drift == "raise":
            raise RuntimeError(
                f"the weight replicas of {len(drifted)} unit(s) differ between ranks after "
                f"optimizer step {self.step}, first `{drifted[0]}`. Something wrote to them "
                "on some ranks only; `on_drift='resync'` would refresh them in full precision "
                "and go on."
            )
        return drifted

    def _differs(self, sums: Tensor, gather: WeightDifferenceAllGather) -> bool:
        if gather.shared_by_node:
            by_node = sums.view(self.topology.num_nodes, self.topology.node_size)
            return bool((by_node != by_node[:1]).any())
        return bool((sums != sums[0]).any())

    # --- state ------------------------------------------------------------------------------

    def replica_state_dict(self) -> dict[str, DTensor]:
        """Each rank's slot of the replicas as DTensors sharded like the parameters, by name.

        Empty without replicas or before the first gather. The values are not the main weights: they
        are what every rank computes with, so saving them lets a resumed run continue exactly.
        """
        slots: dict[str, DTensor] = {}
        for gather in self._difference_gathers():
            slots.update(gather.replica_slots())
        return slots

    def drop_residuals(self) -> None:
        """Forget what error feedback has kept; call it on every rank where a checkpoint is written.

        Residuals of all ranks would be larger than the rest of a checkpoint on many nodes, so they
        are not saved. A run that drops them where it saves continues as one that resumes there. The
        next messages lose the quantization error of one step.
        """
        for unit in self._units:
            if unit.scatter is not None and unit.scatter.residual is not None:
                unit.scatter.residual.drop()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides :meth:`replica_state_dict`: plain numbers."""
        return {"version": _STATE_VERSION, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any], replica: Mapping[str, Tensor]) -> None:
        """Continue from a checkpoint: the next gathers restore the saved replicas.

        Call after the main weights are loaded. Units whose parameters are not all in ``replica``
        start from the main weights in full precision.

        Args:
            state: What :meth:`state_dict` returned.
            replica: What :meth:`replica_state_dict` returned, possibly resharded; DTensors with
                this world's sharding, or this rank's local shards as plain tensors.

        Raises:
            ValueError: ``state`` was written by a newer version of this package.
        """
        version = state.get("version")
        if version != _STATE_VERSION:
            raise ValueError(
                f"the checkpoint's communication state has version {version!r}, this package "
                f"reads version {_STATE_VERSION}. Load it with the package version that wrote "
                "it, or drop the `quantized_fsdp` entry to start from the main weights."
            )
        self._context.step = int(state["step"])
        self.drop_residuals()
        for gather in self._difference_gathers():
            slots = {n: local_tensor(replica[n]) for n in gather.names if n in replica}
            if len(slots) == len(gather.names):
                gather.restore(slots)
            else:
                gather.invalidate()

    # --- measurements -----------------------------------------------------------------------

    @property
    def measure_errors(self) -> bool:
        """Whether quantization errors are summed up; costs extra passes and an exact reduction."""
        return self._context.measure_errors

    @measure_errors.setter
    def measure_errors(self, value: bool) -> None:
        self._context.measure_errors = value

    def errors(self) -> QuantizationErrors:
        """Error sums since the last call; zeros where nothing was measured."""
        self._exchanges.join()
        weights = self._context.weight_errors.pop()
        gradients = self._context.gradient_errors.pop()
        return QuantizationErrors(*weights, *gradients)

    def traffic(self) -> Traffic:
        """A snapshot of this rank's byte counters."""
        return self._context.traffic.snapshot()


def quantize_communication(
    module: nn.Module,
    *,
    weights: WeightQuantization | None,
    gradients: GradientQuantization | None,
    topology: Topology,
    min_quantized_numel: int = 4096,
    seed: int = 0,
) -> QuantizedCommunication:
    """Replace the collectives of every FSDP2 unit in ``module`` by quantized ones.

    Call once, after ``fully_shard`` was applied to ``module`` and its submodules, on every rank.
    With both configs ``None`` nothing is replaced.

    Args:
        module: The root of the sharded model.
        weights: How weights are gathered; ``None`` leaves FSDP2's own all-gather.
        gradients: How gradients are reduced; ``None`` leaves FSDP2's own reduce-scatter. Embeddings
            and heads, which may have bits of their own, are :func:`vocabulary_weights`.
        topology: Ranks and nodes; its world must be the world of the default process group.
        min_quantized_numel: Parameters with fewer elements travel in full precision, as do 1-D
            ones.
        seed: Base of the stochastic-rounding seeds; the same on every rank.

    Raises:
        ValueError: ``module`` has no FSDP2 unit, or a number is out of range.
        NotImplementedError: A unit is sharded over two mesh axes (HSDP).
    """
    if min_quantized_numel < 1:
        raise ValueError(
            f"`min_quantized_numel={min_quantized_numel}` is not valid: give a positive number; "
            "1 quantizes every tensor of two or more dimensions."
        )
    found = list(fsdp_units(module))
    if not found:
        raise ValueError(
            f"`{type(module).__name__}` has no module sharded by FSDP2: apply "
            "`torch.distributed.fsdp.fully_shard` to its blocks and to itself first."
        )
    names_of = {id(p): clean_name(n) for n, p in module.named_parameters(remove_duplicate=False)}
    vocabulary = frozenset(names_of[id(p)] for p in vocabulary_weights(module))
    device = next(module.parameters()).device
    context = _make_context(topology, seed, device, vocabulary)
    units, tensors = [], []
    for index, (name, unit_module, group) in enumerate(found):
        if uses_hsdp(group):
            raise NotImplementedError(
                f"unit `{name}` is sharded over a 2-D mesh (HSDP), whose replica all-reduce "
                "bypasses quantization. Use a 1-D mesh over all ranks; `node_size` gives the "
                "two levels."
            )
        unit = _make_unit(
            index, name, group, names_of, weights, gradients, min_quantized_numel, context
        )
        _install(unit, unit_module, group)
        units.append(unit)
        tensors.extend(_plan_unit(unit))
    plan = CommunicationPlan(
        tuple(tensors), describe_weights(weights), describe_gradients(gradients, topology)
    )
    return QuantizedCommunication(units, context, plan, device)


def _make_context(
    topology: Topology, seed: int, device: torch.device, vocabulary: frozenset[str]
) -> UnitContext:
    if dist.get_world_size() != topology.world_size:
        raise ValueError(
            f"`Topology(world_size={topology.world_size})` does not match the process group, which "
            f"has {dist.get_world_size()} ranks."
        )
    mesh = init_device_mesh(
        device.type,
        (topology.num_nodes, topology.node_size),
        mesh_dim_names=("lq_node", "lq_local"),
    )
    inherit_timeout(mesh)
    return UnitContext(
        topology=topology,
        intra_group=mesh.get_group("lq_local"),
        inter_group=mesh.get_group("lq_node"),
        seed=seed,
        traffic=Traffic(),
        vocabulary=vocabulary,
    )


def _make_unit(
    index: int,
    name: str,
    group: Any,
    names_of: Mapping[int, str],
    weights: WeightQuantization | None,
    gradients: GradientQuantization | None,
    min_quantized_numel: int,
    context: UnitContext,
) -> _Unit:
    params = GroupParams(group)
    names = tuple(names_of[id(p.sharded_param)] for p in params())
    shared: dict[str, Any] = {
        "name": name or "root",
        "index": index,
        "params": params,
        "names": names,
        "min_quantized_numel": min_quantized_numel,
        "context": context,
    }
    gather: WeightAllGather | None = None
    if weights is not None:
        kind = WeightDifferenceAllGather if weights.method == "qWD" else WeightAllGather
        gather = kind(weights, **shared)
    scatter = None
    if gradients is not None:
        scatter = TwoLevelReduceScatter(gradients, **shared)
    return _Unit(name or "root", names, params, gather, scatter)


def _install(unit: _Unit, module: FSDPModule, group: Any) -> None:
    if unit.gather is not None:
        module.set_custom_all_gather(unit.gather)
    if unit.scatter is not None:
        module.set_custom_reduce_scatter(unit.scatter)
        record_reduced_params(group, unit.scatter.record_packed)


def _plan_unit(unit: _Unit) -> list[TensorPlan]:
    params = unit.params()
    return tensor_plans(
        unit.names,
        [p.numel for p in params],
        None if unit.gather is None else unit.gather.segments(),
        None if unit.scatter is None else unit.scatter.segments(),
        [p.requires_grad for p in params],
    )
