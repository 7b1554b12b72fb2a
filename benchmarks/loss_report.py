"""What ``loss_study.py`` found: paired changes with standard errors over seeds, and their tail."""

from __future__ import annotations

import math
import statistics

from ablation_report import BASELINE, Outcomes, counterparts
from common import table

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
