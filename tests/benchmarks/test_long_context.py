"""The benchmark of long sequences counts tokens of whole steps, and what copies expose."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers")
pytest.importorskip("jsonargparse")


def test_rows_of_a_tiny_model(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = tmp_path / "report.json"
    for variant in ("checkpointing, offload", "save_on_cpu"):
        words = (variant, "--tiny", "--seq", "1024", "--warmup", "1", "--steps", "1")
        run("long_context.py", *words, "--json", str(report), "--", "--seed_everything=1")
    first, second = json.loads(report.read_text())["results"]["rows"]
    assert first["tokens_per_s"] * first["step_s"] == pytest.approx(2 * 1024)  # two micro-batches
    assert first["last_loss"] == pytest.approx(6.25, abs=0.5)  # ln 512
    assert first["last_loss"] == pytest.approx(second["last_loss"], abs=1e-3)


def test_exposed_time_is_that_of_copies_beside_no_kernel(load: Callable[[str], ModuleType]) -> None:
    def event(cat: str, ts: float, dur: float, name: str = "Memcpy DtoH") -> dict[str, object]:
        return {"ph": "X", "cat": cat, "ts": ts, "dur": dur, "name": name}

    events = [event("kernel", 0, 10), event("kernel", 20, 10), event("gpu_memcpy", 5, 7)]
    events += [event("gpu_memcpy", 25, 9), event("gpu_memcpy", 50, 9, "Memcpy DtoD")]
    events += [event("gpu_memcpy", 26, 9), event("cpu_op", 0, 99)]
    assert load("long_context").exposed_us({"traceEvents": events}) == 2 + 5


def test_a_timeline_shows_when_each_lane_is_busy(
    load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    def event(cat: str, ts: float, dur: float, name: str = "") -> dict[str, object]:
        return {"ph": "X", "cat": cat, "ts": ts, "dur": dur, "name": name}

    events = [event("kernel", 2000, 1000), event("kernel", 3400, 600), event("kernel", 4501, 9)]
    events += [event("gpu_memcpy", 1000, 500, "Memcpy HtoD"), event("gpu_memcpy", 0, 1, "Memset")]
    load("long_context").write_timeline(report := tmp_path / "r.json", {"traceEvents": events})
    rows = json.loads(report.read_text())["results"]["rows"]
    assert [tuple(row.values()) for row in rows] == [
        ("kernels", 1.0, 3.0),
        ("kernels", 3.501, 3.51),
        ("from the host", 0.0, 0.5),
    ]
