"""Choose how each activation is kept so that all of them fit: a knapsack over measured costs.

A model falls into parts that share no decision: its blocks, and sites outside of blocks. For each
part, and each way of recomputing it (not at all, some halves, the whole), the fronts of its sites
(bytes against cost) are added up. One entry per part is then chosen by dynamic programming over
bytes in steps of 1/4096 of the budget, rounded up, once for each size of the largest recomputed
module, whose activations exist beside all that is kept. What rounding leaves is spent by exchanging
single entries with exact bytes; uniform choices are candidates as well, so that none of them is
better at the same bytes. No random numbers: equal measurements give equal choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

import torch

from .calibration import ActivationCalibration, KeptTensors, SiteCalibration

__all__ = ["Allocation", "allocate", "cost_of", "least_nbytes"]

_STEPS = 4096
_MAX_HALVES = 3  # of a block, all of whose subsets are tried
_MAX_LARGEST = 12  # sizes of the largest recomputed module that are tried


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """A choice for all activations.

    Attributes:
        codecs: by site; others keep full precision.
        recomputed: modules that keep their inputs only.
        kept_nbytes: from forward to backward.
        transient_nbytes: more, while the largest recomputed module runs again.
        mean_squared_error: of the gradients of all sites, relative; 0 where nothing is coded.
        time_s: seconds per step more than in full precision; negative differences do not count.
    """

    codecs: Mapping[str, str]
    recomputed: tuple[str, ...]
    kept_nbytes: int
    transient_nbytes: int
    mean_squared_error: float
    time_s: float

    @property
    def nbytes(self) -> int:
        """Peak of what the choice keeps."""
        return self.kept_nbytes + self.transient_nbytes


@dataclass(frozen=True, slots=True)
class _Entry:
    """One choice for a part of the model."""

    nbytes: int
    cost: float
    codecs: tuple[tuple[str, str], ...] = ()
    recomputed: tuple[str, ...] = ()
    transient: int = 0


@dataclass(slots=True)
class _Part:
    sites: list[SiteCalibration] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    tensors: list[KeptTensors] = field(default_factory=list)
    entries: list[_Entry] = field(default_factory=list)


class _Costs:
    """Cost of a choice: mean squared relative error, and time as a share of a step."""

    def __init__(
        self, calibration: ActivationCalibration, time_weight: float, error_weight: float = 1.0
    ) -> None:
        gradients = sum(len(s.codecs[0].errors) for s in calibration.sites if s.codecs)
        self.per_error = error_weight / max(1, gradients)
        self.per_second = time_weight / max(calibration.step_time_s, 1e-12)
        self.unit_time = {unit.name: unit.time_s for unit in calibration.units}

    def site(self, site: SiteCalibration, codec: str) -> float:
        measured = site.measurement(codec)
        # a code that is faster than full precision is no reason to lose precision
        time = max(0.0, measured.time_s)
        return self.per_error * measured.squared_error + self.per_second * time

    def unit(self, unit: str) -> float:
        return self.per_second * self.unit_time[unit]


def cost_of(
    calibration: ActivationCalibration,
    codecs: Mapping[str, str],
    recomputed: tuple[str, ...],
    time_weight: float,
) -> float:
    """Return what ``allocate`` makes small: mean squared error plus weighted share of time."""
    costs = _Costs(calibration, time_weight)
    by_name = {site.name: site for site in calibration.sites}
    coded = sum(costs.site(by_name[name], codec) for name, codec in sorted(codecs.items()))
    return coded + sum(costs.unit(unit) for unit in recomputed)


def _outermost(name: str, units: list[str]) -> str:
    return next((unit for unit in units if name == unit or name.startswith(f"{unit}.")), "")


def _parts(calibration: ActivationCalibration) -> tuple[list[_Part], int]:
    """Parts of the model, and bytes that are kept anyway or are counted so."""
    units = [unit.name for unit in calibration.units]  # blocks before their halves
    parts: dict[str, _Part] = {}
    for site in calibration.sites:
        if site.codecs:
            key = _outermost(site.name, units) or site.name
            parts.setdefault(key, _Part()).sites.append(site)
    for unit in units:
        parts.setdefault(_outermost(unit, units), _Part()).units.append(unit)
    fixed = 0
    for tensors in calibration.tensors:
        keys: set[str] = set()
        for saver in tensors.savers:
            keys.update(_outermost(unit, units) for unit in (*saver.inside, saver.input_of) if unit)
            if saver.site:
                keys.add(_outermost(saver.site, units) or saver.site)
            elif not saver.inside and not saver.input_of:
                keys.add("")
        key = keys.pop() if len(keys) == 1 else ""
        if key in parts:
            parts[key].tensors.append(tensors)
        else:
            fixed += tensors.nbytes
    return list(parts.values()), fixed


def _ways(units: list[str]) -> Iterator[tuple[str, ...]]:
    """Sets of modules to recompute, none inside another."""
    yield ()
    halves = units[1:]
    sizes = range(1, len(halves) + 1) if len(halves) <= _MAX_HALVES else (1, len(halves))
    for size in sizes:
        yield from combinations(halves, size)
    yield from ((unit,) for unit in units[:1])


def _front(entries: list[_Entry], step: int) -> list[_Entry]:
    """The entries that no other beats in bytes and cost; of those within a step the cheapest."""
    best: list[_Entry] = []
    for entry in sorted(entries, key=lambda e: (-(-e.nbytes // step), e.cost, e.nbytes)):
        if not best or entry.cost < best[-1].cost:
            best.append(entry)
    return best


def _entries(part: _Part, way: tuple[str, ...], costs: _Costs, step: int) -> list[_Entry]:
    """The front of a part for one way of recomputing it."""
    sites = {s.name: s for s in part.sites if not _outermost(s.name, list(way))}
    keeping = dict.fromkeys(sites, 0)
    fixed, again = 0, dict.fromkeys(way, 0)
    for tensors in part.tensors:
        deciding = {s.site for s in tensors.savers if s.holds((), way)}
        if len(deciding) == 1 and (only := next(iter(deciding))) in keeping:
            keeping[only] += tensors.nbytes
        elif deciding:  # also where several sites would have to keep codes
            fixed += tensors.nbytes
        if not deciding or "" not in deciding:
            for unit in {u for s in tensors.savers for u in s.inside if u in again}:
                again[unit] += tensors.nbytes
    transient = max(again.values(), default=0)
    start = sum(costs.unit(unit) for unit in way)
    front = [_Entry(fixed, start, (), way, transient)]
    for name, site in sites.items():
        choices: list[tuple[int, float, tuple[tuple[str, str], ...]]] = [(keeping[name], 0.0, ())]
        choices += [(c.nbytes, costs.site(site, c.codec), ((name, c.codec),)) for c in site.codecs]
        front = _front(
            [
                _Entry(e.nbytes + nbytes, e.cost + cost, e.codecs + choice, way, transient)
                for e in front
                for nbytes, cost, choice in choices
            ],
            step,
        )
    return front


def _pack(parts: list[_Part], capacity: int, step: int, largest: int) -> list[_Entry] | None:
    """One entry per part, of least cost, within ``capacity`` bytes; None if there are none."""
    steps = capacity // step
    if steps < 0:
        return None
    best = torch.zeros(steps + 1, dtype=torch.float64)
    choices: list[torch.Tensor] = []
    fitting = [[e for e in part.entries if e.transient <= largest] for part in parts]
    for entries in fitting:
        table = torch.full((len(entries), steps + 1), float("inf"), dtype=torch.float64)
        for row, entry in enumerate(entries):
            size = -(-entry.nbytes // step)
            if size <= steps:
                table[row, size:] = best[: steps + 1 - size] + entry.cost
        best, choice = table.min(0)
        choices.append(choice)
    if not torch.isfinite(best[steps]):
        return None
    chosen: list[_Entry] = []
    left = steps
    for entries, choice in zip(reversed(fitting), reversed(choices), strict=True):
        entry = entries[int(choice[left])]
        left -= -(-entry.nbytes // step)
        chosen.append(entry)
    return chosen[::-1]


def _polish(parts: list[_Part], chosen: list[_Entry], capacity: int, largest: int) -> list[_Entry]:
    """Spend exact bytes that are left on single better entries, best first."""
    while True:
        left = capacity - sum(entry.nbytes for entry in chosen)
        gain, index, better = 0.0, -1, None
        for i, (part, entry) in enumerate(zip(parts, chosen, strict=True)):
            for other in part.entries:
                fits = other.transient <= largest and other.nbytes - entry.nbytes <= left
                if fits and entry.cost - other.cost > gain:
                    gain, index, better = entry.cost - other.cost, i, other
        if better is None:
            return chosen
        chosen[index] = better


def _uniform(calibration: ActivationCalibration) -> Iterator[dict[str, str]]:
    names = sorted({c.codec for site in calibration.sites for c in site.codecs})
    yield {}
    for codec in names:
        yield {site.name: codec for site in calibration.sites if site.codecs}


def _prepare(
    calibration: ActivationCalibration, costs: _Costs, recompute: bool, step: int
) -> tuple[list[_Part], int, list[int]]:
    parts, fixed = _parts(calibration)
    for part in parts:
        ways = list(_ways(part.units)) if recompute else [()]
        part.entries = [entry for way in ways for entry in _entries(part, way, costs, step)]
    sizes = sorted({entry.transient for part in parts for entry in part.entries} | {0})
    if len(sizes) > _MAX_LARGEST:
        last = len(sizes) - 1
        sizes = [sizes[i * last // (_MAX_LARGEST - 1)] for i in range(_MAX_LARGEST)]
    return parts, fixed, sizes


_Choice = tuple[dict[str, str], tuple[str, ...]]


def _choice(chosen: list[_Entry]) -> _Choice:
    codecs = dict(pair for entry in chosen for pair in entry.codecs)
    return codecs, tuple(unit for entry in chosen for unit in entry.recomputed)


def _leanest(calibration: ActivationCalibration, recompute: bool, at_loss: int) -> _Choice:
    """The choice that needs the fewest bytes, whatever it costs."""
    costs = _Costs(calibration, 0.0, 0.0)
    parts, _, sizes = _prepare(calibration, costs, recompute, 1)
    choices = [
        _choice(
            [
                min((e for e in part.entries if e.transient <= largest), key=lambda e: e.nbytes)
                for part in parts
            ]
        )
        for largest in sizes
    ]
    return min(choices, key=lambda choice: _peak(calibration, choice, at_loss))


def _peak(calibration: ActivationCalibration, choice: _Choice, at_loss: int) -> int:
    kept, transient = calibration.saved_nbytes(*choice)
    return kept + max(transient, at_loss)


def least_nbytes(
    calibration: ActivationCalibration, *, recompute: bool = True, at_loss_nbytes: int = 0
) -> int:
    """Return the smallest budget for which ``allocate`` finds a choice."""
    leanest = _leanest(calibration, recompute, at_loss_nbytes)
    return _peak(calibration, leanest, at_loss_nbytes)


def allocate(
    calibration: ActivationCalibration,
    nbytes: int,
    *,
    time_weight: float = 0.1,
    recompute: bool = True,
    at_loss_nbytes: int = 0,
) -> Allocation | None:
    """Choose codecs and recomputation of least cost within a budget.

    Args:
        calibration: What was measured.
        nbytes: Budget for the peak of saved activations.
        time_weight: Mean squared relative error of gradients that a step of twice the time would be
            worth: at 0.1, ten percent more time weigh as much as errors of 10%.
        recompute: Whether modules may be recomputed.
        at_loss_nbytes: Memory that is needed beside all that is kept while the loss is computed,
            and is free again when a module is recomputed.

    Returns:
        The choice; None if there is none. Full precision for all if that fits.
    """
    step = max(1, nbytes // _STEPS)
    costs = _Costs(calibration, time_weight)
    parts, fixed, sizes = _prepare(calibration, costs, recompute, step)
    found: list[_Choice] = [(codecs, ()) for codecs in _uniform(calibration)]
    if _peak(calibration, found[0], at_loss_nbytes) > nbytes:
        found.append(_leanest(calibration, recompute, at_loss_nbytes))
        for largest in sizes:
            capacity = nbytes - fixed - max(largest, at_loss_nbytes)
            chosen = _pack(parts, capacity, step, largest)
            if chosen is not None:
                found.append(_choice(_polish(parts, chosen, capacity, largest)))
    fitting = [c for c in found if _peak(calibration, c, at_loss_nbytes) <= nbytes]
    if not fitting:
        return None
    best = min(fitting, key=lambda choice: cost_of(calibration, choice[0], choice[1], time_weight))
    return _result(calibration, *best)


def _result(
    calibration: ActivationCalibration,
    codecs: dict[str, str],
    recomputed: tuple[str, ...],
) -> Allocation:
    kept, transient = calibration.saved_nbytes(codecs, recomputed)
    by_name = {site.name: site for site in calibration.sites}
    time = sum(max(0.0, by_name[s].measurement(c).time_s) for s, c in codecs.items())
    time += sum(unit.time_s for unit in calibration.units if unit.name in recomputed)
    return Allocation(
        codecs=codecs,
        recomputed=recomputed,
        kept_nbytes=kept,
        transient_nbytes=transient,
        mean_squared_error=cost_of(calibration, codecs, (), 0.0),
        time_s=time,
    )
