"""Layout of byte messages: how the slot of one rank in an FSDP2 collective becomes one message.

FSDP2 packs the shards of a unit's parameters one after another into a slot per rank. Here a slot is
cut into *runs*: neighbouring parameters in the same wire format are encoded together, and a few
full-precision values between two of them (a norm or a bias) do not split them. All full-precision
values of a message lie in one part. So a unit needs a handful of operators, not some per parameter:
at the size of a transformer block the host takes longer to start them than the GPU to run them. All
sizes are pure functions of the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lq_lightning._compat.torch import copy_all, zero_all
from lq_lightning.codecs import CodecSpec, derive_seed, encode

__all__ = [
    "MessageLayout",
    "Run",
    "Segment",
    "full_precision_reason",
    "keep_small_runs_exact",
    "merge_over_small_gaps",
    "part_seed",
    "segment_runs",
]

ALIGNMENT_NBYTES = 16
# A quantized run holds at least this many times the elements of the gaps within it: their
# codes then cost at most 1.6% of its bytes.
MIN_CODES_PER_GAP = 64

WireFormat = Literal["quantized", "full", "skipped"]


class Segment(NamedTuple):
    """One parameter's place in a slot.

    Attributes:
        name: Fully qualified parameter name.
        start: First element of the shard in the slot.
        numel: Elements of the (padded) shard.
        wire_format: ``"quantized"``, ``"full"`` (full precision) or ``"skipped"`` (not sent).
        reason: Why it is not quantized; empty if it is.
        codec: Index of the layout's codec, if it is quantized.
    """

    name: str
    start: int
    numel: int
    wire_format: WireFormat
    reason: str = ""
    codec: int = 0


class Run(NamedTuple):
    """Neighbouring segments in one wire format: ``slot[start : stop]``.

    Attributes:
        start: First element in the slot.
        numel: Elements.
        quantized: Whether the run is encoded.
        gaps: Full-precision runs within an encoded one. Zeros are encoded in their place.
        codec: Index of the layout's codec, 0 where the run is not encoded.
    """

    start: int
    numel: int
    quantized: bool
    gaps: tuple[Run, ...] = ()
    codec: int = 0

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


def part_seed(seed: int | None, part: int) -> int | None:
    """Seed of one part of a message; None where rounding needs none."""
    return None if seed is None else derive_seed(seed, part)


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Byte layout of one slot's message: the codes of each quantized run, then exact values.

    *Exact* values are sent in full precision: those of full-precision runs and of gaps, in slot
    order and without space between them.

    Attributes:
        runs: Runs, in slot order.
        specs: Codecs, of which each quantized run uses one.
        raw_dtype: Dtype of exact values in the message.
        offsets: First byte of each run's codes, and the end of all codes. A full-precision run has
            none.
        exact_runs: Places of exact values in the slot.
        gap_indices: Indices of those exact runs that are gaps of quantized ones.
        exact_stop: End of the exact part, which starts where the codes end.
        nbytes: Bytes of the whole message, a multiple of 16.
        quantized: Quantized runs, each with its index.
        pieces: Elements before each exact run and in it, alternating.
    """

    runs: tuple[Run, ...]
    specs: tuple[CodecSpec, ...]
    raw_dtype: torch.dtype
    offsets: tuple[int, ...]
    exact_runs: tuple[Run, ...]
    gap_indices: tuple[int, ...]
    exact_stop: int
    nbytes: int
    quantized: tuple[tuple[int, Run], ...]
    pieces: tuple[int, ...]

    @classmethod
    def of(
        cls, runs: Sequence[Run], specs: Sequence[CodecSpec], raw_dtype: torch.dtype
    ) -> MessageLayout:
        """Lay out the codes one run after another, then all exact values.

        Codes take a multiple of 16 bytes, so all parts and messages start at multiples of that.
        """
        offsets = [0]
        exact_runs: list[Run] = []
        gap_indices: list[int] = []
        for run in runs:
            nbytes = specs[run.codec].nbytes(run.numel) if run.quantized else 0
            offsets.append(offsets[-1] + nbytes)
            if run.quantized:
                gap_indices += range(len(exact_runs), len(exact_runs) + len(run.gaps))
            exact_runs += run.gaps if run.quantized else (run,)
        stop = offsets[-1] + sum(run.numel for run in exact_runs) * raw_dtype.itemsize
        before = [0, *(run.stop for run in exact_runs)]
        pairs = zip(exact_runs, before, strict=False)
        return cls(
            tuple(runs),
            tuple(specs),
            raw_dtype,
            tuple(offsets),
            tuple(exact_runs),
            tuple(gap_indices),
            stop,
            -(-stop // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES,
            tuple((index, run) for index, run in enumerate(runs) if run.quantized),
            tuple(size for run, end in pairs for size in (run.start - end, run.numel)),
        )

    @property
    def codes_nbytes(self) -> int:
        """Bytes of all codes, with which a message starts."""
        return self.offsets[-1]

    def spec_of(self, run: Run) -> CodecSpec:
        """Codec of a quantized run."""
        return self.specs[run.codec]

    @property
    def quantized_numel(self) -> int:
        """Elements of a slot that are sent as codes alone."""
        return sum(run.numel - run.gap_numel for run in self.runs if run.quantized)

    @property
    def numel(self) -> int:
        """Elements of a slot that are sent."""
        return sum(run.numel for run in self.runs)

    # --- messages ---------------------------------------------------------------------------

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

    # --- exact values in slots --------------------------------------------------------------

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
        """Write the exact values of ``[..., nbytes]`` messages to their places in slots.

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
