"""Print reports of `benchmarks/results` as Markdown, the way docs/ shows them.

    python benchmarks/table.py benchmarks/results/optimizer_h200.json
    python benchmarks/table.py benchmarks/results/step_time_*gbit.json       # one table of several
    python benchmarks/table.py benchmarks/results/kernels_h200.json --columns op,size_mb,time_us

A report of rows becomes a table of their numbers, `--columns` chooses among them. Reports of step
times become one table, a network per row; losses are compared with full precision of the same seed.
The last line names the commit, the date and the machine of every report.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from common import table

Report = dict[str, Any]
Row = dict[str, Any]
Run = dict[str, Any]
Runs = dict[str, list[Run]]  # by variant

# Path to the rows of a report, and the name of the key where they are a mapping.
ROWS = {
    "activation_kernels": ("cases", ""),
    "activations": ("rows", ""),
    "all_reduce": ("rows", ""),
    "changing_nodes": ("runs", "run"),
    "code_errors": ("rows", ""),
    "gradient_buffer": ("errors.gpt", "code"),
    "gradient_memory": ("windows", "gradients"),
    "host_time": ("rows", ""),
    "kernels": ("cases", ""),
    "lightning_step": ("variants", "variant"),
    "long_context": ("rows", ""),
    "memory": ("models", "model"),
    "offload_timeline": ("rows", ""),
    "optimizer": ("cases", ""),
    "plan_accuracy": ("shown", ""),
    "pretrained": ("rows", ""),
    "pretrained_boundaries": ("rows", ""),
    "slow_network": ("rows", ""),
    "split_link": ("rows", ""),
    "step_time": ("variants", "variant"),
}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, the first column to the left and numbers to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def source(report: Report, path: Path) -> str:
    """Name a report with its commits, dates and machines."""
    made = []
    for environment in report.get("environments") or [report["environment"]]:
        gpus = environment.get("gpus") or [{"name": "CPU"}]
        shared = environment.get("ranks_per_gpu", 1)
        device = gpus[0]["name"] + f" shared by {shared} ranks" * (shared > 1)
        torch = environment["versions"]["torch"]
        made.append(f"{environment['commit']}, {environment['date'][:10]}, {device}, torch {torch}")
    return f"{path.name}: {'; '.join(dict.fromkeys(made))}"


# --- rows -----------------------------------------------------------------------------------------


def cell(value: object) -> str:
    """Show a value with three or four digits."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def flat(row: Any, prefix: str = "") -> Row:
    """Join the keys of nested mappings by dots; lists get numbers, bytes become MB."""
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
    """Name measurements by model and variant, with GiB instead of bytes."""
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


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error; NaN where there are too few values."""
    if not values:
        return math.nan, math.nan
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return statistics.mean(values), error


# --- losses from scratch (loss_study.py) ----------------------------------------------------------

BASELINE, PERTURBED = "full precision", "full precision perturbed"
TAIL_PERCENT = 0.3  # a run that ends so far above full precision has left its path
LOSS_HEADER = (
    *("variant", "runs", "seeds", "validation loss", "against full precision", "std error"),
    *("median", "worst", f"beyond {TAIL_PERCENT}%", "training, second half", "its std error"),
)


def baseline(runs: Runs) -> str:
    """Return what a study compares with: full precision, or else its first variant."""
    return BASELINE if BASELINE in runs else next(iter(runs))


def counterparts(runs: Runs, name: str) -> dict[int, list[Run]]:
    """Return the runs of full precision that a variant is compared with, by seed.

    Including those from perturbed weights: a single run has luck of its own, which all differences
    to it would share. Full precision itself, of both kinds, is compared with the others.
    """
    exact = [*runs[baseline(runs)]]
    if name not in (baseline(runs), PERTURBED):
        exact += runs.get(PERTURBED, [])
    by_seed: dict[int, list[Run]] = {}
    for run in exact:
        by_seed.setdefault(run["seed"], []).append(run)
    return by_seed


def changes(
    runs: Runs, name: str, loss_of: Callable[[Run], float | None] = lambda run: run["val_loss"]
) -> dict[int, list[float]]:
    """Return the changes of a loss in percent, by seed, against the mean of full precision."""
    found: dict[int, list[float]] = {}
    exact = counterparts(runs, name)
    for run in runs[name]:
        others = [loss for other in exact.get(run["seed"], []) if (loss := loss_of(other))]
        own = loss_of(run)
        if others and own:
            change = 100 * (own / statistics.mean(others) - 1)
            found.setdefault(run["seed"], []).append(change)
    return found


def over_seeds(by_seed: dict[int, list[float]]) -> tuple[float, float]:
    """Return the mean and its standard error over seeds.

    Runs of one seed share weights, data and what they are compared with: their mean counts once.
    """
    return mean_and_error([statistics.mean(values) for values in by_seed.values()])


def _second_half(run: Run) -> float | None:
    curve = run.get("curve") or ()
    return statistics.mean(loss for _, loss in curve[len(curve) // 2 :]) if curve else None


def _shown(by_seed: dict[int, list[float]]) -> list[str]:
    mean, error = over_seeds(by_seed)
    return [f"{mean:+.3f}%", "-" if math.isnan(error) else f"{error:.3f}%"]


def loss_rows(runs: Runs) -> list[list[str]]:
    """Return the rows below ``LOSS_HEADER``."""
    found = []
    for name, own in runs.items():
        loss = f"{statistics.mean(run['val_loss'] for run in own):.4f}"
        by_seed = changes(runs, name)
        row = [name, str(len(own)), str(len({run["seed"] for run in own})), loss]
        values = [value for seed in by_seed.values() for value in seed]
        if name == baseline(runs) or not values:
            found.append(row + ["-"] * (len(LOSS_HEADER) - len(row)))
            continue
        beyond = sum(value > TAIL_PERCENT for value in values)
        row += [*_shown(by_seed), f"{statistics.median(values):+.3f}%"]
        row += [f"{max(values):+.3f}%", f"{beyond} of {len(values)}"]
        found.append([*row, *_shown(changes(runs, name, _second_half))])
    return found


def loss_details(runs: Runs) -> str:
    """Lay out the losses of other weights, the curves of training losses, and every pair."""
    compared = [name for name in runs if name != baseline(runs) and changes(runs, name)]
    seeds = sorted({run["seed"] for own in runs.values() for run in own})
    steps = [step for step, _ in runs[compared[0]][0]["curve"]] if compared else []
    weights, windows, pairs = [], [], []
    for name in compared:
        for label, key in (("ranks' weights", ""), ("master weights", "loss_of_main_weights")):
            by_seed = changes(
                runs, name, lambda run, key=key: run["details"].get(key) if key else run["val_loss"]
            )
            if by_seed:
                each = [statistics.mean(values) for values in by_seed.values()]
                spread = f"{statistics.stdev(each):.3f}%" if len(each) > 1 else "-"
                weights.append([name, label, *_shown(by_seed), spread, f"{max(each):+.3f}%"])
        line = [name]
        for step in steps:
            point = changes(runs, name, lambda run, step=step: dict(run["curve"]).get(step))
            mean, error = over_seeds(point)
            line.append(f"{mean:+.2f}" + ("" if math.isnan(error) else f"+-{error:.2f}"))
        windows.append(line)
        ends = changes(runs, name)
        pairs.append(
            [name, *(" ".join(f"{v:+.3f}" for v in ends.get(s, [])) or "-" for s in seeds)]
        )
    parts = {
        "Validation loss by weights: mean, standard error, deviation of one run": (
            table(weights, ("variant", "weights", "mean", "std error", "deviation", "worst"))
        ),
        "Training loss against full precision, up to each step: mean +- standard error": (
            table(windows, ("variant", *map(str, steps)))
        ),
        "Validation loss against full precision, each run": (
            table(pairs, ("variant", *(f"seed {seed}" for seed in seeds)))
        ),
    }
    return "".join(f"\n\n{title}\n{text}" for title, text in parts.items())


# --- fine-tuning ----------------------------------------------------------------------------------

BF16, LORA = "bf16", "LoRA, "
FINE_TUNING_HEADER = ("row", "seeds", "loss", "+ nats", "+ %", "right, %", "+ points")
FINE_TUNING_HEADER += ("coded, + nats", "coded, + points", "bits", "s")


def fine_tuning_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return the rows below ``FINE_TUNING_HEADER``: differences to bf16 of the same seed.

    Losses are of text, in nats, and "right" is the percentage of answers to tasks; "coded" is
    measured with quantizers between layers. Rows without a bf16 run of the same seed are left out.
    """
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        if "error" not in run:
            found.setdefault(run["row"], {})[run["seed"]] = run
    lines = []
    for name, own in found.items():
        exact = found.get(LORA + BF16 if name.startswith(LORA) else BF16, {})
        pairs = [(own[seed], exact[seed]) for seed in sorted(own) if seed in exact]
        if pairs:
            lines.append([name, str(len(pairs)), *_fine_tuning_cells(pairs, own is exact)])
    return lines


