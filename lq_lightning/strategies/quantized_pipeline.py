"""``Trainer(strategy="quantized_pipeline")``: pipeline parallelism with coded boundaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lq_lightning._compat.lightning import set_device_mesh
from lq_lightning._compat.modules import initialize_root
from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel import GradientQuantization, Topology, WeightQuantization
from lq_lightning.foundation.reporting import QuantizationReport
from lq_lightning.pipeline.aq_sgd import AQSGDQuantization
from lq_lightning.pipeline.boundary import TAHQuantization
from lq_lightning.pipeline.plan import PipelinePlan
from lq_lightning.pipeline.schedules import SPLIT_SCHEDULES, stages_of_rank
from lq_lightning.pipeline.split_backward import check_not_compiled
from lq_lightning.strategies.failures import explain_lost_rank
from lq_lightning.strategies.fully_sharded import DEFAULT_TIMEOUT
from lq_lightning.strategies.pipelined import PipelinedStrategy
from lq_lightning.strategies.pipelines.adaptive import check_learner, connect_learner
from lq_lightning.strategies.pipelines.options import PipelineOptions, check_module
from lq_lightning.strategies.pipelines.ranks import PipelineRanks, stage_topology
from lq_lightning.strategies.pipelines.run import PipelineRun
from lq_lightning.strategies.pipelines.stages import (
    CutModule,
    cut,
    cut_of,
    describe_shared,
    place,
    remember_cut,
    shared_tensors,
)
from lq_lightning.strategies.sharding import check_settings, compile_units
from lq_lightning.strategies.units import ChosenUnits, UnitSelector, find_units

__all__ = ["PipelineLayout", "QuantizedPipelineStrategy"]

ScheduleName = Literal["gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zero_bubble", "zbv"]
Split = Literal["parameters"] | list[int] | dict[str, float]
IntegerName = Literal["int2", "int3", "int4", "int5", "int6", "int7", "int8"]
CodecName = Literal["tah", "tah5", "amaq", "none", "bf16", "fp8"] | IntegerName


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineLayout:
    """The pipeline of a run, as one of its ranks sees it.

    Attributes:
        schedule: Order of forward and backward passes.
        pipeline_size: Ranks along the pipeline.
        num_microbatches: The most that a training batch is cut into.
        stages_per_rank: Stages on each rank.
        rank: Place of this rank in its pipeline, from 0 on.
        stages: Indices of its stages.
        kept_nbytes: Bytes that a micro-batch keeps before, and between, halves of backward passes.
    """

    schedule: str
    pipeline_size: int
    num_microbatches: int
    stages_per_rank: int
    rank: int
    stages: tuple[int, ...]
    kept_nbytes: tuple[int, int]


class QuantizedPipelineStrategy(PipelinedStrategy):
    """Pipeline parallelism for any LightningModule around a stack of layers, with few bits between.

    The layers are cut into stages, one or more per rank; a batch is cut into micro-batches, whose
    hidden states and gradients cross the boundaries as codes (TAH-Quant). ``training_step`` and the
    other steps stay as they are and see one micro-batch at a time; losses are averaged over
    micro-batches. With more ranks than ``pipeline_size`` there are several pipelines beside each
    other, on other data: the ranks that hold the same layers shard them as ``"quantized_fsdp"``
    does, with its options.

    The ranks form a mesh ``[pipeline, data_parallel]``. The pipeline is the outer axis: neighbours,
    which share a machine, hold the same layers, and boundaries fall between machines, where they
    need a fraction of the bytes that data parallelism would.

    With one rank along the pipeline this is ``"quantized_fsdp"``.

    Args:
        pipeline_size: Ranks along the pipeline; ``None`` are all. It has to divide their number.
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
        forward_codec: What hidden states travel as: ``"tah5"`` (5 bits), ``"tah"`` (3 and 4
            bits, the paper's), ``"aq_sgd"`` (differences to the same sample an epoch ago),
            ``"amaq"`` (as many bits per channel as the callback ``AdaptiveBits`` learns),
            ``"int2"`` to ``"int8"``, ``"fp8"``, ``"bf16"`` or ``"none"``. Or a
            ``TAHQuantization``, an ``AQSGDQuantization`` or a ``CodecSpec``. Their tiles have to
            divide the hidden size.
        backward_codec: What their gradients travel as; any of these but ``"aq_sgd"``;
            ``"amaq"``, with the widths of hidden states, only where ``forward_codec`` is. The paper
            of TAH-Quant has ``"int6"``.
        tied_gradients: What gradients of weights that the first and the last stage hold (an
            embedding that is also the head) travel as between them, once per optimizer step:
            ``"int8"``, ``"int4"`` or ``"none"``. ``"auto"`` is ``"none"`` where ``backward_codec``
            is, else ``"int8"``. They are as large as the vocabulary: over slow links untie them.
        count_targets: A function from a batch, or a part of one, to the number of its targets, by
            which the losses of micro-batches are weighted, and what they log as means. ``None``:
            means of ``cross_entropy`` are those of the batch where its targets are made of the
            batch alone, and a warning says so where that cannot be seen.
        weights: As in ``QuantizedFSDPStrategy``, among the ranks of a stage; so are all options
            from here on.
        gradients: How gradients are reduced.
        replica: Where the weights that differences refer to are kept.
        node_size: Ranks per node; ``None`` takes it from Lightning.
        min_quantized_numel: Smaller tensors travel in full precision.
        units: Which modules of the whole model are gathered as one piece, on the stage that holds
            them; ``None`` are the layers.
        reshard_after_forward: Has to be False with several stages: weights stay gathered during a
            batch, as every micro-batch needs them.
        reduce_every_microbatch: With ``accumulate_grad_batches``, reduce gradients after every
            batch instead of once per optimizer step; never for each part of a batch.
        skip_nonfinite_steps: Leave out optimizer steps with infinite or NaN gradients, on all ranks
            together.
        check_replicas_every_n_steps: Compare checksums of the weight replicas that often; 0 never.
        on_drift: What to do if replicas differ.
        compile_units: ``torch.compile`` the forward of each unit.
        save_distributed_checkpoint: Write checkpoint directories with one file per rank; otherwise
            single files. Both hold the whole model by its original names.
        verify_checkpoints: Compare checkpoints with their checksums before anything is loaded.
        process_group_backend: ``None`` for NCCL on GPUs and gloo on CPUs.
        timeout: How long a rank waits for others before the run fails; a number is seconds.
        seed: Base of the seeds of stochastic rounding.

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
        forward_codec: CodecName
        | Literal["aq_sgd"]
        | TAHQuantization
        | AQSGDQuantization
        | CodecSpec = "tah5",
        backward_codec: CodecName | TAHQuantization | CodecSpec = "tah5",
        tied_gradients: Literal["auto", "int8", "int4", "none"] = "auto",
        count_targets: Callable[[Any], Any] | None = None,
        weights: Literal["auto", "qWD", "qW", "none"] | WeightQuantization = "auto",
        gradients: Literal["auto", "TLq-HS", "TLq", "ULq", "QuanGrad", "none"]
        | GradientQuantization = "auto",
        replica: Literal["auto", "full", "node"] = "auto",
        node_size: int | None = None,
        min_quantized_numel: int = 4096,
        units: list[str] | Callable[[nn.Module], bool] | None = None,
        reshard_after_forward: bool = False,
        reduce_every_microbatch: bool = False,
        skip_nonfinite_steps: bool = False,
        check_replicas_every_n_steps: int = 100,
        on_drift: Literal["resync", "raise"] = "resync",
        compile_units: bool = False,
        save_distributed_checkpoint: bool = True,
        verify_checkpoints: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        seed: int = 0,
    ) -> None:
        """Check the options; nothing is started."""
        super().__init__(
            weights=weights,
            gradients=gradients,
            replica=replica,
            node_size=node_size,
            min_quantized_numel=min_quantized_numel,
            units=units,
            reshard_after_forward=reshard_after_forward,
            reduce_every_microbatch=reduce_every_microbatch,
            skip_nonfinite_steps=skip_nonfinite_steps,
            check_replicas_every_n_steps=check_replicas_every_n_steps,
            on_drift=on_drift,
            compile_units=compile_units,
            save_distributed_checkpoint=save_distributed_checkpoint,
            verify_checkpoints=verify_checkpoints,
            process_group_backend=process_group_backend,
            timeout=timeout,
            seed=seed,
        )
        self._options = PipelineOptions(
            pipeline_size=pipeline_size,
            schedule=schedule,
            num_microbatches=num_microbatches,
            stages_per_rank=stages_per_rank,
            split=split,
            trunk=trunk,
            forward_codec=forward_codec,
            backward_codec=backward_codec,
            tied_gradients=tied_gradients,
            count_targets=count_targets,
        )
        self._options.check(type(self).__name__)
        if reshard_after_forward and pipeline_size != 1:
            raise ValueError(
                f"`{type(self).__name__}(reshard_after_forward=True)` would gather the weights of "
                "a stage again for every micro-batch: leave it False, or set `pipeline_size=1`."
            )
        if compile_units and schedule in SPLIT_SCHEDULES and pipeline_size != 1:
            raise ValueError(
                f"`{type(self).__name__}(schedule={schedule!r}, compile_units=True)`: the schedule "
                "splits backward passes, which compiled graphs do not support. Choose '1f1b' or "
                "'interleaved_1f1b', or do not compile units."
            )

    # --- environment ------------------------------------------------------------------------------

    @property
    def pipeline_size(self) -> int:
        """Ranks along the pipeline.

        Raises:
            ValueError: They do not divide the world.
        """
        return self._options.size(type(self).__name__, self.world_size)

    @property
    def pipeline(self) -> PipelineLayout | None:
        """The pipeline of this run; ``None`` before it starts, or with one rank along it."""
        if self._ranks is None:
            return None
        options, size = self._options, self._ranks.size
        num_stages = size * options.stages_per_rank
        return PipelineLayout(
            schedule=options.schedule,
            pipeline_size=size,
            num_microbatches=options.microbatches(size),
            stages_per_rank=options.stages_per_rank,
            rank=self._ranks.rank,
            stages=stages_of_rank(options.schedule, self._ranks.rank, num_stages, size),
            kept_nbytes=(0, 0) if self._run is None else self._run.engine.kept_nbytes,
        )

    @property
    def num_parameters(self) -> int | None:
        """Parameters of the whole model, over all stages; ``None`` before it is cut."""
        return None if self._cut is None else sum(self._cut.numel_of.values())

    @property
    def backwards_per_batch(self) -> int:
        """Backward passes whose gradients add up in a batch."""
        return 1 if self.pipeline is None else self.pipeline.num_microbatches

    def topology(self) -> Topology:
        """Ranks and nodes that share the layers of this rank."""
        if self.pipeline_size == 1:
            return super().topology()
        per_node = self.num_processes if self._node_size is None else self._node_size
        return stage_topology(self.world_size, self.global_rank, self.pipeline_size, per_node)

    def setup_environment(self) -> None:
        """Start the process group and make the mesh, once.

        Raises:
            ValueError: The options do not go with the number of ranks.
        """
        size = self.pipeline_size
        self._options.check_schedule(size)
        if size > 1:
            callbacks = self._require_module().trainer.callbacks  # type: ignore[attr-defined]
            check_learner(type(self).__name__, self._options, callbacks)
        super().setup_environment()
        if size == 1:
            return
        if self._ranks is None or not dist.is_initialized():
            with explain_lost_rank(self.global_rank, self.world_size):
                self._ranks = PipelineRanks(size, self.root_device)
        self._device_mesh = self._ranks.mesh
        set_device_mesh(self._require_module(), self._ranks.mesh)

    # --- setup ------------------------------------------------------------------------------------

    def settings(self) -> dict[str, object]:
        """Options that a later Trainer of the same module has to repeat."""
        own: dict[str, object] = {}
        if self.pipeline_size > 1:
            options = self._options
            own = {
                "pipeline_size": self.pipeline_size,
                "stages_per_rank": options.stages_per_rank,
                "split": options.split,
                "trunk": options.trunk,
                "zbv": options.schedule == "zbv",  # others have stages at the same places
            }
        return {**super().settings(), **own}

    def unit_selector(self) -> UnitSelector | ChosenUnits:
        """The units of the whole model, of which a stage shards what it holds."""
        return self._units if self._cut is None else self._cut.units

    def place_module(self, module: LightningModule) -> None:
        """Keep the stages of this rank, and shard them over the ranks that hold the same.

        Raises:
            ValueError, NotImplementedError: The module cannot be cut.
        """
        ranks = self._ranks
        if ranks is None:
            super().place_module(module)
            return
        check_not_compiled(self._options.schedule, module)
        known = cut_of(module)
        record = known or self._cut_now(module, ranks)
        if known is not None:
            check_settings(module, known.settings, self.settings())
        if ranks.replicas > 1:
            self._shard_once(module)
            initialize_root(cast(FSDPModule, module))
        else:
            place(module, self._fsdp_precision, self.root_device)
            if self._compile_units:
                compile_units(module, find_units(module, self.unit_selector()))
        least = self._min_quantized_numel
        self._shared = tuple(shared_tensors(module, record, ranks, self._options, least))
        if known is None:
            for shared in self._shared:
                shared.share_value()
            if self._shared:
                rank_zero_info(describe_shared(self._shared, self._options.tied_gradients))
        run = self._make_run(module, record, ranks)
        drawn = torch.empty((), dtype=torch.int64, device="cpu").random_()
        run.seeds.of_run = self.checkpoint_ranks.broadcast(int(drawn))
        self._connect_learner(run, ranks, record.plan)

    def _cut_now(self, module: LightningModule, ranks: PipelineRanks) -> CutModule:
        check_module(type(self).__name__, module)
        record = cut(module, self._options, ranks, self.settings(), self._units)
        remember_cut(module, record)
        numels = ", ".join(f"{numel:,}" for numel in record.numels)
        rank_zero_info(
            f"{type(self).__name__}: {ranks.replicas} pipeline(s) of {ranks.size} ranks, schedule "
            f"{self._options.schedule!r}\n{record.plan.summary()}\nparameters per stage: {numels}"
        )
        return record

    def _make_run(
        self, module: LightningModule, record: CutModule, ranks: PipelineRanks
    ) -> PipelineRun:
        if self._run is not None and self._run.module is module:
            self._run.engine.count_again()
            return self._run
        if self._run is not None:
            self._run.engine.close()
        with explain_lost_rank(self.global_rank, self.world_size):
            self._run = PipelineRun(module, self._fsdp_precision, self._options, ranks, record)
        return self._run

    def _connect_learner(self, run: PipelineRun, ranks: PipelineRanks, plan: PipelinePlan) -> None:
        callbacks = run.module.trainer.callbacks  # type: ignore[attr-defined]
        with explain_lost_rank(self.global_rank, self.world_size):
            connect_learner(callbacks, run, self._options, ranks, plan)

    def quantization_report(self) -> QuantizationReport | None:
        """What crosses boundaries, and what is reduced and gathered within stages."""
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
