"""Choose how activations are kept so that training fits into a memory budget.

``allocate`` solves a knapsack over measured costs. A model falls into parts that share no decision:
its blocks, and sites outside of blocks. For each part, and each way of recomputing it (not at all,
some halves, the whole), the Pareto fronts of its sites (bytes against cost) are added up. One entry
per part is then chosen by dynamic programming over bytes in steps of 1/4096 of the budget, rounded
up, once for each size of the largest recomputed module, whose activations exist beside all that is
kept. Bytes left over by rounding are spent by exchanging single entries; uniform choices are
candidates as well, so that none of them is better at the same bytes. No random numbers: equal
measurements give equal choices.

Torch's own knapsack (``torch._functorch._activation_checkpointing.knapsack``) decides for each item
whether to keep it; here each part has up to hundreds of choices of which exactly one is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lq_lightning.foundation.agreement import gather_objects
from lq_lightning.foundation.checks import check_choice, is_whole, size_in_bytes

from .calibrate import (
    CANDIDATES,
    FULL_PRECISION,
    OtherMemory,
    applied,
    calibrate_activations,
    measured_nbytes,
    other_memory,
    unchanged,
)
from .calibration import ActivationCalibration, KeptTensors, SiteCalibration, average_values
from .host_memory import gib
from .offload_share import RESIDENT, hidden_nbytes
from .policy import ActivationPolicy, ActivationRule, Matmul
from .recompute import whole_blocks

_STEPS = 4096
_MAX_HALVES = 3  # of a block; all subsets are tried
_MAX_LARGEST = 12  # sizes of the largest recomputed module that are tried
Scope = Literal["device", "activations"]
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """A choice for all activations."""

    codecs: Mapping[str, str]  # by site; others keep full precision
    recomputed: tuple[str, ...]  # modules that keep only their inputs
    kept_nbytes: int  # from forward to backward
    transient_nbytes: int  # in addition, while the largest recomputed module runs again
    mean_squared_error: float  # relative, of the gradients of all sites; 0 where nothing is coded
    time_s: float  # additional seconds per step; codes that save time do not count

    @property
    def nbytes(self) -> int:
        """Peak of saved activations."""
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
    """Return the objective of ``allocate``: mean squared error plus weighted share of time."""
    costs = _Costs(calibration, time_weight)
    by_name = {site.name: site for site in calibration.sites}
    coded = sum(costs.site(by_name[name], codec) for name, codec in sorted(codecs.items()))
    return coded + sum(costs.unit(unit) for unit in recomputed)


def _outermost(name: str, units: list[str]) -> str:
    return next((unit for unit in units if name == unit or name.startswith(f"{unit}.")), "")


def _parts(calibration: ActivationCalibration) -> tuple[list[_Part], int]:
    """Parts of the model, and bytes that are kept anyway or are counted so."""
    units = [unit.name for unit in calibration.units]  # blocks come before their halves
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
    """The Pareto front in bytes and cost; of entries within one step the cheapest."""
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
    """One entry per part, of least cost, within ``capacity`` bytes; None if nothing fits."""
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
    """Spend the exact bytes that are left on single better entries, best first."""
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
    """The choice with the fewest bytes, whatever it costs."""
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
    """Choose codecs and recomputation of least cost within a budget; None if nothing fits.

    ``at_loss_nbytes`` is memory that is needed beside all that is kept while the loss is computed,
    and is free again when a module is recomputed.
    """
    step = max(1, nbytes // _STEPS)
    costs = _Costs(calibration, time_weight)
    parts, fixed, sizes = _prepare(calibration, costs, recompute, step)
    coded = [site for site in calibration.sites if site.codecs]
    names = sorted({each.codec for site in coded for each in site.codecs})
    found: list[_Choice] = [({}, ()), *(({s.name: name for s in coded}, ()) for name in names)]
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
    codecs, recomputed = min(fitting, key=lambda c: cost_of(calibration, c[0], c[1], time_weight))
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


@dataclass(frozen=True, kw_only=False)  # no slots: jsonargparse reads defaults with vars()
class MemoryBudget:
    """Memory that training may take.

    Everything but saved activations (weights, gradients, states of optimizers, the loss) is
    measured and subtracted; activations get the rest.

    Codes are chosen for norms, activation functions, MLPs and linear layers. What attention and
    unrecognized blocks save is kept in full precision or recomputed.

    Args:
        size: Memory per device: ``"60GiB"`` (2**30 bytes each), ``"60 GB"`` (10**9), bytes as an
            ``int``, or a share of the device's memory as a ``float`` up to 1.0. It bounds allocated
            memory (``torch.cuda.max_memory_allocated``); leave the allocator a few percent.
        scope: ``"device"``: all of it; ``"activations"``: saved activations alone.
        time_weight: Value of time. Choices are compared by the mean squared relative error of
            gradients plus this times the share of a step that they take longer. At 0.1, ten percent
            more time are as bad as errors of 10%; larger values prefer codes, 0 prefers
            recomputation wherever that fits.
        recompute: Whether attentions, MLPs and blocks may be recomputed.
        offload: Whether what blocks save may leave the device until backward, too: as much as the
            link to pinned host memory moves during the forward pass, both measured.

    Raises:
        ValueError: A value that is not listed above.
    """

    size: str | int | float
    scope: Scope = "device"
    time_weight: float = 0.1
    recompute: bool = True
    offload: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        check_choice("MemoryBudget", "scope", self.scope, get_args(Scope))
        check_choice("MemoryBudget", "recompute", self.recompute, (True, False))
        check_choice("MemoryBudget", "offload", self.offload, (True, False))
        if not isinstance(self.time_weight, (int, float)) or not self.time_weight >= 0:
            raise ValueError(
                f"`MemoryBudget(time_weight={self.time_weight!r})` must be 0 or more: 0.1 is usual."
            )
        self.nbytes(1 << 40)

    def nbytes(self, total_nbytes: int) -> int:
        """Return the budget in bytes, of a device with ``total_nbytes`` for shares of it."""
        size = self.size
        if is_whole(size) and size > 0:
            return size
        if isinstance(size, float) and 0.0 < size <= 1.0:
            return int(size * total_nbytes)
        nbytes = size_in_bytes(size) if isinstance(size, str) else None
        if not nbytes:
            raise ValueError(
                f"`MemoryBudget({size!r})` is no amount of memory: give a string such as '60GiB' "
                "or '60 GB', an int of bytes, or a float up to 1.0 for a share of the device."
            )
        return nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationPlan:
    """A policy for a budget, and the measurements that it was chosen from.

    Attributes:
        policy: the choice as rules.
        allocation: the choice with its costs.
        calibration: all measurements.
        budget_nbytes: the budget.
        other: memory for everything but saved activations; zeros if the budget is for them alone.
        measured_nbytes: bytes that one forward pass with the policy saves.
        offload_nbytes: host memory for what leaves the device until backward.
    """

    policy: ActivationPolicy
    allocation: Allocation
    calibration: ActivationCalibration
    budget_nbytes: int
    other: OtherMemory
    measured_nbytes: int
    offload_nbytes: int = 0

    def summary(self) -> str:
        """Return a few readable lines."""
        chosen, counts = self.allocation, dict[str, int]()
        for codec in chosen.codecs.values():
            counts[codec] = counts.get(codec, 0) + 1
        coded = ", ".join(f"{count} x {codec}" for codec, count in sorted(counts.items()))
        full = self.calibration.saved_nbytes({})[0]
        step = max(self.calibration.step_time_s, 1e-12)
        return "\n".join(
            [
                f"Saved activations: {gib(chosen.nbytes)} at the peak instead of {gib(full)}; "
                f"{gib(self.other.nbytes)} for everything else, of {gib(self.budget_nbytes)}.",
                f"Sites with codes: {coded or 'none'}; recomputed modules: "
                f"{len(chosen.recomputed)}"
                + (f"; {gib(self.offload_nbytes)} move to the host" if self.offload_nbytes else "")
                + ".",
                "Expected relative error of gradients: "
                f"{chosen.mean_squared_error**0.5:.4f} (root of the mean square); "
                f"time: +{100 * chosen.time_s / step:.1f}%.",
            ]
        )


def _policy(allocation: Allocation, matmul: Matmul) -> ActivationPolicy:
    rules = [ActivationRule(module=unit, recompute=True) for unit in allocation.recomputed]
    rules += [ActivationRule(module=s, codec=codec) for s, codec in allocation.codecs.items()]
    return replace(FULL_PRECISION, matmul=matmul, rules=tuple(rules))


def _total_nbytes(model: nn.Module, budget: MemoryBudget) -> int:
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if isinstance(budget.size, float):
        raise ValueError(
            f"`MemoryBudget({budget.size!r})` is a share of a device's memory, but the model is on "
            f"{device.type!r}: give an amount such as '8GiB'."
        )
    return 0


def _infeasible(
    budget: MemoryBudget,
    calibration: ActivationCalibration,
    other: OtherMemory,
    nbytes: int,
    hidden: int,
) -> RuntimeError:
    least = least_nbytes(
        calibration, recompute=budget.recompute, at_loss_nbytes=other.at_loss_nbytes
    )
    least = max(0, least - hidden)
    need = max(least + other.nbytes, other.after_backward_nbytes)
    return RuntimeError(
        f"`MemoryBudget({budget.size!r})` is {gib(nbytes)}, but the least that would do is "
        f"{need} bytes ({gib(need)}): {gib(least)} for saved activations, "
        f"{gib(other.nbytes)} for everything else. Give more memory, a smaller batch"
        + (", 8-bit states and gradients" if other.nbytes else "")
        + ("." if budget.recompute else ", or allow `recompute=True`.")
    )


def plan_activations(
    model: nn.Module,
    run_step: Callable[[], Tensor],
    budget: MemoryBudget,
    candidates: Sequence[str] = CANDIDATES,
    *,
    optimizers: Sequence[Optimizer] = (),
    accumulates: bool = False,
    matmul: Matmul = "native",
    ranks: int = 1,
) -> ActivationPlan:
    """Measure a model and choose how its activations are kept within a budget.

    The choice is checked by a forward pass with it, and made again with less where that saves more
    than predicted. With several ranks all must call; all get the same policy.

    Args:
        model: Model as it trains: on its device, sharded or not, quantized (by a policy without
            ``recompute`` rules) or not.
        run_step: Forward pass of one real batch; returns the loss, with its graph. Called several
            times; gradients, random numbers and buffers are left as they were.
        budget: The budget.
        candidates: Names of codecs to choose from.
        optimizers: Optimizers of the model; states that do not exist yet are predicted.
        accumulates: Whether gradients of other batches exist during a step.
        matmul: ``matmul`` of the policy.
        ranks: Ranks of this node, which share its memory.

    Raises:
        RuntimeError: The budget cannot be met; the message says what would do.
        ValueError: An unknown codec, or a share of the memory of something that is not a GPU.
    """
    nbytes = budget.nbytes(_total_nbytes(model, budget))
    calibration = calibrate_activations(model, run_step, candidates)
    other = OtherMemory()
    if budget.scope == "device":
        with unchanged(model), applied(model, FULL_PRECISION):
            other = other_memory(model, run_step, calibration, optimizers, accumulates)
        other = average_values(gather_objects(other))  # the most of any rank
    blocks = len(whole_blocks([unit.name for unit in calibration.units]))
    hidden = 0
    if budget.offload and blocks > RESIDENT:
        hidden = min(gather_objects(hidden_nbytes(model, calibration.step_time_s / 3, ranks)))
        hidden = hidden * (blocks - RESIDENT) // blocks
    by_others = (t for t in calibration.tensors if not all(s.inside for s in t.savers))
    outside = sum(tensors.nbytes for tensors in by_others)  # what not only blocks save
    margin = 0
    for _ in range(_ROUNDS):
        allocation = allocate(
            calibration,
            nbytes + hidden - other.nbytes - margin,
            time_weight=budget.time_weight,
            recompute=budget.recompute,
            at_loss_nbytes=other.at_loss_nbytes,
        )
        if allocation is None or other.after_backward_nbytes > nbytes:
            raise _infeasible(budget, calibration, other, nbytes, hidden)
        policy = _policy(allocation, matmul)
        with applied(model, policy):
            measured = max(gather_objects(measured_nbytes(model, run_step)))
        excess = measured - allocation.kept_nbytes
        over = allocation.nbytes + max(0, excess) + other.nbytes - nbytes
        inside = allocation.kept_nbytes - outside
        most = min(hidden, inside * (blocks - RESIDENT) // max(1, blocks))
        if over <= max(0, most):
            return ActivationPlan(
                policy=policy,
                allocation=allocation,
                calibration=calibration,
                budget_nbytes=nbytes,
                other=other,
                measured_nbytes=measured,
                offload_nbytes=max(0, over) * blocks // max(1, blocks - RESIDENT),
            )
        margin += max(excess, over - most)
    raise RuntimeError(
        f"`MemoryBudget({budget.size!r})`: a forward pass saved {gib(excess)} more than "
        f"predicted, {_ROUNDS} times. Does the model save different tensors from step to step? "
        "Give a policy instead of a budget."
    )
