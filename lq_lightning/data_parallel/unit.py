"""FSDP2 units as their collectives see them: shared state, traffic, and the layout of messages.

FSDP2 packs the shards of a unit's parameters one after another into a slot per rank. A slot is cut
into *runs*: neighbouring parameters in one wire format are encoded together, and a few
full-precision values between two of them (a norm or a bias) do not split them. All full-precision
values of a message form one part. So a unit needs a handful of operators, not some per parameter:
at the size of a transformer block the host takes longer to start them than the GPU to run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lq_lightning._compat.fsdp2 import GroupParam
from lq_lightning._compat.torch import after_backward, backward_id, copy_all, zero_all
from lq_lightning.codecs import CodecSpec, derive_seed, encode
from lq_lightning.foundation.groups import RankGroups
from lq_lightning.foundation.streams import CommPipeline
from lq_lightning.foundation.topology import Topology

ALIGNMENT_NBYTES = 16
# A quantized run holds at least this many times the elements of the gaps within it: their
# codes then cost at most 1.6% of its bytes.
MIN_CODES_PER_GAP = 64

WireFormat = Literal["quantized", "full", "skipped"]  # full precision; not sent


# --- traffic ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Traffic:
    """Bytes sent by this rank and elements exchanged since the start.

    A gather or reduce-scatter over ``k`` ranks with ``b`` bytes a rank counts ``(k - 1) * b`` bytes
    sent by each rank, as in a ring. The part counted as leaving the node is the least that must
    leave it, averaged over its ranks.

    Attributes:
        weights_intra: Weight bytes sent within the node.
        weights_inter: Weight bytes sent to other nodes.
        gradients_intra: Gradient bytes sent within the node.
        gradients_inter: Gradient bytes sent to other nodes.
        baseline_weights: Bytes that plain FSDP2 sends for the same weight gathers.
        baseline_gradients: Bytes that plain FSDP2 sends for the same gradient reductions.
        baseline_inter: Part of both that leaves the node.
        weights_messages: Bytes of this rank's weight messages (payload, not times receivers).
        weights_elements: Elements of these.
        gradients_messages: Bytes of this rank's gradient messages on the slowest level used.
        gradients_elements: Elements of these.
        full_precision_gathers: Full-precision gathers of a unit (the first one, and resyncs).
        exchanges: Quantized weight exchanges of a unit.
        reductions: Quantized gradient reductions of a unit.
    """

    weights_intra: float = 0.0
    weights_inter: float = 0.0
    gradients_intra: float = 0.0
    gradients_inter: float = 0.0
    baseline_weights: float = 0.0
    baseline_gradients: float = 0.0
    baseline_inter: float = 0.0
    weights_messages: int = 0
    weights_elements: int = 0
    gradients_messages: int = 0
    gradients_elements: int = 0
    full_precision_gathers: int = 0
    exchanges: int = 0
    reductions: int = 0

    @property
    def sent(self) -> float:
        """Bytes sent by this rank."""
        return self.weights_intra + self.weights_inter + self.gradients_intra + self.gradients_inter

    @property
    def baseline(self) -> float:
        """Bytes that plain FSDP2 would have sent."""
        return self.baseline_weights + self.baseline_gradients

    @property
    def bits_per_weight(self) -> float:
        """Bits on the wire per exchanged weight, scales included; NaN before any exchange."""
        return _ratio(8 * self.weights_messages, self.weights_elements)

    @property
    def bits_per_gradient(self) -> float:
        """Bits on the wire per gradient on the slowest level, scales included; NaN before any."""
        return _ratio(8 * self.gradients_messages, self.gradients_elements)

    def since(self, earlier: Traffic) -> Traffic:
        """Return the counts since the snapshot ``earlier``."""
        return Traffic(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def snapshot(self) -> Traffic:
        """Return a copy that stops counting."""
        return replace(self)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")


def ring_bytes(nbytes: int, topology: Topology) -> tuple[float, float]:
    """Bytes one rank sends in a ring over all ranks, of slots of ``nbytes``: (intra, inter)."""
    inter = (topology.world_size - topology.node_size) / topology.node_size * nbytes
    return (topology.world_size - 1) * nbytes - inter, inter


@dataclass(slots=True)
class ErrorSums:
    """Running sums behind the relative L2 error, kept on the device until read."""

    squared_error: Tensor | None = None
    squared_norm: Tensor | None = None

    def add(self, approximate: Tensor, exact: Tensor) -> None:
        """Add the error of ``approximate`` against ``exact`` (same shape, any float dtype)."""
        exact = exact.float()
        error = torch.sum((approximate.float() - exact) ** 2)
        norm = torch.sum(exact**2)
        self.squared_error = error if self.squared_error is None else self.squared_error + error
        self.squared_norm = norm if self.squared_norm is None else self.squared_norm + norm

    def pop(self) -> tuple[float, float]:
        """Return ``(sum of squared errors, sum of squares)`` and reset them."""
        error = 0.0 if self.squared_error is None else float(self.squared_error)
        norm = 0.0 if self.squared_norm is None else float(self.squared_norm)
        self.squared_error = self.squared_norm = None
        return error, norm


# --- state of units -----------------------------------------------------------------------------


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
    """State that every unit of one model shares."""

    topology: Topology
    groups: RankGroups
    seed: int  # base of all stochastic-rounding seeds
    vocabulary: frozenset[str]  # names of the parameters that are embeddings or heads
    min_quantized_numel: int  # parameters with fewer elements are sent in full precision
    traffic: Traffic = field(default_factory=Traffic)
    step: int = 0  # optimizer steps taken so far; a new number allows one more exchange
    measure_errors: bool = False  # whether to sum up quantization errors (costs extra passes)
    weight_errors: ErrorSums = field(default_factory=ErrorSums)
    gradient_errors: ErrorSums = field(default_factory=ErrorSums)
    reductions: DeferredReductions = field(default_factory=DeferredReductions)

    def count_baseline(self, nbytes: int) -> float:
        """Count what plain FSDP2 sends for slots of ``nbytes``; returns the bytes."""
        intra, inter = ring_bytes(nbytes, self.topology)
        self.traffic.baseline_inter += inter
        return intra + inter


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """One FSDP2 unit."""

    name: str  # for messages
    index: int  # number of the unit in the model, part of the rounding seed
    params: Callable[[], list[GroupParam]]  # describes the unit's parameters as they are now
    names: tuple[str, ...]  # fully qualified names of these parameters
    context: UnitContext

    def places(self, indices: Iterable[int] | None = None) -> Iterator[tuple[str, GroupParam, int]]:
        """Name, parameter and first element in a slot of the packed parameters, by default all."""
        params, start = self.params(), 0
        for index in range(len(params)) if indices is None else indices:
            yield self.names[index], params[index], start
            start += params[index].padded_shard_numel


# --- segments and runs --------------------------------------------------------------------------


class Segment(NamedTuple):
    """One parameter's place in a slot: of its padded shard, in elements."""

    name: str
    start: int
    numel: int
    wire_format: WireFormat
    reason: str = ""  # why it is not quantized; empty if it is
    codec: int = 0  # index of the layout's codec, if it is quantized


