"""What else would work, and what to change where a run does not fit.

Each alternative is judged by a function that simulates it. That takes seconds, so models are
shortened to a few of their equal layers, time is limited, and only the best of what is shown is
simulated as a whole. What there was no time for is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from torch import nn

from lq_lightning.callbacks.model_setup import AfterConfigureModel
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
from lq_lightning.planning.simulation import Build, Overrides, UserRun

REFUSALS = (ValueError, NotImplementedError, RuntimeError)
# Loss falls with the 0.05th power of compute (Kaplan et al., arXiv:2001.08361, figure 1): a percent
# of loss is worth so many percent of time.
PERCENT_OF_TIME = 20.0
_MARGIN = 1.05  # of estimates: what is too large by less is simulated all the same
_FOR_WHOLE = 0.4  # of the time at most is kept to simulate what is shown as a whole
_PAIRS = 12
_FEW_LAYERS = 4  # models of so many are simulated as a whole at once
_LEAST = 2
_NEAR = 0.02  # share of the memory that an estimate may miss


# --- all layers from a few ------------------------------------------------------------------------


def with_layers(build: Build, count: int) -> Build:
    """Return a function that builds the run with the first ``count`` layers of its model."""

    def shortened(overrides: Overrides) -> UserRun:
        trainer, module, data = build(overrides)
        AfterConfigureModel(module, lambda built: keep_layers(built, count))
        return trainer, module, data

    return shortened


def number_of_equal_layers(module: nn.Module) -> int:
    """Return the number of layers of a model; 0 if it has no single list of them, or they differ.

    Layers are equal if their modules are of the same classes, with parameters of the same shapes.
    """
    try:
        names = find_layer_stack(module).layers
    except (ValueError, NotImplementedError):
        return 0
    known = {_outline(module.get_submodule(name)) for name in names}
    return len(names) if len(known) == 1 else 0


def _outline(layer: nn.Module) -> str:
    modules = [f"{name}:{type(each).__qualname__}" for name, each in layer.named_modules()]
    tensors = [f"{n}:{tuple(p.shape)}:{p.dtype}" for n, p in layer.named_parameters()]
    return ";".join([*modules, *tensors])


def keep_layers(module: nn.Module, count: int) -> None:
    """Remove all layers of a model but the first ``count``."""
    names = find_layer_stack(module).layers
    for name in reversed(names[count:]):
        path, _, key = name.rpartition(".")
        container: Any = module.get_submodule(path)
        del container[key if isinstance(container, nn.ModuleDict) else int(key)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Memory of the fullest rank, time of a step, and tokens of all ranks per second."""

    device_nbytes: int
    seconds: float
    tokens_per_s: float


Evaluate = Callable[[RunOptions, int | None], Outcome]
"""Simulates a run with these options, of the whole model or of so many of its layers.

It raises ``ValueError``, ``NotImplementedError`` or ``RuntimeError`` for what cannot run.
"""


class Estimator:
    """Estimates runs from two simulations with few of a model's equal layers, in a line."""

    def __init__(self, evaluate: Evaluate, cluster: Machine, layers: int) -> None:
        self._evaluate, self._cluster, self._layers = evaluate, cluster, layers
        self._more_nbytes, self._slower = 0, 1.0
        self._least: int | None = _LEAST  # of the numbers of layers; None: always the whole model

    def few_layers(self, options: RunOptions) -> tuple[int, int] | None:
        """Two numbers of layers to simulate; None for the whole model at once."""
        stages = options.stages(self._cluster) if options.strategy == "quantized_pipeline" else 1
        stages *= options.others.get("stages_per_rank", 1)
        if self._least is None or options.others.get("split", "parameters") != "parameters":
            return None
        per_stage = max(1, self._least // stages)
        few = (per_stage * stages, (per_stage + 1) * stages)
        return None if self._layers <= max(_FEW_LAYERS, few[1]) else few

    def compare(self, options: RunOptions, known: Outcome) -> None:
        """Take as many layers as it takes to be near a known outcome, and correct the rest.

        Where logits need more memory than few layers do, layers add nothing to the peak before
        there are more of them: then a line through few of them misses it.
        """
        for least in (_LEAST, max(_LEAST, self._layers // 4), None):
            self._least = least
            if self.few_layers(options) is None:
                self._least = None  # other options are not better off
                return
            estimate = self(options)
            missed = known.device_nbytes - estimate.device_nbytes
            if abs(missed) <= _NEAR * known.device_nbytes:
                self._more_nbytes, self._slower = missed, known.seconds / estimate.seconds
                return

    def __call__(self, options: RunOptions) -> Outcome:
        """Estimate a run; simulate it where few layers are no less work."""
        few = self.few_layers(options)
        if few is None:
            return self._evaluate(options, None)
        first, second = (self._evaluate(options, layers) for layers in few)

        def continued(of: Callable[[Outcome], float]) -> float:
            slope = (of(second) - of(first)) / (few[1] - few[0])
            return of(first) + slope * (self._layers - few[0])

        seconds = self._slower * continued(lambda outcome: outcome.seconds)
        nbytes = self._more_nbytes + continued(lambda outcome: outcome.device_nbytes)
        tokens = second.tokens_per_s * second.seconds  # of a step, whatever the layers
        return Outcome(device_nbytes=round(nbytes), seconds=seconds, tokens_per_s=tokens / seconds)


# --- the search -----------------------------------------------------------------------------------


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
    large has the smallest first. ``left_out`` names changes that there was no time for.
    """

    base: Alternative
    fitting: tuple[Alternative, ...]
    too_large: tuple[Alternative, ...]
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
        options = made(self._options, changes)
        price = price_of(options, self._setting.machine)
        return Alternative(
            changes=tuple(change.label for change in changes),
            options=options,
            outcome=outcome,
            price=price,
            added=added_price(price, self._price),
            verified=verified,
        )

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
            with suppress(*REFUSALS):  # of changes that cannot be made
                options = made(self._options, changes)
                outcome, whole = self._estimate(options), self._estimate.few_layers(options) is None
                self.found[changes] = self._alternative(changes, outcome, whole)
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
        pairs = [pair for pair in combinations(tried, 2) if self._go_together(pair)]
        best: dict[frozenset[str], Changes] = {}
        for pair in sorted(pairs, key=lambda pair: (self.nbytes(pair) > memory, order(pair))):
            if self.nbytes(pair) <= _MARGIN * memory and wanted(pair):
                best.setdefault(frozenset(change.topic for change in pair), pair)
        return list(best.values())[:_PAIRS]

    def _go_together(self, changes: Changes) -> bool:
        *others, last = changes
        fit = all(last.goes_with(other) for other in others)
        return fit and all_matter(changes, self._options, self._setting.machine)

    def together(self, of: Callable[[Changes], float]) -> Changes:
        """All changes that lower something, those that do most before what excludes them."""
        tried = [change for change in self.changes if (change,) in self.found]
        kept: list[Change] = []
        for change in sorted(tried, key=lambda change: of((change,))):
            if of((change,)) < of(()) and self._go_together((*kept, change)):
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
            with suppress(*REFUSALS):
                outcome = self._evaluate(left[0].options, None)
                found.append(replace(left[0], outcome=outcome, verified=True))
            self._whole_s = max(self._whole_s, self._setting.clock() - began)
        too_large = [each for each in found if not self.fits(each)]
        return Alternatives(
            base=self.base,
            fitting=tuple(sorted(filter(self.fits, found), key=order)),
            too_large=tuple(sorted(too_large, key=lambda x: (x.outcome.device_nbytes, x.changes))),
            left_out=tuple(self._left_out),
        )
