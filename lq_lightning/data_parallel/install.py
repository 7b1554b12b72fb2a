"""Install quantized collectives on a model sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lq_lightning._compat.fsdp2 import (
    ForwardCounter,
    GroupParams,
    announce_packed_gradients,
    bypass_all_gather,
    fsdp_units,
    gather_normal_tensors,
    hook_hidden_outputs,
    refuse_second_derivatives,
    shard_group,
    uses_hsdp,
)
from lq_lightning._compat.tensor_parallel import tensor_parallel_group
from lq_lightning.codecs import derive_seed
from lq_lightning.data_parallel.all_gather import WeightDifferenceAllGather
from lq_lightning.data_parallel.communication import QuantizedCommunication, UnitCollectives
from lq_lightning.data_parallel.config import GradientQuantization, WeightQuantization
from lq_lightning.data_parallel.plan import (
    CommunicationPlan,
    TensorPlan,
    describe_gradients,
    describe_weights,
    plan_unit,
)
from lq_lightning.data_parallel.reduce_scatter import GradientBucket, TwoLevelReduceScatter
from lq_lightning.data_parallel.replica import ReplicaMemory, StaleReplicaConsensus
from lq_lightning.data_parallel.unit import Unit, UnitContext
from lq_lightning.foundation.checks import is_whole
from lq_lightning.foundation.groups import RankGroups, shared_split
from lq_lightning.foundation.parameters import clean_name, embedding_params
from lq_lightning.foundation.topology import Topology

# Parameters in a bucket of neighbouring units, whose differences are exchanged together (16 MB in 4
# bits) and whose gradients are reduced together: a bucket costs the host as much as a unit. Forward
# waits for all of the first bucket, and gradients wait for theirs in 4 bytes each.
MAX_BUCKET_NUMEL = 1 << 25


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
        weights: Codec of the all-gather of weight differences; ``None`` leaves FSDP2's own.
        gradients: Codecs and method of the reduce-scatter; ``None`` leaves FSDP2's own. Embeddings
            and heads, which may have bits of their own, are :func:`embedding_params`.
        topology: Ranks and nodes that shard ``module``; ``Topology.of(mesh, node_size=...)`` reads
            them off the mesh that ``fully_shard`` got.
        min_quantized_numel: Parameters with fewer elements are sent in full precision, as are 1-D
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
    vocabulary = embedding_params(module) if vocabulary is None else vocabulary
    device = next(module.parameters()).device
    groups = RankGroups.of(topology, shard_group(found[0][2]), device)
    consensus = None if weights is None else _make_consensus(module, groups.every, device)
    context = UnitContext(
        topology=topology,
        groups=groups,
        seed=derive_seed(seed, _first_rank(found, groups.every)),
        vocabulary=frozenset(names_of[id(p)] for p in vocabulary),
        min_quantized_numel=min_quantized_numel,
    )
    every_params = [GroupParams(group) for _, _, group in found]
    places, gradient_buckets = _shared_memory(every_params, weights, gradients)
    units: list[UnitCollectives] = []
    tensors: list[TensorPlan] = []
    for index, (name, unit_module, group) in enumerate(found):
        params = every_params[index]
        names = tuple(names_of[id(p.sharded_param)] for p in params())
        unit = Unit(name=name or "root", index=index, params=params, names=names, context=context)
        gather_normal_tensors(group)
        refuse_second_derivatives(group, unit.name)
        hook_hidden_outputs(unit_module)
        gather = _install_gather(unit, unit_module, group, weights, consensus, places[index])
        scatter = None
        if gradients is not None:
            scatter = TwoLevelReduceScatter(gradients, unit, gradient_buckets[index])
            unit_module.set_custom_reduce_scatter(scatter)
            announce_packed_gradients(group, scatter.expect)
        units.append(UnitCollectives(gather, scatter))
        tensors += plan_unit(unit, gather, scatter, tied)
    plan = CommunicationPlan(
        tuple(tensors),
        describe_weights(weights),
        describe_gradients(gradients, topology, any(t.vocabulary for t in tensors)),
    )
    return QuantizedCommunication(units, context, plan, device, consensus)


def _first_rank(found: list[tuple[str, FSDPModule, Any]], every: dist.ProcessGroup) -> int:
    """First rank of the model: others get noise of their own, tensor-parallel ranks the same.

    These hold the same elements of some parameters, which other noise would let drift apart.
    """
    ranks = dist.get_process_group_ranks(every)
    groups = (tensor_parallel_group(group) for _, _, group in found)
    parallel = next((group for group in groups if group is not None), None)
    if parallel is None:
        return ranks[0]
    # the mesh is regular: all tensor-parallel groups of the model are shifted alike
    return ranks[0] - dist.get_rank() + dist.get_process_group_ranks(parallel)[0]


def _make_consensus(
    module: nn.Module, group: dist.ProcessGroup, device: torch.device
) -> StaleReplicaConsensus:
    own = shared_split("votes", group, [list(range(group.size()))], device)
    return StaleReplicaConsensus(own, device, ForwardCounter(module), module)


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
                f"unit `{name or 'root'}` is sharded over a mesh with replicas (HSDP), whose "
                "all-reduce bypasses quantization. Give `fully_shard` a 1-D mesh of all ranks; "
                "`WeightQuantization(replica='node')` gathers weights within nodes only."
            )
        ranks = [dist.get_process_group_ranks(shard_group(g)) for g in (first, group)]
        if ranks[0] != ranks[1]:
            raise ValueError(
                f"unit `{first_name or 'root'}` is sharded over the ranks {ranks[0]}, but "
                f"`{name or 'root'}` over {ranks[1]}: give `fully_shard` one mesh for all of them, "
                "or call `quantize_communication` on each module whose units share one."
            )


def _shared_memory(
    every_params: Sequence[GroupParams],
    weights: WeightQuantization | None,
    gradients: GradientQuantization | None,
) -> tuple[list[tuple[ReplicaMemory, int]], list[GradientBucket | None]]:
    """Let units of a bucket share memory.

    Returns, by unit: the memory of its replica and its row there; the bucket of its gradients, None
    where it is reduced alone.
    """
    sizes, alone = _bucket_sizes(every_params), [1] * len(every_params)
    places: list[tuple[ReplicaMemory, int]] = []
    for size in sizes if weights is not None else alone:
        memory = ReplicaMemory(size)
        places += [(memory, row) for row in range(size)]
    buckets: list[GradientBucket | None] = []
    # where noise is random, a unit of a bucket would be rounded with other noise
    together = gradients is not None and gradients.rounding != "stochastic"
    for size in sizes if together else alone:
        buckets += [GradientBucket(size) if size > 1 else None] * size
    return places, buckets


def _bucket_sizes(every_params: Sequence[GroupParams]) -> list[int]:
    """Return the sizes of all buckets: neighbouring small units of one shape, or one unit.

    Frozen units and trained ones share no bucket: else all of its units would be exchanged alone.
    """
    buckets: list[list[object]] = []
    room = 0
    for params in every_params:
        shape = [
            (p.padded_shard_numel, p.numel, p.ndim, p.gather_dtype, p.requires_grad)
            for p in params()
        ]
        numel = sum(p.numel for p in params())
        if not buckets or shape != buckets[-1][0] or numel > room:
            buckets.append([])
            room = MAX_BUCKET_NUMEL
        buckets[-1].append(shape)
        room -= numel
    return [len(bucket) for bucket in buckets]


def _install_gather(
    unit: Unit,
    module: FSDPModule,
    group: Any,
    weights: WeightQuantization | None,
    consensus: StaleReplicaConsensus | None,
    place: tuple[ReplicaMemory, int],
) -> WeightDifferenceAllGather | None:
    if weights is None or consensus is None:
        return None
    gather = WeightDifferenceAllGather(weights, unit, consensus, *place)
    bypass_all_gather(group, gather.read)
    module.set_custom_all_gather(gather)
    return gather
