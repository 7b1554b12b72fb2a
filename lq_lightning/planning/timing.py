"""Milliseconds of a step: the last step's events, replayed on streams and links.

The host issues events in their order. Each takes it some time, each stream works off its own, and
waits order streams and host. What the computing stream does in the time between two optimizer steps
is the step: so parts add up to the total.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lq_lightning.pipeline.schedules import Action, Key, Program

from .costs import (
    BETWEEN,
    BUBBLE,
    CODECS,
    COMPUTE,
    ERRORS,
    HOST_LATE,
    OPTIMIZER,
    PARTS,
    SHARED,
    WITHIN,
    Slower,
    collective_costs,
    fused,
    is_codec,
    is_idle,
    operator_costs,
    sent_nbytes,
)
from .machine import Machine
from .trace import (
    COMPUTING,
    HOST,
    SHARDED,
    Allocate,
    Collective,
    Event,
    Free,
    Mark,
    Operator,
    Record,
    Trace,
    Wait,
)

SURE = 1.645  # standard deviations around an interval that contains 90%

# Host time in that of issuing an operator. Python around operators is counted where a trace shows
# it: hooks of FSDP2 and ours by the events that they record and wait for, DTensor's by operators on
# them. Compiled code launches fewer kernels, each after more of it. Fitted to the steps of
# `plan_accuracy.json` that the host bounds.
OPERATOR_CALLS, COMPILED_CALLS, SHARDED_CALLS = 1.0, 4.5, 7.5
EVENT_CALLS, COLLECTIVE_CALLS, BATCH_CALLS = 9.5, 7.5, 150.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Time of one optimizer step, with its 90% interval.

    ``parts`` are what the computing stream does meanwhile; they add up to ``seconds``. In a
    pipeline they are of the rank that waits least. GPUs of a node send each other
    ``sent_within_nbytes``, a node sends others ``sent_between_nbytes``.
    """

    seconds: float
    low_s: float
    high_s: float
    parts: Mapping[str, float]
    sent_within_nbytes: float
    sent_between_nbytes: float


def step_time(
    traces: Sequence[Trace], machine: Machine, schedule: Program | None = None
) -> StepTime:
    """Return the time of a step.

    Traces are of one rank of each place in the pipeline, in the order of the schedule's ranks; of
    one without a pipeline.

    Raises:
        ValueError: A trace has no step.
    """
    prepared = _prepared(traces, machine, schedule)
    seconds, parts = _replayed(prepared, schedule, Slower())
    errors = _errors(machine)
    high = low = 0.0
    for name, error in errors.items():
        slower, faster = (
            _replayed(prepared, schedule, replace(Slower(), **{name: factor}))[0]
            for factor in (1 + error, 1 / (1 + error))
        )
        high += max(0.0, slower - seconds) ** 2
        low += max(0.0, seconds - faster) ** 2
    # Where two things bound a step alike, it is faster only if both are.
    all_faster = Slower(**{name: 1 / (1 + error) for name, error in errors.items()})
    together = seconds - _replayed(prepared, schedule, all_faster)[0]
    low = max(low, max(0.0, together) ** 2 / len(errors))
    sent = [each.sent() for each in prepared]
    return StepTime(
        seconds=seconds,
        low_s=seconds - SURE * math.sqrt(low),
        high_s=seconds + SURE * math.sqrt(high),
        parts={name: parts.get(name, 0.0) for name in PARTS},
        sent_within_nbytes=max(within for within, _ in sent),
        sent_between_nbytes=max(between for _, between in sent),
    )


def expected_seconds(
    traces: Sequence[Trace], machine: Machine, schedule: Program | None = None
) -> float:
    """Return the seconds of :func:`step_time` alone, which takes a tenth of the work."""
    return _replayed(_prepared(traces, machine, schedule), schedule, Slower())[0]


def _prepared(
    traces: Sequence[Trace], machine: Machine, schedule: Program | None
) -> list[_Prepared]:
    places = len(schedule.orders) if schedule else 1
    return [_Prepared(trace, machine, places) for trace in traces]


def _replayed(
    prepared: Sequence[_Prepared], schedule: Program | None, slower: Slower
) -> tuple[float, Mapping[str, float]]:
    replays = [_Replay(each, slower) for each in prepared]
    if schedule is None:
        return replays[0].seconds, replays[0].parts
    return _Pipeline(replays, schedule).run()


def _errors(machine: Machine) -> dict[str, float]:
    """Return the larger of our error and the machine's, by what is slower."""
    gpu = machine.gpu
    known = {
        "products": gpu.error,
        "memory": gpu.error,
        "host": gpu.operator_error,
        "within_node": machine.within_node.error,
        "between_nodes": machine.between_nodes.error,
    }
    return {name: max(error, float(getattr(ERRORS, name))) for name, error in known.items()}


# --- one rank -------------------------------------------------------------------------------------


