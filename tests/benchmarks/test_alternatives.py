"""Alternatives to ``quantized_fsdp`` are measured, and their losses compared at equal time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Load = Callable[[str], ModuleType]
Run = Callable[..., str]

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TEXT = ("--cpu", "--text", str(FOLDER))


def test_alternatives_are_measured(run: Run, tmp_path: Path) -> None:
    reports = [str(tmp_path / f"{part}.json") for part in "abc"]
    rows = "tiny:quantized,tiny:local-8,tiny:ddp-powersgd-8,loss:ddp-powersgd-8,loss:local-8"
    short = ("--tiny", "--steps", "1", "--loss-steps", "8", "--points", "2")
    shown = run("alternatives.py", *TEXT, *short, "--rows", rows, "--json", reports[0])
    assert "ddp-powersgd-8" in shown
    run("alternatives.py", *TEXT, *short, "--rows", "tiny:ddp,loss:ddp", "--json", reports[1])
    merged = run("alternatives.py", "--merge", *reports[:2], "--json", reports[2])
    again = run("alternatives.py", "--merge", reports[2], "--json", reports[2])
    assert again == merged
    results = json.loads(Path(reports[2]).read_text())["results"]
    assert [row["method"] for row in results["rows"]][-1] == "ddp"
    assert set(results["losses"]) == {"ddp-powersgd-8", "local-8", "ddp"}
    assert "s, all steps" in merged
    assert "local-8" in run("table.py", reports[2])


def test_losses_are_read_at_equal_time(load: Load) -> None:
    report = load("alternatives_report")

    def row(method: str, *step_ms: float | None) -> dict[str, Any]:
        cells = {
            rate: {"step_ms": ms, "arithmetic_ms": 500.0}
            for rate, ms in zip(("none", "1gbit"), step_ms, strict=True)
        }
        return {"size": "125m", "method": method, "cells": cells}

    def run(method: str, *losses: float, **more: Any) -> dict[str, Any]:
        points = [(10 * (index + 1), loss) for index, loss in enumerate(losses)]
        return {"method": method, "points": points, "start": 0, "first": None} | more

    results = {
        "setup": {"rates": ["none", "1gbit"], "parameters": {"125m": 1}, "losses": {"steps": 30}},
        "rows": [row("ddp", 100, 1000), row("thin", 200, 300), row("slow", 100, None)],
        "losses": {
            "ddp": run("ddp", 5.0, 4.0, 3.0),
            "thin@10": run("thin", 5.0, 4.2, 3.4, start=10, first="ddp"),
            "slow": run("slow", 5.0, 4.0, 3.0),
            "unknown": run("unknown", 5.0, 4.0, 3.0),
        },
    }
    curves = report.timed(results, "1gbit")
    assert [t for t, _ in curves["ddp"]] == [10, 20, 30]
    assert [t for t, _ in curves["thin@10"]] == [10, 13, 16]  # ten steps of another
    assert [t for t, _ in curves["slow"]] == [5, 10, 15]  # by arithmetic
    assert "unknown" not in curves
    assert report.seconds_to(curves["thin@10"], 3.8) == pytest.approx(14.5)
    assert report.seconds_to(curves["thin@10"], 3.0) != report.seconds_to(curves["thin@10"], 3.0)
    assert report.arithmetic_ms(125e6, 50, "1gbit") == pytest.approx(1050)
    other = results | {"setup": results["setup"] | {"rates": ["none"]}}
    with pytest.raises(ValueError, match="only reports of equal runs"):
        report.joined([results, other])
