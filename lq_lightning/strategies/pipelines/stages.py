"""Cut a LightningModule down to the stages of this rank, once, and keep a record of the cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lq_lightning.data_parallel import embedding_params
from lq_lightning.foundation.meta_start import initialize_meta_tensors
from lq_lightning.foundation.parameters import clean_name, embeddings, tied_names
from lq_lightning.pipeline.partition import keep_stages
from lq_lightning.pipeline.plan import PipelinePlan, SharedParameter, plan_stages
from lq_lightning.pipeline.schedules import rank_of_stage, stages_of_rank
from lq_lightning.plugins import FullyShardedPrecision
from lq_lightning.strategies.options import UnitSelector
from lq_lightning.strategies.pipelines.gradients import SharedTensor
from lq_lightning.strategies.pipelines.options import PipelineOptions
from lq_lightning.strategies.pipelines.ranks import PipelineRanks
from lq_lightning.strategies.sharding import (
    ChosenUnits,
    already_configured,
    choose_units,
)

_RECORD = "_lq_cut"  # kept in the module, so that both are freed together


@dataclass(frozen=True, kw_only=True, slots=True)
class CutModule:
    """Record of a module of which this rank has kept a part.

    Attributes:
        settings: Options that the cut depends on.
        plan: Modules of each stage.
        stages: Indices of this rank's stages.
        units: FSDP2 units of the whole model.
        order: Place of every parameter and buffer in the state dict of the whole model.
        aliases: First name in the whole model by name of a tied parameter in this part.
        ties: First name by further name of tied parameters in the whole state dict.
        numels: Parameters of each stage; shared ones are counted in each.
        numel_of: Elements of every parameter of the whole model, tied ones once.
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

    Args:
        module: Whole model on any device, the meta device too.
        units: Chosen in the whole module, so that all ranks refuse the same; None are its layers.

    Raises:
        ValueError, NotImplementedError: As ``plan_stages`` and ``choose_units``.
    """
    num_stages = ranks.size * options.stages_per_rank
    plan = plan_stages(module, num_stages, options.split, trunk=options.trunk)
    stages = stages_of_rank(options.schedule, ranks.rank, num_stages, ranks.size)
    layers = ChosenUnits(frozenset(plan.layers), "the layers of this rank")
    chosen = layers if units is None else choose_units(module, units)
    names = [clean_name(name) for name in module.state_dict()]
    ties = tied_names(module)
    words = _names_of(module, embedding_params(module))
    tables = _names_of(module, [table.weight for table in embeddings(module)])
    numel_of = {clean_name(name): p.numel() for name, p in module.named_parameters()}
    numels = [0] * num_stages
    for name, numel in numel_of.items():
        for stage in _stages_of(plan, name):
            numels[stage] += numel
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
        embeddings=tables,
        vocabulary=words,
    )


def _names_of(module: nn.Module, parameters: Sequence[Tensor]) -> frozenset[str]:
    wanted = {id(parameter) for parameter in parameters}
    named = module.named_parameters(remove_duplicate=False)
    return frozenset(clean_name(name) for name, parameter in named if id(parameter) in wanted)


def _stages_of(plan: PipelinePlan, name: str) -> tuple[int, ...]:
    shared = next((s.stages for s in plan.shared if name in s.names), None)
    return plan.stages_of(name) if shared is None else shared


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
    """Parameters that several ranks of the pipeline hold, in one order on all of them."""
    named = {clean_name(n): p for n, p in module.named_parameters(remove_duplicate=False)}
    found = []
    for shared in record.plan.shared:
        places = _places(shared, record.plan.num_stages, ranks.size, options.schedule)
        if len(places) > 1:
            group: dist.ProcessGroup = ranks.holders(places)
            own = next((named[name] for name in shared.names if name in named), None)
            name, numel = shared.names[0], record.numel_of[shared.names[0]]
            codec = options.tied_codec() if numel >= min_quantized_numel else None
            found.append(SharedTensor(name, own, group, codec))
    return found


def describe_shared(found: Iterable[SharedTensor], option: str) -> str:
    """One line per parameter for people; ``option`` is the strategy's ``tied_gradients``."""
    lines = []
    for shared in found:
        code = "full precision" if shared.codec is None else shared.codec.name
        lines.append(
            f"gradients of `{shared.name}` travel in {code} between the ranks that hold it "
            f"(tied_gradients={option!r})"
        )
    return "\n".join(lines)


def _places(shared: SharedParameter, num_stages: int, size: int, schedule: str) -> list[int]:
    return sorted({rank_of_stage(schedule, stage, num_stages, size) for stage in shared.stages})