class _Prepared:
    """Two steps of a trace, and what does not depend on how fast things are.

    The first of the two brings streams into the state in which every step finds them: with weights
    still on their way, for example.
    """

    def __init__(self, trace: Trace, machine: Machine, places: int) -> None:
        events = trace.last_steps(2)
        if not events:
            raise ValueError(f"the trace of rank {trace.rank} has no step: simulate two or more")
        found = fused(events) if trace.compiled else events
        self.events = [event for event in found if not isinstance(event, Allocate | Free)]
        self._done = max(0, trace.steps - 2)
        self.machine = machine
        self.compiled = trace.compiled
        self.local = min(trace.gpus_per_node, trace.world_size)
        self._columns = max(1, trace.world_size // places)
        self.costs = list(map(self._costs, self.events))

    def _costs(self, event: Event) -> tuple[float, float, float]:
        if isinstance(event, Operator):
            return operator_costs(event, self.machine.gpu)
        if isinstance(event, Collective):
            return collective_costs(event, self.machine, self.groups(event))
        return 0.0, 0.0, 0.0

    def groups(self, collective: Collective) -> int:
        """Return how many groups of ranks do this through one node's network."""
        if collective.kind in ("send", "recv"):
            return min(self.local, self._columns)
        return max(1, self.local * collective.nodes // max(1, collective.ranks))

    def stepped(self) -> list[int]:
        """Return where steps end, of micro-batches the last; two of them bound what is timed."""
        ends: dict[int, int] = {}
        for index, event in enumerate(self.events):
            if isinstance(event, Mark) and event.name == "stepped" and event.step > self._done:
                ends.setdefault(event.step, index)
        last = list(ends.values())[-2:]
        return last if len(last) > 1 else [0, len(self.events) - 1]

    def sent(self) -> tuple[float, float]:
        """Return the bytes that the node sends in a step, within itself and to others."""
        start, end = self.stepped()
        sent = [
            sent_nbytes(event, self.groups(event))
            for event in self.events[start:end]
            if isinstance(event, Collective)
        ]
        return self.local * sum(each[0] for each in sent), sum(each[1] for each in sent)


@dataclass(slots=True)
class _Replay:
    """The events of a rank on a clock, with factors on their costs.

    ``seconds`` lie between the last two optimizer steps. ``actions`` has what the computing stream
    did in them by part, within each action of a pipeline and outside of them for None; ``sends``
    the seconds and level of the messages of actions.
    """

    prepared: _Prepared
    slower: Slower
    seconds: float = 0.0
    actions: dict[Action | None, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    sends: dict[Action, tuple[float, str]] = field(default_factory=dict)
    _host: float = 0.0
    _streams: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    _links: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _events: dict[int, float] = field(default_factory=dict)
    _beside: list[tuple[float, float, str]] = field(default_factory=list)
    _waited: Any = field(default_factory=Counter)  # Counter[str] would be of whole numbers
    _timed: bool = False

    def __post_init__(self) -> None:
        """Replay."""
        start, end = self.prepared.stepped()
        before, costs = 0.0, self.prepared.costs
        for index, event in enumerate(self.prepared.events[: end + 1]):
            if index == start:
                before, self._timed = self._streams[COMPUTING], True
                self._waited.clear()
            if isinstance(event, Operator):
                self._operator(event, self.slower.of_operator(*costs[index]))
            elif isinstance(event, Collective):
                self._collective(event, self.slower.of_collective(*costs[index]))
            elif isinstance(event, Record):
                self._events[event.event] = self._streams[event.stream]
                self._issue(EVENT_CALLS * event.by_python)
            elif isinstance(event, Wait):
                self._wait(event)
            elif isinstance(event, Mark) and event.name == "batch":
                self._issue(BATCH_CALLS)
        self._spend(None)
        self.seconds = self._streams[COMPUTING] - before

    @property
    def parts(self) -> Counter[str]:
        """Seconds of each part."""
        return sum(self.actions.values(), Counter())

    def _issue(self, calls: float) -> float:
        self._host += calls * self.slower.host * self.prepared.machine.gpu.operator_s
        return self._host

    def _operator(self, operator: Operator, seconds: float) -> None:
        if operator.name == SHARDED:
            self._issue(SHARDED_CALLS)
            return
        idle, calls = is_idle(operator), OPERATOR_CALLS
        if self.prepared.compiled:
            calls = 0.0 if idle else COMPILED_CALLS
        issued = self._issue(calls)
        if idle:
            return
        stream = operator.stream
        part = OPTIMIZER if operator.phase == "optimizer" else COMPUTE
        part = CODECS if is_codec(operator) else part
        begin = self._begin(stream, issued)
        if stream == COMPUTING:
            self._waited[part] += seconds
            for other in (CODECS, OPTIMIZER, COMPUTE):
                shared = SHARED * self._overlap(begin, begin + seconds, other)
                self._waited[other] += shared
                seconds += shared
            self._spend(operator.action)
        else:
            self._beside.append((begin, begin + seconds, part))
        self._streams[stream] = begin + seconds

    def _collective(self, collective: Collective, seconds: float) -> None:
        issued = self._issue(COLLECTIVE_CALLS)
        level = BETWEEN if collective.nodes > 1 else WITHIN
        if collective.kind in ("send", "recv"):  # the schedule says when
            if collective.kind == "send" and collective.action is not None and self._timed:
                action = Action(*collective.action)
                self.sends[action] = (self.sends.get(action, (0.0,))[0] + seconds, level)
            return
        stream = collective.stream
        if collective.ranks < 2:
            return
        ready = self._begin(stream, issued)
        begin = max(ready, self._links[level])
        self._links[level] = self._streams[stream] = begin + seconds
        if stream == COMPUTING:
            self._waited[level] += begin + seconds - ready
            self._spend(collective.action)
        else:
            self._beside.append((begin, begin + seconds, level))

    def _begin(self, stream: int, issued: float) -> float:
        """Return when a stream can begin what was issued now."""
        if stream == COMPUTING:
            self._waited[HOST_LATE] += max(0.0, issued - self._streams[stream])
        self._streams[stream] = max(self._streams[stream], issued)
        return self._streams[stream]

    def _wait(self, wait: Wait) -> None:
        self._issue(EVENT_CALLS * wait.by_python)
        until = self._events.get(wait.event, 0.0)
        if wait.stream == HOST:
            self._host = max(self._host, until)
            return
        now = self._streams[wait.stream]
        if until <= now:
            return
        if wait.stream == COMPUTING:
            rest = until - now
            for part in (BETWEEN, WITHIN, CODECS, OPTIMIZER, COMPUTE):
                covered = min(rest, self._overlap(now, until, part))
                self._waited[part] += covered
                rest -= covered
            self._waited[HOST_LATE] += rest
        self._streams[wait.stream] = until

    def _overlap(self, begin: float, end: float, part: str) -> float:
        """Return how long other streams do something between two times."""
        now = self._streams[COMPUTING]
        self._beside = [each for each in self._beside if each[1] > now]
        return sum(
            max(0.0, min(end, last) - max(begin, first))
            for first, last, what in self._beside
            if what == part
        )

    def _spend(self, action: tuple[str, int, int] | None) -> None:
        """Count what the computing stream did and waited for, for an action."""
        if self._timed:
            self.actions[Action(*action) if action else None] += self._waited
        self._waited.clear()


# --- a pipeline -----------------------------------------------------------------------------------


class _Pipeline:
    """Ranks of a pipeline, each working off its order as messages arrive.

    ``gaps`` are of the last step: by rank, waiting for computations of others and for messages.
    """

    def __init__(self, replays: Sequence[_Replay], program: Program) -> None:
        self.program, self.gaps = program, list[Any]()
        self._replays, self._actions = replays, [replay.actions for replay in replays]
        self._sends = {action: sent for replay in replays for action, sent in replay.sends.items()}
        self._free = [0.0] * len(replays)
        self._links: dict[tuple[int, int], float] = defaultdict(float)
        orders = zip(program.turns, program.orders, strict=True)
        self._every = sorted(
            (turn, rank, action)
            for rank, (turns, order) in enumerate(orders)
            for turn, action in zip(turns, order, strict=True)
        )

    def run(self) -> tuple[float, Mapping[str, float]]:
        """Return the time of a step of all ranks, and its parts on the rank that waits least.

        A rank begins the next step when it has updated its weights. The second step is the one that
        counts: in the first, all ranks begin at once.
        """
        first = self._step()
        seconds = self._step() - first
        waits = [sum(gaps.values()) for gaps in self.gaps]
        rank = waits.index(min(waits))
        parts: Any = self._replays[rank].parts + self.gaps[rank]
        parts[BUBBLE] += seconds - sum(parts.values())  # until the last rank ends
        return seconds, parts

    def _step(self) -> float:
        """Run one step; return when the last rank has ended it."""
        self.gaps = [Counter() for _ in self._free]
        arrived: dict[Key, tuple[float, float, str]] = {}
        for _, rank, action in self._every:
            self._run(rank, action, arrived)
        for rank, actions in enumerate(self._actions):
            self._free[rank] += sum(actions.get(None, Counter()).values())
        return max(self._free)

    def _run(self, rank: int, action: Action, arrived: dict[Key, tuple[float, float, str]]) -> None:
        """Run an action when its message is there; note when its own was made and arrives."""
        kind, stage, microbatch = action
        begin = free = self._free[rank]
        key = Key(stage - (kind == "F"), kind != "F", microbatch)
        if kind != "W" and key in arrived:
            made, there, level = arrived[key]
            begin, late = max(free, there), max(0.0, made - free)
            self.gaps[rank][BUBBLE] += late
            self.gaps[rank][level] += begin - free - late
        end = begin + sum(self._actions[rank].get(action, Counter()).values())
        self._free[rank] = there = end
        sent = self.program.sent_after(action)
        if sent is not None:
            target, level = self.program.rank_of(sent.boundary + (not sent.backward)), WITHIN
            if target != rank:
                seconds, level = self._sends.get(action, (0.0, WITHIN))
                there = max(end, self._links[rank, target]) + seconds
                self._links[rank, target] = there
            arrived[sent] = end, there, level
