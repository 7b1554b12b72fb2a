"""What the last stage alone knows after a batch, told to all ranks of its pipeline."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning.strategies.pipelines.logs import LogCall, Logged
from lq_lightning.strategies.pipelines.ranks import PipelineRanks

__all__ = ["Outcome", "OutcomeBroadcast"]


class Outcome(NamedTuple):
    """Of a batch, the same on all ranks of a pipeline.

    Attributes:
        loss: float32 scalar; None where there is none.
        calls: What is logged.
        values: ``[len(calls)]`` float64, what is logged under these.
    """

    loss: Tensor | None
    calls: tuple[LogCall, ...]
    values: Tensor


class OutcomeBroadcast:
    """Sends outcomes from the last stage to all ranks of a pipeline, which call it together.

    Numbers stay on the device, so that no host waits for what it computes. What is logged hardly
    changes: names travel when they do.

    Args:
        ranks: Of the run.
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
        """Return on all ranks the mean loss of micro-batches and what they have logged.

        Args:
            step: Name of the step that ran.
            losses: Of its micro-batches, on the last stage; if one is None there is no mean.
            logged: By them, on the last stage.
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
        """Return on all ranks what a step returned on the last stage, on each rank's device."""
        file = io.BytesIO()
        if self.is_source:
            torch.save(value, file)
        content = self.share_object(file.getvalue())
        if self.is_source:
            return value
        return torch.load(
            io.BytesIO(content), map_location=self._ranks.device, weights_only=False
        )  # of this very run

    def share_object(self, value: Any) -> Any:
        """Return the last stage's value on all ranks."""
        box = [value]
        source = dist.get_process_group_ranks(self._ranks.control_group)[self._source]
        dist.broadcast_object_list(box, src=source, group=self._ranks.control_group)
        return box[0]