class Run(NamedTuple):
    """Neighbouring segments in one wire format: ``slot[start : stop]``."""

    start: int
    numel: int
    quantized: bool  # whether the run is encoded
    gaps: tuple[Run, ...] = ()  # full-precision runs within it; zeros are encoded in their place
    codec: int = 0  # index of the layout's codec, 0 where the run is not encoded

    @property
    def stop(self) -> int:
        """End of the run in the slot."""
        return self.start + self.numel

    @property
    def gap_numel(self) -> int:
        """Full-precision elements within an encoded run."""
        return sum(run.numel for run in self.gaps)


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


def segment_runs(segments: Sequence[Segment]) -> list[Run]:
    """Merge neighbouring segments of one wire format; skipped ones end a run."""
    runs: list[Run] = []
    for segment in segments:
        if segment.wire_format == "skipped" or segment.numel == 0:
            continue
        quantized = segment.wire_format == "quantized"
        run = Run(segment.start, segment.numel, quantized, codec=segment.codec if quantized else 0)
        last = runs[-1] if runs else None
        alike = last is not None and (last.quantized, last.codec) == (run.quantized, run.codec)
        if last is not None and alike and last.stop == run.start:
            runs[-1] = last._replace(numel=last.numel + run.numel)
        else:
            runs.append(run)
    return runs


