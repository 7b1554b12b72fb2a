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
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
STEP_TIME = ROOT / "benchmarks" / "step_time.py"
LIGHTNING_STEP = ROOT / "benchmarks" / "lightning_step.py"
NODES = ROOT / "benchmarks" / "nodes.sh"
FAST = ["--tiny", "--cpu", "--steps", "2", "--warmup", "2"]


def _run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
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
        *("--node-size", "1", "--json", str(report), "--trace", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    profile = json.loads(gzip.decompress((tmp_path / "quantized_trainer.json.gz").read_bytes()))
    marked = [e for e in profile["traceEvents"] if e["name"] == "step" and e["ph"] == "X"]
    assert len(marked) == 2
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


def _optimizer_errors(tmp_path: Path, *options: str) -> dict[str, Any]:
    report = tmp_path / "report.json"
    script = ROOT / "benchmarks" / "optimizer_error.py"
    done = _run(sys.executable, str(script), *options, "--out", str(report))
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(report.read_text())["results"]
    for kind in ("library", "coat"):
        results[kind] = {(r["first"], r["second"]): r for r in results[kind]}
    return results


def test_optimizer_error_compares_formats(tmp_path: Path) -> None:
    results = _optimizer_errors(tmp_path, "--steps", "5")
    assert results["moments"]["checkpoint"] is None
    library, paper = results["library"], results["coat"]
    expanded = library["expanded_fp8", "expanded_fp8"]
    assert library["float32", "float32"]["mse"] == 0
    assert expanded["lost"] == 0
    assert 0 < expanded["mse"] < library["fp8", "fp8"]["mse"]
    # the library's codes are COAT's but for rounded constants
    assert expanded["mse"] == pytest.approx(paper["E4M3+Expand", "E4M3+Expand"]["mse"], rel=0.05)
    assert library["fp8", "fp8"]["lost"] == pytest.approx(paper["E4M3", "E4M3"]["lost"], rel=0.05)
    for name in ("E4M3", "E5M2"):
        assert paper[f"{name}+Expand", "E5M2"]["mse"] < paper[name, "E5M2"]["mse"]
        assert paper[name, f"{name}+Expand"]["lost"] == 0


def test_optimizer_error_of_a_checkpoint(tmp_path: Path) -> None:
    """Groups that the expansion could trip over: constant ones, zeros and a single element."""
    m, v = torch.randn(64, 129), torch.rand(64, 129).square()
    m[0], v[0], m[1], v[1, :100] = 0.5, 0.25, 0.0, 0.0
    state = {
        "state": {0: {"exp_avg": m, "exp_avg_sq": v}, 1: {"exp_avg": v[0], "exp_avg_sq": v[0]}}
    }
    torch.save(state, tmp_path / "moments.pt")
    results = _optimizer_errors(tmp_path, "--checkpoint", str(tmp_path / "moments.pt"))
    assert results["moments"] == {"checkpoint": "moments.pt", "matrices": 1, "numel": 64 * 129}
    assert all(r["mse"] == r["mse"] for kind in ("library", "coat") for r in results[kind].values())


def test_nodes_explains_itself() -> None:
    shown = _run("bash", str(NODES), "-h")
    assert shown.returncode == 0
    assert "usage: nodes.sh" in shown.stdout
    assert _run("bash", str(NODES)).returncode == 2
    assert "-n and -g" in _run("bash", str(NODES), "-n", "two", "x.py").stderr


def _with_gpus(folder: Path, count: int) -> dict[str, str]:
    """Return an environment whose `nvidia-smi` lists ``count`` GPUs."""
    tool = folder / "nvidia-smi"
    lines = "".join(f"echo 'GPU {index}: Some GPU (UUID: {index})'\n" for index in range(count))
    tool.write_text(f"#!/bin/sh\n{lines}")
    tool.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize(("gpus", "expected"), [(4, ["0,1 1", "2,3 1"]), (2, ["0,1 2", "0,1 2"])])
def test_nodes_share_gpus_where_there_are_too_few(
    tmp_path: Path, gpus: int, expected: list[str]
) -> None:
    if not _can_make_nodes():
        pytest.skip("needs root, ip and tc")
    python = tmp_path / "python"  # takes the place of torchrun on every node
    shown = '"$NCCL_HOSTID" "$CUDA_VISIBLE_DEVICES" "${LQ_RANKS_PER_GPU:-1}"'
    python.write_text(f"#!/bin/sh\necho NODE {shown}\n")
    python.chmod(0o755)
    nodes = ("bash", str(NODES), "-p", str(python), "-n", "2")
    done = _run(*nodes, "-g", "2", "x.py", **_with_gpus(tmp_path, gpus))
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split("-", 1)[1] for line in done.stdout.splitlines())
    assert lines == [f"{node} {line}" for node, line in enumerate(expected)]
    refused = _run(*nodes, "-g", "5", "x.py", **_with_gpus(tmp_path, gpus))
    assert refused.returncode == 2
    assert "-g 5: the ranks of one node need a GPU each" in refused.stderr


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
