"""The part of a run that one rank holds: process groups, stages, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lq_lightning._compat.modules import discard_unreduced_gradients, reduce_gradients
from lq_lightning._compat.tensor_parallel import DATA, TENSOR
from lq_lightning._compat.tensors import local_tensor
from lq_lightning._compat.torch import all_gather_flat, group_timeout
from lq_lightning.codecs import CodecSpec, decode_reduce, encode
from lq_lightning.data_parallel import Topology, embedding_params
from lq_lightning.foundation.groups import shared_group, shared_mesh, shared_split, world_group
from lq_lightning.foundation.meta_start import initialize_meta_tensors
from lq_lightning.foundation.parameters import (
    clean_name,
    embeddings,
    mark_embedding_params,
    tied_names,
)
from lq_lightning.pipeline.partition import keep_stages
from lq_lightning.pipeline.plan import PipelinePlan, hidden_size, plan_stages
from lq_lightning.pipeline.schedules import rank_of_stage, stages_of_rank
from lq_lightning.plugins import FullyShardedPrecision
from lq_lightning.strategies.options import UnitSelector
from lq_lightning.strategies.pipelines.options import PipelineOptions
from lq_lightning.strategies.sharding import (
    ChosenUnits,
    already_configured,
    choose_units,
)

_RECORD = "_lq_cut"  # kept in the module, so that both are freed together


def stage_topology(world_size: int, rank: int, pipeline_size: int, ranks_per_node: int) -> Topology:
    """Return the topology of a rank's stage.

    A stage has neighbouring ranks, of which ``ranks_per_node`` share a machine. It lies within a
    node, covers whole nodes, or is cut by the edges of nodes into parts; as many neighbours as the
    greatest common divisor of their sizes always share a node.
    """
    replicas = world_size // pipeline_size
    return Topology(
        world_size=replicas,
        rank=rank % replicas,
        node_size=math.gcd(ranks_per_node, replicas),
    )


class PipelineRanks:
    """The mesh ``[pipeline, data_parallel, tensor_parallel]`` of a run.

    The pipeline is the outer axis: neighbouring ranks, which share a machine, hold the same layers
    and reduce gradients with each other, and the boundaries between stages fall between machines.
    A boundary moves activations of a few bits once per micro-batch, data parallelism several times
    the parameters, so that the slow link gets the smaller part.

    Every rank must make this, in one order with other groups. ``pipeline_size * tensor_size``
    divides the world size.

    Attributes:
        mesh: 3-D; tensor-parallel ranks are neighbours.
        group: Ranks of this pipeline, in the order of its stages.
        control_group: The same ranks on gloo, for small messages between hosts.
        stage_group: Ranks with the same layers and tensor-parallel shards, and other data.
        tensor_size: Ranks that share each layer, on the same data.
        model_group: Ranks with the same layers.
        stage_control_group: The same ranks on gloo.
    """

    def __init__(self, pipeline_size: int, tensor_size: int, device: torch.device) -> None:
        replicas = dist.get_world_size() // (pipeline_size * tensor_size)
        axes = {"pipeline": pipeline_size, DATA: replicas, TENSOR: tensor_size}
        self.mesh = shared_mesh(device.type, axes)
        self.device, self.tensor_size = device, tensor_size
        self.group: dist.ProcessGroup = self.mesh.get_group("pipeline")
        self.stage_group: dist.ProcessGroup = self.mesh.get_group(DATA)
        self.model_group = self.stage_group
        if tensor_size > 1:
            stages = self.mesh.mesh.flatten(1).tolist()
            self.model_group = shared_split("model", world_group(), stages, device)
        self.control_group = _over_gloo(self.group, device)
        self.stage_control_group = _over_gloo(self.model_group, device)

    @property
    def size(self) -> int:
        """Ranks along the pipeline."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """Number of this rank in its pipeline."""
        return self.group.rank()

    @property
    def replicas(self) -> int:
        """Pipelines beside each other, on other data."""
        return self.stage_group.size()

    @property
    def share_layers(self) -> bool:
        """Whether several ranks hold the same layers."""
        return self.model_group.size() > 1

    def holders(self, places: Sequence[int]) -> dist.ProcessGroup:
        """Return the group of some ranks of each pipeline, by their ascending numbers.

        All ranks of the pipeline must call this in one order; another group is returned to ranks
        outside of it.
        """
        if list(places) == list(range(self.size)):
            return self.group
        others = [[place] for place in range(self.size) if place not in places]
        return shared_split("holders", self.group, [list(places), *others], self.device)


def _over_gloo(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    def make() -> dist.ProcessGroup:
        made: dist.ProcessGroup | None = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=group_timeout(dist.group.WORLD, device),
            backend="gloo",
            use_local_synchronization=True,
        )
        if made is None:
            raise AssertionError("this rank is in its own groups")
        return made

    return shared_group("over gloo", group, make)


# --- gradients ----------------------------------------------------------------------------------


class SharedTensor:
    """A parameter that several ranks of a pipeline hold, such as a tied embedding.

    Args:
        name: First name in the whole model.
        parameter: Copy on this rank; None if there is none.
        group: Ranks that hold a copy, in the order of their stages.
        codec: Code of gradients on the wire; None for their own dtype.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter | None,
        group: dist.ProcessGroup,
        codec: CodecSpec | None,
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.sent_nbytes = 0  # bytes of gradients to the other ranks
        self._group = group
        self.codec = codec

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first that holds the parameter."""
        return self._group.rank() == 0

    @torch.no_grad()
    def share_value(self) -> None:
        """Give all copies the value of the first one."""
        if self.parameter is not None:
            local = local_tensor(self.parameter.detach())
            if local.numel():  # all copies are sharded alike
                dist.broadcast(local, group=self._group, group_src=0)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add up the gradients of all copies; each has used the parameter for something else."""
        if self.parameter is None or not self.parameter.requires_grad:
            return
        if self.parameter.grad is None:  # not used here in this batch, but others wait
            self.parameter.grad = torch.zeros_like(self.parameter)
        local = local_tensor(self.parameter.grad)
        if not local.numel():
            return
        others = self._group.size() - 1
        if self.codec is None:
            # Bytes of a ring all-reduce; gloo and NCCL may use another algorithm.
            self.sent_nbytes += 2 * others * local.nbytes // (others + 1)
            dist.all_reduce(local, group=self._group)
        else:
            self.sent_nbytes += others * self._sum_codes(local, self.codec)

    def _sum_codes(self, gradient: Tensor, codec: CodecSpec) -> int:
        """Decode the same bytes on all ranks and sum in fp32, so that the copies stay equal."""
        flat = gradient.contiguous().view(1, -1)
        message = encode(codec, flat).view(-1)
        gathered = message.new_empty(self._group.size() * message.numel())
        all_gather_flat(gathered, message, self._group)
        messages = gathered.view(self._group.size(), 1, -1)
        decode_reduce(codec, messages, flat.shape[1], out=flat)
        if flat.data_ptr() != gradient.data_ptr():
            gradient.copy_(flat.view_as(gradient))
        return message.numel()


