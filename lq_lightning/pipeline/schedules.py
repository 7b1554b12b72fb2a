"""Schedules: the order in which each rank of a pipeline computes a step.

Everything here is pure. Every rank derives the orders of all ranks, and from them the order in
which messages reach it, so that nothing has to be announced before it is sent.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple, cast, get_args

from lq_lightning._compat.torch import TorchSchedule, schedule_actions
from lq_lightning.foundation.checks import check_choice

Schedule = Literal["gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zero_bubble", "zbv"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
SPLIT_SCHEDULES = ("zero_bubble", "zbv")  # their backward passes have two halves
BITS = range(2, 9)  # widths of integer codes

_ONE_STAGE = ("gpipe", "1f1b", "eager_1f1b")


class Action(NamedTuple):
    """One computation of one stage.

    Kinds are ``"F"`` forward, ``"B"`` backward, ``"I"`` backward for the input only, and ``"W"``
    the rest of backward, for the weights.
    """

    kind: str
    stage: int
    microbatch: int


Orders = Sequence[Sequence[Action]]  # by rank


class Key(NamedTuple):
    """A message of a step; see ``Message``."""

    boundary: int
    backward: bool
    microbatch: int


@dataclass(frozen=True, slots=True)
class Program:
    """The orders of all ranks for one step.

    ``turns`` has by rank the place of each of its computations in one order of all computations of
    all ranks, in which each comes after its inputs.
    """

    schedule: str
    num_stages: int
    num_microbatches: int
    orders: Orders
    turns: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        """Find the common order."""
        object.__setattr__(self, "turns", _turns(self.orders, self.num_stages))

    def rank_of(self, stage: int) -> int:
        """Return the rank of a stage."""
        return rank_of_stage(self.schedule, stage, self.num_stages, len(self.orders))

    def messages(self, source: int, target: int) -> Iterator[tuple[Key, int]]:
        """Yield the messages of one rank to another, in the order in which they are sent.

        With each goes the number of computations of ``target`` that come before the sender's in the
        common order. If every rank posts the receive after that many, and waits for all its
        transfers before each computation, each waits only for earlier ones, so all of them end.
        """
        if source == target:
            return
        for index, action in enumerate(self.orders[source]):
            key = self.sent_after(action)
            if key and self.rank_of(key.boundary + (not key.backward)) == target:
                yield key, bisect_left(self.turns[target], self.turns[source][index])

    def sent_after(self, action: Action) -> Key | None:
        """Return the message that an action makes, if any."""
        if action.kind == "F" and action.stage < self.num_stages - 1:
            return Key(action.stage, False, action.microbatch)
        if action.kind in "BI" and action.stage > 0:
            return Key(action.stage - 1, True, action.microbatch)
        return None


def rank_of_stage(schedule: str, stage: int, num_stages: int, pipeline_size: int) -> int:
    """Return the rank of a stage: round the ranks, or for ``"zbv"`` there and back."""
    turn, place = divmod(stage, pipeline_size)
    return pipeline_size - 1 - place if schedule == "zbv" and turn % 2 else place


def stages_of_rank(
    schedule: str, rank: int, num_stages: int, pipeline_size: int
) -> tuple[int, ...]:
    """Return the stages of a rank, in order."""
    return tuple(
        stage
        for stage in range(num_stages)
        if rank_of_stage(schedule, stage, num_stages, pipeline_size) == rank
    )


def check_schedule(
    schedule: str, pipeline_size: int, num_microbatches: int, stages_per_rank: int = 1
) -> None:
    """Raise ``ValueError`` unless the schedule has such stages per rank and micro-batches."""
    check_choice("quantized_pipeline", "schedule", schedule, SCHEDULES)
    if schedule in _ONE_STAGE and stages_per_rank != 1:
        raise ValueError(
            f"`stages_per_rank={stages_per_rank}` with `schedule={schedule!r}`: it has one stage "
            "on each rank. Use 'interleaved_1f1b' or 'zero_bubble' for several."
        )
    if schedule == "zbv" and stages_per_rank != 2:
        raise ValueError(
            f"`stages_per_rank={stages_per_rank}` with `schedule='zbv'`: it has two stages on each "
            "rank. Set `stages_per_rank=2`, or use 'zero_bubble'."
        )
    if schedule != "gpipe" and num_microbatches < pipeline_size:
        raise ValueError(
            f"`num_microbatches={num_microbatches}` is too few for `schedule={schedule!r}` with "
            f"`pipeline_size={pipeline_size}`: it needs at least as many micro-batches as ranks. "
            f"Set `num_microbatches={pipeline_size}` or more, or use 'gpipe'."
        )
    if schedule in ("interleaved_1f1b", "zero_bubble"):
        rounds = num_microbatches // pipeline_size
        if num_microbatches % rounds:
            allowed = num_microbatches - num_microbatches % pipeline_size
            raise ValueError(
                f"`num_microbatches={num_microbatches}` with `schedule={schedule!r}` and "
                f"`pipeline_size={pipeline_size}` cannot be cut into {rounds} equal rounds: use a "
                f"multiple of the ranks, {allowed} or {allowed + pipeline_size}."
            )


@lru_cache(maxsize=8)
def training_program(
    schedule: str, pipeline_size: int, num_microbatches: int, stages_per_rank: int = 1
) -> Program:
    """Return the orders of a training step.

    ``"gpipe"``: all forward passes, then all backward passes. ``"1f1b"``: stage ``s`` of ``n``
    starts with ``n - s`` forward passes, then backward and forward alternate. ``"eager_1f1b"``
    starts with ``3 (n - s) - 2``, for slow links: until the first gradient comes back, a hidden
    state is sent, the next stage computes and a gradient is sent, each of which takes one period of
    the steady state at most. 1F1B would wait for transfers. ``"interleaved_1f1b"``,
    ``"zero_bubble"`` (interleaved, ZB1P) and ``"zbv"`` are torch's. Errors as ``check_schedule``.
    """
    check_schedule(schedule, pipeline_size, num_microbatches, stages_per_rank)
    if schedule in _ONE_STAGE:
        starts = {
            "gpipe": [num_microbatches] * pipeline_size,
            "1f1b": list(range(pipeline_size, 0, -1)),
            "eager_1f1b": list(range(3 * pipeline_size - 2, 0, -3)),
        }[schedule]
        lists = [
            _one_forward_one_backward(rank, min(start, num_microbatches), num_microbatches)
            for rank, start in enumerate(starts)
        ]
    else:
        lists = [
            _merged([Action(*each) for each in order])
            for order in schedule_actions(
                cast(TorchSchedule, schedule), pipeline_size, num_microbatches, stages_per_rank
            )
        ]
    return Program(schedule, pipeline_size * stages_per_rank, num_microbatches, lists)


@lru_cache(maxsize=8)
def evaluation_program(
    schedule: str, pipeline_size: int, num_microbatches: int, stages_per_rank: int = 1
) -> Program:
    """Return the orders of an evaluation step: forward passes of any number of micro-batches.

    Rounds of as many micro-batches as ranks, within a round stage by stage. All ranks follow one
    total order in which every stage comes after the one before it, so none deadlocks.
    """
    num_stages = pipeline_size * stages_per_rank
    orders = []
    for rank in range(pipeline_size):
        mine = stages_of_rank(schedule, rank, num_stages, pipeline_size)
        actions = (Action("F", s, m) for s in mine for m in range(num_microbatches))
        orders.append(
            sorted(actions, key=lambda a: (a.microbatch // pipeline_size, a.stage, a.microbatch))
        )
    return Program(schedule, num_stages, num_microbatches, orders)


def _one_forward_one_backward(stage: int, start: int, num_microbatches: int) -> list[Action]:
    order = [Action("F", stage, m) for m in range(start)]
    for m in range(num_microbatches):
        order.append(Action("B", stage, m))
        if m + start < num_microbatches:
            order.append(Action("F", stage, m + start))
    return order


def _merged(order: list[Action]) -> list[Action]:
    """Make two halves that follow each other one backward pass, which costs less.

    Stage 0 needs no gradient of its input: its first half is the whole, so that nothing is kept for
    the second.
    """
    merged: list[Action] = []
    for action in order:
        if action.kind == "I" and action.stage == 0:
            merged.append(action._replace(kind="B"))
        elif action.kind == "W" and action.stage == 0:
            continue
        elif action.kind == "W" and merged[-1] == action._replace(kind="I"):
            merged[-1] = action._replace(kind="B")
        else:
            merged.append(action)
    return merged


def _turns(orders: Orders, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the place of each computation in one order of all.

    They are sorted by the time at which each would run if all took one unit and transfers none.
    Within a unit of time backward passes go first, late stages before early ones, then forward
    passes, early stages first: so that most receives come a computation before they are needed.
    """
    times: dict[Action, int] = {}
    free = [0] * len(orders)
    waiting = [list(reversed(order)) for order in orders]
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(waiting):
            while order:
                inputs = _inputs(order[-1], num_stages)
                made = [times[action] for each in inputs for action in each if action in times]
                if len(made) < len(inputs):
                    break
                time = max([free[rank], *(each + 1 for each in made)])
                times[order.pop()] = time
                free[rank] = time + 1
                progress = True
    if any(waiting):
        raise AssertionError("ranks wait for each other")

    def place(action: Action) -> tuple[int, ...]:
        forward = action.kind == "F"
        return times[action], forward, action.stage if forward else -action.stage

    turns = {action: turn for turn, action in enumerate(sorted(times, key=place))}
    return tuple(tuple(turns[action] for action in order) for order in orders)


