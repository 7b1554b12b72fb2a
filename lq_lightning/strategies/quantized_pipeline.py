"""``Trainer(strategy="quantized_pipeline")``: pipeline parallelism with coded boundaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lq_lightning._compat.lightning import accumulation_window, set_device_mesh, show_whole_totals
from lq_lightning._compat.modules import initialize_root
from lq_lightning._compat.tensor_parallel import TENSOR
from lq_lightning.checkpoint.checkpointer import ALL_RANKS, ModelLayout, show_shards
from lq_lightning.checkpoint.ranks import RankGroup
from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel import Topology
from lq_lightning.foundation.checks import counted
from lq_lightning.foundation.groups import distrust_groups
from lq_lightning.foundation.reporting import QuantizationReport
from lq_lightning.pipeline.aq_sgd import AQSGDQuantization
from lq_lightning.pipeline.message import TAHQuantization
from lq_lightning.pipeline.schedules import SPLIT_SCHEDULES, stages_of_rank
from lq_lightning.pipeline.split_backward import check_not_compiled
from lq_lightning.strategies.checks import check_meshes
from lq_lightning.strategies.fully_sharded import FullyShardedStrategy
from lq_lightning.strategies.gradient_norm import GradientNorm
from lq_lightning.strategies.options import FSDPOptions, UnitSelector, check_option_names
from lq_lightning.strategies.pipelines.checkpoints import StageLayout
from lq_lightning.strategies.pipelines.options import (
    PipelineOptions,
    check_module,
    check_stage_optimizer,
    make_stage_optimizer,
)
from lq_lightning.strategies.pipelines.run import PipelineRun
from lq_lightning.strategies.pipelines.stages import (
    CutModule,
    PipelineGradients,
    PipelineRanks,
    SharedTensor,
    cut,
    cut_of,
    describe_shared,
    place,
    remember_cut,
    shared_tensors,
    stage_topology,
)
from lq_lightning.strategies.sharding import (
    ChosenUnits,
    check_settings,
    compile_units,
    find_units,
)
from lq_lightning.strategies.tensor_parallel import data_topology

ScheduleName = Literal["gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zero_bubble", "zbv"]
Split = Literal["parameters"] | list[int] | dict[str, float]
IntegerName = Literal["int2", "int3", "int4", "int5", "int6", "int7", "int8"]
BackwardName = Literal["none", "bf16", "fp8"] | IntegerName
ForwardName = BackwardName | Literal["tah", "tah5", "aq_sgd", "amaq"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineLayout:
    """The pipeline of a run, as one of its ranks sees it.

    Attributes:
        pipeline_size: Ranks along the pipeline.
        num_microbatches: The most that a training batch is cut into.
        rank: Place of this rank in its pipeline, from 0 on.
        stages: Indices of its stages.
        numels: Parameters of every stage; shared ones are counted in each.
    """

    schedule: str
    pipeline_size: int
    num_microbatches: int
    stages_per_rank: int
    rank: int
    stages: tuple[int, ...]
    numels: tuple[int, ...]


class QuantizedPipelineStrategy(FullyShardedStrategy):
    """Pipeline parallelism for any LightningModule around a stack of layers, with few bits between.

    The layers are cut into stages, one or more per rank; a batch is cut into micro-batches, whose
    hidden states and gradients cross the boundaries as codes (TAH-Quant). ``training_step`` and the
    other steps stay as they are and see one micro-batch at a time; losses are averaged over
    micro-batches. With more ranks than ``pipeline_size * tensor_parallel_size`` there are several
    pipelines beside each other, on other data: the ranks that hold the same layers shard them as
    ``"quantized_fsdp"`` does, with its options.

    The ranks form a mesh ``[pipeline, data_parallel, tensor_parallel]``. The pipeline is the outer
    axis: neighbours, which share a machine, hold the same layers, and boundaries fall between
    machines, where they need a fraction of the bytes that data parallelism would. Over a boundary
    each tensor-parallel rank sends its own hidden state: its share of the tokens with sequence
    parallelism, else the whole, as the others do.

    With one rank along the pipeline this is ``"quantized_fsdp"``.

    Args:
        pipeline_size: Ranks along the pipeline; ``None`` are all, or as many as
            ``tensor_parallel_size`` leaves. It has to divide their number.
        schedule: ``"1f1b"`` takes turns with forward and backward passes; ``"eager_1f1b"`` starts
            with more forward passes, for links about as slow as the computation; ``"gpipe"`` runs
            all forward passes first; ``"interleaved_1f1b"`` has several stages on each rank;
            ``"zero_bubble"`` also computes gradients of weights apart, where a rank would wait;
            ``"zbv"`` does so with two stages per rank, there and back.
        num_microbatches: Parts of a training batch. ``None``: the largest number that divides the
            batch and suits the schedule, up to four per rank along the pipeline, which leaves a
            rank waiting for less than a fifth of a step.
        stages_per_rank: Stages on each rank, for ``"interleaved_1f1b"`` and ``"zero_bubble"``.
        split: ``"parameters"`` balances stages by their parameters. A list gives the layers of each
            stage. A mapping from names of modules to costs balances by these
            (``lq_lightning.pipeline.measure.measure_times``).
        trunk: Name of the list of layers to cut, for a model that has several.
        forward_codec: Code of hidden states: ``"tah5"`` (5 bits), ``"tah"`` (3 and 4
            bits, the paper's), ``"aq_sgd"`` (differences to the same sample an epoch ago),
            ``"amaq"`` (as many bits per channel as the callback ``AdaptiveBits`` learns),
            ``"int2"`` to ``"int8"``, ``"fp8"``, ``"bf16"`` or ``"none"``. Or a
            ``TAHQuantization``, an ``AQSGDQuantization`` or a ``CodecSpec``. Their tiles have to
            divide the hidden size.
        backward_codec: Code of their gradients: ``"int2"`` to ``"int8"`` or ``"fp8"``, rounded
            stochastically; ``"bf16"`` or ``"none"``; or a ``CodecSpec`` with
            ``rounding="stochastic"``. The paper of TAH-Quant has ``"int6"``, rounded to nearest.
        tied_gradients: Code of gradients of weights that the first and the last stage hold (an
            embedding that is also the head), exchanged once per optimizer step:
            ``"int8"``, ``"int4"`` or ``"none"``. ``"auto"`` is ``"none"`` where ``backward_codec``
            is, else ``"int8"``. They are as large as the vocabulary: over slow links untie them.
        count_targets: A function from a batch, or a part of one, to the number of its targets, by
            which losses and logged means of micro-batches are weighted. ``None``:
            means of ``cross_entropy`` are those of the batch where its targets are made of the
            batch alone, and a warning says so where that cannot be seen.
        reshard_after_forward: Has to be False with several stages: weights stay gathered during a
            batch, as every micro-batch needs them.
        options: Options of ``QuantizedFSDPStrategy`` except ``local_steps``, for the ranks of a
            stage. ``units`` selects from the whole model, and None means the layers;
            ``reduce_every_microbatch`` reduces after every batch of an accumulation, never after a
            micro-batch; single-file checkpoints too hold the whole model by its original names.

    Raises:
        ValueError: An option has a value outside its choices, or does not go with the others.
        TypeError: An option does not exist.
    """

    strategy_name = "quantized_pipeline"

    def __init__(
        self,
        pipeline_size: int | None = None,
        schedule: ScheduleName = "1f1b",
        num_microbatches: int | None = None,
        stages_per_rank: int = 1,
        split: Split = "parameters",
        trunk: str | None = None,
        forward_codec: ForwardName | TAHQuantization | AQSGDQuantization | CodecSpec = "tah5",
        backward_codec: BackwardName | CodecSpec = "int5",
        tied_gradients: Literal["auto", "int8", "int4", "none"] = "auto",
        count_targets: Callable[[Any], Any] | None = None,
        *,
        reshard_after_forward: bool = False,
        **options: Any,
    ) -> None:
        given = locals()
        check_option_names(QuantizedPipelineStrategy, options)  # from a subclass's `__init__`
        super().__init__(FSDPOptions(reshard_after_forward=reshard_after_forward, **options))
        own = {field.name: given[field.name] for field in fields(PipelineOptions)}
        self._pipeline_options = PipelineOptions(**own)
        self._pipeline_options.check(type(self).__name__)
        if reshard_after_forward and pipeline_size != 1:
            raise ValueError(
                f"`{type(self).__name__}(reshard_after_forward=True)` would gather the weights of "
                "a stage again for every micro-batch: leave it False, or set `pipeline_size=1`."
            )
        if self._options.compile_units and schedule in SPLIT_SCHEDULES and pipeline_size != 1:
            raise ValueError(
                f"`{type(self).__name__}(schedule={schedule!r}, compile_units=True)`: the schedule "
                "splits backward passes, which compiled graphs do not support. Choose '1f1b' or "
                "'interleaved_1f1b', or do not compile units."
            )
        self._ranks: PipelineRanks | None = None  # None: no pipeline, but plain FSDP2
        self._run: PipelineRun | None = None
        self._shared: tuple[SharedTensor, ...] = ()
        self._gradients: PipelineGradients | None = None

    @property
    def _cut(self) -> CutModule | None:
        return cut_of(self._attached_module)

    # --- environment ------------------------------------------------------------------------------

    @property
    def pipeline_size(self) -> int:
        """Ranks along the pipeline."""
        return self._pipeline_options.size(type(self).__name__, self.world_size, self._tensor.size)

    @property
    def pipeline(self) -> PipelineLayout | None:
        """The pipeline of this run; ``None`` before it starts, or with one rank along it."""
        if self._ranks is None:
            return None
        options, size = self._pipeline_options, self._ranks.size
        num_stages = size * options.stages_per_rank
        return PipelineLayout(
            schedule=options.schedule,
            pipeline_size=size,
            num_microbatches=options.microbatches(size),
            stages_per_rank=options.stages_per_rank,
            rank=self._ranks.rank,
            stages=stages_of_rank(options.schedule, self._ranks.rank, num_stages, size),
            numels=() if self._cut is None else self._cut.numels,
        )

    @property
    def num_parameters(self) -> int | None:
        """Parameters of the whole model, over all stages; ``None`` before it is cut."""
        return None if self._cut is None else sum(self._cut.numel_of.values())

    @property
    def backwards_per_batch(self) -> int:
        """Number of backward passes whose gradients add up in a batch."""
        return 1 if self.pipeline is None else self.pipeline.num_microbatches

    def topology(self) -> Topology:
        """Ranks and nodes that hold the layers of this rank."""
        if self.pipeline_size == 1:
            return super().topology()
        per_node = self._options.node_size or self.num_processes
        ranks = stage_topology(self.world_size, self.global_rank, self.pipeline_size, per_node)
        return data_topology(type(self).__name__, ranks, self._tensor.size)

    def model_group(self) -> dist.ProcessGroup | None:
        """Ranks of this rank's stage."""
        return None if self._ranks is None else self._ranks.model_group

    def setup_environment(self) -> None:
        """Start the process group and make the mesh, once."""
        size = self.pipeline_size
        self._pipeline_options.check_schedule(size)
        if size > 1:
            callbacks = self._require_module().trainer.callbacks  # type: ignore[attr-defined]
            self._pipeline_options.check_learner(type(self).__name__, callbacks)
        super().setup_environment()
        if size == 1:
            return
        if self._ranks is None or not dist.is_initialized():
            with self._failures.explained():
                self._ranks = PipelineRanks(size, self._tensor.size, self.root_device)
        self._device_mesh = self._ranks.mesh
        part = "each stage" if self._tensor.size == 1 else "each tensor-parallel part of a stage"
        self.why_alone = f"{part} is on one rank, so its weights and gradients do not travel"
        set_device_mesh(self._require_module(), self._ranks.mesh)

    # --- setup ------------------------------------------------------------------------------------

    def settings(self) -> dict[str, object]:
        """Options that a later Trainer of the same module has to repeat."""
        if self.pipeline_size == 1:
            return super().settings()
        options = self._pipeline_options
        return {
            **super().settings(),
            "pipeline_size": self.pipeline_size,
            "stages_per_rank": options.stages_per_rank,
            "split": options.split,
            "trunk": options.trunk,
            "zbv": options.schedule == "zbv",  # all others have stages at the same places
        }

    def on_sharded(self, module: LightningModule) -> Any:
        """Install the quantized collectives among the ranks of a stage."""
        if self._cut is None:
            return super().on_sharded(module)
        vocabulary = self._cut.parameters_of(module, self._cut.vocabulary)
        return self._collectives.install(module, self.topology(), vocabulary)

    def unit_selector(self) -> UnitSelector | ChosenUnits:
        """Units of the whole model; a stage shards those that it holds."""
        return self._options.units if self._cut is None else self._cut.units

    def place_module(self, module: LightningModule) -> None:
        """Keep the stages of this rank, sharded over the ranks that hold the same ones."""
        ranks = self._ranks
        if ranks is None:
            super().place_module(module)
            return
        check_not_compiled(self._pipeline_options.schedule, module)
        known = cut_of(module)
        drafts = self._draft_plans(module)  # before it is cut
        record = known or self._cut_now(module, ranks)
        if known is not None:
            check_settings(module, known.settings, self.settings())
        if ranks.share_layers:
            self._parallelize(module, drafts)
            self._shard_once(module)
            initialize_root(cast(FSDPModule, module))
        else:
            place(module, self._fsdp_precision, self.root_device)
            if self._options.compile_units:
                compile_units(module, find_units(module, self.unit_selector()))
        least = self._options.min_quantized_numel
        # makes process groups, in one order on all ranks
        self._shared = tuple(shared_tensors(module, record, ranks, self._pipeline_options, least))
        if known is None:
            for shared in self._shared:
                shared.share_value()
            if self._shared:
                rank_zero_info(describe_shared(self._shared, self._pipeline_options.tied_gradients))
        note = (
            "The rows of this table are of rank 0, which has the first of "
            f"{record.plan.num_stages} stages; the sums below it are of the whole model."
        )
        sums = sum(record.numel_of.values()), record.num_trained
        show_whole_totals(module.trainer, *sums, note)
        run = self._make_run(module, record, ranks)
        # stages draw from one seed, so that code in front of the layers draws alike on all of them
        drawn = torch.empty((), dtype=torch.int64, device="cpu").random_()
        run.seeds.of_run = ALL_RANKS.broadcast(int(drawn))
        run.connect_learner(module.trainer.callbacks)  # type: ignore[attr-defined]

    def _cut_now(self, module: LightningModule, ranks: PipelineRanks) -> CutModule:
        check_module(type(self).__name__, module)
        check_meshes(module, ranks.mesh)
        record = cut(module, self._pipeline_options, ranks, self.settings(), self._options.units)
        remember_cut(module, record)
        numels = ", ".join(f"{numel:,}" for numel in record.numels)
        rank_zero_info(
            f"{type(self).__name__}: {counted(ranks.replicas, 'pipeline')} of {ranks.size} x "
            f"{ranks.tensor_size} ranks, schedule {self._pipeline_options.schedule!r}\n"
            f"{record.plan.summary()}\n"
            f"parameters per stage: {numels}"
        )
        return record

    def _make_run(
        self, module: LightningModule, record: CutModule, ranks: PipelineRanks
    ) -> PipelineRun:
        if self._run is not None and self._run.module is module:
            return self._run
        if self._run is not None:
            self.parts.remove(self._run)
            self._run.engine.close()
            self._run = None
        self._run = PipelineRun(module, self._fsdp_precision, self._pipeline_options, ranks, record)
        self.parts.append(self._run)
        return self._run

    def quantization_report(self) -> QuantizationReport | None:
        """Report also bytes over stage boundaries and of tied gradients."""
        report = super().quantization_report()
        if self._run is None:
            return report
        own = self._run.report()
        tied = float(sum(shared.sent_nbytes for shared in self._shared))
        own = replace(own, counts={**own.counts, "bytes_tied_gradients": tied})
        if report is None:
            return replace(own, totals={"skipped_steps": self.num_skipped_steps})
        return replace(
            report, counts={**report.counts, **own.counts}, ratios={**report.ratios, **own.ratios}
        )

    # --- checkpoints ------------------------------------------------------------------------------

    def model_layout(self) -> ModelLayout:
        """How the attached module is spread over the ranks."""
        if self._ranks is None:
            return super().model_layout()
        module, record = self._require_module(), self._cut
        shards, control = RankGroup(group=self._ranks.model_group), self._ranks.control_group
        if record is None:
            return ModelLayout(module=module, shard_ranks=shards)
        return StageLayout(module=module, shard_ranks=shards, cut=record, control_group=control)

    def on_exception(self, exception: BaseException) -> None:
        """Drop groups in which messages of this run may wait for a later run."""
        if self._run is not None and self._run.engine.failed is not None:
            distrust_groups()
        super().on_exception(exception)

    def teardown(self) -> None:
        """Free the samples that codecs keep."""
        if self._run is not None:
            self._run.forget()
        super().teardown()

    # --- data -------------------------------------------------------------------------------------

    def same_batch_groups(self) -> list[dist.ProcessGroup]:
        """Groups over the stages and over the tensor-parallel ranks of a pipeline."""
        if self._ranks is None:
            return []
        return [self._ranks.control_group, self._ranks.mesh.get_group(TENSOR)]

    def full_precision_states(self, quantize_embeddings: bool) -> list[nn.Parameter]:
        """Parameters whose optimizer states must not be rounded.

        Parameters that other stages hold too have to be updated alike there. An embedding of the
        whole model may look like any other matrix in this part of it.
        """
        if self._cut is None:
            return []
        names = frozenset(name for shared in self._cut.plan.shared for name in shared.names)
        if not quantize_embeddings:
            names |= self._cut.embeddings
        return self._cut.parameters_of(self._require_module(), names)

    # --- gradients --------------------------------------------------------------------------------

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizer of this rank's stages."""
        make = partial(super().setup_optimizers, trainer)
        self._fsdp_precision.clip_norm = self._gradients = self._norm = None
        if self._ranks is None:
            make()
            self._say_that_nothing_is_cut()
            return
        ALL_RANKS.together(partial(make_stage_optimizer, make))
        if all(shared.codec is None for shared in self._shared):
            why = "no weights of `min_quantized_numel` elements are on several ranks"
            self._collectives.warn_without_effect(("tied_gradients",), why)
        self._steps.defers = False  # a schedule always does
        for optimizer in self.optimizers:
            check_stage_optimizer(type(self).__name__, optimizer)
        if self.optimizers:
            module = self._require_module()
            self._gradients = PipelineGradients(module, self.optimizers[0], self._shared)
            self._norm = self.make_norm()
            self._fsdp_precision.clip_norm = self._norm.clip

    def _say_that_nothing_is_cut(self) -> None:
        why = "with one rank along the pipeline the model is not cut, and nothing crosses stages"
        names = [field.name for field in fields(PipelineOptions) if field.name != "pipeline_size"]
        self._collectives.warn_without_effect(names, why)
        if "pipeline_size" not in self.given:
            rank_zero_info(f"{type(self).__name__}: {why}")

    def make_norm(self) -> GradientNorm:
        """Norm of the gradients of all stages; of a tied parameter, the first holder counts."""
        norm = super().make_norm()
        norm.silent = {id(shared.parameter) for shared in self._shared if not shared.is_first}
        return norm

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Hand out the gradients, which the schedule computed within ``training_step``."""
        gradients, module = self._gradients, self._require_module()
        if gradients is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        precision = self._fsdp_precision
        last = accumulation_window(module.trainer).last
        self.pre_backward(closure_loss)
        loss = precision.pre_backward(closure_loss, module)
        with self._guard():
            with precision.handing_out(module):
                gradients.give_back(reduce=last or self._options.reduce_every_microbatch)
            if last:
                gradients.sum_shared()
        loss = precision.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    # --- steps ------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward passes of all micro-batches; return their mean loss."""
        gradients, run = self._gradients, self._run
        if gradients is None or run is None:
            return super().training_step(*args, **kwargs)
        module = self._require_module()
        trainer = module.trainer
        with self._guard(*args):
            count = run.prepare("training_step", args, training=True)
            gradients.start(accumulation_window(trainer).first)
            scale = 1.0 / (count * trainer.accumulate_grad_batches)
            with self._fsdp_precision.adding_up(module):
                result = run.train(scale)
            gradients.hold()  # Lightning calls `zero_grad` between this and `backward`
        return result

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None:
            return super()._evaluate(step, *args, **kwargs)
        with self._guard(*args):
            run.prepare(step.__name__, args, training=False)
            result = run.evaluate(everywhere=step.__name__ == "predict_step")
        if self._is_sharded:
            show_shards(self._attached_module)
        return result
