"""Tables of ``alternatives.py``: joined reports, speeds, and losses at equal time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import network
from common import table

Results = dict[str, Any]
Points = list[tuple[float, float]]
Table = tuple[list[str], list[list[str]]]  # header and rows


def arithmetic_ms(sent_bytes: float, free_ms: float, rate: str | None) -> float:
    """Milliseconds of a step that sends so many bytes and hides none of that behind its work.

    Args:
        sent_bytes: Bytes that one interface sends.
        free_ms: Milliseconds of a step on an unlimited network.
        rate: See ``network.bits_per_s``; None for no limit.
    """
    return free_ms + 8e3 * sent_bytes / network.bits_per_s(rate or network.UNLIMITED)


def joined(every: Sequence[Results]) -> Results:
    """Join reports of equal runs; of a row that was repeated the last counts.

    Raises:
        ValueError: They are of different networks, worlds or runs.
    """
    setup: dict[str, Any] = {}
    rows: dict[tuple[str, str], Any] = {}
    losses: dict[str, Any] = {}
    for results in every:
        for key, value in results["setup"].items():
            if isinstance(value, dict) and key != "losses":
                setup[key] = setup.get(key, {}) | value
            elif setup.setdefault(key, value) != value:
                raise ValueError(
                    f"`{key}` is {value} in one report and {setup[key]} in another: only reports "
                    "of equal runs can be joined"
                )
        rows |= {(row["size"], row["method"]): row for row in results["rows"]}
        losses |= results["losses"]
    return {"setup": setup, "rows": list(rows.values()), "losses": losses}


def step_ms(cell: dict[str, Any]) -> float | None:
    """Milliseconds of a cell: measured, else arithmetic; None where neither is known."""
    found: float | None = cell["arithmetic_ms"] if cell["step_ms"] is None else cell["step_ms"]
    return found


def speeds(results: Results, size: str) -> Table:
    """Return the rows of one size, arithmetic in parentheses."""
    rates = results["setup"]["rates"]
    cells = []
    for row in results["rows"]:
        if row["size"] != size:
            continue
        line = [row["method"], _number(row["sent_bytes"], 1e6, ".2f")]
        line.append(_number(row["peak_memory_gib"], 1, ".1f"))
        for rate in rates:
            cell = row["cells"][rate]
            shown = _number(cell["step_ms"], 1, ".0f")
            predicted = _number(cell["arithmetic_ms"], 1, ".0f")
            line.append(f"~{predicted}" if shown == "-" else f"{shown} ({predicted})")
        cells.append(line)
    header = [size, "MB", "GiB", *(f"ms, {network.file_label(rate)}" for rate in rates)]
    return header, cells


def _number(value: float | None, unit: float, form: str) -> str:
    return "-" if value is None else format(value / unit, form)


# --- loss at equal time ---------------------------------------------------------------------------


def timed(results: Results, rate: str) -> dict[str, Points]:
    """Return seconds and validation losses of each method on a network, from the first validation.

    Methods of which the speed is not known are left out.
    """
    size = next(iter(sorted(results["setup"]["parameters"])), "")  # the smallest
    of = {row["method"]: row["cells"][rate] for row in results["rows"] if row["size"] == size}
    found = {}
    for name, run in results["losses"].items():
        own = step_ms(of[run["method"]]) if run["method"] in of else None
        first = step_ms(of[run["first"]]) if run["first"] in of else None
        start = run["start"]
        if own is None or (start and first is None):
            continue
        found[name] = [
            ((min(step, start) * (first or 0.0) + max(0, step - start) * own) / 1e3, loss)
            for step, loss in run["points"]
        ]
    return found


def seconds_to(points: Points, loss: float) -> float:
    """Seconds after which a loss is reached; NaN if it is not."""
    if points[0][1] <= loss:
        return points[0][0]
    for (t0, a), (t1, b) in itertools.pairwise(points):
        if b <= loss:
            return t0 + (t1 - t0) * (a - loss) / (a - b)
    return math.nan


def losses(results: Results, rate: str) -> Table:
    """Return when each method reaches the highest of all last losses on a network."""
    curves = timed(results, rate)
    if not curves:
        return [], []
    target = max(points[-1][1] for points in curves.values())
    cells = [
        [
            name,
            f"{seconds_to(points, target):.0f}",
            f"{points[-1][0]:.0f}",
            f"{points[-1][1]:.4f}",
        ]
        for name, points in curves.items()
    ]
    header = [f"loss, {network.file_label(rate)}", f"s to {target:.4f}", "s, all steps", "last"]
    return header, cells


def tables(results: Results) -> list[Table]:
    """Return speeds of every size, and losses on every network."""
    found = [speeds(results, size) for size in dict.fromkeys(r["size"] for r in results["rows"])]
    if results["losses"]:
        found += [losses(results, rate) for rate in results["setup"]["rates"]]
    return [each for each in found if each[1]]


def show(results: Results) -> str:
    """Lay out everything for a terminal."""
    note = "MB: sent by one host in a step; ms (arithmetic: bytes over rate, plus ms without limit)"
    return "\n\n".join([*(table(rows, header) for header, rows in tables(results)), note])
