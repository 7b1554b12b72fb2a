"""Boundaries whose channels have learned bit widths (AMAQ, arXiv 2510.05468).

The values of a channel, over all tokens of a message, share a width, a scale and a minimum. The
rank that sends hidden states learns the widths. It tells the receiving rank once per optimizer
step, between two steps of the pipeline, so that both ends always agree on sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lq_lightning.codecs.mixed import (
    Ranges,
    WidthTable,
    decode_mixed,
    encode_and_round_mixed,
    encode_mixed,
)
from lq_lightning.foundation.agreement import gather_objects

from .engine import PipelineEngine, agree_on, batch_digest
from .execution import Listener, started
from .message import BoundaryCodec, Message, check_floats, check_payload
from .schedules import rank_of_stage

StartingWidths = Callable[[int], WidthTable]  # the first table for a number of channels


class MixedCodec(BoundaryCodec):
    """The codec ``"amaq"`` of hidden states.

    Payloads come from ``encode_mixed``. Boundaries without a table of their own use the common
    starting table, which both ends know without a message.
    """

    name = "amaq"

    def __init__(self) -> None:
        self.tables: dict[int, WidthTable] = {}  # those that were set, by boundary
        self._start: StartingWidths | None = None
        self._ranges: Ranges = "full"
        self._starting: dict[int, WidthTable] = {}  # by number of channels

    def begin(self, start: StartingWidths, ranges: Ranges) -> None:
        """Set the starting widths and the ranges, and forget all tables.

        Both ends call it alike; ``ranges`` matters to the sender.
        """
        self.close()
        self._start, self._ranges = start, ranges

    def set_table(self, boundary: int, table: WidthTable) -> None:
        """Use these widths from the next message of a boundary on; both ends call it alike."""
        self.tables[boundary] = table

    def table(self, boundary: int, channels: int) -> WidthTable:
        """Return the widths of a message.

        Raises:
            ValueError: nothing learns widths, or they are for other hidden states.
        """
        if self._start is None:
            raise ValueError(
                f"The codec {self.name!r} has no widths: they are learned by `AdaptiveBits`, which "
                "is missing. Add it to the callbacks of the Trainer, or choose another codec."
            )
        known = self.tables.get(boundary)
        if known is None:
            if channels not in self._starting:
                self._starting[channels] = self._start(channels)
            return self._starting[channels]
        if known.channels != channels:
            raise ValueError(
                f"The widths of boundary {boundary} are those of {known.channels} channels, but "
                f"hidden states have {channels}. Load a checkpoint of a model with this hidden "
                "size, or start without one."
            )
        return known

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Refuse a run that learns no widths, hidden states they do not fit, and other dtypes."""
        check_floats(self.name, dtype)
        if len(shape) < 2:
            raise ValueError(
                f"The codec {self.name!r} was given hidden states of shape {tuple(shape)}; "
                "expected [..., tokens, channels]. Choose the codec 'bf16'."
            )
        for boundary in self.tables or (0,):
            self.table(boundary, shape[-1])

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype, message: Message) -> int:
        """Return the bytes of a payload."""
        return self._nbytes(message.boundary, shape)

    def encode(self, x: Tensor, message: Message) -> Tensor:
        """Return codes, scales and minima by width."""
        return encode_mixed(*self._arguments(x, message))

    def encode_and_round(self, x: Tensor, message: Message) -> tuple[Tensor, Tensor]:
        """Return the payload, and its decoded values in shape and dtype of ``x``.

        Takes less time than ``encode`` and ``decode``.
        """
        payload, values = encode_and_round_mixed(*self._arguments(x, message))
        return payload, values.view(x.shape)

    def decode(
        self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, message: Message
    ) -> Tensor:
        """Return the values."""
        check_payload(self.name, payload, self._nbytes(message.boundary, shape))
        table = self.table(message.boundary, shape[-1])
        return decode_mixed(payload, table, math.prod(shape[:-1]), dtype).view(tuple(shape))

    def bits_per_value(self, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Return the mean over the boundaries of this rank, without their tables."""
        sizes = [self._nbytes(boundary, shape) for boundary in self.tables or (0,)]
        return 8 * sum(sizes) / (len(sizes) * max(1, math.prod(shape)))

    def close(self) -> None:
        """Forget all widths."""
        self._start = None
        self.tables.clear()
        self._starting.clear()

    def _arguments(self, x: Tensor, message: Message) -> tuple[Tensor, WidthTable, Ranges]:
        self.check(x.shape, x.dtype)
        table = self.table(message.boundary, x.shape[-1])
        values = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])
        return values, table, self._ranges

    def _nbytes(self, boundary: int, shape: Sequence[int]) -> int:
        return self.table(boundary, shape[-1]).nbytes(math.prod(shape[:-1]))


# --- interface to the learner -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedBoundary:
    """A boundary between two ranks of a pipeline."""

    index: int  # of the stage before it
    name: str  # of the layer whose output crosses it, whatever the stages
    source: int  # rank that sends hidden states
    target: int


def boundaries_between(schedule: str, names: Sequence[str], size: int) -> list[CodedBoundary]:
    """Return the boundaries between stages on different ranks; within a rank nothing is sent.

    ``names`` has all boundaries, in order: one fewer than there are stages.
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
        self.is_first = self._rank == 0  # of its pipeline
        # over which this rank sends hidden states: it learns their widths
        self.sent = tuple(each for each in self.all if each.source == self._rank)

    def listen(self, listener: Listener | None) -> None:
        """Let ``listener`` encode hidden states in training; None for the codec alone."""
        self._engine.listener = listener

    def begin(
        self, start: StartingWidths, tables: Mapping[int, WidthTable], facts: Mapping[str, str]
    ) -> None:
        """Set the first widths.

        Args:
            start: returns the table of a boundary that is not in ``tables``.
            tables: tables of all boundaries or none; the same on all ranks.
            facts: values that must be equal on all ranks, by name.

        Raises:
            RuntimeError: ranks were given something else, with the values.
        """
        digests = {
            f"the digest of the widths of boundary {index}": batch_digest(table.pack())
            for index, table in tables.items()
        }
        remedy = "Give all ranks the same options and the same checkpoint."
        agree_on({**facts, **digests}, remedy, self._group)
        self._codec.begin(start, "fitted")
        for index, table in tables.items():
            self._codec.set_table(index, table)

    def encode(self, message: Message, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the payload of a hidden state, and the values that the other rank decodes."""
        return self._codec.encode_and_round(hidden, message)

    def exchange(self, tables: Mapping[int, WidthTable], channels: int) -> None:
        """Use the ``tables`` of ``sent`` from now on, and send them to the receiving ranks.

        Each receiving rank gets one message, with the tables of all boundaries to it. All tables of
        the pipeline have the same number of channels.
        """
        outgoing: dict[int, list[int]] = {}  # boundaries by peer, ascending on both ends
        incoming: dict[int, list[int]] = {}
        for each in self.all:
            if each.source == self._rank:
                outgoing.setdefault(each.target, []).append(each.index)
            elif each.target == self._rank:
                incoming.setdefault(each.source, []).append(each.index)
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
