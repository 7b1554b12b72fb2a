"""How the slot of one rank in an FSDP2 collective maps to one byte message.

FSDP2 packs the shards of a unit's parameters one after another into a slot per rank. Here a slot is
cut into *runs*: neighbouring parameters that travel the same way are encoded together, so a unit
needs a few kernels, not one per parameter. All sizes are pure functions of the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lq_lightning.codecs import CodecSpec

__all__ = ["MessageLayout", "Run", "Segment", "segment_runs"]

ALIGNMENT_NBYTES = 16

Travel = Literal["quantized", "full", "skipped"]


class Segment(NamedTuple):
    """One parameter's place in a slot.

    Attributes:
        name: Fully qualified parameter name.
        start: First element of the shard in the slot.
        numel: Elements of the (padded) shard.
        travel: ``"quantized"``, ``"full"`` (full precision) or ``"skipped"`` (never exchanged).
        reason: Why it is not quantized; empty if it is.
    """

    name: str
    start: int
    numel: int
    travel: Travel
    reason: str = ""


class Run(NamedTuple):
    """Neighbouring segments that travel together: ``slot[start : start + numel]``."""

    start: int
    numel: int
    quantized: bool


def segment_runs(segments: Sequence[Segment]) -> list[Run]:
    """Merge neighbouring segments that travel the same way; skipped ones end a run."""
    runs: list[Run] = []
    for segment in segments:
        if segment.travel == "skipped" or segment.numel == 0:
            continue
        quantized = segment.travel == "quantized"
        last = runs[-1] if runs else None
        if last and last.quantized == quantized and last.start + last.numel == segment.start:
            runs[-1] = last._replace(numel=last.numel + segment.numel)
        else:
            runs.append(Run(segment.start, segment.numel, quantized))
    return runs


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Byte layout of one slot's message.

    Attributes:
        runs: The runs, in slot order.
        spec: Codec of the quantized runs.
        raw_dtype: Dtype of the values of full-precision runs in the message.
        offsets: First byte of each run's part.
        nbytes: Bytes of the whole message, a multiple of 16.
    """

    runs: tuple[Run, ...]
    spec: CodecSpec
    raw_dtype: torch.dtype
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, runs: Sequence[Run], spec: CodecSpec, raw_dtype: torch.dtype) -> MessageLayout:
        """Lay the runs out one after another, each at a multiple of 16 bytes."""
        offsets, total = [], 0
        for run in runs:
            offsets.append(total)
            total += cls._run_nbytes(run, spec, raw_dtype)
        return cls(tuple(runs), spec, raw_dtype, tuple(offsets), total)

    @staticmethod
    def _run_nbytes(run: Run, spec: CodecSpec, raw_dtype: torch.dtype) -> int:
        if run.quantized:
            return _aligned(spec.nbytes(run.numel))
        return _aligned(run.numel * raw_dtype.itemsize)

    @property
    def quantized_numel(self) -> int:
        """Elements of a slot that travel as codes."""
        return sum(run.numel for run in self.runs if run.quantized)

    @property
    def numel(self) -> int:
        """Elements of a slot that travel at all."""
        return sum(run.numel for run in self.runs)

    def part(self, messages: Tensor, index: int) -> Tensor:
        """Bytes of run ``index`` in each message.

        Args:
            messages: ``[..., nbytes]`` uint8.

        Returns:
            ``[..., k]`` uint8 view; for a full-precision run ``[..., numel]`` of ``raw_dtype``.
        """
        run, start = self.runs[index], self.offsets[index]
        if run.quantized:
            return messages[..., start : start + self.spec.nbytes(run.numel)]
        stop = start + run.numel * self.raw_dtype.itemsize
        return messages[..., start:stop].view(self.raw_dtype)