class PipelineGradients:
    """Keeps a batch's gradients from ``zero_grad`` until Lightning asks for them.

    The schedule of a pipeline runs forward and backward together, as Lightning's ``training_step``.
    Then Lightning calls ``zero_grad``, and only then ``backward``, which hands them out. Gradients
    are moved, never copied. In a sharded module they stay unreduced inside FSDP2, out of reach of
    ``zero_grad``.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, shared: Sequence[SharedTensor]
    ) -> None:
        self._root = module if isinstance(module, FSDPModule) else None
        self._optimizer = optimizer
        self._shared = shared
        self._held: list[tuple[nn.Parameter, Tensor]] = []
        if self._root is not None:
            discard_unreduced_gradients(module)

    def _parameters(self) -> Iterable[nn.Parameter]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def start(self, first: bool) -> None:
        """Before a schedule: gradients add up from zero if the batch is the first of a window."""
        self._held.clear()  # left by a batch that an error ended
        if first:
            for parameter in self._parameters():
                parameter.grad = None
            if self._root is not None:
                discard_unreduced_gradients(cast(nn.Module, self._root))
        if self._root is not None:
            # Whole gradients add up over the micro-batches, in weights that stay gathered.
            self._root.set_is_last_backward(False)
            self._root.set_reshard_after_backward(False)
            self._root.set_requires_gradient_sync(False)

    def hold(self) -> None:
        """After a schedule: take the gradients out of ``zero_grad``'s reach."""
        if self._root is None:
            for parameter in self._parameters():
                if parameter.grad is not None:
                    self._held.append((parameter, parameter.grad))
                    parameter.grad = None

    def give_back(self, reduce: bool) -> None:
        """Within Lightning's backward: hand the gradients out.

        ``reduce``: reduce-scatter them over the ranks of the stage now.
        """
        for parameter, gradient in self._held:
            parameter.grad = gradient
        self._held.clear()
        if self._root is not None and reduce:
            reduce_gradients(self._root)

    def sum_shared(self) -> None:
        """Add up the gradients of shared parameters, complete and reduced, over their stages."""
        for shared in self._shared:
            shared.sum_gradients()


