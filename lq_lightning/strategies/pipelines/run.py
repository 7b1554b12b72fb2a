"""Batches through the pipeline: the user's steps, run by micro-batch and stage."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchmetrics import Metric, MetricCollection

from lq_lightning._compat.modules import begin_root_forward, end_root_forward
from lq_lightning._compat.saved_tensors import hasten_casts, let_go_of_casts, version_of
from lq_lightning._compat.tensor_parallel import plain_loss
from lq_lightning.foundation.agreement import gather_objects
from lq_lightning.foundation.reporting import QuantizationReport
from lq_lightning.foundation.strategy_part import StrategyPart
from lq_lightning.pipeline.aq_sgd import AQSGDCodec
from lq_lightning.pipeline.batches import batch_size, concatenate, sample_ids, split_batch
from lq_lightning.pipeline.boundary_widths import BoundaryWidths, MixedCodec, boundaries_between
from lq_lightning.pipeline.engine import PipelineEngine, agree_on, batch_signature
from lq_lightning.pipeline.interceptor import LayerInterceptor
from lq_lightning.pipeline.message import BoundaryMeta
from lq_lightning.pipeline.partition import StageModule, kept_stages
from lq_lightning.pipeline.random_numbers import RandomNumbers, held_generators, mixed_seed
from lq_lightning.pipeline.schedules import rank_of_stage
from lq_lightning.plugins import FullyShardedPrecision
from lq_lightning.strategies.pipelines.logs import (
    LogRecorder,
    OutcomeBroadcast,
    replay,
    sum_over_pipelines,
    unchanged,
)
from lq_lightning.strategies.pipelines.options import PipelineOptions, learner_of
from lq_lightning.strategies.pipelines.stages import CutModule, PipelineRanks
from lq_lightning.strategies.pipelines.targets import COUNT, BatchMeans


class BatchSeeds:
    """Seeds that are the same on all stages of a pipeline, and differ between batches and replicas.

    They are functions of the seed of the run and of the progress of training, both of which
    checkpoints hold, so that a resumed run goes on with the same numbers. ``replica`` is the index
    of this pipeline; ``of_run``, the seed that all ranks share, is set before the first batch.
    """

    def __init__(self, replica: int) -> None:
        self.of_run = 0
        self._replica = replica
        self._evaluating: tuple[object, ...] = ()
        self._evaluated = 0

    def next(self, trainer: Trainer, step: str, training: bool) -> int:
        """Return the seed of the next batch; call it once for each."""
        place: tuple[object, ...]
        if training:
            place = (trainer.current_epoch, trainer.fit_loop.batch_idx)
        else:
            evaluating = (step, trainer.sanity_checking, trainer.global_step)
            self._evaluated = self._evaluated + 1 if evaluating == self._evaluating else 0
            self._evaluating = evaluating
            place = (*evaluating, self._evaluated)
        return mixed_seed(self.of_run, self._replica, training, *place)


# --- steps of micro-batches ---------------------------------------------------------------------


class StepOutput(NamedTuple):
    """Loss, if the step returned one, and other outputs of a micro-batch; without graph."""

    loss: Tensor | None
    extra: dict[str, Any]


class MicroBatches:
    """Runs the user's step on the micro-batches of one batch, as stages ask for them.

    ``calls`` is the interceptor of the module's layers, ``logs`` the recorder of ``self.log``.
    """

    def __init__(
        self, module: LightningModule, precision: FullyShardedPrecision, calls: LayerInterceptor
    ) -> None:
        self._calls = calls
        self.logs = LogRecorder(module, calls.check)
        self._module = module
        self._metrics = [m for m in module.modules() if isinstance(m, (Metric, MetricCollection))]
        self._precision = precision
        self._root = module if isinstance(module, FSDPModule) else None
        self._step: Callable[..., Any] | None = None
        self._arguments: list[tuple[Any, ...]] = []
        self._scale: float | None = None
        self._shares: Sequence[float] | None = None
        self._means: BatchMeans | None = None
        self._weights: list[Tensor] = []
        self._version = 0
        self._cast: set[object] = set()
        self._outputs: dict[int, StepOutput] = {}

    @contextmanager
    def running(
        self,
        step: str,
        arguments: list[tuple[Any, ...]],
        scale: float | None,
        shares: Sequence[float] | None = None,
        means: BatchMeans | None = None,
    ) -> Generator[None, None, None]:
        """Around the schedule of one batch.

        ``arguments`` of the step are given by micro-batch. Losses are multiplied by ``scale``
        before backward; None in evaluation. ``shares`` are the targets of micro-batches over their
        mean, if somebody counts them; ``means`` corrects means over targets on the last stage.
        """
        self._step, self._arguments, self._scale = getattr(self._module, step), arguments, scale
        self._shares, self._means = shares, means
        self._outputs.clear()
        if self._root is None:
            self._weights = list(self._module.parameters())
        try:
            with self._precision.casting_once() if self._root is None else nullcontext():
                yield
        finally:
            self._step, self._arguments, self._weights = None, [], []
            self._cast.clear()

    def enter(self, part: Callable[[Tensor | None], Any], hidden: Tensor | None) -> Any:
        """Run the part of a stage as a forward of the root unit, in the run's precision.

        ``part`` catches ``StageEnd``: no exception crosses FSDP2's forward.
        """
        self._precision.collect()
        with self._precision.forward_context():
            if self._precision.casts_once:
                return self._enter_with_casts(part, hidden)
            if self._root is None:
                return part(hidden)
            begin_root_forward(self._root)
            return end_root_forward(self._root, part(hidden))

    def _enter_with_casts(self, part: Callable[[Tensor | None], Any], hidden: Tensor | None) -> Any:
        """Run the part of a stage with the casts of weights that earlier micro-batches left."""
        version = sum(version_of(weight) for weight in self._weights)
        if version != self._version:  # by an optimizer, or by the step itself (`max_norm`)
            torch.clear_autocast_cache()
            self._version = version
            self._cast.clear()
        output = part(hidden)
        if part not in self._cast and isinstance(output, Tensor):
            hasten_casts(output)
            if not let_go_of_casts(output):
                self._cast.add(part)
        return output

    def run(self, index: int, is_last: bool) -> Any:
        """Call the user's step on a micro-batch; return the scaled loss, in evaluation the output.

        Only on the last stage do steps come to their end. Logs of other stages, from in front of
        the layers, are dropped: the last stage repeats them.
        """
        if self._step is None:
            raise AssertionError("a stage ran outside of a schedule")
        self._calls.random.start(index)
        with (
            self.logs.recording() if is_last else self.logs.muted(),
            nullcontext() if is_last else unchanged(self._metrics),
            self._means.watching(index) if is_last and self._means else nullcontext(),
        ):
            result = self._step(*self._arguments[index])
        self._calls.check(result, "what the step returns")  # beside the loss, too
        if self._scale is None:
            return _whole(result)
        loss, extra = _split_output(type(self._module).__name__, result)
        loss = None if loss is None else plain_loss(loss)
        if loss is not None and self._shares is not None:
            share = self._shares[index]
            # without a target there may be no number that 0 makes 0, nor its gradient
            loss = loss * share if share else torch.zeros_like(loss).requires_grad_()
        self._outputs[index] = StepOutput(None if loss is None else loss.detach(), _whole(extra))
        if loss is None:  # all ranks hear of it when the schedule is done
            return torch.zeros((), device=self._module.device, requires_grad=True)
        return loss * self._scale

    def in_order(self) -> list[StepOutput]:
        """Return the outputs of the last batch by micro-batch, on the rank of the last stage."""
        return [self._outputs[index] for index in sorted(self._outputs)]


def _whole(outputs: Any) -> Any:
    """Gather DTensors, whose mesh other stages do not have."""
    return apply_to_collection(outputs, DTensor, DTensor.full_tensor)


def _split_output(owner: str, result: Any) -> tuple[Tensor | None, dict[str, Any]]:
    """Split the output of ``training_step`` into the loss and the rest."""
    if result is None:
        return None, {}
    if isinstance(result, Tensor):
        return result, {}
    if isinstance(result, Mapping) and isinstance(result.get("loss"), Tensor):
        # Without graphs, which would be kept until the last micro-batch.
        rest = {k: v.detach() if isinstance(v, Tensor) else v for k, v in result.items()}
        del rest["loss"]
        return result["loss"], rest
    raise TypeError(
        f"`{owner}.training_step` returned a {type(result).__name__}: return the loss, a "
        "dictionary with a tensor under 'loss', or None."
    )


def joined_extra(outputs: Sequence[StepOutput]) -> dict[str, Any]:
    """Join the values that micro-batches returned beside the loss, as if they were one batch.

    Scalars are averaged, other tensors are joined along their first dimension, anything else
    becomes a list.
    """
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for output in outputs for key in output.extra):
        values = [output.extra[key] for output in outputs if key in output.extra]
        if all(isinstance(value, Tensor) for value in values):
            scalar = values[0].ndim == 0
            joined[key] = torch.stack(values).mean(0) if scalar else torch.cat(values)
        else:
            joined[key] = values
    return joined


# --- batches ------------------------------------------------------------------------------------


_BATCHES_TO_CHECK = 3  # checks of means over targets wait for the GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """A batch that all ranks of the pipeline agree on."""

    step: str
    arguments: list[tuple[Any, ...]]  # of the step for each micro-batch
    boundary: BoundaryMeta
    samples: Tensor | None  # identities, for codecs that remember samples
    shares: list[float] | None  # targets of micro-batches over their mean; None: not counted
    seed: int  # of random numbers
    watched: bool  # the first of its shape


class PipelineRun(StrategyPart):
    """Runs the steps of a module of which this rank has kept its stages.

    All ranks of a pipeline make one and call its methods together. ``module`` is this rank's part,
    on its device, sharded or not.

    Attributes:
        remembers: Whether hidden states are coded as differences to earlier ones of the sample.
        seeds: Seeds of the batches.
    """

    def __init__(
        self,
        module: LightningModule,
        precision: FullyShardedPrecision,
        options: PipelineOptions,
        ranks: PipelineRanks,
        record: CutModule,
    ) -> None:
        self.module = module
        num_stages = record.plan.num_stages
        self._options, self._ranks = options, ranks
        kept = kept_stages(module)
        if kept is None:
            raise AssertionError("a pipeline runs modules that were cut")
        self._micro = MicroBatches(module, precision, kept.calls)
        self._stages = {
            stage: StageModule(
                module,
                stage,
                partial(self._micro.run, is_last=stage == num_stages - 1),
                self._micro.enter,
            )
            for stage in record.stages
        }
        kept.calls.random = self._random = RandomNumbers(ranks.device)
        kept.calls.tensor_size = ranks.tensor_size
        self._plan = record.plan
        self.seeds = BatchSeeds(ranks.stage_group.rank())
        self._refused: list[str] = []
        for stage_module in self._stages.values():
            stage_module.refused = self._refused
        last = rank_of_stage(options.schedule, num_stages - 1, num_stages, ranks.size)
        self._outcome = OutcomeBroadcast(ranks, last)
        sum_over_pipelines(module, ranks, self._outcome.share_output)
        self.codecs = options.make_codecs()
        self.remembers = isinstance(self.codecs[0], AQSGDCodec)
        self._learned = isinstance(self.codecs[0], MixedCodec)
        self.engine = PipelineEngine(
            self._stages,
            num_stages,
            ranks.group,
            ranks.control_group,
            ranks.device,
            options.schedule,
            options.microbatches(ranks.size),
            *self.codecs,
        )
        self._boundaries: dict[str, BoundaryMeta] = {}
        self._has_logged_formats = False
        self._batch: _Batch | None = None
        self._has_trained = False
        self._batches_to_check = _BATCHES_TO_CHECK

    def connect_learner(self, callbacks: Iterable[Callback]) -> None:
        """Give the boundaries to the callback that learns their widths, if there is one.

        All ranks of the run call this together.
        """
        learner, codec, ranks = learner_of(callbacks), self.codecs[0], self._ranks
        if learner is None or not isinstance(codec, MixedCodec):
            return
        names = [f"{layers[-1]}:output" for layers in self._plan.stages[:-1]]
        boundaries = BoundaryWidths(
            boundaries_between(self._options.schedule, names, ranks.size),
            self.engine,
            codec,
            ranks.control_group,
            ranks.stage_control_group,
        )
        learner.connect_boundaries(boundaries, self.module)

    def prepare(self, step: str, arguments: tuple[Any, ...], training: bool) -> int:
        """Cut a batch into micro-batches, find the shapes of hidden states; return their number.

        Args:
            arguments: Arguments of the step; the batch comes first.
            training: Whether :meth:`train` follows, not :meth:`evaluate`.

        Raises:
            RuntimeError: On all ranks: they have different batches.
            ValueError: On all ranks: the batch cannot be cut, or hidden states not be encoded.
            NotImplementedError: On all ranks: the layers pass on more than a hidden state.
        """
        batch, *others = arguments
        samples = sample_ids(batch) if self.remembers and training else None
        self.engine.agree(batch, training, samples=samples)
        count = self._options.microbatches_of(batch_size(batch), self._ranks.size, training)
        parts = [(part, *others) for part in split_batch(batch, count)]
        key = f"{step} {count} {batch_signature(batch)}"
        watched = key not in self._boundaries
        if watched:
            self._hold_generators()
        seed = self.seeds.next(self.module.trainer, step, training)
        boundary = self._boundary(key, step, parts)
        for stage in self._stages.values():
            stage.set_boundary(boundary)
            stage.watched = watched
        shares = None if step == "predict_step" else self._options.shares([p[0] for p in parts])
        self._batch = _Batch(
            step=step,
            arguments=parts,
            boundary=boundary,
            samples=samples,
            shares=shares,
            seed=seed,
            watched=watched,
        )
        return count

    def _hold_generators(self) -> None:
        """Find generators that the module keeps where all stages have them."""
        everywhere = self._plan.num_stages
        found = held_generators(self.module)
        shared = {n: g for n, g in found.items() if len(self._plan.stages_of(n)) == everywhere}
        self._random.hold(shared)
        agree_on(
            {f"the state of the generator `{n}`": s for n, s in self._random.held_states().items()},
            "All stages of a pipeline have to draw the same numbers in a step: seed the generators "
            "that the module keeps alike on them, or apart by the data-parallel rank only.",
            self._ranks.control_group,
        )

    def _refuse_together(self, batch: _Batch) -> None:
        """Raise on all ranks if a watched step did something that is refused on any of them."""
        if not batch.watched:
            return
        own = self._refused.copy(), self._random.compared or {}
        everyone = gather_objects(own, self._ranks.control_group)
        self._refused.clear()
        self._random.compared = None
        name = f"`{type(self.module).__name__}.{batch.step}`"
        for refused, _ in everyone:
            if refused:
                raise NotImplementedError(f"{name}: {refused[0]}")
        for index in range(len(batch.arguments)):
            if len(set().union(*(drawn.get(index, set()) for _, drawn in everyone))) > 1:
                raise NotImplementedError(
                    f"{name} draws other random numbers in front of the layers on some stages than "
                    "on others, so that later ones would not be the same: draw as many on every "
                    "rank, whatever it holds."
                )

    def _boundary(self, key: str, step: str, parts: list[tuple[Any, ...]]) -> BoundaryMeta:
        known = self._boundaries.get(key)
        if self._someone_lacks(known is None):
            found: Any = self._probe(step, parts) if 0 in self._stages else None
            failed = found if isinstance(found, Exception) else None
            if known is None:
                found = self.engine.share(found if failed is None else _for_others(failed, step))
            if failed is not None:
                raise failed
            if isinstance(found, Exception):
                raise found
            known = self._boundaries[key] = known or found
            for codec in self.codecs:
                codec.check(known.shape, known.dtype)
            self._log_formats(known)
        if known is None:
            raise AssertionError("unknown boundaries are probed")
        return known

    def _probe(self, step: str, parts: list[tuple[Any, ...]]) -> BoundaryMeta | Exception:
        """Run the first layer; an error is returned, since the other ranks wait to hear of it."""
        try:
            with self._random.batch(0, advance=False), self._micro.running(step, parts, None):
                return self._stages[0].probe(0)
        except Exception as error:
            return error

    def _someone_lacks(self, lacking: bool) -> bool:
        """Return whether any rank with these layers has to probe: they do so together."""
        if not self._ranks.share_layers:
            return lacking
        flag = torch.tensor([lacking], dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._ranks.stage_control_group)
        return bool(flag.item())

    def _log_formats(self, boundary: BoundaryMeta) -> None:
        """Log the formats of the first hidden states."""
        if not self._has_logged_formats:
            self._has_logged_formats = True
            shape, dtype = boundary.shape, boundary.dtype
            bits = [codec.bits_per_value(shape, dtype) for codec in self.codecs]
            names = [codec.name for codec in self.codecs]
            rank_zero_info(
                f"boundaries: {list(shape)} {dtype} per micro-batch, forward as "
                f"{names[0]} ({bits[0]:.2f} bits per value), backward as {names[1]} ({bits[1]:.2f})"
            )

    def forget(self) -> None:
        """Let codecs start over, on all ranks: the weights are others now."""
        for codec in self.codecs:
            codec.forget()

    def on_weights_loaded(self) -> None:
        """Forget the samples of earlier weights."""
        self.forget()

    def extra_state(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """The seed of the run, from which steps get their random numbers."""
        return {"seed_of_steps": self.seeds.of_run}, {}

    def load_extra_state(
        self, values: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Continue with the saved seed; samples that codecs remember are not saved."""
        self.seeds.of_run = int(values.get("seed_of_steps", self.seeds.of_run))
        if self.remembers:
            rank_zero_warn(
                "Checkpoints do not hold the hidden states that the codec 'aq_sgd' keeps of "
                "samples: each sample travels in full precision once again, so that the first "
                "epoch is slower, and the run does not continue bit for bit."
            )

    def train(self, scale: float) -> Any:
        """Run forward and backward passes, which add to the module's gradients.

        Losses are multiplied by ``scale`` before backward.

        Returns:
            As ``training_step``, on all ranks: the mean loss of the micro-batches, on the last
            stage with other returned values; None if a micro-batch had no loss.
        """
        with self._running(scale) as (batch, means):
            self.engine.step(batch.boundary, batch.samples, len(batch.arguments), batch.seed)
            outputs = self._micro.in_order()
        self._refuse_together(batch)
        losses = [output.loss for output in outputs]
        self._check_means(batch.step, losses, means)
        loss = self._share(batch.step, losses, batch.shares)
        if not self._has_trained and loss is not None:
            self._has_trained = True  # a look at the loss waits for the GPU
            _check_first_loss(type(self.module).__name__, batch.step, loss)
        extra = joined_extra(outputs)
        return {**extra, "loss": loss} if extra and loss is not None else loss

    def evaluate(self, everywhere: bool) -> Any:
        """Run forward passes; return the joined outputs on the last stage, or ``everywhere``."""
        with self._running(None) as (batch, _):
            parts = self.engine.evaluate(
                batch.boundary, batch.samples, len(batch.arguments), batch.seed
            )
        self._refuse_together(batch)
        self._share(batch.step, [], batch.shares)
        result = concatenate(parts) if parts else None
        return self._outcome.share_output(result) if everywhere else result

    @contextmanager
    def _running(
        self, scale: float | None
    ) -> Generator[tuple[_Batch, BatchMeans | None], None, None]:
        """Around the schedule of the prepared batch; the last stage corrects means over targets."""
        batch, self._batch = self._batch, None
        if batch is None:
            raise AssertionError("a batch is prepared before it runs")
        counts = batch.shares is None and batch.step != "predict_step" and len(batch.arguments) > 1
        means = BatchMeans(batch.arguments) if counts and self._outcome.is_source else None
        running = self._micro.running(batch.step, batch.arguments, scale, batch.shares, means)
        self._random.compared = {} if batch.watched else None
        with self._random.batch(batch.seed), running:
            yield batch, means

    def _check_means(
        self, step: str, losses: list[Tensor | None], means: BatchMeans | None
    ) -> None:
        """Warn in the first batches if the mean over micro-batches is not the mean of the batch."""
        if means is None or self._batches_to_check == 0:
            return
        self._batches_to_check -= 1
        counts = means.left_out()
        if counts is None:
            return
        self._batches_to_check = 0
        found = [None if loss is None else round(loss.item(), 4) for loss in losses]
        warnings.warn(
            f"the micro-batches of a batch have {counts} targets and losses of {found}, whose mean "
            "is not that over all targets. They are weighted by themselves where "
            f"`{step}` calls `cross_entropy` with `reduction='mean'` and makes the targets of the "
            "batch alone: make random ones in the data set. For other losses give the strategy "
            f"`count_targets`, {COUNT}.",
            stacklevel=2,
        )

    def _share(
        self, step: str, losses: list[Tensor | None], shares: list[float] | None
    ) -> Tensor | None:
        """Log the last stage's records on all ranks; return the mean loss."""
        loss, logged = self._outcome.share(step, losses, self._micro.logs.take(shares))
        replay(self.module, logged, self._ranks.stage_group)
        return loss

    def report(self) -> QuantizationReport:
        """Report the bytes that this rank has sent to neighbouring stages in training."""
        sent = self.engine.traffic
        tables = {"bytes_boundary_tables": sent.table_bytes} if self._learned else {}
        return QuantizationReport(
            counts={
                "bytes_boundary_forward": sent.forward_bytes,
                "bytes_boundary_backward": sent.backward_bytes,
                **tables,
            },
            ratios={
                "bits_per_hidden_value": (
                    8.0 * (sent.forward_bytes + sent.table_bytes),
                    sent.forward_values,
                ),
                "bits_per_hidden_gradient": (8.0 * sent.backward_bytes, sent.backward_values),
            },
        )


def _check_first_loss(owner: str, step: str, loss: Tensor) -> None:
    """Warn of NaN, which placeholders give to layers that read them past the step's own code."""
    if bool(loss.isnan()):
        rank_zero_warn(
            "The loss of the first batch is NaN. If it is not without a pipeline, "
            f"`{owner}.{step}` uses something made in front of the layers, such as embeddings for "
            "a skip connection, behind the first of them, but stages pass on the hidden state "
            "alone. Let the layers hand it on within that, or use `quantized_fsdp`. Or a "
            "micro-batch has no target: see `count_targets`."
        )


def _for_others(error: Exception, step: str) -> Exception:
    """Return the error that other ranks raise if the first layer fails on the rank that has it."""
    if isinstance(error, (NotImplementedError, ValueError)):
        return type(error)(str(error))
    return RuntimeError(f"`{step}` failed on the first stage: {type(error).__name__}: {error}")
