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

    Inputs of linear layers are kept until the weights' half of a backward pass, all else until the
    input's half. They are the same in schedules that do not split the backward pass.

    Attributes:
        peaks: pairs of micro-batches of which all else is kept, and of which inputs of linear
            layers are kept, at one time; those that no other pair exceeds, in ascending order.
    """

    peaks: tuple[tuple[int, int], ...]

    @property
    def linear_inputs(self) -> int:
        """Most micro-batches of which inputs of linear layers are kept."""
        return max(linear for _, linear in self.peaks)

    @property
    def others(self) -> int:
        """Most micro-batches of which all else is kept."""
        return max(others for others, _ in self.peaks)

    def peak(self, linear_share: float) -> float:
        """Return the peak in micro-batches, of which linear layers' inputs are ``linear_share``."""
        return max((1 - linear_share) * others + linear_share * line for others, line in self.peaks)

    def __str__(self) -> str:
        """Return one number, or both."""
        if self.linear_inputs == self.others:
            return str(self.others)
        return f"{self.others} ({self.linear_inputs} of linear inputs)"


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
        others = linear = 0
        pairs = set()
        for action in order:
            step = 1 if action.kind == "F" else -1
            others += step * (action.kind in "FBI")
            linear += step * (action.kind in "FBW")
            pairs.add((others, linear))
        ranks.append(InFlight(tuple(sorted(p for p in pairs if not _exceeded(p, pairs)))))
    return tuple(ranks)


def compensated_bits(
    counts: Sequence[InFlight] | Sequence[int],
    bits: int = 4,
    rounding: Literal["floor", "nearest"] = "floor",
    cap: int = 8,
    linear_share: float | None = None,
) -> tuple[int, ...]:
    """Return bits per rank that use the memory that ranks with fewer micro-batches leave.

    Rank ``i`` gets ``bits * N_1 / N_i``, where ``N_1`` is the largest count (AGoQ, equation 22; its
    equation 21 for ``N_i`` counts the ranks from the other end). With counts of split backward
    passes the quotient is that of the peaks at the share of linear layers' inputs; if that is not
    known, the least for any share. So with ``"floor"`` no rank's peak exceeds that of the rank with
    the largest, at ``bits``.

    Args:
        counts: by rank, what ``in_flight`` returns, or numbers of micro-batches.
        bits: of the rank with the largest count.
        rounding: ``"floor"``; or ``"nearest"``, as in the paper, with which peaks can grow.
        cap: most bits.
        linear_share: share of linear layers' inputs in the saved bytes of a micro-batch, 0 to 1.

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
    if linear_share is not None and not 0 <= linear_share <= 1:
        raise ValueError(f"`linear_share={linear_share}` is not a share: give 0 to 1, or None.")
    ranks = [c if isinstance(c, InFlight) else InFlight(((c, c),)) for c in counts]
    if linear_share is None:
        shares = sorted({0.0, 1.0}.union(*(_turning_points(rank) for rank in ranks)))
    else:
        shares = [linear_share]
    result = []
    for rank in ranks:
        largest = [max(each.peak(share) for each in ranks) for share in shares]
        ratio = min(most / rank.peak(s) for most, s in zip(largest, shares, strict=True))
        exact = bits * ratio + 1e-9  # what is an integer stays one
        rounded = math.floor(exact if rounding == "floor" else exact + 0.5)
        result.append(min(rounded, cap))
    return tuple(result)


def _exceeded(pair: tuple[int, int], pairs: set[tuple[int, int]]) -> bool:
    return any(p != pair and p[0] >= pair[0] and p[1] >= pair[1] for p in pairs)


def _turning_points(rank: InFlight) -> set[float]:
    """Return the shares at which another pair of counts becomes the peak.

    Between two of them, of any rank, peaks are linear in the share, and a quotient of two such has
    its least value at an end.
    """
    points = set()
    for others, linear in rank.peaks:
        for fewer, more in rank.peaks:
            if others > fewer and more > linear:
                points.add((others - fewer) / (others - fewer + more - linear))
    return points
