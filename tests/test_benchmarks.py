"""The step-time benchmark and the emulated nodes run and report what they measured."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STEP_TIME = ROOT / "benchmarks" / "step_time.py"
LIGHTNING_STEP = ROOT / "benchmarks" / "lightning_step.py"
NODES = ROOT / "benchmarks" / "nodes.sh"
FAST = ["--tiny", "--cpu", "--steps", "2", "--warmup", "2"]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def _can_make_nodes() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return False
    name = f"lqtest{os.getpid() % 10000}"
    made = _run("ip", "netns", "add", name).returncode == 0
    return made and _run("ip", "netns", "del", name).returncode == 0


def test_step_time_compares_the_variants(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    variants = "fsdp2,quantized,gradients-only"
    traces = tmp_path / "traces"
    done = _run(
        *launcher,
        *("--nproc-per-node", "2", str(STEP_TIME), *FAST),
        *("--variants", variants, "--json", str(report), "--trace", str(traces)),
    )
    assert done.returncode == 0, done.stderr
    profile = json.loads(gzip.decompress((traces / "quantized.json.gz").read_bytes()))
    marked = [e for e in profile["traceEvents"] if e["name"] == "step" and e["ph"] == "X"]
    assert len(marked) == 2
    assert profile["commit"]
    data = json.loads(report.read_text())["results"]
    assert data["setup"]["world_size"] == 2
    assert data["setup"]["backend"] == "gloo"
    results = data["variants"]
    assert list(results) == variants.split(",")
    assert all(r["step_ms"] > 0 for r in results.values())
    # Same start, same data: quantization may not change the first loss much, nor lose the bytes.
    assert math.isclose(
        results["quantized"]["first_loss"], results["fsdp2"]["first_loss"], rel_tol=1e-3
    )
    assert results["quantized"]["sent_bytes"] < results["gradients-only"]["sent_bytes"]
    assert results["gradients-only"]["sent_bytes"] < results["fsdp2"]["sent_bytes"]


def test_lightning_step_times_trainer_and_loop(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = _run(
        *(*launcher, "--nproc-per-node", "2", str(LIGHTNING_STEP), *FAST),
        *("--node-size", "1", "--json", str(report)),
    )
    assert done.returncode == 0, done.stderr
    variants = json.loads(report.read_text())["results"]["variants"]
    assert list(variants) == ["fsdp2", "quantized"]
    assert all(ms > 0 for times in variants.values() for ms in times.values())
    assert "Trainer ms/step" in done.stdout


def test_step_time_asks_for_a_file_per_rate() -> None:
    options = ("--rates", "none,10gbit", "--json", "report.json")
    done = _run(sys.executable, str(STEP_TIME), *FAST, *options)
    assert done.returncode == 2
    assert "put {rate} in" in done.stderr


def test_run_all_explains_itself() -> None:
    script = str(ROOT / "benchmarks" / "run_all.sh")
    assert "usage: run_all.sh" in _run("bash", script, "-h").stdout
    assert _run("bash", script, "everything").returncode == 2


def test_optimizer_error_compares_formats(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    script = ROOT / "benchmarks" / "optimizer_error.py"
    done = _run(sys.executable, str(script), "--steps", "5", "--out", str(report))
    assert done.returncode == 0, done.stderr
    results = {(r["first"], r["second"]): r for r in json.loads(report.read_text())["results"]}
    expanded = results["expanded_fp8", "expanded_fp8"]
    assert results["float32", "float32"]["mse"] == 0
    assert expanded["lost"] == 0
    assert 0 < expanded["mse"] < results["fp8", "fp8"]["mse"]


def test_nodes_explains_itself() -> None:
    shown = _run("bash", str(NODES), "-h")
    assert shown.returncode == 0
    assert "usage: nodes.sh" in shown.stdout
    assert _run("bash", str(NODES)).returncode == 2
    assert "-n and -g" in _run("bash", str(NODES), "-n", "two", "x.py").stderr


@pytest.mark.slow
def test_nodes_limit_the_rate_and_clean_up(tmp_path: Path) -> None:
    if not _can_make_nodes():
        pytest.skip("needs root, ip and tc")
    report = tmp_path / "report.json"
    done = _run(
        *("bash", str(NODES), "-p", sys.executable, "-r", "20mbit", "-n", "2", "-g", "1"),
        *(str(STEP_TIME), *FAST, "--hidden", "256", "--node-size", "1"),
        *("--variants", "fsdp2,quantized", "--json", str(report)),
    )
    assert done.returncode == 0, done.stderr
    plain = json.loads(report.read_text())["results"]["variants"]["fsdp2"]
    # 20 Mb/s are 2.5e6 B/s; the bucket may let 4 MB through at once.
    assert plain["step_ms"] / 1e3 >= (plain["interface_bytes"] - 4e6) / 2.5e6
    assert plain["interface_bytes"] >= plain["sent_inter_bytes"]
    assert "lq" not in _run("ip", "netns", "list").stdout
    assert "lqb" not in _run("ip", "link").stdout


@pytest.mark.slow
def test_one_launch_measures_several_rates(tmp_path: Path) -> None:
    if not _can_make_nodes():
        pytest.skip("needs root, ip and tc")
    done = _run(
        *("bash", str(NODES), "-p", sys.executable, "-n", "2", "-g", "1"),
        *(str(STEP_TIME), *FAST, "--hidden", "256", "--node-size", "1", "--rates", "none,50mbit"),
        *("--variants", "fsdp2", "--json", str(tmp_path / "step_time_{rate}.json")),
    )
    assert done.returncode == 0, done.stderr
    reports = {
        rate: json.loads((tmp_path / f"step_time_{rate}.json").read_text())["results"]
        for rate in ("unlimited", "50mbit")
    }
    links = {rate: report["setup"]["link_gbit_per_s"] for rate, report in reports.items()}
    assert links["50mbit"] == pytest.approx(0.05, rel=0.2)
    assert links["unlimited"] > 5 * links["50mbit"]
