"""Reports become tables, and tables of docs/ hold what the reports say."""

from __future__ import annotations

import json
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


def test_losses_are_compared_by_seed(load: Callable[[str], ModuleType]) -> None:
    report = load("ablation_report")

    def runs(*losses: float, curve: tuple[float, ...]) -> list[dict[str, Any]]:
        steps = [(50 * (index + 1), loss) for index, loss in enumerate(curve)]
        return [
            {"seed": seed, "val_loss": loss, "train_s": 1.0, "curve": steps}
            for seed, loss in enumerate(losses)
        ]

    variants = {
        "qWD": runs(2.02, 4.08, curve=(6.0, 9.0, 2.1, 2.2)),
        "full precision": runs(2.0, 4.0, curve=(3.0, 3.0, 2.0, 2.0)),
    }
    rows = report.loss_rows(report.to_outcomes({"variants": variants}, ["full precision"]))
    # changes of 1% and 2%: mean 1.5%, standard error 0.5%; in training 5 and 10% over the second
    # half
    assert rows[0][0] == "full precision"
    assert rows[0][3] == "-"
    assert rows[1] == ["qWD", "2", "3.0500", "+1.500%", "0.500%", "+7.500%", "+10.000%"]


def test_picture_is_drawn_from_the_reports(
    load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    load("picture").draw(tmp_path / "new.svg")
    drawn, kept = ((tmp_path / "new.svg"), ROOT / "docs/images/step_time.svg")
    texts = [[line for line in p.read_text().splitlines() if " ms" in line] for p in (drawn, kept)]
    assert texts[0] == texts[1], "run python benchmarks/picture.py docs/images/step_time.svg"


def test_joined_reports_keep_all_runs_of_a_seed_once(
    load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """A run repeated on another machine counts too; the mean is what others are compared with."""
    report = load("ablation_report")

    def write(name: str, **losses: float) -> Path:
        runs = {v: [{"seed": 0, "val_loss": x, "train_s": x}] for v, x in losses.items()}
        path = tmp_path / name
        path.write_text(json.dumps({"results": {"variants": runs}}))
        return path

    base = report.BASELINE
    one, two = write("one", **{base: 1.0}), write("two", **{base: 3.0, "coded": 2.2})
    outcomes = report.to_outcomes(report.merged([one, two, one]), [base])
    assert [o.val_loss for o in outcomes[base]] == [1.0, 3.0]
    assert report.changes(outcomes, "coded") == pytest.approx([10.0])
