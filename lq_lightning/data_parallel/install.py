"""Install quantized collectives on a model sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lq_lightning._compat.forwards import (
    ForwardCounter,
    gather_normal_tensors,
    hook_hidden_outputs,
    refuse_second_derivatives,
)
from lq_lightning._compat.fsdp2 import (
    GroupParams,
    announce_packed_gradients,
    fsdp_units,
    shard_group,
    uses_hsdp,
)
from lq_lightning._compat.gathers import serve_gathers
from lq_lightning.codecs import derive_seed
from lq_lightning.data_parallel.all_gather import QuantizedAllGather
from lq_lightning.data_parallel.communication import QuantizedCommunication, QuantizedUnit
from lq_lightning.data_parallel.config import GradientQuantization, WeightQuantization
from lq_lightning.data_parallel.outside_writes import WriteVotes
from lq_lightning.data_parallel.plan import (
    CommunicationPlan,
    TensorPlan,
    describe_gradients,
    describe_weights,
    tensor_plans,
)
from lq_lightning.data_parallel.reduce_scatter import TwoLevelReduceScatter
from lq_lightning.data_parallel.reduction_stack import ReductionStack
from lq_lightning.data_parallel.replica import ReplicaMemory
from lq_lightning.data_parallel.unit import UnitContext, UnitDescription
from lq_lightning.data_parallel.vocabulary import vocabulary_weights
from lq_lightning.data_parallel.weight_all_gather import WeightAllGather
from lq_lightning.data_parallel.weight_difference import WeightDifferenceAllGather
from lq_lightning.foundation.checks import is_whole
from lq_lightning.foundation.groups import RankGroups, shared_split
from lq_lightning.foundation.parameters import clean_name
from lq_lightning.foundation.topology import Topology
from lq_lightning.foundation.traffic import Traffic

__all__ = ["quantize_communication"]

# Parameters of neighbouring units whose differences are exchanged together, 16 MB in 4 bits, and
# whose gradients are reduced together: each exchange costs the host as much as one of a unit.
# Forward waits for all of the first one, and gradients wait in 4 bytes each for their stack.
MAX_STACKED_NUMEL = 1 << 25


def quantize_communication(
    module: nn.Module,
    *,
    weights: WeightQuantization | None,
    gradients: GradientQuantization | None,
    topology: Topology,
    min_quantized_numel: int = 4096,
    seed: int = 0,
    vocabulary: Sequence[nn.Parameter] | None = None,
) -> QuantizedCommunication:
    """Replace the collectives of every FSDP2 unit in ``module`` by quantized ones.

    Call once, after ``fully_shard`` was applied to ``module`` and its submodules, on every rank
    that shards ``module``. Other ranks need not call it, or may call it for a module of their own:
    the stages of a pipeline do. With both configs ``None`` nothing is replaced.

    Args:
        module: The root of the sharded model.
        weights: How weights are gathered; ``None`` leaves FSDP2's own all-gather.
        gradients: How gradients are reduced; ``None`` leaves FSDP2's own reduce-scatter. Embeddings
            and heads, which may have bits of their own, are :func:`vocabulary_weights`.
        topology: Ranks and nodes that shard ``module``; ``Topology.of(mesh, node_size=...)`` reads
            them off the mesh that ``fully_shard`` got.
        min_quantized_numel: Parameters with fewer elements travel in full precision, as do 1-D
            ones.
        seed: Base of the stochastic-rounding seeds; the same on every rank.
        vocabulary: Embeddings and heads; None finds them, which needs an embedding in ``module``.

    Raises:
        ValueError: ``module`` has no FSDP2 unit, its units or ``topology`` have other ranks, or a
            number is out of range.
        NotImplementedError: A unit is sharded over two mesh axes (HSDP).
    """
    if not is_whole(min_quantized_numel) or min_quantized_numel < 1:
        raise ValueError(
            f"`min_quantized_numel={min_quantized_numel!r}` is not valid: give a whole number; "
            "1 quantizes every tensor of two or more dimensions."
        )
    found = list(fsdp_units(module))
    _check_meshes(module, found)
    all_names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        all_names.setdefault(id(parameter), []).append(clean_name(name))
    names_of = {key: names[-1] for key, names in all_names.items()}
    tied = {names[-1]: tuple(names[:-1]) for names in all_names.values()}
    words = vocabulary_weights(module) if vocabulary is None else vocabulary
    device = next(module.parameters()).device
    groups = RankGroups.of(topology, shard_group(found[0][2]), device)
    differences = weights is not None and weights.method == "qWD"
    votes = _make_votes(module, groups.every, device) if differences else None
    context = _make_context(topology, groups, seed, frozenset(names_of[id(p)] for p in words))
    units: list[QuantizedUnit] = []
    tensors: list[TensorPlan] = []
    every_params = [GroupParams(group) for _, _, group in found]
    stacks, alone = _stacks(every_params), [1] * len(found)
    places = _places_in_memory(stacks if _may_stack(weights) else alone)
    reduced_with = _reduction_stacks(stacks if _may_stack(gradients) else alone)
    for index, (name, unit_module, group) in enumerate(found):
        params = every_params[index]
        description = UnitDescription(
            name=name or "root",
            index=index,
            params=params,
            names=tuple(names_of[id(p.sharded_param)] for p in params()),
            min_quantized_numel=min_quantized_numel,
            context=context,
        )
        unit = _install(
            *(description, unit_module, group, weights, gradients, votes),
            *(places[index], reduced_with[index]),
        )
        units.append(unit)
        tensors += (t._replace(tied=tied[t.name]) for t in _plan_unit(description, unit))
    plan = CommunicationPlan(
        tuple(tensors),
        describe_weights(weights),
        describe_gradients(gradients, topology, any(t.vocabulary for t in tensors)),
    )
    return QuantizedCommunication(units, context, plan, device, votes)


def _make_context(
    topology: Topology,
    groups: RankGroups,
    seed: int,
    vocabulary: frozenset[str],
) -> UnitContext:
    first = dist.get_process_group_ranks(groups.every)[0]
    return UnitContext(
        topology=topology,
        group=groups.every,
        intra_group=groups.intra,
        inter_group=groups.inter,
        seed=derive_seed(seed, first),  # models sharded over other ranks get noise of their own
        traffic=Traffic(),
        vocabulary=vocabulary,
    )


def _make_votes(module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> WriteVotes:
    own = shared_split("votes", group, [list(range(group.size()))], device)
    return WriteVotes(own, device, ForwardCounter(module), lambda: module.training)


def _check_meshes(module: nn.Module, found: list[tuple[str, FSDPModule, Any]]) -> None:
    if not found:
        raise ValueError(
            f"`{type(module).__name__}` has no module sharded by FSDP2: apply "
            "`torch.distributed.fsdp.fully_shard` to its blocks and to itself first."
        )
    first_name, _, first = found[0]
    for name, _, group in found:
        if uses_hsdp(group):
            raise NotImplementedError(
                f"unit `{name}` is sharded over a 2-D mesh (HSDP), whose replica all-reduce "
                "bypasses quantization. Use a 1-D mesh over all ranks; `node_size` gives the "
                "two levels."
            )
        ranks = [dist.get_process_group_ranks(shard_group(g)) for g in (first, group)]
        if ranks[0] != ranks[1]:
            raise ValueError(
                f"unit `{first_name or 'root'}` is sharded over the ranks {ranks[0]}, but "
                f"`{name or 'root'}` over {ranks[1]}: give `fully_shard` one mesh for all of them, "
                "or call `quantize_communication` on each module whose units share one."
            )


def _may_stack(config: WeightQuantization | GradientQuantization | None) -> bool:
    """Whether units may be handled together: in a stack, one would be rounded with other noise."""
    return config is not None and config.rounding != "stochastic"


def _stacks(every_params: Sequence[GroupParams]) -> list[int]:
    """Return the sizes of all stacks: of neighbouring small units of one shape, or of one unit.

    What they do together costs the host little more than what one of them does. Frozen units and
    trained ones share nothing: else all of their stack would be exchanged alone.
    """
    stacks: list[list[object]] = []
    room = 0
    for params in every_params:
        shape = [
            (p.padded_shard_numel, p.numel, p.ndim, p.gather_dtype, p.requires_grad)
            for p in params()
        ]
        numel = sum(p.numel for p in params())
        if not stacks or shape != stacks[-1][0] or numel > room:
            stacks.append([])
            room = MAX_STACKED_NUMEL
        stacks[-1].append(shape)
        room -= numel
    return [len(stack) for stack in stacks]


def _places_in_memory(stacks: Sequence[int]) -> list[tuple[ReplicaMemory, int]]:
    """Let the units of a stack share the memory of their replicas."""
    memories = [(ReplicaMemory(units), units) for units in stacks]
    return [(memory, index) for memory, units in memories for index in range(units)]


def _reduction_stacks(stacks: Sequence[int]) -> list[ReductionStack | None]:
    """Let the units of a stack share the memory of gradients that are to be reduced."""
    made = [(ReductionStack(units) if units > 1 else None, units) for units in stacks]
    return [stack for stack, units in made for _ in range(units)]


def _install(
    description: UnitDescription,
    module: FSDPModule,
    group: Any,
    weights: WeightQuantization | None,
    gradients: GradientQuantization | None,
    votes: WriteVotes | None,
    place: tuple[ReplicaMemory, int],
    stack: ReductionStack | None,
) -> QuantizedUnit:
    gather_normal_tensors(group)
    refuse_second_derivatives(group, description.name)
    hook_hidden_outputs(module)
    gather: QuantizedAllGather | None = None
    if weights is not None:
        if votes is None:
            gather = WeightAllGather(weights, description)
        else:
            gather = WeightDifferenceAllGather(weights, description, votes, *place)
            serve_gathers(group, gather.read)
        module.set_custom_all_gather(gather)
    scatter = None
    if gradients is not None:
        scatter = TwoLevelReduceScatter(gradients, description, stack)
        module.set_custom_reduce_scatter(scatter)
        announce_packed_gradients(group, scatter.expect)
    return QuantizedUnit(name=description.name, gather=gather, scatter=scatter)


def _plan_unit(description: UnitDescription, unit: QuantizedUnit) -> list[TensorPlan]:
    params = description.params()
    return tensor_plans(
        description.names,
        [p.numel for p in params],
        None if unit.gather is None else unit.gather.segments(),
        None if unit.scatter is None else unit.scatter.layouts.segments(),
        [p.requires_grad for p in params],
    )
