"""Interface between a rank's pipeline engine and the learner of its boundary bit widths.

The rank that sends hidden states learns the widths. It tells the receiving rank once per optimizer
step, between two steps of the pipeline, so that both ends always agree on sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lq_lightning.codecs.mixed import WidthTable
from lq_lightning.foundation.agreement import gather_objects

from .engine import Agreement, PipelineEngine, batch_digest
from .execution import Listener, started
from .message import Message
from .mixed import MixedCodec, StartingWidths
from .schedules import rank_of_stage

__all__ = ["BoundaryWidths", "CodedBoundary", "LearnsWidths", "boundaries_between"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedBoundary:
    """A boundary between two ranks.

    Attributes:
        index: index of the stage before it.
        name: name of the layer whose output crosses it, whatever the stages.
        source: rank in the pipeline that sends hidden states.
        target: rank that receives them.
    """

    index: int
    name: str
    source: int
    target: int


def boundaries_between(schedule: str, names: Sequence[str], size: int) -> list[CodedBoundary]:
    """Return the boundaries between stages on different ranks; within a rank nothing is sent.

    ``names`` are those of all boundaries, in order: one fewer than there are stages.
    """
    num_stages = len(names) + 1
    places = [rank_of_stage(schedule, stage, num_stages, size) for stage in range(num_stages)]
    return [
        CodedBoundary(index=index, name=name, source=places[index], target=places[index + 1])
        for index, name in enumerate(names)
        if places[index] != places[index + 1]
    ]


@runtime_checkable
class LearnsWidths(Protocol):
    """A callback that learns the widths of boundaries."""

    def connect_boundaries(self, boundaries: BoundaryWidths, module: nn.Module) -> None:
        """Take the boundaries of the run; called on all ranks together before the first step.

        It has to call ``boundaries.begin``, also if the run only evaluates. ``module`` holds this
        rank's stages.
        """


class BoundaryWidths:
    """The ``"amaq"`` boundaries of a pipeline, as one of its ranks sees them.

    All ranks of the pipeline call ``begin``, ``exchange``, ``total`` and ``gather`` together.

    Args:
        boundaries: boundaries between ranks of the whole pipeline, ascending.
        engine: engine of this rank.
        codec: codec of its hidden states.
        control_group: ranks of the pipeline, over gloo.
        replicas: ranks with the same stages, over gloo.
    """

    def __init__(
        self,
        boundaries: Sequence[CodedBoundary],
        engine: PipelineEngine,
        codec: MixedCodec,
        control_group: dist.ProcessGroup,
        replicas: dist.ProcessGroup,
    ) -> None:
        self.all = tuple(boundaries)
        self._engine, self._codec = engine, codec
        self._group, self._replicas = control_group, replicas
        self._rank = dist.get_rank(control_group)

    @property
    def sent(self) -> tuple[CodedBoundary, ...]:
        """Boundaries over which this rank sends hidden states: it learns their widths."""
        return tuple(each for each in self.all if each.source == self._rank)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its pipeline."""
        return self._rank == 0

    def listen(self, listener: Listener | None) -> None:
        """Let ``listener`` encode what is sent in training; None for the codec alone."""
        self._engine.listener = listener

    def begin(
        self, start: StartingWidths, tables: Mapping[int, WidthTable], facts: Mapping[str, str]
    ) -> None:
        """Set the first widths.

        Args:
            start: returns the table of a boundary with so many channels that is not in ``tables``.
            tables: tables of all boundaries or none; the same on all ranks.
            facts: what ranks must have been given alike, by name.

        Raises:
            RuntimeError: ranks were given something else, with the values.
        """
        digests = {
            f"the digest of the widths of boundary {index}": batch_digest(table.pack())
            for index, table in tables.items()
        }
        Agreement(self._group).check(
            {**facts, **digests}, "Give all ranks the same options and the same checkpoint."
        )
        self._codec.begin(start, "fitted")
        for index, table in tables.items():
            self._codec.set_table(index, table)

    def encode(self, message: Message, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the payload of a hidden state, and what the other rank decodes."""
        return self._codec.encode_and_round(hidden, message)

    def exchange(self, tables: Mapping[int, WidthTable], channels: int) -> None:
        """Use the ``tables`` of ``sent`` from now on, and send them to the receiving ranks.

        Each of these gets one message, with the tables of all boundaries to it. All tables of the
        pipeline have the same number of channels.
        """
        outgoing, incoming = self._by_peer()
        works, arriving, leaving = [], {}, {}  # buffers must live until all transfers are done
        nbytes = -(-channels // 2)
        for peer, indices in incoming.items():
            buffer = torch.empty(len(indices) * nbytes, dtype=torch.uint8)
            works.append(started(dist.irecv(buffer, group=self._group, group_src=peer)))
            arriving[peer] = buffer
        for peer, indices in outgoing.items():
            leaving[peer] = torch.cat([tables[index].pack() for index in indices])
            works.append(started(dist.isend(leaving[peer], group=self._group, group_dst=peer)))
            self._engine.traffic.table_bytes += leaving[peer].numel()
        for work in works:
            work.wait()
        for index, table in tables.items():
            self._codec.set_table(index, table)
        for peer, indices in incoming.items():
            for index, packed in zip(indices, arriving[peer].view(-1, nbytes), strict=True):
                self._codec.set_table(index, WidthTable.unpack(packed, channels))

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of ``values``, on the CPU, over the ranks of the pipeline."""
        summed = values.clone()
        dist.all_reduce(summed, group=self._group)
        return summed

    def average(self, gradients: Tensor) -> Tensor:
        """Return the mean of ``gradients``, on the CPU, over the ranks with the same stages."""
        size = dist.get_world_size(self._replicas)
        if size == 1 or not gradients.numel():
            return gradients
        mean = gradients.clone()
        dist.all_reduce(mean, group=self._replicas)
        return mean.div_(size)

    def gather(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return the picklable entries, by name of boundary, of all ranks on all of them."""
        parts = gather_objects(dict(part), self._group)
        joined = {name: value for each in parts for name, value in each.items()}
        return {each.name: joined[each.name] for each in self.all if each.name in joined}

    def _by_peer(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Return the boundaries to each rank, and those from each, ascending on both ends."""
        outgoing: dict[int, list[int]] = {}
        incoming: dict[int, list[int]] = {}
        for each in self.all:
            if each.source == self._rank:
                outgoing.setdefault(each.target, []).append(each.index)
            elif each.target == self._rank:
                incoming.setdefault(each.source, []).append(each.index)
        return outgoing, incoming