# --- the cut ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class CutModule:
    """Record of a module of which this rank has kept a part.

    Attributes:
        settings: Options that the cut depends on.
        units: FSDP2 units of the whole model.
        order: Position of every parameter and buffer in the state dict of the whole model.
        aliases: First name in the whole model by name of a tied parameter in this part.
        ties: First name by further name of tied parameters in the whole state dict.
        numels: Parameters of each stage; shared ones are counted in each.
        numel_of: Elements of every parameter of the whole model, tied ones once.
        num_trained: Elements of those that are trained.
        embeddings: Weights of embeddings in the whole model, by all names that they have.
        vocabulary: Weights of embeddings and heads, likewise.
    """

    settings: Mapping[str, object]
    plan: PipelinePlan
    stages: tuple[int, ...]
    units: ChosenUnits
    order: Mapping[str, int]
    aliases: Mapping[str, str]
    ties: Mapping[str, str]
    numels: tuple[int, ...]
    numel_of: Mapping[str, int]
    num_trained: int
    embeddings: frozenset[str]
    vocabulary: frozenset[str]

    def parameters_of(self, module: nn.Module, names: frozenset[str]) -> list[nn.Parameter]:
        """Return the parameters of this part that have one of the names."""
        return [p for n, p in module.named_parameters() if clean_name(n) in names]


def cut_of(module: nn.Module | None) -> CutModule | None:
    """Return the record of a module that was cut; None if it is whole."""
    return None if module is None else module.__dict__.get(_RECORD)


def remember_cut(module: LightningModule, record: CutModule) -> None:
    """Keep the record in the module; it is not built again from now on."""
    module.__dict__[_RECORD] = record
    module.configure_model = already_configured  # type: ignore[method-assign]


def cut(
    module: LightningModule,
    options: PipelineOptions,
    ranks: PipelineRanks,
    settings: Mapping[str, object],
    units: UnitSelector,
) -> CutModule:
    """Reduce a whole module, in place, to the stages of this rank.

    The module may be on the meta device. ``units`` are chosen in the whole module, so that all
    ranks refuse the same; None for its layers. Errors as ``plan_stages`` and ``choose_units``.
    """
    num_stages = ranks.size * options.stages_per_rank
    plan = plan_stages(module, num_stages, options.split, trunk=options.trunk)
    if (channels := hidden_size(module, plan)) is not None:
        options.check_hidden_size(channels)
    stages = stages_of_rank(options.schedule, ranks.rank, num_stages, ranks.size)
    layers = ChosenUnits(frozenset(plan.layers), "the layers of this rank")
    chosen = layers if units is None else choose_units(module, units)
    names = [clean_name(name) for name in module.state_dict()]
    ties = tied_names(module)
    words = _names_of(module, embedding_params(module))
    tables = _names_of(module, [table.weight for table in embeddings(module)])
    numel_of = {clean_name(name): p.numel() for name, p in module.named_parameters()}
    num_trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    numels = [0] * num_stages
    shared = {name: each.stages for each in plan.shared for name in each.names}
    for name, numel in numel_of.items():
        for stage in shared.get(name) or plan.stages_of(name):
            numels[stage] += numel
    mark_embedding_params(module)
    keep_stages(module, plan, stages)
    kept = {clean_name(name) for name, _ in module.named_parameters()}
    return CutModule(
        settings=settings,
        plan=plan,
        stages=stages,
        units=chosen,
        order={name: place for place, name in enumerate(names)},
        aliases={name: ties[name] for name in kept & ties.keys()},
        ties=ties,
        numels=tuple(numels),
        numel_of=numel_of,
        num_trained=num_trained,
        embeddings=tables,
        vocabulary=words,
    )


def _names_of(module: nn.Module, parameters: Sequence[Tensor]) -> frozenset[str]:
    wanted = {id(parameter) for parameter in parameters}
    named = module.named_parameters(remove_duplicate=False)
    return frozenset(clean_name(name) for name, parameter in named if id(parameter) in wanted)


def place(module: LightningModule, precision: FullyShardedPrecision, device: torch.device) -> None:
    """Bring a part that is not sharded to its device and dtype; idempotent."""
    precision.convert_module(module)
    initialize_meta_tensors(module, device)
    module.to(device)


def shared_tensors(
    module: LightningModule,
    record: CutModule,
    ranks: PipelineRanks,
    options: PipelineOptions,
    min_quantized_numel: int,
) -> list[SharedTensor]:
    """Return parameters that several ranks of the pipeline hold, in one order on all of them."""
    named = {clean_name(n): p for n, p in module.named_parameters(remove_duplicate=False)}
    found = []
    for shared in record.plan.shared:
        sizes = record.plan.num_stages, ranks.size
        places = sorted({rank_of_stage(options.schedule, s, *sizes) for s in shared.stages})
        if len(places) > 1:
            group: dist.ProcessGroup = ranks.holders(places)
            own = next((named[name] for name in shared.names if name in named), None)
            name, numel = shared.names[0], record.numel_of[shared.names[0]]
            codec = options.tied_codec() if numel >= min_quantized_numel else None
            found.append(SharedTensor(name, own, group, codec))
    return found


def describe_shared(found: Iterable[SharedTensor], option: str) -> str:
    """Return a line per parameter; ``option`` is the strategy's ``tied_gradients``."""
    lines = []
    for shared in found:
        code = "full precision" if shared.codec is None else shared.codec.code
        lines.append(
            f"gradients of `{shared.name}` travel in {code} between the ranks that hold it "
            f"(tied_gradients={option!r})"
        )
    return "\n".join(lines)
