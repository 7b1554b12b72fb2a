"""What the collectives of one FSDP2 unit share, and which parameters they quantize."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning._compat.fsdp2 import GroupParam
from lq_lightning._compat.torch import after_backward, backward_id
from lq_lightning.codecs import CodecSpec, derive_seed
from lq_lightning.data_parallel.layout import Segment, segment_runs
from lq_lightning.foundation.streams import CommPipeline
from lq_lightning.foundation.topology import Topology
from lq_lightning.foundation.traffic import ErrorSums, Traffic

__all__ = [
    "DeferredReductions",
    "UnitCollective",
    "UnitContext",
    "UnitDescription",
    "full_precision_reason",
    "keep_small_runs_exact",
    "part_seed",
    "weight_segments",
]


class DeferredReductions:
    """Runs the last level of gradient reductions beside the rest of backward.

    The network is the slowest part of a reduction, and only the optimizer needs its result. On
    streams of its own it overlaps with the first level of the units that follow, and FSDP2 need not
    hold up backward for it. The stream that calls backward waits for it in the end.

    A reduction may wait for others that it is done together with. In front of any other one, and
    when backward ends, it is done without them. So what decides on the order of collectives is the
    order in which units are reduced, which is the same on every rank.
    """

    def __init__(self) -> None:
        self._stages = CommPipeline()
        self._backward = -1
        self._waiting: tuple[object, Callable[[], None]] | None = None

    def begin(self) -> None:
        """Say that the backward that runs now will reduce something.

        Another one that has not ended may have failed, without waiting. What it left still writes
        to gradients whose memory may be in use again, so this one waits first.
        """
        if self._backward not in (-1, backward_id()):
            self.join()

    def make_room(self) -> None:
        """Let the current stream wait until another reduction may be deferred."""
        self.begin()
        self._reduce_waiting()
        self._stages.make_room()

    def wait_for_more(self, stack: object, reduce: Callable[[], None]) -> None:
        """Let ``reduce`` be called later, unless it is meanwhile replaced for the same stack."""
        if self._waiting is not None and self._waiting[0] is not stack:
            self._reduce_waiting()
        self._join_after_backward()
        self._waiting = (stack, reduce)

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
        """Forget what waits for more: of a backward that failed, nobody will use it."""
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
    """What every unit of one model shares.

    Attributes:
        topology: Ranks and nodes.
        group: All ranks of the topology, in its order.
        intra_group: Ranks of this node, in local-rank order.
        inter_group: Ranks with this local rank, in node order.
        seed: Base of all stochastic-rounding seeds.
        traffic: Byte counters.
        vocabulary: Names of the parameters that are embeddings or heads.
        step: Optimizer steps taken so far; a new number allows one more exchange.
        measure_errors: Whether to sum up quantization errors (costs extra passes).
        weight_errors: Sums of the weights' relative error.
        gradient_errors: Sums of the gradients' relative error.
        reductions: Where the slowest level of gradient reductions runs on CUDA.
    """

    topology: Topology
    group: dist.ProcessGroup
    intra_group: dist.ProcessGroup
    inter_group: dist.ProcessGroup
    seed: int
    traffic: Traffic
    vocabulary: frozenset[str]
    step: int = 0
    measure_errors: bool = False
    weight_errors: ErrorSums = field(default_factory=ErrorSums)
    gradient_errors: ErrorSums = field(default_factory=ErrorSums)
    reductions: DeferredReductions = field(default_factory=DeferredReductions)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitDescription:
    """One FSDP2 unit, as its collectives see it.

    Attributes:
        name: Name of the unit, for messages.
        index: Number of the unit in the model, part of the rounding seed.
        params: Function that describes the unit's parameters as they are now.
        names: Fully qualified names of these parameters.
        min_quantized_numel: Parameters with fewer elements travel in full precision.
        context: What all units share.
    """

    name: str
    index: int
    params: Callable[[], list[GroupParam]]
    names: tuple[str, ...]
    min_quantized_numel: int
    context: UnitContext


class UnitCollective:
    """A collective of one unit: what it knows about the unit's parameters.

    Args:
        unit: The unit.
    """

    def __init__(self, unit: UnitDescription) -> None:
        self.name = unit.name
        self.names = unit.names
        self._index = unit.index
        self._params = unit.params
        self._min_quantized_numel = unit.min_quantized_numel
        self._context = unit.context


def part_seed(seed: int | None, part: int) -> int | None:
    """Seed of one part of what ``seed`` is for; None where rounding needs none."""
    return None if seed is None else derive_seed(seed, part)


def weight_segments(
    params: Sequence[GroupParam],
    names: Sequence[str],
    min_quantized_numel: int,
    skip_frozen: bool,
) -> list[Segment]:
    """Say for each parameter of a unit how its shard travels in the all-gather.

    Args:
        params: Parameters in the order in which FSDP2 packs them.
        names: Their fully qualified names.
        min_quantized_numel: Parameters with fewer elements travel in full precision.
        skip_frozen: Whether parameters that are not trained are left out of the exchange.
    """
    segments, start = [], 0
    for param, name in zip(params, names, strict=True):
        reason = ""
        travel = "quantized"
        if skip_frozen and not param.requires_grad:
            travel, reason = "skipped", "frozen: gathered once in full precision"
        else:
            reason = full_precision_reason(
                param.ndim, param.numel, param.gather_dtype, min_quantized_numel
            )
            travel = "full" if reason else "quantized"
        segments.append(Segment(name, start, param.padded_shard_numel, travel, reason))  # type: ignore[arg-type]
        start += param.padded_shard_numel
    return segments


def full_precision_reason(
    ndim: int, numel: int, dtype: torch.dtype, min_quantized_numel: int
) -> str:
    """Why weights or gradients of a whole parameter are not quantized; empty if they are."""
    if not dtype.is_floating_point:
        return f"{dtype} is not floating point"
    if ndim < 2:
        return f"{ndim}-D"
    if numel < min_quantized_numel:
        return f"{numel} elements < min_quantized_numel={min_quantized_numel}"
    return ""


def keep_small_runs_exact(
    segments: list[Segment], specs: Sequence[CodecSpec], itemsize: int
) -> list[Segment]:
    """Let quantized runs travel in full precision where their codes would not be smaller."""
    small = [
        run
        for run in segment_runs(segments)
        if run.quantized and specs[run.codec].nbytes(run.numel) >= run.numel * itemsize
    ]
    return [
        segment._replace(travel="full", reason="the encoded shard would not be smaller")
        if any(run.start <= segment.start < run.start + run.numel for run in small)
        and segment.travel == "quantized"
        else segment
        for segment in segments
    ]
