"""What the sections of all generated pages share: reports, Markdown, and where numbers are from."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ablation_report import (
    BASELINE,
    Outcomes,
    changes,
    mean_percent,
    std_error,
    to_outcomes,
    training_changes,
)


class Folder:
    """The reports and pictures that a page is made of.

    Args:
        results: Folder of the JSON reports.
        page: The page, next to its folder ``images``.
    """

    def __init__(self, results: Path, page: Path) -> None:
        self._results = results
        self._page = page

    def report(self, name: str) -> dict[str, Any] | None:
        """Return a report without its ``.json``, or None if there is none."""
        path = self._results / f"{name}.json"
        if not path.exists():
            return None
        report: dict[str, Any] = json.loads(path.read_text())
        return report | {"name": name}

    def matching(self, pattern: str) -> list[dict[str, Any]]:
        """Return all reports whose name matches, sorted by it."""
        found = [self.report(path.stem) for path in sorted(self._results.glob(f"{pattern}.json"))]
        return [report for report in found if report is not None]

    def picture(self, name: str, text: str) -> str:
        """Return the Markdown that shows a picture; empty if there is none."""
        path = self._page.parent / "images" / f"{name}.png"
        return f"![{text}](images/{name}.png)\n" if path.exists() else ""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, the first column to the left and numbers to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def missing(command: str) -> str:
    """Return what stands in place of a table."""
    return f"Not measured yet: `{command}` makes this table.\n"


def sources(reports: Iterable[dict[str, Any]]) -> str:
    """Return a line that names reports, and what made them."""
    parts = []
    for report in reports:
        name = report["name"]
        environments = report.get("environments") or [report.get("environment", {})]
        made = []
        for environment in environments:
            gpus = environment.get("gpus") or [{"name": "CPU"}]
            torch = environment.get("versions", {}).get("torch")
            shared = environment.get("ranks_per_gpu", 1)
            made.append(
                f"{environment.get('commit')}, {str(environment.get('date'))[:10]}, "
                f"{gpus[0]['name']}{f' shared by {shared} ranks' * (shared > 1)}, torch {torch}"
            )
        link = f"[{name}.json](../benchmarks/results/{name}.json)"
        parts.append(f"{link} ({'; '.join(dict.fromkeys(made))})")
    return f"\nFrom {', '.join(parts)}.\n"


def number(value: float | None, digits: int = 0, unit: str = "") -> str:
    """Format a number that may not have been measured."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def ablations(folder: Folder, shown: Callable[[str], bool], command: str) -> str:
    """Validation loss against full precision with the same seed, of the variants to be shown.

    Args:
        folder: With the reports; those that have none of these variants are left out.
        shown: Says of a variant's name whether it is to be shown.
        command: What to run if there is no such report.
    """
    parts = []
    for report in folder.matching("ablation_*"):
        results = report["results"]
        chosen = {name for name in results["variants"] if name != BASELINE and shown(name)}
        if not chosen:
            continue
        outcomes = to_outcomes(results, [BASELINE])
        preset = results["preset"]
        steps = results.get("stop_after") or preset["steps"]
        tokens = steps * preset["batch"] * preset["seq"] * results["world_size"]
        length = f"{preset['steps']} steps"
        if steps < preset["steps"]:
            length = f"the first {steps} of {length}"
        parts.append(
            f"{preset['layers']} layers, hidden {preset['hidden']}, {length}, "
            f"{tokens / 1e6:.3g}M tokens, {results['world_size']} ranks in nodes of "
            f"{results['node_size']}:\n\n"
            + loss_table("variant", outcomes, [n for n in outcomes if n in chosen or n == BASELINE])
            + sources([report])
            + "\n"
            + folder.picture(report["name"], "Loss of each variant against full precision")
        )
    return "\n".join(part.strip("\n") + "\n" for part in parts) or missing(command)


def loss_table(label: str, outcomes: Outcomes, shown: Iterable[str] | None = None) -> str:
    """Return the Markdown of :func:`loss_rows`; ``label`` stands above the variants."""
    header = [label, "seeds", "validation loss", "against full precision", "std error"]
    header += ["training, second half", "last quarter"]
    return markdown(header, loss_rows(outcomes, shown))


def loss_rows(outcomes: Outcomes, shown: Iterable[str] | None = None) -> list[list[str]]:
    """Return the rows of an ablation: seeds, loss, its change and error, the changes in training.

    The error of full precision is the deviation of one seed, that of the others the standard error
    of their mean difference to the same seeds.

    Args:
        outcomes: Of all variants that were run.
        shown: Variants that get a row; all by default.
    """
    rows = []
    for name in outcomes if shown is None else shown:
        runs = outcomes[name]
        loss = f"{statistics.mean(run.val_loss for run in runs):.4f}"
        change = training = late = "-"
        if name != BASELINE:
            change = mean_percent(changes(outcomes, name))
            training = mean_percent(training_changes(outcomes, name))
            late = mean_percent(training_changes(outcomes, name, last=0.25))
        error = std_error(outcomes, name)
        spread = "-" if math.isnan(error) else f"{error:.3f}%"
        rows.append([name, str(len(runs)), loss, change, spread, training, late])
    return rows
