"""The generated pages show what the reports hold."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def page(load_benchmark: Any) -> ModuleType:
    return load_benchmark("performance_page")


@pytest.fixture(scope="module")
def performance(load_benchmark: Any) -> ModuleType:
    return load_benchmark("page_performance")


@pytest.fixture(scope="module")
def parts(load_benchmark: Any) -> ModuleType:
    return load_benchmark("page_parts")


def run(page: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["performance_page.py", *map(str, arguments)])
    return int(page.main())


def write_step_time(
    folder: Path, label: str, commit: str = "abc", **variants: dict[str, float | None]
) -> None:
    setup = {"link_gbit_per_s": 9.8}
    results = {"setup": setup, "variants": variants}
    report = {"environment": {"commit": commit}, "results": results}
    (folder / f"step_time_{label}.json").write_text(json.dumps(report))


def test_the_pages_are_up_to_date(page: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(page, monkeypatch, "--check") == 0, "run python benchmarks/performance_page.py"


def test_check_fails_until_the_pages_are_written(
    page: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in page.PAGES:
        (tmp_path / name).write_text((ROOT / "docs" / name).read_text())
    (tmp_path / "results").mkdir()
    options = ("--docs", tmp_path, "--results", tmp_path / "results")
    assert run(page, monkeypatch, "--check", *options) == 1
    assert run(page, monkeypatch, *options) == 0
    assert run(page, monkeypatch, "--check", *options) == 0
    for name, sections in page.PAGES.items():
        assert (tmp_path / name).read_text().count("Not measured yet") == len(sections)


def test_step_times_and_exposed_time(
    performance: ModuleType, parts: ModuleType, tmp_path: Path
) -> None:
    plain = {"step_ms": 600.0, "step_ms_min": 590.0, "step_ms_max": 640.0}
    fast = {"step_ms": 200.0, "step_ms_min": 190.0, "step_ms_max": 210.0}
    profiled = {"compute_ms": 150.0, "exposed_ms": 50.0}
    write_step_time(tmp_path, "unlimited", fsdp2=plain | {"compute_ms": 160.0, "exposed_ms": 440.0})
    not_profiled = {"compute_ms": None, "exposed_ms": None}
    write_step_time(tmp_path, "10gbit", fsdp2=plain | not_profiled, quantized=fast | profiled)
    folder = parts.Folder(tmp_path, tmp_path / "page.md")
    times = performance.step_time(folder)
    assert "| 2x2, 10 Gb/s | 9.8 | 600 (590 to 640) | 200, **3.00x** (190 to 210) |" in times
    assert "2x2, 25 Gb/s: not measured yet" in times
    waiting = performance.exposed(folder)
    assert "| 2x2, unlimited | 440 (73%) | - |" in waiting
    assert "| 2x2, 10 Gb/s | ~440 (73%) | 50 (25%) |" in waiting


def test_sessions_have_tables_of_their_own(
    performance: ModuleType, parts: ModuleType, tmp_path: Path
) -> None:
    def timed(ms: float) -> dict[str, float | None]:
        return {"step_ms": ms, "step_ms_min": ms, "step_ms_max": ms}

    write_step_time(tmp_path, "nvlink", commit="new", fsdp2=timed(600.0))
    write_step_time(tmp_path, "nvlink_stochastic", commit="old", fsdp2=timed(800.0))
    write_step_time(tmp_path, "nvlink_compile", commit="old", fsdp2=timed(700.0))
    folder = parts.Folder(tmp_path, tmp_path / "page.md")
    present, earlier = performance.step_time(folder).split("An earlier session")
    assert "600 (600 to 600)" in present
    assert "800 (800 to 800)" in earlier
    # Compiled steps stand beside those of their own session.
    assert "| 800 (800 to 800) | 700 (700 to 700) |" in performance.compiled(folder)


def test_losses_are_compared_by_seed(parts: ModuleType) -> None:
    def runs(*losses: float, curve: tuple[float, ...] = (3.0, 2.0)) -> list[dict[str, Any]]:
        steps = [(50 * (index + 1), loss) for index, loss in enumerate(curve)]
        return [
            {"seed": seed, "val_loss": loss, "train_s": 1.0, "curve": steps}
            for seed, loss in enumerate(losses)
        ]

    variants = {
        "qWD": runs(2.02, 4.08, curve=(6.0, 9.0, 2.1, 2.2)),
        "full precision": runs(2.0, 4.0, curve=(3.0, 3.0, 2.0, 2.0)),
    }
    variants["qW"] = runs(2.1, curve=())
    rows = parts.loss_rows(parts.to_outcomes({"variants": variants}, ["full precision"]))
    # changes of 1% and 2%: mean 1.5%, standard error 0.5%; one seed has none
    # in training 5 and 10% over the second half
    assert rows[0][0] == "full precision"
    assert rows[0][3] == "-"
    assert rows[1] == ["qWD", "2", "3.0500", "+1.500%", "0.500%", "+7.500%", "+10.000%"]
    assert rows[2] == ["qW", "1", "2.1000", "+5.000%", "-", "-", "-"]


def test_a_page_with_other_markers_is_refused(
    page: ModuleType, performance: ModuleType, parts: ModuleType, tmp_path: Path
) -> None:
    folder = parts.Folder(tmp_path, tmp_path / "page.md")
    with pytest.raises(ValueError, match="the page marks"):
        page.fill("<!-- begin: other -->\n<!-- end: other -->\n", folder, performance.SECTIONS)


def test_sources_say_where_ranks_share_a_gpu(parts: ModuleType) -> None:
    environment = {"commit": "abc", "date": "2026-11-21T00:00:00", "versions": {"torch": "2.11.0"}}
    environment |= {"gpus": [{"name": "NVIDIA H200"}]}
    alone = parts.sources([{"name": "x", "environment": environment | {"ranks_per_gpu": 1}}])
    assert "(abc, 2026-11-21, NVIDIA H200, torch 2.11.0)" in alone
    shared = parts.sources([{"name": "x", "environment": environment | {"ranks_per_gpu": 2}}])
    assert "NVIDIA H200 shared by 2 ranks, torch" in shared


def test_steps_of_the_trainer(performance: ModuleType, parts: ModuleType, tmp_path: Path) -> None:
    folder = parts.Folder(tmp_path, tmp_path / "page.md")
    assert "Not measured yet" in performance.lightning_step(folder)
    for name, trainer_ms in (("10gbit", 190.4), ("10gbit_with_broadcast", 209.0)):
        times = {"quantized": {"loop_ms": 187.6, "trainer_ms": trainer_ms}}
        report = {"results": {"variants": times}}
        (tmp_path / f"lightning_step_{name}.json").write_text(json.dumps(report))
    shown = performance.lightning_step(folder)
    assert "| 10gbit | quantized | 188 | 190 |" in shown
    assert "| 10gbit with broadcast | quantized | 188 | 209 |" in shown
    assert shown.count("lightning_step_10gbit") == 4  # each report is named and linked


def test_update_error(performance: ModuleType, parts: ModuleType, tmp_path: Path) -> None:
    folder = parts.Folder(tmp_path, tmp_path / "page.md")
    assert "Not measured yet" in performance.update_error(folder)
    row = {"error": 0.2, "projection": 0.98, "noise": 0.19, "second_moment": 1.03}
    setup = {"layers": 4, "hidden": 384, "steps": 50, "warmup": 120}
    finer = {"error": 0.0076, "projection": 0.9992, "noise": 0.0075, "second_moment": 0.9998}
    results = {"setup": setup, "nodes": 2, "schemes": {"nearest": row}, "weights": {"qWD": finer}}
    report = {"results": results}
    (tmp_path / "update_error.json").write_text(json.dumps(report))
    shown = performance.update_error(folder)
    assert "2 nodes, 50 steps from step 120 on:" in shown
    assert "| nearest | 20.0% | 19.0% | -2.0% | +3.0% |" in shown
    assert "| qWD | 0.76% | 0.75% | -0.08% | -0.02% |" in shown


def test_small_kernels_stand_beside_empty_launches(
    performance: ModuleType, parts: ModuleType, tmp_path: Path
) -> None:
    cases = [
        {"op": op, "size_mb": size, "time_us": time_us, "share_of_copy": share}
        for op, size, time_us, share in (
            ("encode", 1.0, 2.54, 0.12),
            ("decode", 1.0, 3.36, 0.2),
            ("encode", 64.0, 20.0, 0.9),
            ("odd", 256.0, 1.0, 0.8),
        )
    ]
    results = {"copy_gb_per_s": 4246.6, "cases": cases}
    results |= {"empty_launch_us": 0.74, "smallest_kernel_us": 1.17}
    (tmp_path / "kernels_h200.json").write_text(json.dumps({"results": results}))
    shown = performance.kernels(parts.Folder(tmp_path, tmp_path / "page.md"))
    assert "| encode | 12% | 90% | - |" in shown
    assert "1 MB takes 2.5 to 3.4 us, an empty launch 0.7 us, a kernel that reads" in shown
    assert "cache line 1.2 us." in shown


def test_noise_stands_beside_its_cost(
    performance: ModuleType, parts: ModuleType, tmp_path: Path
) -> None:
    folder = parts.Folder(tmp_path, tmp_path / "page.md")
    assert "Not measured yet" in performance.noise_cost(folder)
    update: dict[str, Any] = {"schemes": {}, "weights": {}}
    for index, (of, scheme) in enumerate(performance.NOISY.values()):
        update[of][scheme] = {"noise": 0.5 / (index + 1)}
    (tmp_path / "update_error.json").write_text(json.dumps({"results": update}))
    run = {"seed": 0, "train_s": 1.0}
    variants = {
        "full precision": [run | {"val_loss": 2.0, "curve": [(50, 3.0)]}],
        "qWD": [run | {"val_loss": 2.1, "curve": [(50, 3.3)]}],
    }
    results = {"train_tokens": 301_400_000, "variants": variants}
    (tmp_path / "ablation_gpt_125m_2x1.json").write_text(json.dumps({"results": results}))
    shown = performance.noise_cost(folder).splitlines()
    assert "| loss after 301M tokens (training) |" in shown[0]
    assert shown[2] == "| qW | 50.0% | 25.00% | - (-) |"
    assert shown[3] == "| qWD | 25.0% | 6.25% | +5.000% (+10.000%) |"


def test_sensitivity(performance: ModuleType, parts: ModuleType, tmp_path: Path) -> None:
    folder = parts.Folder(tmp_path, tmp_path / "page.md")
    assert "Not measured yet" in performance.sensitivity(folder)
    run = {"seed": 0, "train_s": 1.0}
    variants = {
        "2 bits": [run | {"val_loss": 2.1, "curve": [(50, 3.3)]}],
        "full precision": [run | {"val_loss": 2.0, "curve": [(50, 3.0)]}],
    }
    setup = {"layers": 4, "hidden": 128, "steps": 400, "batch": 16, "seq": 128}
    results = {"setup": setup, "nodes": 2, "variants": variants}
    (tmp_path / "sensitivity.json").write_text(json.dumps({"results": results}))
    shown = performance.sensitivity(folder)
    assert "400 steps, 1.64M tokens" in shown
    assert "| full precision | 1 | 2.0000 | - | - | - | - |" in shown
    assert "| 2 bits | 1 | 2.1000 | +5.000% | - | +10.000% | +10.000% |" in shown
