"""One batch after the other through the pipeline, as all of its ranks see it."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lq_lightning.checkpoint.checkpointer import StrategyPart
from lq_lightning.foundation.agreement import gather_objects
from lq_lightning.foundation.reporting import QuantizationReport
from lq_lightning.pipeline.aq_sgd import AQSGDCodec
from lq_lightning.pipeline.batches import batch_size, concatenate, sample_ids, split_batch
from lq_lightning.pipeline.boundary_widths import BoundaryWidths, boundaries_between
from lq_lightning.pipeline.engine import Agreement, PipelineEngine, batch_signature
from lq_lightning.pipeline.message import BoundaryMeta
from lq_lightning.pipeline.mixed import MixedCodec
from lq_lightning.pipeline.partition import StageModule, kept_stages
from lq_lightning.pipeline.random_numbers import RandomNumbers, held_generators, mixed_seed
from lq_lightning.pipeline.schedules import rank_of_stage
from lq_lightning.plugins import FullyShardedPrecision
from lq_lightning.strategies.pipelines.logs import LogCall, Logged, replay, sum_over_pipelines
from lq_lightning.strategies.pipelines.options import PipelineOptions, learner_of
from lq_lightning.strategies.pipelines.ranks import PipelineRanks
from lq_lightning.strategies.pipelines.stages import CutModule
from lq_lightning.strategies.pipelines.steps import MicroBatches, joined_extra
from lq_lightning.strategies.pipelines.targets import COUNT


class BatchSeeds:
    """Seeds that are the same on all stages of a pipeline, and differ between batches and replicas.

    They are functions of the seed of the run and of where training is, both of which checkpoints
    hold, so that a resumed run goes on with the numbers of the one that was interrupted.

    Args:
        replica: Index of this pipeline among the replicas.

    Attributes:
        of_run: Seed that all ranks share; set before the first batch.
    """

    def __init__(self, replica: int) -> None:
        self.of_run = 0
        self._replica = replica
        self._evaluating: tuple[object, ...] = ()
        self._evaluated = 0

    def next(self, trainer: Trainer, step: str, training: bool) -> int:
        """Return the seed of the batch that comes now; call it once for each."""
        place: tuple[object, ...]
        if training:
            place = (trainer.current_epoch, trainer.fit_loop.batch_idx)
        else:
            evaluating = (step, trainer.sanity_checking, trainer.global_step)
            self._evaluated = self._evaluated + 1 if evaluating == self._evaluating else 0
            self._evaluating = evaluating
            place = (*evaluating, self._evaluated)
        return mixed_seed(self.of_run, self._replica, training, *place)


class Outcome(NamedTuple):
    """Of a batch, the same on all ranks of a pipeline.

    Attributes:
        loss: float32 scalar; None where there is none.
        calls: Recorded calls of ``self.log``.
        values: ``[len(calls)]`` float64, their values.
    """

    loss: Tensor | None
    calls: tuple[LogCall, ...]
    values: Tensor


class OutcomeBroadcast:
    """Sends outcomes from the last stage to all ranks of a pipeline, which call it together.

    Numbers stay on the device, so that no host waits for it. Names are sent only when they change,
    which is rare.

    Args:
        source: Place of the last stage's rank in the pipeline.
    """

    def __init__(self, ranks: PipelineRanks, source: int) -> None:
        self._ranks, self._source = ranks, source
        self._known: dict[str, tuple[LogCall, ...]] = {}

    @property
    def is_source(self) -> bool:
        """Whether this rank has the last stage."""
        return self._ranks.rank == self._source

    def share(self, step: str, losses: Sequence[Tensor | None], logged: Logged) -> Outcome:
        """Return on all ranks the mean loss of the micro-batches and their log records.

        Args:
            losses: Losses of the micro-batches, on the last stage; if one is None there is no mean.
            logged: Records of the micro-batches, on the last stage.
        """
        present = [loss for loss in losses if loss is not None]
        has_loss = len(present) == len(losses) > 0
        calls = logged.calls if self.is_source else self._known.get(step, ())
        header = torch.tensor([has_loss, calls != self._known.get(step, ())], dtype=torch.int64)
        dist.broadcast(header, group=self._ranks.control_group, group_src=self._source)
        has_loss, changed = bool(header[0]), bool(header[1])
        if changed:
            calls = self._known[step] = self.share_object(calls)
        numbers = torch.zeros(1 + len(calls), dtype=torch.float64, device=self._ranks.device)
        if self.is_source:
            numbers[1:] = logged.values
            if has_loss:
                numbers[0] = torch.stack([loss.float().reshape(()) for loss in present]).mean()
        if has_loss or calls:
            dist.broadcast(numbers, group=self._ranks.group, group_src=self._source)
        return Outcome(numbers[0].float() if has_loss else None, calls, numbers[1:])

    def share_output(self, value: Any) -> Any:
        """Return on all ranks the output of the last stage, on each rank's device."""
        file = io.BytesIO()
        if self.is_source:
            torch.save(value, file)
        content = self.share_object(file.getvalue())
        if self.is_source:
            return value
        return torch.load(
            io.BytesIO(content), map_location=self._ranks.device, weights_only=False
        )  # written by this very run

    def share_object(self, value: Any) -> Any:
        """Return the last stage's value on all ranks."""
        box = [value]
        source = dist.get_process_group_ranks(self._ranks.control_group)[self._source]
        dist.broadcast_object_list(box, src=source, group=self._ranks.control_group)
        return box[0]


