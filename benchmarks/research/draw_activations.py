"""Draw time against saved memory of a decoder layer, a panel per shape, from `activations.py`.

    python benchmarks/research/draw_activations.py activations.json --picture activations.png

Several reports of the same shapes are joined; a variant's row in a later one replaces earlier ones.
Prints which points no other point beats in both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
OURS = ("agoq", "coat", "fp8-4bit")
COLORS = {"ours": "#d43d51", "float8": "#f6bd16", "bf16": "#5b8ff9"}


def read(paths: Sequence[Path]) -> dict[str, list[Row]]:
    """Return the measured rows of some reports by shape."""
    found: dict[tuple[str, str], Row] = {}
    for path in paths:
        for row in json.loads(path.read_text())["results"]["rows"]:
            if "ms" in row:
                found[row["case"], row["variant"]] = row
    cases: dict[str, list[Row]] = {}
    for (case, _), row in found.items():
        cases.setdefault(case, []).append(row)
    return cases


def kind(variant: str) -> str:
    """Return ours, float8 or bf16."""
    if variant.split(",")[0] in OURS:
        return "ours"
    return "float8" if variant.startswith("torchao") else "bf16"


def undominated(rows: Sequence[Row]) -> list[Row]:
    """Return the rows for which no other is at least as good in both and better in one."""

    def beats(a: Row, b: Row) -> bool:
        at_least = a["ms"] <= b["ms"] and a["saved_units"] <= b["saved_units"]
        return at_least and (a["ms"] < b["ms"] or a["saved_units"] < b["saved_units"])

    kept = [row for row in rows if not any(beats(other, row) for other in rows)]
    return sorted(kept, key=lambda row: row["saved_units"])


def draw(cases: dict[str, list[Row]], path: Path) -> None:
    """Draw the picture; the line joins what nothing beats.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 4.6 * len(cases)), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(cases), 1, squeeze=False)[:, 0]
    for axes, (case, rows) in zip(panels, cases.items(), strict=True):
        # what is far slower than the rest, such as offloading, would squeeze all others together
        limit = 2.6 * min(r["ms"] for r in rows)
        near = sorted((r for r in rows if r["ms"] <= limit), key=lambda r: r["ms"])
        far = [r for r in rows if r["ms"] > limit]
        front = undominated(near)
        axes.plot([r["saved_units"] for r in front], [r["ms"] for r in front], "-", color="#c5ccd6")
        for number, row in enumerate(near, 1):
            point = (row["saved_units"], row["ms"])
            label = f"{number}  {row['variant']}"
            axes.scatter(*point, color=COLORS[kind(row["variant"])], s=30, zorder=2, label=label)
            axes.annotate(str(number), point, xytext=(4, 3), textcoords="offset points", fontsize=8)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
        note = "".join(f"; not shown: {r['variant']}, {r['ms']:.0f} ms" for r in far)
        axes.set_title(case + note, fontsize=9, loc="left")
        axes.set_xlabel("saved for backward, in inputs of the layer (U)")
        axes.set_ylabel("forward + backward, ms")
        axes.set_xlim(left=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white")


def main() -> None:
    """Read, print, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", type=Path, nargs="+", help="JSON files of activations.py")
    parser.add_argument("--picture", type=Path, help="image to write")
    args = parser.parse_args()
    cases = read(args.reports)
    for case, rows in cases.items():
        print(f"{case}: nothing is both faster and smaller than")
        for row in undominated(rows):
            print(f"  {row['variant']}: {row['ms']:.2f} ms, {row['saved_units']:.2f} U")
    if args.picture:
        draw(cases, args.picture)


if __name__ == "__main__":
    main()
