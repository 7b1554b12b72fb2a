"""What ``adaptive_bits.py`` found: tables of losses and of bits, and curves."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from ablation_report import BASELINE, Outcome, Outcomes
from common import table

HEADER = (
    *("variant", "seeds", "bits", "in training", "loss", "perplexity", "gap", "std error"),
    *("to groups", "std error", "without codes", "training", "worst", "steps to target"),
)
SITE_HEADER = ("variant", "site", "mean bits", "deviation", "least", "most")
STABILITY_HEADER = (
    *("variant", "seeds", "before training", "lowest", "at the end"),
    *("largest rise", "std error", "worst seed"),
)
_LINEAR_NATS = 0.02  # the scale of gaps is logarithmic beyond
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


def _validations(run: Outcome) -> list[float]:
    before = (run.details or {}).get("val_losses", [])
    return [*before, run.val_loss] if before else []


def _mean_bits(run: Outcome) -> list[float]:
    return (run.details or {}).get("mean_bits", [])


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


def rise(losses: Sequence[float]) -> float:
    """Return by how much a curve came to exceed the lowest loss before, at most; 0 if it falls."""
    lows = itertools.accumulate(losses, min)
    return max(loss - low for loss, low in zip(losses, lows, strict=True))


def stability_rows(outcomes: Outcomes) -> list[list[str]]:
    """Return the rows below :data:`STABILITY_HEADER`, of runs that were validated on their way.

    Losses in nats, means over seeds; what a loss rose by in thousandths of a nat, with the standard
    error over seeds, and that of the seed with the largest.
    """
    found = []
    for name, runs in outcomes.items():
        curves = [curve for run in runs if (curve := _validations(run))]
        if not curves:
            continue
        rises = [rise(curve) for curve in curves]
        losses = [[curve[0] for curve in curves], [*map(min, curves)], [c[-1] for c in curves]]
        found.append(
            [
                name,
                str(len(curves)),
                *(f"{statistics.mean(values):.4f}" for values in losses),
                *mean_and_error(rises),
                f"{1e3 * max(rises):+.1f}",
            ]
        )
    return found


def tables(outcomes: Outcomes) -> list[tuple[Sequence[str], list[list[str]]]]:
    """Return headers and rows of what the outcomes have."""
    found: list[tuple[Sequence[str], list[list[str]]]] = [
        (HEADER, rows(outcomes)),
        (SITE_HEADER, site_rows(outcomes)),
        (STABILITY_HEADER, stability_rows(outcomes)),
    ]
    return [(header, cells) for header, cells in found if cells]


def summary(outcomes: Outcomes) -> str:
    """Lay out the outcomes for a terminal."""
    return "\n\n".join(table(cells, header) for header, cells in tables(outcomes))


def draw_curves(outcomes: Outcomes, path: Path) -> None:
    """Draw gaps of the losses to full precision, and the mean bits, over steps.

    Lines are means over seeds, and shaded is what lies between the seeds.

    Args:
        outcomes: With full precision among them.
        path: Image to write; its ending chooses the format.

    Raises:
        ValueError: There is no full-precision run to compare with.
    """
    if BASELINE not in outcomes:
        raise ValueError(f"the figure compares with {BASELINE!r}, of which there is no run")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels: list[tuple[str, Callable[[Outcome], list[float]], str, bool]] = [
        ("training loss above full precision (nats)", _losses, "every", True),
        ("validation loss above full precision (nats)", _validations, "val_every", True),
        ("mean bits", _mean_bits, "every", False),
    ]
    panels = [p for p in panels if any(p[1](run) for runs in outcomes.values() for run in runs)]
    figure, drawn = plt.subplots(
        1, len(panels), figsize=(5 * len(panels), 4.5), constrained_layout=True, squeeze=False
    )
    names = [name for name in outcomes if name != BASELINE]
    for axes, (label, curve_of, every, is_gap) in zip(drawn[0], panels, strict=True):
        exact = {run.seed: curve_of(run) for run in outcomes[BASELINE]}
        for color, name in enumerate(names):
            curves = [
                _less(curve, exact[run.seed]) if is_gap else curve
                for run in outcomes[name]
                if (curve := curve_of(run)) and run.seed in exact
            ]
            if not curves:
                continue
            at_once = list(zip(*curves, strict=True))
            first = 0 if curve_of is _validations else 1
            interval = (outcomes[name][0].details or {})[every]
            steps = [interval * (first + index) for index in range(len(at_once))]
            means = [statistics.mean(values) for values in at_once]
            axes.plot(steps, means, color=f"C{color}", linewidth=1.2, label=name)
            axes.fill_between(
                *(steps, [*map(min, at_once)], [*map(max, at_once)]),
                **{"color": f"C{color}", "alpha": 0.15, "linewidth": 0},
            )
        if is_gap:
            axes.axhline(0, color="0.4", linewidth=0.8)
            axes.set_yscale("symlog", linthresh=_LINEAR_NATS)
        axes.set_ylabel(label)
        axes.set_xlabel("optimizer step")
    drawn[0, 0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, dpi=110, metadata=metadata)
    plt.close(figure)


def _less(curve: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(curve, other, strict=True)]