def _inputs(action: Action, num_stages: int) -> list[tuple[Action, ...]]:
    """Return the inputs of a computation, each with the actions that may have made it."""
    kind, stage, _ = action
    if kind == "F":
        return [(action._replace(stage=stage - 1),)] if stage > 0 else []
    if kind == "W":
        return [(action._replace(kind="I"),)]
    inputs: list[tuple[Action, ...]] = [(action._replace(kind="F"),)]
    if stage < num_stages - 1:
        after = action._replace(stage=stage + 1)
        inputs.append((after._replace(kind="B"), after._replace(kind="I")))
    return inputs


# --- micro-batches in flight --------------------------------------------------------------------


def in_flight(
    schedule: str, pipeline_size: int, num_microbatches: int, stages_per_rank: int = 1
) -> tuple[int, ...]:
    """Count by rank the most micro-batches that a schedule keeps; errors as ``check_schedule``.

    With split backward passes those before their first half count. Interleaved 1F1B with 4 ranks,
    2 stages each and enough micro-batches keeps 11, 9, 7 and 5.
    """
    program = training_program(schedule, pipeline_size, num_microbatches, stages_per_rank)
    ranks = []
    for order in program.orders:
        changes = ({"F": 1, "B": -1, "I": -1, "W": 0}[action.kind] for action in order)
        ranks.append(max(accumulate(changes)))
    return tuple(ranks)


