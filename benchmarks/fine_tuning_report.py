"""What ``fine_tuning.py`` found, as rows of a table: differences to bf16 of the same seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from common import table

Run = dict[str, Any]

BASELINE = "bf16"
LORA = "LoRA, "
HEADER = ("row", "seeds", "loss", "+ nats", "+ %", "right, %", "+ points")
HEADER += ("coded, + nats", "coded, + points", "bits", "s")


def by_row(runs: Sequence[Run]) -> dict[str, dict[int, Run]]:
    """Return the runs that ended well, by row and seed."""
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        if "error" not in run:
            found.setdefault(run["row"], {})[run["seed"]] = run
    return found


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return the rows below :data:`HEADER`, differences with their standard errors.

    Losses are those of text, in nats, and right are the answers to tasks, in percent; "coded" is
    measured with what layers pass each other coded. Rows without a run of bf16 of the same seed
    are left out.
    """
    found = by_row(runs)
    lines = []
    for name, own in found.items():
        exact = found.get(LORA + BASELINE if name.startswith(LORA) else BASELINE, {})
        pairs = [(own[seed], exact[seed]) for seed in sorted(own) if seed in exact]
        if not pairs:
            continue
        lines.append([name, str(len(pairs)), *_cells(pairs, own is exact)])
    return lines


def _cells(pairs: Sequence[tuple[Run, Run]], baseline: bool) -> list[str]:
    first = pairs[0][0]

    def changed(of: Callable[[Run], float], how: str, digits: int) -> str:
        if baseline or how not in first:
            return "-"
        return _mean([of(own[how]) - of(exact["alone"]) for own, exact in pairs], digits)

    percent = [100 * (_loss(a["alone"]) / _loss(b["alone"]) - 1) for a, b in pairs]
    return [
        f"{statistics.mean(_loss(own['alone']) for own, _ in pairs):.4f}",
        changed(_loss, "alone", 4),
        "-" if baseline else _mean(percent, 2),
        f"{statistics.mean(_right(own['alone']) for own, _ in pairs):.1f}",
        changed(_right, "alone", 1),
        changed(_loss, "with_codes", 4),
        changed(_right, "with_codes", 1),
        f"{statistics.mean(own['bits'] for own, _ in pairs):.2f}" if "bits" in first else "-",
        f"{statistics.mean(own['seconds'] for own, _ in pairs):.1f}",
    ]


def _loss(measured: dict[str, Any]) -> float:
    return float(measured["text_loss"])


def _right(measured: dict[str, Any]) -> float:
    return float(measured["task"]["accuracy"])


def _mean(values: Sequence[float], digits: int) -> str:
    shown = f"{statistics.mean(values):+.{digits}f}"
    if len(values) < 2:
        return shown
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{shown} ± {error:.{digits}f}"


def summary(runs: Sequence[Run]) -> str:
    """Lay out the comparison for a terminal, and name what failed."""
    failed = [f"failed: {run['row']}:{run['seed']}" for run in runs if "error" in run]
    return "\n".join([table(rows(runs), HEADER), *failed])
