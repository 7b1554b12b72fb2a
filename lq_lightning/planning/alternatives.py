"""What else would work, and what to change where a run does not fit.

Each alternative is judged by a function that simulates it. That takes seconds, so models are
shortened to a few of their equal layers, time is limited, and only the best of what is shown is
simulated as a whole. What there was no time for is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from lq_lightning.planning.changes import (
    FAST_RECIPES,
    FASTEST_FIRST,
    SMALLEST_FIRST,
    Change,
    Model,
    changes_of,
    in_turn,
)
from lq_lightning.planning.estimates import Estimator, Evaluate, Outcome
from lq_lightning.planning.machine import Machine
from lq_lightning.planning.prices import Price, added_price, price_of
from lq_lightning.planning.run_options import RunOptions

REFUSALS = (ValueError, NotImplementedError, RuntimeError)
# Loss falls with the 0.05th power of compute (Kaplan et al., arXiv:2001.08361, figure 1): a percent
# of loss is worth so many percent of time.
PERCENT_OF_TIME = 20.0
_MARGIN = 1.05  # of estimates: what is too large by less is simulated all the same
_FOR_WHOLE = 0.4  # of the time at most is kept to simulate what is shown as a whole
_PAIRS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A run with other options.

    ``changes`` are those that a user would write; none for the run as it is. ``added`` is the part
    of the price that they bring. ``verified`` says whether the whole model was simulated; else a
    few layers, continued in a line.
    """

    changes: tuple[str, ...]
    options: RunOptions
    outcome: Outcome
    price: Price
    added: Price
    verified: bool

    def cost(self, base: Outcome) -> tuple[bool, float]:
        """Order by cost: what has no measured price last, then time and loss together."""
        slower = 100 * (self.outcome.seconds / base.seconds - 1)
        loss = max(0.0, self.added.percent or 0.0)
        return bool(self.added.unmeasured), slower + PERCENT_OF_TIME * loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternatives:
    """What was found: ``base`` is the run as it is.

    What fits has the fastest first, or the cheapest where the run itself does not fit; what is too
    large has the smallest first. ``refused`` says why changes cannot be made, ``left_out`` names
    those that there was no time for.
    """

    base: Alternative
    fitting: tuple[Alternative, ...]
    too_large: tuple[Alternative, ...]
    refused: dict[str, str]
    left_out: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What alternatives are looked for, and where.

    ``base`` is the outcome of the run as it is, if it is known, and ``base_s`` the seconds that it
    took to simulate that. So many as ``shown`` are shown; ``time_limit_s`` is for all simulations.
    """

    machine: Machine
    memory_nbytes: int
    model: Model = Model()
    base: Outcome | None = None
    base_s: float = 0.0
    shown: int = 5
    time_limit_s: float = 40.0
    clock: Callable[[], float] = time.monotonic


def ranked(options: RunOptions, evaluate: Evaluate, setting: Setting) -> Alternatives:
    """Find what else fits, by tokens per second; only what is faster is simulated as a whole.

    Raises:
        ValueError, NotImplementedError, RuntimeError: The run as it is cannot run.
    """
    search = _Search(options, evaluate, setting)
    base = search.base.outcome
    by_products = sorted(search.changes, key=lambda c: c.choices.get("recipe") not in FAST_RECIPES)
    search.try_all((change,) for change in in_turn(by_products, FASTEST_FIRST))
    times = [each.outcome.seconds for each in search.found.values() if search.fits(each)]
    best = min(times, default=float("inf"))
    search.try_all(search.pairs(lambda pair: search.seconds(pair) < best, search.seconds))
    search.try_all([search.together(search.seconds)])
    return search.result(
        lambda found: (-found.outcome.tokens_per_s, *found.cost(base), found.changes),
        lambda found: found.outcome.tokens_per_s > base.tokens_per_s,
    )


def remedies(options: RunOptions, evaluate: Evaluate, setting: Setting) -> Alternatives:
    """Find the cheapest changes, or pairs of changes, with which a run fits.

    The cost of a change is the time that it adds to a step and the loss that it adds, at
    ``PERCENT_OF_TIME``; changes whose price nobody has measured come last. If no pair is enough,
    all changes that save memory are made together.

    Raises:
        ValueError, NotImplementedError, RuntimeError: The run as it is cannot run.
    """
    search = _Search(options, evaluate, setting)
    smaller = [change for change in search.changes if change.memory != "more"]
    search.try_all((change,) for change in in_turn(smaller, SMALLEST_FIRST))

    def need_each_other(pair: Changes) -> bool:
        alone = [search.nbytes((change,)) for change in pair]
        return max(alone) < search.nbytes(()) and min(alone) > setting.memory_nbytes

    search.try_all(search.pairs(need_each_other, search.cost))
    if not any(map(search.fits, search.found.values())):
        search.try_all([search.together(search.nbytes)])
    base = search.base.outcome
    return search.result(lambda found: (*found.cost(base), found.changes), lambda found: True)


Changes = tuple[Change, ...]


class _Search:
    """Tries changes of a run, and notes what came of them; ``()`` is the run as it is."""

    def __init__(self, options: RunOptions, evaluate: Evaluate, setting: Setting) -> None:
        self._options, self._evaluate, self._setting = options, evaluate, setting
        self.changes = changes_of(options, setting.machine, setting.model)
        self._refused: dict[str, str] = {}
        self._left_out: dict[str, None] = {}
        began, limit = setting.clock(), setting.time_limit_s
        self._whole_s = setting.base_s  # of the simulation of a whole model; 0: not known
        self._price = price_of(options, setting.machine)
        self._estimate = Estimator(evaluate, setting.machine, setting.model.layers)
        outcome = setting.base or self._estimate(options)
        if setting.base is not None:
            self._estimate.compare(options, outcome)
        self._estimate_s = setting.clock() - began
        whole = self._estimate.few_layers(options) is None
        reserved = min(_FOR_WHOLE, setting.shown * self._whole_s / limit or _FOR_WHOLE) * limit
        self._end = began + limit
        self._estimates_end = self._end - (0.0 if whole else reserved)
        self.base = self._alternative((), outcome, whole or setting.base is not None)
        self.found: dict[Changes, Alternative] = {(): self.base}

    def _alternative(self, changes: Changes, outcome: Outcome, verified: bool) -> Alternative:
        options = self._changed(changes)
        price = price_of(options, self._setting.machine)
        return Alternative(
            changes=tuple(change.label for change in changes),
            options=options,
            outcome=outcome,
            price=price,
            added=added_price(price, self._price),
            verified=verified,
        )

    def _changed(self, changes: Changes) -> RunOptions:
        choices = {name: value for change in changes for name, value in change.choices.items()}
        return replace(self._options, **choices)

    def try_all(self, sets: Iterable[Changes]) -> None:
        """Estimate sets of changes, in order, while there is time."""
        too_large = self.base.outcome.device_nbytes > _MARGIN * self._setting.memory_nbytes
        for changes in sets:
            label = ", ".join(change.label for change in changes)
            larger = too_large and all(change.memory == "more" for change in changes)
            if changes in self.found or larger:
                continue
            began = self._setting.clock()
            if began + self._estimate_s > self._estimates_end:
                self._left_out[label] = None
                continue
            try:
                options = self._changed(changes)
                outcome, whole = self._estimate(options), self._estimate.few_layers(options) is None
                self.found[changes] = self._alternative(changes, outcome, whole)
            except REFUSALS as refused:
                self._refused[label] = str(refused)
            self._estimate_s = max(self._estimate_s, self._setting.clock() - began)

    # --- what to try next -------------------------------------------------------------------------

    def _gains(self, changes: Changes, of: Callable[[Outcome], float]) -> float:
        """Expect of changes made together what each of them alone brings."""
        base = of(self.base.outcome)
        return base + sum(of(self.found[(change,)].outcome) - base for change in changes)

    def seconds(self, changes: Changes) -> float:
        """Time of a step to expect."""
        return self._gains(changes, lambda outcome: outcome.seconds)

    def nbytes(self, changes: Changes) -> float:
        """Memory to expect."""
        return self._gains(changes, lambda outcome: outcome.device_nbytes)

    def cost(self, changes: Changes) -> tuple[bool, float]:
        """Cost to expect."""
        base = self.base.outcome
        outcome = replace(base, seconds=self.seconds(changes))
        return self._alternative(changes, outcome, False).cost(base)

    def pairs(
        self, wanted: Callable[[Changes], bool], order: Callable[[Changes], Any]
    ) -> list[Changes]:
        """Pairs that seem to fit, the best of each two topics; those that may not come last."""
        memory = self._setting.memory_nbytes
        tried = [change for change in self.changes if (change,) in self.found]
        pairs = [pair for pair in combinations(tried, 2) if pair[0].goes_with(pair[1])]
        best: dict[frozenset[str], Changes] = {}
        for pair in sorted(pairs, key=lambda pair: (self.nbytes(pair) > memory, order(pair))):
            if self.nbytes(pair) <= _MARGIN * memory and wanted(pair):
                best.setdefault(frozenset(change.topic for change in pair), pair)
        return list(best.values())[:_PAIRS]

    def together(self, of: Callable[[Changes], float]) -> Changes:
        """All changes that lower something, those that do most before what excludes them."""
        tried = [change for change in self.changes if (change,) in self.found]
        kept: list[Change] = []
        for change in sorted(tried, key=lambda change: of((change,))):
            if of((change,)) < of(()) and all(change.goes_with(other) for other in kept):
                kept.append(change)
        return tuple(sorted(kept, key=self.changes.index))

    # --- the end ----------------------------------------------------------------------------------

    def fits(self, found: Alternative) -> bool:
        """Whether a device has the memory."""
        return found.outcome.device_nbytes <= self._setting.memory_nbytes

    def result(
        self, order: Callable[[Alternative], Any], worth: Callable[[Alternative], bool]
    ) -> Alternatives:
        """Put all in order, and simulate what is shown as a whole, if it is worth that."""
        found, shown = list(self.found.values()), self._setting.shown
        for _ in range(2 * shown):  # one that turns out too large makes room for the next
            fitting = sorted(filter(self.fits, found), key=order)
            left = [each for each in fitting[:shown] if not each.verified and worth(each)]
            began = self._setting.clock()
            if not left or began + max(self._whole_s, self._estimate_s) > self._end:
                break
            found.remove(left[0])
            try:
                outcome = self._evaluate(left[0].options, None)
                found.append(replace(left[0], outcome=outcome, verified=True))
            except REFUSALS as refused:
                self._refused[", ".join(left[0].changes)] = str(refused)
            self._whole_s = max(self._whole_s, self._setting.clock() - began)
        too_large = [each for each in found if not self.fits(each)]
        return Alternatives(
            base=self.base,
            fitting=tuple(sorted(filter(self.fits, found), key=order)),
            too_large=tuple(sorted(too_large, key=lambda x: (x.outcome.device_nbytes, x.changes))),
            refused=self._refused,
            left_out=tuple(self._left_out),
        )