def _fine_tuning_cells(pairs: Sequence[tuple[Run, Run]], baseline: bool) -> list[str]:
    first = pairs[0][0]

    def mean(values: Sequence[float], digits: int) -> str:
        found, error = mean_and_error(values)
        return f"{found:+.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")

    def changed(of: Callable[[Run], float], how: str, digits: int) -> str:
        if baseline or how not in first:
            return "-"
        return mean([of(own[how]) - of(exact["alone"]) for own, exact in pairs], digits)

    def loss(measured: Run) -> float:
        return float(measured["text_loss"])

    def right(measured: Run) -> float:
        return float(measured["task"]["accuracy"])

    percent = [100 * (loss(a["alone"]) / loss(b["alone"]) - 1) for a, b in pairs]
    return [
        f"{statistics.mean(loss(own['alone']) for own, _ in pairs):.4f}",
        changed(loss, "alone", 4),
        "-" if baseline else mean(percent, 2),
        f"{statistics.mean(right(own['alone']) for own, _ in pairs):.1f}",
        changed(right, "alone", 1),
        changed(loss, "with_codes", 4),
        changed(right, "with_codes", 1),
        f"{statistics.mean(own['bits'] for own, _ in pairs):.2f}" if "bits" in first else "-",
        f"{statistics.mean(own['seconds'] for own, _ in pairs):.1f}",
    ]


LOSSES: dict[str, Callable[[Row], tuple[Sequence[str], list[list[str]]]]] = {
    "loss_study": lambda results: (LOSS_HEADER, loss_rows(results["variants"])),
    "fine_tuning": lambda results: (FINE_TUNING_HEADER, fine_tuning_rows(results["runs"])),
}


# --- command line ---------------------------------------------------------------------------------


def show(paths: Sequence[Path], columns: Sequence[str] = ()) -> str:
    """Return the tables of some reports and their sources.

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
            markdown(*LOSSES[kind](report["results"]))
            if kind in LOSSES
            else table_of_rows(report, columns)
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