def keep_small_runs_exact(
    segments: list[Segment], specs: Sequence[CodecSpec], itemsize: int
) -> list[Segment]:
    """Send quantized runs in full precision where their codes would not be smaller."""
    small = [
        run
        for run in segment_runs(segments)
        if run.quantized and specs[run.codec].nbytes(run.numel) >= run.numel * itemsize
    ]
    return [
        segment._replace(wire_format="full", reason="the encoded shard would not be smaller")
        if any(run.start <= segment.start < run.stop for run in small)
        and segment.wire_format == "quantized"
        else segment
        for segment in segments
    ]


def merge_over_small_gaps(runs: Sequence[Run]) -> list[Run]:
    """Merge quantized runs of one codec across the few full-precision elements between them.

    Each merge saves the operators of a run. It costs codes that nobody needs, so the gaps of a run
    are at most ``1 / MIN_CODES_PER_GAP`` of it. Runs with skipped segments between them stay apart.
    """
    merged: list[Run] = []
    for run in runs:
        merged.append(run)
        while (joined := _joined(merged[-3:])) is not None:
            merged[-3:] = [joined]
    return merged


def _joined(runs: Sequence[Run]) -> Run | None:
    """Two quantized runs and the full-precision one between them as one; None if not worth it."""
    if [run.quantized for run in runs] != [True, False, True]:
        return None
    left, gap, right = runs
    if left.stop != gap.start or gap.stop != right.start or left.codec != right.codec:
        return None
    gaps = (*left.gaps, gap, *right.gaps)
    joined = Run(left.start, right.stop - left.start, True, gaps, left.codec)
    return joined if joined.gap_numel * MIN_CODES_PER_GAP <= joined.numel else None


def _exact_within(run: Run) -> tuple[Run, ...]:
    return run.gaps if run.quantized else (run,)


def part_seed(seed: int | None, part: int) -> int | None:
    """Seed of one part of a message; None where rounding needs none."""
    return None if seed is None else derive_seed(seed, part)