def compensated_bits(
    counts: Sequence[int],
    bits: int = 4,
    rounding: Literal["floor", "nearest"] = "floor",
    cap: int = 8,
) -> tuple[int, ...]:
    """Return bits per rank that use the memory left by ranks with fewer micro-batches in flight.

    Rank ``i`` gets ``bits * N_1 / N_i``, where ``N_1`` is the largest count (DBCA-PP; AGoQ,
    equation 22; its equation 21 for ``N_i`` counts the ranks from the other end). So with
    ``"floor"`` no rank's peak exceeds the largest at ``bits``. Counts 11, 9, 7, 5 give 4, 4, 6, 8
    bits.

    ``counts`` are results of ``in_flight``, or numbers of micro-batches, by rank; ``bits`` and
    ``cap`` are 2 to 8. All else is as in ``StageBitCompensation``.
    """
    check_choice("StageBitCompensation", "bits", bits, tuple(BITS))
    check_choice("StageBitCompensation", "cap", cap, tuple(BITS))
    check_choice("StageBitCompensation", "rounding", rounding, ("floor", "nearest"))
    if cap < bits:
        raise ValueError(f"`cap={cap}` is below `bits={bits}`: set `cap={bits}` or more.")
    result = []
    for count in counts:
        exact = bits * max(counts) / count + 1e-9  # integers stay integers
        rounded = math.floor(exact if rounding == "floor" else exact + 0.5)
        result.append(min(rounded, cap))
    return tuple(result)
