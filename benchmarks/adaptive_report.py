"""What ``adaptive_bits.py`` found: tables of losses and of bits, and curves."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ablation_report import BASELINE, Outcome, Outcomes
from common import table

HEADER = (
    *("variant", "seeds", "bits", "in training", "loss", "perplexity", "gap", "std error"),
    *("to groups", "std error", "without codes", "training", "worst", "steps to target"),
)
SITE_HEADER = ("variant", "site", "mean bits", "deviation", "least", "most")
_BITS = re.compile(r"(?:qat \w+|aq_sgd|amaq) (\d)")


def group_baseline(name: str) -> str | None:
    """Return the variant of groups with as many bits, or None."""
    found = _BITS.match(name)
    return f"qat group {found[1]}" if found else None


def differences(
    outcomes: Outcomes,
    name: str,
    other: str | None,
    number: Callable[[Outcome], float | None] = lambda run: run.val_loss,
) -> list[float]:
    """Return what a number of a variant exceeds that of another one by, of seeds that both have."""
    if other is None or name == other:
        return []
    of_other = {run.seed: number(run) for run in outcomes.get(other, [])}
    pairs = [(number(run), of_other.get(run.seed)) for run in outcomes[name]]
    return [a - b for a, b in pairs if a is not None and b is not None]


def mean_and_error(values: Sequence[float]) -> tuple[str, str]:
    """Return mean and standard error in thousandths of a nat, ``-`` for what is unknown."""
    mean = f"{1e3 * statistics.mean(values):+.1f}" if values else "-"
    if len(values) < 2:
        return mean, "-"
    return mean, f"{1e3 * statistics.stdev(values) / len(values) ** 0.5:.1f}"


def training_excess(
    outcomes: Outcomes, name: str, of: Callable[[list[float]], float]
) -> list[float]:
    """Return, per seed, how far training was above full precision in its second half.

    Args:
        outcomes: With full precision among them.
        name: Of the variant.
        of: Makes one number of differences at some steps, such as their mean.
    """
    exact = {run.seed: _losses(run) for run in outcomes.get(BASELINE, [])}
    found = []
    for run in outcomes[name]:
        pairs = list(zip(_losses(run), exact.get(run.seed, []), strict=False))
        if name != BASELINE and pairs:
            found.append(of([loss - other for loss, other in pairs[len(pairs) // 2 :]]))
    return found


def _losses(run: Outcome) -> list[float]:
    return (run.details or {}).get("losses", [])


def _mean(runs: Sequence[Outcome], number: Callable[[Outcome], float | None], form: str) -> str:
    values = [number(run) for run in runs]
    known = [value for value in values if value is not None]
    return format(statistics.mean(known), form) if known else "-"


def _detail(key: str) -> Callable[[Outcome], float | None]:
    return lambda run: (run.details or {}).get(key)


def rows(outcomes: Outcomes) -> list[list[str]]:
    """Return the rows below :data:`HEADER`, differences in thousandths of a nat, same seeds.

    "bits" are those per value on the wire after the last step, "in training" on average. "gap" is
    to full precision, "to groups" to groups with codes of as many bits, "without codes" that of the
    trained model without quantization to full precision; "training" is the gap of the training
    loss in the second half of a run, "worst" the largest there, of means of a few steps.
    """
    found = []
    for name, runs in outcomes.items():
        loss = statistics.mean(run.val_loss for run in runs)
        without = differences(
            outcomes, name, BASELINE, lambda run: run.exact_val_loss or run.val_loss
        )
        found.append(
            [
                name,
                str(len(runs)),
                _mean(runs, _detail("final_bits"), ".3f"),
                _mean(runs, lambda run: run.forward_bits, ".3f"),
                f"{loss:.4f}",
                f"{math.exp(loss):.4f}",
                *mean_and_error(differences(outcomes, name, BASELINE)),
                *mean_and_error(differences(outcomes, name, group_baseline(name))),
                mean_and_error(without)[0],
                mean_and_error(training_excess(outcomes, name, statistics.mean))[0],
                mean_and_error(training_excess(outcomes, name, max))[0],
                _mean(runs, _detail("reached"), ".0f"),
            ]
        )
    return found


def site_rows(outcomes: Outcomes) -> list[list[str]]:
    """Return the rows below :data:`SITE_HEADER`, means over seeds."""
    found = []
    for name, runs in outcomes.items():
        of_runs = [run.details["sites"] for run in runs if run.details and "sites" in run.details]
        for site in of_runs[0] if of_runs else ():
            numbers = [
                statistics.mean(sites[site][key] for sites in of_runs)
                for key in ("mean", "deviation", "least", "most")
            ]
            found.append([name, site, *(f"{number:.2f}" for number in numbers)])
    return found


def summary(outcomes: Outcomes) -> str:
    """Lay out the outcomes for a terminal."""
    sites = site_rows(outcomes)
    tables = [table(rows(outcomes), HEADER), *([table(sites, SITE_HEADER)] if sites else [])]
    return "\n\n".join(tables)


def draw_curves(outcomes: Outcomes, path: Path) -> None:
    """Draw the gap of the training loss to full precision, and the mean bits, over steps.

    Args:
        outcomes: With full precision among them; curves are means over seeds.
        path: Image to write; its ending chooses the format.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    exact = {run.seed: _losses(run) for run in outcomes[BASELINE]}
    for name, runs in outcomes.items():
        gaps = [
            [a - b for a, b in zip(_losses(run), exact[run.seed], strict=False)]
            for run in runs
            if run.seed in exact
        ]
        if name == BASELINE or not gaps:
            continue
        (line,) = left.plot(*_points(gaps, runs[0].details), label=name, linewidth=1.2)
        bits = [
            run.details["mean_bits"] for run in runs if run.details and "mean_bits" in run.details
        ]
        if bits:
            right.plot(*_points(bits, runs[0].details), color=line.get_color(), linewidth=1.2)
    left.axhline(0, color="0.4", linewidth=0.8)
    left.set_ylabel("training loss above full precision (nats)")
    left.legend(fontsize=7)
    right.set_ylabel("mean bits")
    for axes in (left, right):
        axes.set_xlabel("optimizer step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _points(
    curves: Sequence[Sequence[float]], details: dict[str, Any] | None
) -> tuple[list[int], list[float]]:
    means = [statistics.mean(values) for values in zip(*curves, strict=True)]
    every = (details or {})["every"]
    return [every * index for index in range(1, len(means) + 1)], means
