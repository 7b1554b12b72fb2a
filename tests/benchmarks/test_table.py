"""Reports become tables, and tables of docs/ hold what the reports say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_report_has_a_table(table: ModuleType, path: Path) -> None:
    header, _, first, *_ = table.show([path]).splitlines()
    assert header.count("|") == first.count("|") > 3
    assert path.name in table.show([path]).splitlines()[-1]


def _report(path: Path, **step_ms: float) -> Path:
    setup = {"world_size": 4, "node_size": 2, "emulated_rate": path.stem, "link_gbit_per_s": 9.5}
    variants = {name: {"step_ms": ms, "peak": None} for name, ms in step_ms.items()}
    made: dict[str, Any] = {"commit": "abc", "date": "2026-01-02T03", "versions": {"torch": "2.11"}}
    results = {"setup": setup, "variants": variants}
    report = {"benchmark": "step_time", "environment": made, "results": results}
    path.write_text(json.dumps(report))
    return path


def test_networks_are_rows_and_the_first_variant_is_what_others_beat(
    table: ModuleType, tmp_path: Path
) -> None:
    slow = _report(tmp_path / "10gbit.json", plain=600.0, fast=200.0)
    quick = _report(tmp_path / "none.json", plain=1234.5)
    lines = table.show([slow, quick]).splitlines()
    assert lines[0] == "| nodes, rate | link, Gb/s | plain | fast |"
    assert lines[2] == "| 2x2, 10gbit | 9.5 | 600 | 200, 3.00x |"
    assert lines[3] == "| 2x2, none | 9.5 | 1234 | - |"
    assert lines[-2] == "10gbit.json: abc, 2026-01-02, CPU, torch 2.11"


def test_columns_are_chosen_by_name(table: ModuleType, tmp_path: Path) -> None:
    path = _report(tmp_path / "10gbit.json", plain=600.0)
    assert table.show([path], ["variant", "peak"]).splitlines()[2] == "| plain | - |"
    with pytest.raises(ValueError, match=r"no columns \['speed'\]: choose among variant, step_ms"):
        table.show([path], ["speed"])


def test_runs_of_one_seed_count_once(table: ModuleType) -> None:
    def runs(*values: float) -> list[dict[str, Any]]:
        return [{"seed": seed, "val_loss": 1 + v / 100} for seed, v in enumerate(values)]

    found = {
        table.BASELINE: runs(-0.1, 0.1, -0.1),
        table.PERTURBED: runs(0.1, -0.1, 0.1),
        "both": runs(0.0, 0.1, 0.2) + runs(0.0, 0.3, 0.4),
    }
    mean, error = table.over_seeds(table.changes(found, "both"))
    assert (mean, error) == pytest.approx((0.5 / 3, 0.1 * (7 / 3) ** 0.5 / 3**0.5))
    row = dict(zip(table.LOSS_HEADER, table.loss_rows(found)[-1], strict=True))
    assert (row["runs"], row["seeds"], row["beyond 0.3%"]) == ("6", "3", "1 of 6")
    assert (row["median"], row["worst"]) == ("+0.150%", "+0.400%")
    without = {"muon": runs(0.0, 0.0), "muon8": runs(0.1, 0.3)}  # compared with the first
    rows = [dict(zip(table.LOSS_HEADER, row, strict=True)) for row in table.loss_rows(without)]
    assert [row["against full precision"] for row in rows] == ["-", "+0.200%"]


@pytest.mark.parametrize("name", ["step_time", "activation_memory", "offload_timeline"])
def test_pictures_are_drawn_from_the_reports(
    load: Callable[[str], ModuleType], tmp_path: Path, name: str
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"{name}.svg"
    load("picture").draw(path)
    kept = ROOT / "docs" / "images" / path.name
    texts = [re.findall(r">([^<]+)</text>", p.read_text()) for p in (path, kept)]
    assert texts[0] == texts[1] != [], f"run python benchmarks/picture.py docs/images/{path.name}"
