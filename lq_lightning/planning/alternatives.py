"""What else would work, and what to change where a run does not fit.

Each alternative is judged by a function that simulates it. That takes seconds, so time is limited,
and what there was no time for is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

from torch import nn

from lq_lightning.foundation.layer_stack import find_layer_stack
from lq_lightning.planning.changes import (
    FAST_RECIPES,
    FASTEST_FIRST,
    SMALLEST_FIRST,
    Change,
    Model,
    all_matter,
    changes_of,
    in_turn,
    made,
)
from lq_lightning.planning.machine import Machine
from lq_lightning.planning.prices import Price, added_price, price_of
from lq_lightning.planning.run_options import RunOptions

REFUSALS = (ValueError, NotImplementedError, RuntimeError)
# Loss falls with the 0.05th power of compute (Kaplan et al., arXiv:2001.08361, figure 1): a percent
# of loss is worth so many percent of time.
PERCENT_OF_TIME = 20.0
_MARGIN = 1.05  # of sums of gains: what is too large by less is simulated all the same
_PAIRS = 12


def layers_of(module: nn.Module) -> list[str]:
    """Outline each layer of a model: classes of modules, shapes of parameters, what is trained.

    Empty without a single list of layers.
    """
    try:
        names = find_layer_stack(module).layers
    except (ValueError, NotImplementedError):
        return []
    return [_outline(module.get_submodule(name)) for name in names]


def _outline(layer: nn.Module) -> str:
    modules = [f"{name}:{type(each).__qualname__}" for name, each in layer.named_modules()]
    tensors = [
        f"{name}:{tuple(each.shape)}:{each.dtype}:{each.requires_grad}"
        for name, each in layer.named_parameters()
    ]
    return ";".join([*modules, *tensors])


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Memory of the fullest rank, time of a step, and tokens of all ranks per second."""

    device_nbytes: int
    seconds: float
    tokens_per_s: float


Evaluate = Callable[[RunOptions], Outcome]
"""Simulates a run with these options.

It raises ``ValueError``, ``NotImplementedError`` or ``RuntimeError`` for what cannot run.
"""


# --- the search -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Outcome):
    """The run with ``changes``, as a user would write them; none for the run as it is."""

    changes: tuple[str, ...]
    price: Price


class Alternatives(NamedTuple):
    """What was found.

    What fits has the fastest first, or the cheapest where the run itself does not fit; what is too
    large has the smallest first. ``left_out`` names changes that there was no time for.
    """

    fitting: tuple[Choice, ...]
    too_large: tuple[Choice, ...]
    left_out: tuple[str, ...]


Changes = tuple[Change, ...]


