"""The steps of a LightningModule, run in parts: micro-batch by micro-batch, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchmetrics import Metric, MetricCollection

from lq_lightning._compat.modules import begin_root_forward, end_root_forward
from lq_lightning._compat.saved_tensors import hasten_casts, let_go_of_casts, version_of
from lq_lightning.pipeline.interceptor import LayerInterceptor
from lq_lightning.pipeline.partition import kept_stages
from lq_lightning.plugins import FullyShardedPrecision
from lq_lightning.strategies.pipelines.logs import LogRecorder, unchanged
from lq_lightning.strategies.pipelines.targets import BatchMeans


class StepOutput(NamedTuple):
    """Output of the last stage for a micro-batch.

    Attributes:
        loss: Loss without graph; None if the step returned none.
        extra: Other values of the returned dictionary, without graph.
    """

    loss: Tensor | None
    extra: dict[str, Any]


class MicroBatches:
    """Runs the user's step on the micro-batches of one batch, as stages ask for them.

    Attributes:
        logs: Recorder of the steps on the last stage.
        means: Corrects means over targets in the schedule that runs; None if it must not.
    """

    def __init__(self, module: LightningModule, precision: FullyShardedPrecision) -> None:
        kept = kept_stages(module)
        self._calls = LayerInterceptor(()) if kept is None else kept.calls
        self.logs = LogRecorder(module, self._calls.check)
        self._module = module
        self._metrics = [m for m in module.modules() if isinstance(m, (Metric, MetricCollection))]
        self._precision = precision
        self._root = module if isinstance(module, FSDPModule) else None
        self._step: Callable[..., Any] | None = None
        self._arguments: list[tuple[Any, ...]] = []
        self._scale: float | None = None
        self._shares: Sequence[float] | None = None
        self.means: BatchMeans | None = None
        self._weights: list[Tensor] = []
        self._version = 0
        self._cast: set[object] = set()
        self.outputs: dict[int, StepOutput] = {}

    @contextmanager
    def running(
        self,
        step: str,
        arguments: list[tuple[Any, ...]],
        scale: float | None,
        shares: Sequence[float] | None = None,
    ) -> Generator[None, None, None]:
        """Around the schedule of one batch.

        Args:
            arguments: Arguments of the step for each micro-batch.
            scale: Factor of losses before backward; None in evaluation.
            shares: Targets of each micro-batch relative to their mean; None if nobody counts them.
        """
        self._step, self._arguments, self._scale = getattr(self._module, step), arguments, scale
        self._shares = shares
        counts = shares is None and step != "predict_step" and len(arguments) > 1
        self.means = BatchMeans(arguments) if counts else None
        self.outputs.clear()
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
        """Call the user's step on a micro-batch.

        Args:
            is_last: Whether this is the last stage, where steps come to their end. Logs of other
                stages, from in front of the layers, are dropped: the last stage repeats them.

        Returns:
            The scaled loss; in evaluation the output of the step.
        """
        if self._step is None:
            raise AssertionError("a stage ran outside of a schedule")
        self._calls.random.start(index)
        with (
            self.logs.recording() if is_last else self.logs.muted(),
            nullcontext() if is_last else unchanged(self._metrics),
            self.means.watching(index) if is_last and self.means is not None else nullcontext(),
        ):
            result = self._step(*self._arguments[index])
        self._calls.check(result, "what the step returns")  # beside the loss, too
        if self._scale is None:
            return result
        loss, extra = _split_output(type(self._module).__name__, result)
        if loss is not None and self._shares is not None:
            loss = self._weighted(loss, self._shares[index])
        self.outputs[index] = StepOutput(None if loss is None else loss.detach(), extra)
        if loss is None:  # all ranks hear of it when the schedule is done
            return torch.zeros((), device=self._module.device, requires_grad=True)
        return loss * self._scale

    def _weighted(self, loss: Tensor, share: float) -> Tensor:
        # without a target there may be no number that 0 makes 0, nor its gradient
        return loss * share if share else torch.zeros_like(loss).requires_grad_()

    def in_order(self) -> list[StepOutput]:
        """Outputs of the last batch by micro-batch, on the rank of the last stage."""
        return [self.outputs[index] for index in sorted(self.outputs)]


def _split_output(owner: str, result: Any) -> tuple[Tensor | None, dict[str, Any]]:
    """Split what ``training_step`` returned into the loss and the rest.

    Raises:
        TypeError: It is neither a tensor, nor a dictionary with a loss, nor None.
    """
    if result is None:
        return None, {}
    if isinstance(result, Tensor):
        return result, {}
    if isinstance(result, Mapping) and isinstance(result.get("loss"), Tensor):
        rest = {key: value for key, value in result.items() if key != "loss"}
        # Without graphs, which would be kept until the last micro-batch.
        return result["loss"], {
            key: value.detach() if isinstance(value, Tensor) else value
            for key, value in rest.items()
        }
    raise TypeError(
        f"`{owner}.training_step` returned a {type(result).__name__}: return the loss, a "
        "dictionary with a tensor under 'loss', or None."
    )


def joined_extra(outputs: Sequence[StepOutput]) -> dict[str, Any]:
    """Join what micro-batches returned beside the loss, as if they were one batch.

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
