"""How many micro-batches a schedule keeps on each rank, and which bits they can have.

Stages at the end of a pipeline keep fewer micro-batches than those at its start, so that memory is
left there for more bits of each (DBCA-PP; AGoQ, section 4.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lq_lightning.foundation.checks import check_choice

from .schedules import training_program

__all__ = ["BITS", "InFlight", "compensated_bits", "in_flight"]

BITS = range(2, 9)  # widths that integer codes have


@dataclass(frozen=True, slots=True)
class InFlight:
    """What a rank keeps at its peaks, in micro-batches of a stage.

    Where a schedule splits backward passes, a micro-batch keeps something else between the two
    halves than before them: no longer what only gradients of inputs need, but until the second half
    also the gradients that have arrived at weights.

    Attributes:
        peaks: pairs of micro-batches whose backward pass is to begin, and of those between its two
            halves, at one time; those that no other pair exceeds, in ascending order.
    """

    peaks: tuple[tuple[int, int], ...]

    @property
    def whole(self) -> int:
        """Most micro-batches whose backward pass is to begin."""
        return max(whole for whole, _ in self.peaks)

    @property
    def halves(self) -> int:
        """Most micro-batches between the two halves of their backward pass."""
        return max(half for _, half in self.peaks)

    def peak(self, half_size: float) -> float:
        """Return the peak in micro-batches, if one between two halves counts ``half_size``."""
        return max(whole + half_size * half for whole, half in self.peaks)

    def __str__(self) -> str:
        """Return one number, or both."""
        return f"{self.whole} ({self.halves} between halves)" if self.halves else str(self.whole)


def in_flight(
    schedule: str, pipeline_size: int, num_microbatches: int, stages_per_rank: int = 1
) -> tuple[InFlight, ...]:
    """Count by rank what a schedule keeps, from what it computes in which order.

    Interleaved 1F1B with 4 ranks, 2 stages each and enough micro-batches keeps 11, 9, 7 and 5.

    Raises:
        ValueError: as ``check_schedule``.
    """
    program = training_program(schedule, pipeline_size, num_microbatches, stages_per_rank)
    ranks = []
    for order in program.orders:
        whole = half = 0
        pairs = set()
        for action in order:
            whole += {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
            half += {"F": 0, "B": 0, "I": 1, "W": -1}[action.kind]
            pairs.add((whole, half))
        ranks.append(InFlight(tuple(sorted(p for p in pairs if not _exceeded(p, pairs)))))
    return tuple(ranks)


def compensated_bits(
    counts: Sequence[InFlight] | Sequence[int],
    bits: int = 4,
    rounding: Literal["floor", "nearest"] = "floor",
    cap: int = 8,
    half_size: float = 1.0,
) -> tuple[int, ...]:
    """Return bits per rank that use the memory that ranks with fewer micro-batches leave.

    Rank ``i`` gets ``bits * N_1 / N_i``, where ``N_1`` is the largest count (AGoQ, equation 22; its
    equation 21 for ``N_i`` counts the ranks from the other end). With counts of split backward
    passes the quotient is that of ``InFlight.peak``. So with ``"floor"`` no rank's peak exceeds
    that of the rank with the largest, at ``bits``.

    Args:
        counts: by rank, what ``in_flight`` returns, or numbers of micro-batches.
        bits: of the rank with the largest count.
        rounding: ``"floor"``; or ``"nearest"``, as in the paper, with which peaks can grow.
        cap: most bits.
        half_size: bytes that a micro-batch keeps between the halves of its backward pass, per byte
            that it keeps before.

    Returns:
        Bits in 2 to 8: counts 11, 9, 7, 5 give 4, 4, 6, 8, with ``"nearest"`` 4, 5, 6, 8.

    Raises:
        ValueError: a value that is not listed above.
    """
    check_choice("StageBitCompensation", "bits", bits, tuple(BITS))
    check_choice("StageBitCompensation", "cap", cap, tuple(BITS))
    check_choice("StageBitCompensation", "rounding", rounding, ("floor", "nearest"))
    if cap < bits:
        raise ValueError(f"`cap={cap}` is below `bits={bits}`: set `cap={bits}` or more.")
    if not 0 <= half_size < math.inf:
        raise ValueError(f"`half_size={half_size}` is no quotient of bytes: give 0 or more.")
    ranks = [c if isinstance(c, InFlight) else InFlight(((c, 0),)) for c in counts]
    peaks = [rank.peak(half_size) for rank in ranks]
    result = []
    for peak in peaks:
        exact = bits * max(peaks) / peak + 1e-9  # what is an integer stays one
        rounded = math.floor(exact if rounding == "floor" else exact + 0.5)
        result.append(min(rounded, cap))
    return tuple(result)


def _exceeded(pair: tuple[int, int], pairs: set[tuple[int, int]]) -> bool:
    return any(p != pair and p[0] >= pair[0] and p[1] >= pair[1] for p in pairs)