class Search:
    """Tries changes of a run, and notes what came of them; ``()`` is the run as it is.

    Args:
        options: Of the run as it is.
        evaluate: Simulates it with others.
        machine: Where.
        model: What its model lets one choose.
        base: Outcome of the run as it is.
        base_s: Seconds that it took to simulate that.
        time_limit_s: For all simulations.
        clock: Returns seconds.
    """

    def __init__(
        self,
        options: RunOptions,
        evaluate: Evaluate,
        machine: Machine,
        model: Model,
        *,
        base: Outcome,
        base_s: float,
        time_limit_s: float,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._options, self._evaluate, self._machine = options, evaluate, machine
        self._memory_nbytes, self._clock = machine.gpu.memory_nbytes, clock
        self._changes = changes_of(options, machine, model)
        self._left_out: dict[str, None] = {}
        self._took_s = base_s  # what simulations take at most
        self._end = clock() + time_limit_s
        self._base = self._choice((), base)
        self._found: dict[Changes, Choice] = {(): self._base}

    def ranked(self) -> Alternatives:
        """Find what fits, by tokens per second."""
        by_products = sorted(
            self._changes, key=lambda c: c.choices.get("recipe") not in FAST_RECIPES
        )
        self._try((change,) for change in in_turn(by_products, FASTEST_FIRST))
        times = [choice.seconds for choice in self._found.values() if self._fits(choice)]
        best = min(times, default=float("inf"))
        self._try(self._pairs(lambda pair: self._seconds(pair) < best, self._seconds))
        self._try([self._together(self._seconds)])
        return self._result(
            lambda choice: (-choice.tokens_per_s, *self.cost(choice), choice.changes)
        )

    def remedies(self) -> Alternatives:
        """Find the cheapest changes, or pairs of changes, with which a run fits.

        If no pair is enough, all changes that save memory are made together.
        """
        smaller = [change for change in self._changes if not change.grows]
        self._try((change,) for change in in_turn(smaller, SMALLEST_FIRST))

        def need_each_other(pair: Changes) -> bool:
            alone = [self._nbytes((change,)) for change in pair]
            return max(alone) < self._nbytes(()) and min(alone) > self._memory_nbytes

        self._try(self._pairs(need_each_other, self._expected_cost))
        if not any(map(self._fits, self._found.values())):
            self._try([self._together(self._nbytes)])
        return self._result(lambda found: (*self.cost(found), found.changes))

    def cost(self, choice: Choice) -> tuple[bool, float]:
        """Order by cost: what has no measured price last, then the time and loss that it adds.

        A percent of loss counts as ``PERCENT_OF_TIME``.
        """
        added = added_price(choice.price, self._base.price)
        slower = 100 * (choice.seconds / self._base.seconds - 1)
        return bool(added.unmeasured), slower + PERCENT_OF_TIME * max(0.0, added.percent or 0.0)

    def _choice(self, changes: Changes, outcome: Outcome) -> Choice:
        return Choice(
            changes=tuple(change.label for change in changes),
            price=price_of(made(self._options, changes), self._machine),
            device_nbytes=outcome.device_nbytes,
            seconds=outcome.seconds,
            tokens_per_s=outcome.tokens_per_s,
        )

    def _try(self, sets: Iterable[Changes]) -> None:
        """Simulate sets of changes, in order, while there is time."""
        too_large = self._base.device_nbytes > _MARGIN * self._memory_nbytes
        for changes in sets:
            larger = too_large and all(change.grows for change in changes)
            if changes in self._found or larger:
                continue
            began = self._clock()
            if began + self._took_s > self._end:
                self._left_out[", ".join(change.label for change in changes)] = None
                continue
            with suppress(*REFUSALS):  # of changes that cannot be made
                outcome = self._evaluate(made(self._options, changes))
                self._found[changes] = self._choice(changes, outcome)
            self._took_s = max(self._took_s, self._clock() - began)

    # --- what to try next -------------------------------------------------------------------------

    def _gains(self, changes: Changes, of: Callable[[Outcome], float]) -> float:
        """Expect of changes made together what each of them alone brings."""
        return of(self._base) + sum(of(self._found[(c,)]) - of(self._base) for c in changes)

    def _seconds(self, changes: Changes) -> float:
        return self._gains(changes, lambda outcome: outcome.seconds)

    def _nbytes(self, changes: Changes) -> float:
        return self._gains(changes, lambda outcome: outcome.device_nbytes)

    def _expected_cost(self, changes: Changes) -> tuple[bool, float]:
        outcome = replace(self._base, seconds=self._seconds(changes))
        return self.cost(self._choice(changes, outcome))

    def _tried(self) -> list[Change]:
        return [change for change in self._changes if (change,) in self._found]

    def _pairs(
        self, wanted: Callable[[Changes], bool], order: Callable[[Changes], Any]
    ) -> list[Changes]:
        """Pairs that seem to fit, the best of each two topics; those that may not come last."""
        memory = self._memory_nbytes
        pairs = [pair for pair in combinations(self._tried(), 2) if self._go_together(pair)]
        best: dict[frozenset[str], Changes] = {}
        for pair in sorted(pairs, key=lambda pair: (self._nbytes(pair) > memory, order(pair))):
            if self._nbytes(pair) <= _MARGIN * memory and wanted(pair):
                best.setdefault(frozenset(change.topic for change in pair), pair)
        return list(best.values())[:_PAIRS]

    def _go_together(self, changes: Changes) -> bool:
        *others, last = changes
        fit = all(last.goes_with(other) for other in others)
        return fit and all_matter(changes, self._options, self._machine)

    def _together(self, of: Callable[[Changes], float]) -> Changes:
        """All changes that lower something, those that do most before what excludes them."""
        kept: list[Change] = []
        for change in sorted(self._tried(), key=lambda change: of((change,))):
            if of((change,)) < of(()) and self._go_together((*kept, change)):
                kept.append(change)
        return tuple(sorted(kept, key=self._changes.index))

    # --- the end ----------------------------------------------------------------------------------

    def _fits(self, choice: Choice) -> bool:
        return choice.device_nbytes <= self._memory_nbytes

    def _result(self, order: Callable[[Choice], Any]) -> Alternatives:
        found = self._found.values()
        too_large = [choice for choice in found if not self._fits(choice)]
        return Alternatives(
            fitting=tuple(sorted(filter(self._fits, found), key=order)),
            too_large=tuple(sorted(too_large, key=lambda x: (x.device_nbytes, x.changes))),
            left_out=tuple(self._left_out),
        )
