"""Print reports of `benchmarks/results` as Markdown, the way docs/ shows them.

    python benchmarks/table.py benchmarks/results/optimizer_h200.json
    python benchmarks/table.py benchmarks/results/step_time_*gbit.json       # one table of several
    python benchmarks/table.py benchmarks/results/kernels_h200.json --columns op,size_mb,time_us

A report of rows becomes a table of their numbers, `--columns` chooses among them. Reports of step
times become one table, a network per row, and those of ablations are compared with full precision.
The last line names the commit, the date and the machine of every report.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import activation_report
import alternatives_report
import fine_tuning_report
import loss_report
from ablation_report import BASELINE, LOSS_HEADER, loss_rows, to_outcomes

Report = dict[str, Any]
Row = dict[str, Any]

# Where the rows of a report are, and what an entry of a mapping is called.
ROWS = {
    "activation_kernels": ("cases", ""),
    "activations": ("rows", ""),
    "all_reduce": ("rows", ""),
    "gradient_buffer": ("errors.gpt", "code"),
    "gradient_memory": ("windows", "gradients"),
    "host_time": ("rows", ""),
    "kernels": ("cases", ""),
    "lightning_step": ("variants", "variant"),
    "long_context": ("rows", ""),
    "memory": ("models", "model"),
    "optimizer": ("cases", ""),
    "optimizer_drift": ("cases", ""),
    "pretrained": ("rows", ""),
    "pretrained_boundaries": ("rows", ""),
    "slow_network": ("rows", ""),
    "split_gradients": ("rows", ""),
    "split_link": ("rows", ""),
    "split_memory": ("rows", ""),
    "split_sizes": ("rows", ""),
    "step_time": ("variants", "variant"),
    "tah_kernels": ("ops", ""),
}
LOSSES = (
    "ablation",
    "activation_ablation",
    "alternatives",
    "fine_tuning",
    "loss_study",
)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, the first column to the left and numbers to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def source(report: Report, path: Path) -> str:
    """Name a report, and what made it."""
    environments = report.get("environments") or [report["environment"]]
    made = []
    for environment in environments:
        gpus = environment.get("gpus") or [{"name": "CPU"}]
        shared = environment.get("ranks_per_gpu", 1)
        device = gpus[0]["name"] + f" shared by {shared} ranks" * (shared > 1)
        torch = environment["versions"]["torch"]
        made.append(f"{environment['commit']}, {environment['date'][:10]}, {device}, torch {torch}")
    return f"{path.name}: {'; '.join(dict.fromkeys(made))}"


def cell(value: object) -> str:
    """Show a value with three or four digits."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def flat(row: Any, prefix: str = "") -> Row:
    """Join the keys of nested mappings by dots; numbers of a list are counted, bytes become MB."""
    if isinstance(row, list):
        row = dict(enumerate(row))
    if not isinstance(row, dict):
        if prefix.endswith("_bytes"):
            return {f"{prefix.removesuffix('_bytes')}_mb": row and row / 1e6}
        return {prefix: row}
    found: Row = {}
    for key, value in row.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def rows_of(report: Report) -> list[Row]:
    """Return the rows of a report, nested values flattened."""
    path, name = ROWS[report["benchmark"]]
    found = report["results"]
    for key in path.split("."):
        found = found[key]
    if report["benchmark"] == "memory":
        found = _variants_of_models(found)
    if isinstance(found, dict):
        found = [{name: key} | value for key, value in found.items()]
    return [flat(row) for row in found]


def _variants_of_models(models: Row) -> Row:
    """Name what was measured by model and variant, with GiB instead of bytes."""
    return {
        f"{model}, {label}": {
            f"{source}_gib": {when: n and n / 2**30 for when, n in result[source].items()}
            for source in ("measured", "predicted")
        }
        | {key: value for key, value in result.items() if key not in ("measured", "predicted")}
        for model, of in models.items()
        for label, result in of["variants"].items()
    }


def table_of_rows(report: Report, columns: Sequence[str]) -> str:
    """Lay out the rows of one report."""
    rows = rows_of(report)
    known = list(dict.fromkeys(key for row in rows for key in row))
    unknown = [column for column in columns if column not in known]
    if unknown:
        raise ValueError(f"no columns {unknown}: choose among {', '.join(known)}")
    chosen = columns or known
    return markdown(chosen, [[cell(row.get(key)) for key in chosen] for row in rows])


def table_of_losses(report: Report) -> str:
    """Lay out the losses of an ablation."""
    if report["benchmark"] == "activation_ablation":
        outcomes = to_outcomes(report["results"], [BASELINE])
        tables = [markdown(activation_report.HEADER, activation_report.rows(outcomes))]
        header, errors = activation_report.gradient_errors(outcomes)
        return "\n".join([*tables, *([markdown(header, errors)] if errors else [])])
    if report["benchmark"] == "alternatives":
        return "\n".join(markdown(*each) for each in alternatives_report.tables(report["results"]))
    if report["benchmark"] == "loss_study":
        outcomes = to_outcomes(report["results"], [BASELINE])
        return markdown(loss_report.HEADER, loss_report.rows(outcomes))
    if report["benchmark"] == "fine_tuning":
        rows = fine_tuning_report.rows(report["results"]["runs"])
        return markdown(fine_tuning_report.HEADER, rows)
    return markdown(LOSS_HEADER, loss_rows(to_outcomes(report["results"], [BASELINE])))


def table_of_networks(reports: Sequence[Report], column: str) -> str:
    """Lay out one number of several reports of step times, a network per row."""
    variants = list(dict.fromkeys(v for r in reports for v in r["results"]["variants"]))
    rows = []
    for report in reports:
        setup, measured = report["results"]["setup"], report["results"]["variants"]
        first = measured[variants[0]][column]
        nodes = setup["world_size"] // setup["node_size"]
        row = [f"{nodes}x{setup['node_size']}, {setup['emulated_rate']}"]
        row.append(cell(setup["link_gbit_per_s"]))
        for variant in variants:
            value = measured.get(variant, {}).get(column)
            faster = f", {first / value:.2f}x" if value and first and variant != variants[0] else ""
            row.append(cell(value) + faster)
        rows.append(row)
    return markdown(["nodes, rate", "link, Gb/s", *variants], rows)


def show(paths: Sequence[Path], columns: Sequence[str] = ()) -> str:
    """Return the tables of some reports, and what made them.

    Args:
        paths: JSON files of one kind of benchmark, or of several.
        columns: Columns to show; one for step times, ``step_ms`` by default.

    Raises:
        ValueError: A report has no such column, or is of no known benchmark.
    """
    reports = [json.loads(path.read_text()) for path in paths]
    kinds = [report["benchmark"] for report in reports]
    unknown = sorted(set(kinds) - set(ROWS) - set(LOSSES))
    if unknown:
        raise ValueError(f"unknown benchmarks {unknown}: known are {', '.join([*ROWS, *LOSSES])}")
    if len(reports) > 1 and set(kinds) == {"step_time"}:
        parts = [table_of_networks(reports, columns[0] if columns else "step_ms")]
    else:
        parts = [
            table_of_losses(report) if kind in LOSSES else table_of_rows(report, columns)
            for kind, report in zip(kinds, reports, strict=True)
        ]
    named = [source(report, path) for report, path in zip(reports, paths, strict=True)]
    return "\n".join([*parts, *named])


def main() -> None:
    """Print the reports that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", type=Path, nargs="+", help="JSON files")
    parser.add_argument("--columns", default="", help="comma-separated; all by default")
    args = parser.parse_args()
    try:
        print(show(args.reports, [name for name in args.columns.split(",") if name]))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
