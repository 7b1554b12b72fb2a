"""Every benchmark runs at a tiny size, so that a change of the library does not break it unseen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
TINY = ("--tiny", "--cpu")
SHORT = ("--steps", "2", "--warmup", "1")
Run = Callable[..., str]
Load = Callable[[str], ModuleType]


@pytest.mark.parametrize(
    ("script", "options", "shown"),
    [
        ("step_time.py", (*TINY, *SHORT, "--variants", "fsdp2,quantized,ddp-8-bit"), "quantized"),
        ("lightning_step.py", (*TINY, *SHORT, "--variants", "quantized"), "Trainer ms/step"),
        (
            "lightning_step.py",
            (*TINY, *SHORT, "--llama", "--accumulate", "2", "--variants", "A+O+G"),
            "A+O+G",
        ),
        ("all_reduce.py", ("--cpu", "--sizes", "64K", "--seconds", "0.01"), "0.0625 MiB"),
        ("code_errors.py", ("--tiny", "--steps", "2"), "expanded_fp8"),
        ("host_time.py", ("--layers", "2", "--repeats", "2"), "exchanges us/unit"),
    ],
    ids=lambda value: value if str(value).endswith(".py") else "",
)
def test_script_runs(run: Run, script: str, options: tuple[str, ...], shown: str) -> None:
    assert shown in run(script, *options)


@pytest.mark.parametrize(
    "name", ["GPT-125M", pytest.param("GPT-1.3B, 2 nodes, 10gbit", marks=pytest.mark.slow)]
)
def test_plans_are_compared_with_runs(run: Run, tmp_path: Path, name: str) -> None:
    """Measured and planned by processes of their own; a second call has nothing left to do."""
    report = tmp_path / "report.json"
    options = ("plan_accuracy.py", "--tiny", "--steps", "2", "--only", name, "--json", str(report))
    run(*options, "--only-measure")
    shown = run(*options)
    assert f"{name}: step, ms" in shown
    row = json.loads(report.read_text())["results"]["rows"][name]
    lines = {line["name"]: line["difference"] for line in row["lines"]}
    assert lines["weights"] == pytest.approx(0, abs=0.02)
    assert lines["optimizer states"] == pytest.approx(0, abs=0.02)
    assert lines.get("sent between nodes", 0) == 0
    assert "planned" not in run(*options)


def test_script_that_needs_a_gpu_imports(load: Load) -> None:
    assert callable(load("optimizer").main)


def test_kernels_run_on_the_cpu_too(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case, at a small size; an operator that differs from itself is seen."""
    kernels = load("kernels")
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    cases = [case for family in kernels.FAMILIES for case in family()]
    assert len({case.name for case in cases}) == len(cases) > 100
    for case in cases:
        rows, columns = case.checked
        small = replace(case, checked=(min(rows, 64), min(columns, 2048) // 128 * 128))
        assert not kernels.differs(small), case.name
    made = [case.buffers(2, 256)["x"] for case in cases[:2]]
    wrong = replace(cases[0], run=lambda buffers: (torch.randn(2, 256),), checked=(2, 256))
    assert made[0].shape == made[1].shape == (2, 256)
    assert "bytes" in kernels.differs(wrong)


def test_prepared_text_reaches_the_runs(load: Load, run: Run, tmp_path: Path) -> None:
    """From Python files to tokens, and from those to losses."""
    for folder in (tmp_path / "some", tmp_path / "more"):  # of equal files one is read
        folder.mkdir()
        (folder / "__init__.py").write_text("import os\n")
        for n in range(9):
            lines = (f"def {folder.name}_{n}_{i}():\n    return {n}\n" for i in range(99))
            (folder / f"file{n}.py").write_text("".join(lines))
    (tmp_path / "some" / "table.py").write_text("1234567890, " * 2000)
    corpus = load("corpus")
    files = corpus.choose_files([tmp_path / "some", tmp_path / "more"], 10**6)
    assert len(files) == 19, "no table, no copy"
    out, report = tmp_path / "tokens", tmp_path / "report.json"
    numbers = corpus.prepare(files, 300, 10**5, out, 0.08)
    assert np.load(out / "val.npy").size == numbers["num_tokens"]["val"] > 0
    run(
        *("loss_study.py", "--cpu", "--preset", "gpt_smoke", "--seeds", "0", "--starts", "1"),
        *("--tokens", str(out), "--variants", "full precision;both", "--json", str(report)),
    )
    results = json.loads(report.read_text())["results"]
    assert results["vocab"] == 304
    assert results["variants"]["full precision"][0]["val_loss"] < np.log(results["vocab"])


# --- profiles -------------------------------------------------------------------------------------

COMPUTE, OUTER, REDUCE, COPIES = 7, 15, 17, 18
GATHER, SCATTER = "ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_SendRecv"
# Name, stream, start, end and time of launch in microseconds. The second step lasts from 1000 to
# 2000 and computes for 600 of it.
KERNELS = [
    ("gemm", COMPUTE, 100, 1000, 10),
    (GATHER, OUTER, 960, 1100, 86),  # in flight when the second step starts
    ("gemm", COMPUTE, 1120, 1420, 110),
    ("direct_copy", COPIES, 1300, 1310, 111),
    ("flash", COMPUTE, 1420, 1670, 150),
    (SCATTER, REDUCE, 1500, 1900, 151),
    ("multi_tensor_apply", COMPUTE, 1950, 2000, 190),
]


def _event(category: str, name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "args": args}


def _trace(kernels: list[tuple[str, int, int, int, int]]) -> dict[str, Any]:
    events = [_event("user_annotation", "step", start, start + 90) for start in (0, 100)]
    for number, (name, stream, start, end, launched) in enumerate(kernels):
        events.append(_event("cuda_runtime", "launch", launched, launched + 1, correlation=number))
        events.append(_event("kernel", name, start, end, correlation=number, stream=stream))
    return {"traceEvents": events}


def test_profiles_show_compute_and_waiting_time(load: Load) -> None:
    read_step = load("step_time").read_step
    assert read_step(_trace(KERNELS)) == pytest.approx((0.6, 0.4))
    with pytest.raises(ValueError, match="marks 0 `step` ranges"):
        read_step({"traceEvents": []})
    with pytest.raises(ValueError, match="no GPU work"):
        read_step(_trace([]))


# --- emulated nodes -------------------------------------------------------------------------------


def _shell(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def _can_make_nodes() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return False
    name = f"lqtest{os.getpid() % 10000}"
    made = _shell("ip", "netns", "add", name).returncode == 0
    return made and _shell("ip", "netns", "del", name).returncode == 0


@pytest.mark.parametrize("script", ["nodes.sh", "run_all.sh"])
def test_shell_scripts_explain_themselves(script: str) -> None:
    shown = _shell("bash", str(BENCHMARKS / script), "-h")
    assert shown.returncode == 0
    assert f"usage: {script}" in shown.stdout


@pytest.mark.slow
def test_nodes_limit_the_rate_and_clean_up(tmp_path: Path) -> None:
    if not _can_make_nodes():
        pytest.skip("needs root, ip and tc")
    report = tmp_path / "report.json"
    done = _shell(
        *("bash", str(BENCHMARKS / "nodes.sh"), "-p", sys.executable),
        *("-r", "20mbit", "-n", "2", "-g", "1"),
        *(str(BENCHMARKS / "step_time.py"), *TINY, *SHORT, "--hidden", "256", "--node-size", "1"),
        *("--variants", "fsdp2,quantized", "--json", str(report)),
    )
    assert done.returncode == 0, done.stderr
    variants = json.loads(report.read_text())["results"]["variants"]
    plain = variants["fsdp2"]
    # 20 Mb/s are 2.5e6 B/s; the bucket may let 4 MB through at once.
    assert plain["step_ms"] / 1e3 >= (plain["interface_bytes"] - 4e6) / 2.5e6
    assert variants["quantized"]["interface_bytes"] < plain["interface_bytes"] / 3
    assert "lq" not in _shell("ip", "netns", "list").stdout