# --- messages -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MessageLayout:
    """Byte layout of one slot's message: the codes of each quantized run, then exact values.

    *Exact* values are sent in full precision: those of full-precision runs and of gaps, in slot
    order and without space between them. Codes take a multiple of 16 bytes, as do messages, so all
    parts start at multiples of that.
    """

    runs: Sequence[Run]  # in slot order
    specs: Sequence[CodecSpec]  # codecs, of which each quantized run uses one
    raw_dtype: torch.dtype  # of exact values in the message

    @cached_property
    def quantized(self) -> list[tuple[int, Run]]:
        """Quantized runs, each with its index."""
        return [(index, run) for index, run in enumerate(self.runs) if run.quantized]

    @cached_property
    def offsets(self) -> list[int]:
        """First byte of each run's codes, and the end of all codes. Exact runs have none."""
        offsets = [0]
        for run in self.runs:
            nbytes = self.spec_of(run).nbytes(run.numel) if run.quantized else 0
            offsets.append(offsets[-1] + nbytes)
        return offsets

    @cached_property
    def exact_runs(self) -> list[Run]:
        """Places of exact values in the slot."""
        return [part for run in self.runs for part in _exact_within(run)]

    @cached_property
    def gap_indices(self) -> list[int]:
        """Indices of those exact runs that are gaps of quantized ones."""
        are_gaps = [run.quantized for run in self.runs for _ in _exact_within(run)]
        return [index for index, is_gap in enumerate(are_gaps) if is_gap]

    @cached_property
    def pieces(self) -> list[int]:
        """Elements before each exact run and in it, alternating."""
        ends = [0, *(run.stop for run in self.exact_runs)]
        pairs = zip(self.exact_runs, ends, strict=False)
        return [size for run, end in pairs for size in (run.start - end, run.numel)]

    @cached_property
    def exact_stop(self) -> int:
        """End of the exact part, which starts where the codes end."""
        numel = sum(run.numel for run in self.exact_runs)
        return self.codes_nbytes + numel * self.raw_dtype.itemsize

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole message."""
        return -(-self.exact_stop // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES

    @property
    def codes_nbytes(self) -> int:
        """Bytes of all codes, with which a message starts."""
        return self.offsets[-1]

    @cached_property
    def numel(self) -> int:
        """Elements of a slot that are sent."""
        return sum(run.numel for run in self.runs)

    def spec_of(self, run: Run) -> CodecSpec:
        """Codec of a quantized run."""
        return self.specs[run.codec]

    def allocate(self, *shape: int, device: torch.device) -> Tensor:
        """Return ``[*shape, nbytes]`` uint8 messages, whose parts are not written yet.

        Codecs write every byte of their part. The few bytes behind the exact one are zero here, so
        that equal values make equal messages.
        """
        messages = torch.empty(*shape, self.nbytes, dtype=torch.uint8, device=device)
        if self.exact_stop < self.nbytes:
            messages[..., self.exact_stop :].zero_()
        return messages

    def part(self, messages: Tensor, index: int) -> Tensor:
        """Codes of run ``index``, a quantized one: ``[..., k]`` view of ``[..., nbytes]`` uint8."""
        return messages[..., self.offsets[index] : self.offsets[index + 1]]

    def exact(self, messages: Tensor) -> Tensor:
        """Exact values of ``[..., nbytes]`` messages: ``[..., E]`` view of ``raw_dtype``."""
        return messages[..., self.codes_nbytes : self.exact_stop].view(self.raw_dtype)

    def encode(
        self,
        slots: Tensor,
        messages: Tensor,
        *,
        seed: int | None = None,
        reference: Tensor | None = None,
        skip: int | None = None,
    ) -> None:
        """Encode slots, or their difference to ``reference``, into messages.

        Args:
            slots: ``[..., n]`` of ``raw_dtype``; gaps are overwritten with zeros.
            messages: ``[..., nbytes]`` uint8.
            seed: Seed of stochastic rounding.
            reference: ``[..., n]``; its gaps hold zeros until a message is decoded.
            skip: Index in ``[R + 1, n]`` slots of the one without a message.
        """
        self.exact_to_messages(slots, messages, reference, skip)
        for index, run in self.quantized:
            part = slice(run.start, run.stop)
            encode(
                self.spec_of(run),
                slots[..., part],
                seed=part_seed(seed, index),
                reference=None if reference is None else reference[..., part],
                out=self.part(messages, index),
                skip=skip,
            )

    def read_exact(self, slots: Tensor) -> Tensor:
        """Return a copy of the exact values of ``[..., n]`` slots: ``[..., E]``."""
        return torch.cat(self._exact_views(slots), dim=-1)

    def exact_to_messages(
        self,
        slots: Tensor,
        messages: Tensor,
        reference: Tensor | None = None,
        skip: int | None = None,
    ) -> None:
        """Write the exact values of slots to their messages, and zeros over the gaps.

        Encoded as zeros, the values of gaps change neither the scale of their group nor, where they
        are not finite, their neighbours. Gaps of ``reference`` have to hold zeros meanwhile, too;
        :meth:`exact_to_slots` ends that. Arguments as for :meth:`encode`.
        """
        if not self.exact_runs:
            return
        views = self._exact_views(slots)
        if skip is None:
            torch.cat(views, dim=-1, out=self.exact(messages))
        else:
            every = torch.cat(views, dim=-1)
            torch.cat((every[:skip], every[skip + 1 :]), out=self.exact(messages))
        if self.gap_indices:
            gaps = [views[index] for index in self.gap_indices]
            if reference is not None:
                views = self._exact_views(reference)
                gaps += [views[index] for index in self.gap_indices]
            zero_all(gaps)

    def exact_to_slots(self, messages: Tensor, slots: Tensor) -> None:
        """Write the exact values of messages to their places in slots.

        The codes have to be decoded before: they hold zeros in the gaps.
        """
        if self.exact_runs:
            self.write_exact(self.exact(messages), slots)

    def write_exact(self, values: Tensor, slots: Tensor) -> None:
        """Write ``[..., E]`` exact values to their places in ``[..., n]`` slots of any dtype."""
        parts = values.to(slots.dtype).split_with_sizes(self.pieces[1::2], dim=-1)
        copy_all(self._exact_views(slots), parts)

    def _exact_views(self, slots: Tensor) -> tuple[Tensor, ...]:
        """Views of the exact runs in ``[..., n]`` slots, each ``[..., numel]``."""
        rest = slots.shape[-1] - self.exact_runs[-1].stop
        # one operator, where slices would be one for each view
        return slots.split_with_sizes((*self.pieces, rest), dim=-1)[1::2]
