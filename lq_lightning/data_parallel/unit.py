"""State that the collectives of an FSDP2 unit share, with each other and with other units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from lq_lightning._compat.fsdp2 import GroupParam
from lq_lightning._compat.torch import after_backward, backward_id
from lq_lightning.foundation.streams import CommPipeline
from lq_lightning.foundation.topology import Topology
from lq_lightning.foundation.traffic import ErrorSums, Traffic

__all__ = ["DeferredReductions", "Unit", "UnitContext"]


class DeferredReductions:
    """Runs the last level of gradient reductions beside the rest of backward.

    The network is the slowest part of a reduction, and only the optimizer needs its result. On
    streams of its own it overlaps with the first level of the units that follow, and FSDP2 need not
    hold up backward for it. The stream that calls backward waits for it in the end.

    The reduction of a bucket may wait for more units. Before any other reduction, and when backward
    ends, it runs without them. So the order of collectives follows from the order in which units
    are reduced, which is the same on every rank.
    """

    def __init__(self) -> None:
        self._stages = CommPipeline()
        self._backward = -1
        self._waiting: tuple[object, Callable[[], None]] | None = None

    def begin(self) -> None:
        """Note that the backward that runs now will reduce something.

        Another one that has not ended may have failed, without waiting. Its reductions still write
        to gradients whose memory may be in use again, so this one waits first.
        """
        if self._backward not in (-1, backward_id()):
            self.join()

    def make_room(self) -> None:
        """Let the current stream wait until another reduction may be deferred."""
        self.begin()
        self._reduce_waiting()
        self._stages.make_room()

    def wait_for_more(self, bucket: object, reduce: Callable[[], None]) -> None:
        """Call ``reduce`` later, unless it is replaced for the same bucket before."""
        if self._waiting is not None and self._waiting[0] is not bucket:
            self._reduce_waiting()
        self._join_after_backward()
        self._waiting = (bucket, reduce)

    def submit(
        self, messages: Tensor, exchange: Callable[[], Tensor], finish: Callable[[Tensor], None]
    ) -> None:
        """Run ``exchange`` of messages, and ``finish`` with what it received, beside backward."""
        self._join_after_backward()
        self._stages.submit(messages, exchange, finish)

    def join(self) -> None:
        """Let the current stream wait for all reductions."""
        try:
            self._reduce_waiting()
        finally:
            self._backward = -1
            self._stages.join()

    def drop(self) -> None:
        """Drop the waiting bucket: of a backward that failed, nobody will use it."""
        self._waiting = None

    def _join_after_backward(self) -> None:
        if self._backward != backward_id():
            self._backward = backward_id()
            after_backward(self.join)

    def _reduce_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting[1]()


@dataclass(slots=True)
class UnitContext:
    """State that every unit of one model shares.

    Attributes:
        topology: Ranks and nodes.
        group: All ranks of the topology, in its order.
        intra_group: Ranks of this node, in local-rank order.
        inter_group: Ranks with this local rank, in node order.
        seed: Base of all stochastic-rounding seeds.
        traffic: Byte counters.
        vocabulary: Names of the parameters that are embeddings or heads.
        min_quantized_numel: Parameters with fewer elements are sent in full precision.
        step: Optimizer steps taken so far; a new number allows one more exchange.
        measure_errors: Whether to sum up quantization errors (costs extra passes).
        weight_errors: Sums of the weights' relative error.
        gradient_errors: Sums of the gradients' relative error.
        reductions: Streams for the slowest level of gradient reductions.
    """

    topology: Topology
    group: dist.ProcessGroup
    intra_group: dist.ProcessGroup
    inter_group: dist.ProcessGroup
    seed: int
    traffic: Traffic
    vocabulary: frozenset[str]
    min_quantized_numel: int
    step: int = 0
    measure_errors: bool = False
    weight_errors: ErrorSums = field(default_factory=ErrorSums)
    gradient_errors: ErrorSums = field(default_factory=ErrorSums)
    reductions: DeferredReductions = field(default_factory=DeferredReductions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """One FSDP2 unit, as its collectives see it.

    Attributes:
        name: Name of the unit, for messages.
        index: Number of the unit in the model, part of the rounding seed.
        params: Function that describes the unit's parameters as they are now.
        names: Fully qualified names of these parameters.
        context: State that all units share.
    """

    name: str
    index: int
    params: Callable[[], list[GroupParam]]
    names: tuple[str, ...]
    context: UnitContext