_BATCHES_TO_CHECK = 3  # checks of means over targets wait for the GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """A batch that all ranks of the pipeline agree on.

    Attributes:
        arguments: Arguments of the step for each micro-batch.
        boundary: Shapes and dtypes that cross the boundaries.
        samples: Identities of its samples, for codecs that remember them.
        shares: Targets of each micro-batch relative to their mean; None if nobody counts them.
        seed: Seed of its random numbers.
        watched: Whether it is the first of its shape.
    """

    step: str
    arguments: list[tuple[Any, ...]]
    boundary: BoundaryMeta
    samples: Tensor | None
    shares: list[float] | None
    seed: int
    watched: bool


class PipelineRun(StrategyPart):
    """Runs the steps of a module of which this rank has kept its stages.

    All ranks of a pipeline make one and call its methods together.

    Args:
        module: This rank's part, at its place, sharded or not.

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
        self._micro = MicroBatches(module, precision)
        self._stages = {
            stage: StageModule(
                module,
                stage,
                partial(self._micro.run, is_last=stage == num_stages - 1),
                self._micro.enter,
            )
            for stage in record.stages
        }
        self._random = RandomNumbers(ranks.device)
        kept = kept_stages(module)
        if kept is None:
            raise AssertionError("a pipeline runs modules that were cut")
        kept.calls.random = self._random
        self._plan = record.plan
        self.seeds = BatchSeeds(ranks.stage_group.rank())
        self._watched: set[str] = set()
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
        self._seen: set[tuple[tuple[int, ...], torch.dtype]] = set()
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
        """Cut a batch into micro-batches, and find the shapes that cross the boundaries.

        Args:
            arguments: Arguments of the step; the batch comes first.
            training: Whether :meth:`train` follows, not :meth:`evaluate`.

        Returns:
            The number of micro-batches.

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
        watched = key not in self._watched
        if watched:
            self._watched.add(key)
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
        Agreement(self._ranks.control_group).check(
            {f"the state of the generator `{n}`": s for n, s in self._random.held_states().items()},
            "All stages of a pipeline have to draw the same numbers in a step: seed the generators "
            "that the module keeps alike on them, or apart by the data-parallel rank only.",
        )

    def _refuse_together(self, batch: _Batch) -> None:
        """Raise on all ranks if any of them saw the step do something that is refused."""
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
            self._tell(known)
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
        """Whether a replica of this rank's stage has to probe, which sharded ones do together."""
        if self._ranks.replicas == 1:
            return lacking
        flag = torch.tensor([lacking], dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._ranks.stage_control_group)
        return bool(flag.item())

    def _tell(self, boundary: BoundaryMeta) -> None:
        """Say once how hidden states of a shape travel."""
        kind = (boundary.shape, boundary.dtype)
        if kind in self._seen:
            return
        first = not self._seen
        self._seen.add(kind)
        if first:
            bits = [codec.bits_per_value(*kind) for codec in self.codecs]
            names = [codec.name for codec in self.codecs]
            rank_zero_info(
                f"boundaries: {list(boundary.shape)} {boundary.dtype} per micro-batch, forward as "
                f"{names[0]} ({bits[0]:.2f} bits per value), backward as {names[1]} ({bits[1]:.2f})"
            )

    def forget(self) -> None:
        """Let codecs begin anew, on all ranks: the weights are others now."""
        for codec in self.codecs:
            codec.forget()

    def on_weights_loaded(self) -> None:
        """Refer to nothing that was sent before."""
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

    def _take(self) -> _Batch:
        batch, self._batch = self._batch, None
        if batch is None:
            raise AssertionError("a batch is prepared before it runs")
        return batch

    def train(self, scale: float) -> Any:
        """Run forward and backward passes, which add to the module's gradients.

        Args:
            scale: Factor of losses before backward.

        Returns:
            As ``training_step``, on all ranks: the mean loss of the micro-batches, on the last
            stage with other returned values; None if a micro-batch had no loss.
        """
        batch = self._take()
        running = self._micro.running(batch.step, batch.arguments, scale, batch.shares)
        self._random.compared = {} if batch.watched else None
        with self._random.batch(batch.seed), running:
            self.engine.step(batch.boundary, batch.samples, len(batch.arguments))
            outputs = self._micro.in_order()
        self._refuse_together(batch)
        losses = [output.loss for output in outputs]
        self._check_means(batch.step, losses)
        outcome = self._share(batch.step, losses, batch.shares)
        loss = outcome.loss
        if not self._has_trained and loss is not None:
            self._has_trained = True  # a look at the loss waits for the GPU
            _check_first_loss(type(self.module).__name__, batch.step, loss)
        extra = joined_extra(outputs)
        return {**extra, "loss": loss} if extra and loss is not None else loss

    def evaluate(self, everywhere: bool) -> Any:
        """Run forward passes.

        Args:
            everywhere: Whether all ranks are to have the outputs, not only the last stage.

        Returns:
            Outputs of the step for all micro-batches, joined; None on other stages.
        """
        batch = self._take()
        running = self._micro.running(batch.step, batch.arguments, None, batch.shares)
        self._random.compared = {} if batch.watched else None
        with self._random.batch(batch.seed), running:
            parts = self.engine.evaluate(batch.boundary, batch.samples, len(batch.arguments))
        self._refuse_together(batch)
        self._share(batch.step, [], batch.shares)
        result = concatenate(parts) if parts else None
        return self._outcome.share_output(result) if everywhere else result

    def _check_means(self, step: str, losses: list[Tensor | None]) -> None:
        """Warn in the first batches if the mean over micro-batches is not the mean of the batch."""
        means, self._micro.means = self._micro.means, None
        if not self._outcome.is_source or means is None or self._batches_to_check == 0:
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

    def _share(self, step: str, losses: list[Tensor | None], shares: list[float] | None) -> Outcome:
        """Log the last stage's records on all ranks; return them and the mean loss."""
        outcome = self._outcome.share(step, losses, self._micro.logs.take(shares))
        replay(self.module, outcome.calls, outcome.values, self._ranks.stage_group)
        return outcome

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
    """Warn of NaN, which stand-ins give to layers that read them past the step's own code."""
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
