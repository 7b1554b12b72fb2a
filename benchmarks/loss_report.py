"""What ``loss_study.py`` found: paired changes with standard errors over seeds, and their tail."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from ablation_report import BASELINE, Outcome, Outcomes, counterparts
from common import table

Curve = tuple[tuple[int, float], ...]

TAIL_PERCENT = 0.3  # a run that ends so far above full precision has left its path

HEADER = (
    *("variant", "runs", "seeds", "validation loss", "against full precision", "std error"),
    *("median", "worst", f"beyond {TAIL_PERCENT}%", "training, second half", "its std error"),
)


def changes(outcomes: Outcomes, name: str) -> dict[int, list[float]]:
    """Return the changes of validation loss against full precision in percent, by seed.

    Against the mean of all full-precision runs of the seed; see ``counterparts``.
    """
    found: dict[int, list[float]] = {}
    exact = counterparts(outcomes, name)
    for outcome in outcomes[name]:
        if outcome.seed in exact:
            mean = statistics.mean(other.val_loss for other in exact[outcome.seed])
            found.setdefault(outcome.seed, []).append(100 * (outcome.val_loss / mean - 1))
    return found


def training_changes(outcomes: Outcomes, name: str) -> dict[int, list[float]]:
    """Likewise, of the training loss over the second half of each run: a sum over more tokens."""
    found: dict[int, list[float]] = {}
    exact = counterparts(outcomes, name)
    for outcome in outcomes[name]:
        others = [_second_half(o.curve) for o in exact.get(outcome.seed, []) if o.curve]
        if others and outcome.curve:
            change = 100 * (_second_half(outcome.curve) / statistics.mean(others) - 1)
            found.setdefault(outcome.seed, []).append(change)
    return found


def _second_half(curve: tuple[tuple[int, float], ...]) -> float:
    return statistics.mean(loss for _, loss in curve[len(curve) // 2 :])


def mean_and_error(by_seed: dict[int, list[float]]) -> tuple[float, float]:
    """Return the mean over seeds and its standard error; NaN for one seed.

    Runs of one seed share weights, data and what they are compared with: their mean counts once.
    """
    means = [statistics.mean(values) for values in by_seed.values()]
    if not means:
        return float("nan"), float("nan")
    error = statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else float("nan")
    return statistics.mean(means), error


def rows(outcomes: Outcomes) -> list[list[str]]:
    """Return the rows below :data:`HEADER`."""
    found = []
    for name, runs in outcomes.items():
        loss = f"{statistics.mean(run.val_loss for run in runs):.4f}"
        by_seed = changes(outcomes, name)
        row = [name, str(len(runs)), str(len({run.seed for run in runs})), loss]
        values = [value for seed in by_seed.values() for value in seed]
        if name == BASELINE or not values:
            found.append(row + ["-"] * (len(HEADER) - len(row)))
            continue
        beyond = sum(value > TAIL_PERCENT for value in values)
        row += [*_mean_and_error(by_seed), f"{statistics.median(values):+.3f}%"]
        row += [f"{max(values):+.3f}%", f"{beyond} of {len(values)}"]
        found.append([*row, *_mean_and_error(training_changes(outcomes, name))])
    return found


def _mean_and_error(by_seed: dict[int, list[float]]) -> list[str]:
    mean, error = mean_and_error(by_seed)
    return [f"{mean:+.3f}%", "-" if math.isnan(error) else f"{error:.3f}%"]


def summary(outcomes: Outcomes) -> str:
    """Lay out the losses for a terminal."""
    return table(rows(outcomes), HEADER)


# --- details --------------------------------------------------------------------------------------

MEASURES = {
    "ranks' weights": None,
    "main weights": "loss_of_main_weights",
    "average": "loss_of_average",
}
WORST = 3  # pairs that are shown with their curves


def details(outcomes: Outcomes) -> str:
    """Lay out spreads, when training losses part, every pair, and the worst of them."""
    parts = {
        "Validation of other weights: mean, standard error, deviation of one run": _measures,
        "Training loss against full precision, up to each step: mean +- standard error": _windows,
        "Validation loss against full precision, each run": _pairs,
    }
    found = ["", *(f"\n{title}\n{part(outcomes)}" for title, part in parts.items())]
    return "\n".join([*found, *_worst(outcomes)])


def _measures(outcomes: Outcomes) -> str:
    lines = []
    for label, key in MEASURES.items():
        if key and any(key not in (run.details or {}) for of in outcomes.values() for run in of):
            continue
        of = {n: [_measured(run, key) for run in runs] for n, runs in outcomes.items()}
        for name in outcomes:
            by_seed = changes(of, name)
            if name == BASELINE or not by_seed:
                continue
            each = [statistics.mean(values) for values in by_seed.values()]
            spread = f"{statistics.stdev(each):.3f}%" if len(each) > 1 else "-"
            lines.append([name, label, *_mean_and_error(by_seed), spread, f"{max(each):+.3f}%"])
    return table(lines, ("variant", "weights", "mean", "std error", "deviation", "worst"))


def _measured(run: Outcome, key: str | None) -> Outcome:
    return replace(run, val_loss=run.details[key]) if key and run.details else run


def curve_changes(outcomes: Outcomes, name: str) -> dict[int, list[Curve]]:
    """Return how the training loss of each run changes in percent, step by step, by seed."""
    found: dict[int, list[Curve]] = {}
    exact = counterparts(outcomes, name)
    for run in outcomes[name]:
        others = [dict(other.curve) for other in exact.get(run.seed, [])]
        if others:
            points = [
                (step, 100 * (loss / statistics.mean(other[step] for other in others) - 1))
                for step, loss in run.curve
                if all(step in other for other in others)
            ]
            found.setdefault(run.seed, []).append(tuple(points))
    return found


def _windows(outcomes: Outcomes) -> str:
    lines, steps = [], []
    for name in outcomes:
        by_seed = curve_changes(outcomes, name)
        if name == BASELINE or not by_seed:
            continue
        steps = [step for step, _ in next(iter(by_seed.values()))[0]]
        line = [name]
        for index in range(len(steps)):
            point = {seed: [c[index][1] for c in curves] for seed, curves in by_seed.items()}
            mean, error = mean_and_error(point)
            line.append(f"{mean:+.2f}" + ("" if math.isnan(error) else f"+-{error:.2f}"))
        lines.append(line)
    return table(lines, ("variant", *map(str, steps)))


def _pairs(outcomes: Outcomes) -> str:
    seeds = sorted({run.seed for runs in outcomes.values() for run in runs})
    lines = []
    for name in outcomes:
        by_seed = changes(outcomes, name)
        if name != BASELINE and by_seed:
            cells = [" ".join(f"{v:+.3f}" for v in by_seed.get(seed, [])) or "-" for seed in seeds]
            lines.append([name, *cells])
    return table(lines, ("variant", *(f"seed {seed}" for seed in seeds)))


def _worst(outcomes: Outcomes) -> list[str]:
    """Show the runs that end farthest above full precision beside full precision."""
    ranked = [
        (value, name, seed, index)
        for name in outcomes
        if name != BASELINE
        for seed, values in changes(outcomes, name).items()
        for index, value in enumerate(values)
    ]
    found = []
    for value, name, seed, index in sorted(ranked, reverse=True)[:WORST]:
        run = [run for run in outcomes[name] if run.seed == seed][index]
        exact = counterparts(outcomes, name)[seed][0]
        found.append(f"\n{name}, seed {seed}: {value:+.3f}%; training loss against full precision")
        curve = curve_changes(outcomes, name)[seed][index]
        found.append("  ".join(f"{step}: {change:+.2f}%" for step, change in curve))
        found.append(f"gradient norms: mean, largest, share of clipped steps; {name} | exact")
        both = zip(_norms(run), _norms(exact), strict=False)
        found += [f"{step}: {text} | {other}" for (step, text), (_, other) in both]
    return found


def _norms(run: Outcome) -> list[tuple[int, str]]:
    kept = run.details or {}
    each = zip(run.grad_norms, kept.get("largest_norms", ()), kept.get("clipped", ()), strict=False)
    return [(step, f"{mean:.3f} {top[1]:.3f} {cut[1]:.2f}") for (step, mean), top, cut in each]
