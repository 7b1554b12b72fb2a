"""Tables of ``activation_ablation.py``."""

from __future__ import annotations

import math
import statistics

from ablation_report import (
    BASELINE,
    PERTURBED,
    Outcome,
    Outcomes,
    changes,
    mean_percent,
    std_error,
    training_changes,
)
from common import table

HEADER = (
    *("variant", "runs", "validation loss", "against mean of bf16", "std error", "same seed"),
    *("its std error", "training, second half", "gradient norm, tenths", "tokens/s", "peak GiB"),
)


def full_precision(outcomes: Outcomes) -> list[Outcome]:
    """Return all runs that quantize nothing."""
    return outcomes.get(BASELINE, []) + outcomes.get(PERTURBED, [])


def against_mean(outcomes: Outcomes, name: str) -> tuple[float, float]:
    """Return the difference of a variant's mean loss to that of all bf16 runs and its error.

    Both in percent. The standard error is that of a difference of two means. A variant of one run
    is given the deviation of the bf16 runs; NaN if there are no two of them.
    """
    exact = [outcome.val_loss for outcome in full_precision(outcomes)]
    coded = [outcome.val_loss for outcome in outcomes[name]]
    if not exact:
        return math.nan, math.nan
    mean = statistics.mean(exact)
    deviation = statistics.stdev(exact) if len(exact) > 1 else math.nan
    own = statistics.stdev(coded) if len(coded) > 1 else deviation
    error = math.sqrt(deviation**2 / len(exact) + own**2 / len(coded))
    return 100 * (statistics.mean(coded) / mean - 1), 100 * error / mean


def norm_tenths(runs: list[Outcome]) -> str:
    """Return the mean gradient norms of each tenth of the runs (AGoQ's table 15), as text."""
    norms = [norm for _, norm in runs[0].grad_norms]
    if len(norms) < 10:
        return "-"
    columns = zip(*([norm for _, norm in run.grad_norms] for run in runs), strict=True)
    means = [statistics.mean(column) for column in columns]
    tenths = [means[len(means) * i // 10 : len(means) * (i + 1) // 10] for i in range(10)]
    return " ".join(f"{statistics.mean(tenth):.2f}" for tenth in tenths)


def _mean(values: list[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):.{digits}f}" if known else "-"


def rows(outcomes: Outcomes) -> list[list[str]]:
    """Return the rows below :data:`HEADER`, for all variants that were run."""
    found = []
    for name, runs in outcomes.items():
        percent, error = against_mean(outcomes, name)
        paired = math.nan if name == BASELINE else std_error(outcomes, name)
        exact = name in (BASELINE, PERTURBED)
        found.append(
            [
                name,
                str(len(runs)),
                f"{statistics.mean(run.val_loss for run in runs):.4f}",
                "-" if math.isnan(percent) else f"{percent:+.3f}%",
                "-" if exact or math.isnan(error) else f"{error:.3f}%",
                "-" if name == BASELINE else mean_percent(changes(outcomes, name)),
                "-" if math.isnan(paired) else f"{paired:.3f}%",
                "-" if name == BASELINE else mean_percent(training_changes(outcomes, name)),
                norm_tenths(runs),
                _mean([run.tokens_per_s for run in runs], 0),
                _mean([run.peak_gib for run in runs], 1),
            ]
        )
    return found


def gradient_errors(outcomes: Outcomes) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of errors of gradients (AGoQ's table 13); no rows without any.

    Normalized L2 errors, then mean absolute errors, means over the runs that measured them.
    """
    details = [run.details or {} for run in full_precision(outcomes)]
    found = [d["gradient_errors"] for d in details if "gradient_errors" in d]
    measured = [each["rows"] for each in found if "rows" in each]
    failed = [["failed", each["failed"]] for each in found if "failed" in each]
    if not measured:
        return ["gradient errors", ""], failed
    keys = sorted({key for row in measured[0] for key in row if key != "code"}, key=_error_order)
    lines = []
    for same_code in zip(*measured, strict=True):
        cells = [[row[key] for row in same_code if key in row] for key in keys]
        texts = [f"{statistics.mean(values):.2g}" if values else "-" for values in cells]
        lines.append([same_code[0]["code"], *texts])
    return ["code", *keys], lines


def _error_order(key: str) -> tuple[bool, int]:
    kind, _, how = key.rpartition(", ")
    order = ("norm", "linear weight", "activation", "attention q", "attention k", "attention v")
    return how == "MAE", order.index(kind)


def summary(outcomes: Outcomes) -> str:
    """Lay out the outcomes for a terminal; full precision as a whole in the last line."""
    lines = table(rows(outcomes), HEADER)
    header, errors = gradient_errors(outcomes)
    if errors:
        lines = f"{table(errors, header)}\n{lines}"
    losses = [outcome.val_loss for outcome in full_precision(outcomes)]
    if len(losses) < 2:
        return lines
    mean, deviation = statistics.mean(losses), statistics.stdev(losses)
    return f"{lines}\nbf16: {mean:.4f}, one run deviates by {100 * deviation / mean:.3f}%"
