"""Options of a pipeline, checked before anything is started."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import LBFGS, Optimizer

from lq_lightning.codecs import CodecSpec
from lq_lightning.foundation.checks import check_choice, check_count, counted
from lq_lightning.pipeline.boundary import check_codec_name, make_boundary_codec
from lq_lightning.pipeline.boundary_widths import LearnsWidths, MixedCodec
from lq_lightning.pipeline.message import BoundaryCodec
from lq_lightning.pipeline.schedules import SCHEDULES, check_schedule

# With four micro-batches per rank the bubble is below a fifth of a step, whatever the size:
# (p - 1) / (4p + p - 1).
_MICROBATCHES_PER_RANK = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineOptions:
    """Options of stages, schedule and boundaries; see ``QuantizedPipelineStrategy``."""

    pipeline_size: int | None
    schedule: str
    num_microbatches: int | None
    stages_per_rank: int
    split: Any
    trunk: str | None
    forward_codec: Any
    backward_codec: Any
    tied_gradients: str
    count_targets: Callable[[Any], Any] | None = None

    def check(self, owner: str) -> None:
        """Raise ``ValueError`` for values that no run could have."""
        for name in ("pipeline_size", "num_microbatches", "stages_per_rank"):
            check_count(owner, name, getattr(self, name), 1, NoneType)
        check_choice(owner, "schedule", self.schedule, SCHEDULES)
        check_choice(owner, "tied_gradients", self.tied_gradients, ("auto", "int4", "int8", "none"))
        if self.count_targets is not None and not callable(self.count_targets):
            raise ValueError(
                f"`{owner}(count_targets={self.count_targets!r})` is not supported: give a "
                "function from a batch to the number of its targets, or None."
            )
        if not isinstance(self.split, (str, Sequence, Mapping)) or (
            isinstance(self.split, str) and self.split != "parameters"
        ):
            raise ValueError(
                f"`{owner}(split={self.split!r})` is not supported: choose 'parameters', or give "
                "the number of layers of each stage, or costs by name of module. To balance by "
                "time, give the seconds that `lq_lightning.pipeline.measure.measure_times` "
                "measures on one device."
            )
        check_codec_name(owner, "forward_codec", self.forward_codec, backward=False)
        check_codec_name(owner, "backward_codec", self.backward_codec, backward=True)
        self.make_codecs()
        if self.pipeline_size is not None:
            self.check_schedule(self.pipeline_size)

    def make_codecs(self) -> tuple[BoundaryCodec, BoundaryCodec]:
        """Return new codecs of hidden states and of their gradients, for one rank."""
        backward = make_boundary_codec(self.backward_codec, backward=True)
        return make_boundary_codec(self.forward_codec), backward

    def check_hidden_size(self, channels: int) -> None:
        """Refuse codecs whose tiles do not divide the channels, before the first batch does."""
        for codec in self.make_codecs():
            if not isinstance(codec, MixedCodec):  # has any number, and tables for each
                codec.check((1, 1, channels), torch.float32)

    def shares(self, batches: Sequence[Any]) -> list[float] | None:
        """Return targets of each micro-batch over their mean; None without ``count_targets``."""
        if self.count_targets is None:
            return None
        counts = [float(self.count_targets(batch)) for batch in batches]
        if not all(0 <= count < math.inf for count in counts):
            raise ValueError(
                f"`count_targets` returned {counts} for the micro-batches of a batch: return the "
                "number of targets, 0 or more."
            )
        # without any target in the batch the loss stays as the step computes it
        mean = sum(counts) / len(counts)
        return [count / mean if mean else 1.0 for count in counts]

    def tied_codec(self) -> CodecSpec | None:
        """Return the codec of gradients of tied weights; None for full precision."""
        name = self.tied_gradients
        if name == "auto":
            name = "none" if self.backward_codec == "none" else "int8"
        if name == "none":
            return None
        if name == "int8":
            return CodecSpec(code="int8", group_size=128, scale_dtype="bfloat16")
        return CodecSpec(code="int4", group_size=128, hadamard_size=128, scale_dtype="bfloat16")

    def check_learner(self, owner: str, callbacks: Iterable[Callback]) -> None:
        """Raise ``ValueError`` unless widths are learned exactly where hidden states use them."""
        learner = learner_of(callbacks)
        travels = self.forward_codec == "amaq"
        if travels and learner is None:
            raise ValueError(
                f'`{owner}(forward_codec="amaq")` sends hidden states in widths that '
                "`AdaptiveBits` learns, but there is none in the Trainer: add "
                "`lq_lightning.AdaptiveBits()` to its callbacks, or choose another codec, such as "
                '"tah5".'
            )
        if learner is not None and not travels:
            name = type(learner).__name__
            raise ValueError(
                f"`{name}` learns the widths of what crosses the boundaries of stages, but `{owner}"
                f"(forward_codec={self.forward_codec!r})` sends that otherwise: set "
                f'forward_codec="amaq", or remove `{name}`.'
            )

    def check_schedule(self, pipeline_size: int) -> None:
        """Raise ``ValueError`` for a schedule that does not go with the numbers."""
        if pipeline_size > 1:
            check_schedule(
                self.schedule, pipeline_size, self.microbatches(pipeline_size), self.stages_per_rank
            )

    def size(self, owner: str, world_size: int, tensor_size: int = 1) -> int:
        """Return the ranks along the pipeline, for each of ``tensor_size`` tensor-parallel ranks.

        ``ValueError`` if they do not divide the world.
        """
        for name, size, ranks in (
            ("tensor_parallel_size", tensor_size, world_size),
            ("pipeline_size", self.pipeline_size or 1, world_size // tensor_size),
        ):
            if size > ranks or ranks % size:
                divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
                whole = ranks == world_size
                which = "ranks" if whole else f"groups of {tensor_size} tensor-parallel ranks"
                raise ValueError(
                    f"`{owner}({name}={size})` does not divide the {ranks} {which} of the run: "
                    f"every pipeline needs as many. Allowed here: {divisors}."
                )
        return self.pipeline_size or world_size // tensor_size

    def microbatches(self, pipeline_size: int) -> int:
        """Return the most micro-batches that a training batch is cut into."""
        if self.num_microbatches is None:
            return _MICROBATCHES_PER_RANK * pipeline_size
        return self.num_microbatches

    def microbatches_of(self, batch_size: int, pipeline_size: int, training: bool) -> int:
        """Return the number of micro-batches of a batch.

        In evaluation, where any number will do, the largest that divides the batch. In training
        the given number, or without one the largest that divides the batch and suits the schedule.
        """
        if batch_size < 1:
            raise ValueError(
                "a batch without samples cannot be cut into micro-batches: let the loader leave it "
                "out."
            )
        most = self.microbatches(pipeline_size)
        divisors = [n for n in range(min(most, batch_size), 0, -1) if batch_size % n == 0]
        if not training:
            return divisors[0]
        if self.num_microbatches is not None:
            if batch_size % self.num_microbatches:
                suitable = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
                suitable = [n for n in suitable if self._suits(pipeline_size, n)]
                raise ValueError(
                    f"a batch of {counted(batch_size, 'sample')} cannot be cut into "
                    f"`num_microbatches={self.num_microbatches}` equal micro-batches. Give a "
                    "`batch_size` that is a multiple of it, and `drop_last=True` to the training "
                    "data loader if its last batch is smaller; or one of "
                    f"{suitable}, or None, as `num_microbatches`."
                )
            return self.num_microbatches
        for count in divisors:
            if self._suits(pipeline_size, count):
                return count
        raise ValueError(
            f"a batch of {counted(batch_size, 'sample')} cannot be cut into equal micro-batches, "
            f"at most {most}, that suit `schedule={self.schedule!r}` with "
            f"`pipeline_size={pipeline_size}`. Use a `batch_size` that is a multiple of "
            f"{pipeline_size}, and `drop_last=True` in the training data loader if its last batch "
            "is smaller; or `schedule='gpipe'`."
        )

    def _suits(self, pipeline_size: int, count: int) -> bool:
        try:
            check_schedule(self.schedule, pipeline_size, count, self.stages_per_rank)
        except ValueError:
            return False
        return True


def learner_of(callbacks: Iterable[Callback]) -> LearnsWidths | None:
    """Return the callback that learns the widths of boundaries, if there is one."""
    return next((each for each in callbacks if isinstance(each, LearnsWidths)), None)


def check_module(owner: str, module: LightningModule) -> None:
    """Raise ``NotImplementedError`` for a module whose steps cannot run in parts."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise NotImplementedError(
            f"`{owner}` does not work with manual optimization: forward and backward passes of "
            "several micro-batches are interleaved, so that no line of `training_step` can call "
            f"backward. Set `automatic_optimization = True` in `{name}`, or use `quantized_fsdp`."
        )
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        method = getattr(module, step, None)
        if method is not None and is_param_in_hook_signature(
            method, "dataloader_iter", explicit=True
        ):
            raise NotImplementedError(
                f"`{name}.{step}(self, dataloader_iter)` does not work with `{owner}`, which cuts "
                "each batch into micro-batches: take `batch` instead."
            )
    if is_overridden("backward", module):
        raise NotImplementedError(
            f"`{name}.backward` is overridden, but `{owner}` runs the backward passes itself, one "
            "per micro-batch and stage. Scale the loss in `training_step` instead; a "
            "`loss_parallel()` that is around it there holds in backward, too."
        )


def check_stage_optimizer(owner: str, optimizer: Optimizer) -> None:
    """Raise ``NotImplementedError`` for an optimizer that evaluates the loss by itself."""
    if isinstance(optimizer, LBFGS):
        raise NotImplementedError(
            f"`LBFGS` does not work with `{owner}`: it evaluates the loss several times in a step "
            "and needs the products of all parameters with each other. Use AdamW, for example."
        )


def make_stage_optimizer(configure: Callable[[], None]) -> None:
    """Make the optimizer; raise ``ValueError`` with advice where a rank has nothing to train."""
    try:
        configure()
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        raise ValueError(
            "`configure_optimizers` gives an optimizer no parameters, since the stages of a rank "
            "have none that are trained. Give it all of `self.parameters()`, of which an optimizer "
            "leaves the frozen ones as they are, or let stages end elsewhere (`split`)."
        ) from error
