"""A step of a pipeline: ranks that work off their orders as messages arrive."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lq_lightning.pipeline.schedules import Action, Key, Program

from .costs import BUBBLE, WITHIN

Span = tuple[str, str, float, float]


@dataclass(slots=True)
class PipelineClock:
    """Ranks of a pipeline, each working off its order as messages arrive.

    ``actions`` are the seconds of each action of each rank by part, and outside of them for None;
    ``sends`` those of the message that an action sends, with its level. ``gaps`` and ``spans`` are
    of the last step: by rank, waiting for computations of others and for messages; actions and
    messages.
    """

    actions: Sequence[Mapping[Action | None, Counter[str]]]
    program: Program
    sends: dict[Action, tuple[float, str]] = field(default_factory=dict)
    gaps: list[Any] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    _free: list[float] = field(default_factory=list)
    _links: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))

    def step(self) -> float:
        """Run one step; return when the last rank has ended it."""
        places = len(self.program.orders)
        self._free = self._free or [0.0] * places
        self.gaps, self.spans = [Counter() for _ in range(places)], []
        waiting = [deque(order) for order in self.program.orders]
        arrived: dict[Key, tuple[float, float, str]] = {}
        while any(waiting):
            before = sum(map(len, waiting))
            for rank, order in enumerate(waiting):
                while order and self._run(rank, order[0], arrived):
                    order.popleft()
            if sum(map(len, waiting)) == before:
                raise AssertionError("ranks wait for each other")
        for rank, actions in enumerate(self.actions):
            outside = sum(actions.get(None, Counter()).values())
            self.spans.append(
                (f"rank {rank}", "update", self._free[rank], self._free[rank] + outside)
            )
            self._free[rank] += outside
        return max(self._free)

    def _run(self, rank: int, action: Action, arrived: dict[Key, tuple[float, float, str]]) -> bool:
        """Run an action, unless its input is still to be made."""
        kind, stage, microbatch = action
        key = None
        if kind == "F" and stage > 0:
            key = Key(stage - 1, False, microbatch)
        elif kind in "BI" and stage < self.program.num_stages - 1:
            key = Key(stage, True, microbatch)
        begin = self._free[rank]
        if key is not None:
            if key not in arrived:
                return False
            made, there, level = arrived[key]
            begin = max(begin, there)
            late = max(0.0, made - self._free[rank])
            self.gaps[rank][BUBBLE] += late
            self.gaps[rank][level] += begin - self._free[rank] - late
        end = begin + sum(self.actions[rank].get(action, Counter()).values())
        self._free[rank] = end
        self.spans.append((f"rank {rank}", f"{kind}{stage}.{microbatch}", begin, end))
        backward = kind != "F"
        if (
            kind != "W"
            and 0 <= (target := stage + (-1 if backward else 1)) < self.program.num_stages
        ):
            key = Key(target if backward else stage, backward, microbatch)
            arrived[key] = self._send(rank, self.program.rank_of(target), action, end)
        return True

    def _send(
        self, rank: int, target: int, action: Action, made: float
    ) -> tuple[float, float, str]:
        """Return when a message was made, when it arrives, and the level of its link."""
        if rank == target:
            return made, made, WITHIN
        seconds, level = self.sends.get(action, (0.0, WITHIN))
        begin = max(made, self._links[rank, target])
        self._links[rank, target] = there = begin + seconds
        self.spans.append((f"{rank} to {target}", "message", begin, there))
        return made, there, level
