"""The benchmarks of gradient accumulation and of the 8-bit all-reduce run and report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _run(*command: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_error_study_compares_schemes(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    script = str(ROOT / "benchmarks" / "gradient_buffer.py")
    schemes = "fp8-tensor,int8-g128,int8-g32-half-steps"
    options = ("--data", "gaussian", "--numel", "4096", "--schemes", schemes)
    _run(script, *options, "--json", str(report))
    results = json.loads(report.read_text())["results"]
    assert all(n < 1.135 for n in results["nbytes_per_parameter"].values())
    errors = results["errors"]["gaussian"]
    at_16 = [errors[name]["stored"][2] for name in schemes.split(",")]
    assert 0.05 < at_16[0] < 0.10
    assert at_16[0] > 3 * at_16[1] > 3 * at_16[2]
    assert at_16[2] < 0.0125


def test_all_reduce_is_checked_and_timed(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    script = str(ROOT / "benchmarks" / "all_reduce.py")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    options = ("--cpu", "--sizes", "64K,100K", "--seconds", "0.05", "--json", str(report))
    assert "0.0625 MiB" in _run(*launcher, script, *options)
    results = json.loads(report.read_text())["results"]
    assert [row["nbytes"] for row in results["rows"]] == [64 << 10, 100 << 10]
    assert all(row["ms"][name] > 0 for row in results["rows"] for name in row["ms"])
    assert all(0 < row["relative_error"] < 0.015 for row in results["rows"])
    assert 8 < results["bits_per_element"] < 8.2


def test_update_error_ranks_the_schemes(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    script = str(ROOT / "benchmarks" / "update_error.py")
    sizes = ("--layers", "1", "--hidden", "32", "--heads", "2", "--seq", "32", "--batch", "2")
    options = ("--cpu", "--warmup", "2", "--steps", "20", "--json", str(report))
    _run(script, *sizes, *options, "--cache", str(tmp_path / "cache"))
    results = json.loads(report.read_text())["results"]
    schemes = results["schemes"]
    noise = {name: row["noise"] for name, row in schemes.items()}
    assert noise["nearest, error feedback"] < 0.85 * noise["nearest"] < 0.7 * noise["stochastic"]
    assert noise["nearest, 6 bits"] < 0.03
    assert noise["nearest"] < 0.6 * noise["nearest, 3 bits"] < 0.4 * noise["nearest, 2 bits"]
    assert all(0.8 < row["projection"] < 1.01 for row in schemes.values())
    of_weights = {name: row["noise"] for name, row in results["weights"].items()}
    assert 0 < of_weights["bf16"] < of_weights["qWD"] < 0.2 * of_weights["qW"]
    assert of_weights["qWD"] < 2 * of_weights["bf16"], "differences reach the replica"
