"""Every benchmark runs at a tiny size, so that a change of the library does not break it unseen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
TINY = ("--tiny", "--cpu")
SHORT = ("--steps", "2", "--warmup", "1")
NEEDS_GPU = [
    "activation_kernels",
    "gradient_memory",
    "kernels",
    "optimizer",
    "tune_float8",
    "tune_kernels",
    "tune_norm",
]

Run = Callable[..., str]
Load = Callable[[str], ModuleType]


@pytest.mark.parametrize(
    ("script", "options", "shown"),
    [
        ("step_time.py", (*TINY, *SHORT, "--variants", "fsdp2,quantized,ddp-8-bit"), "quantized"),
        ("lightning_step.py", (*TINY, *SHORT, "--variants", "quantized"), "Trainer ms/step"),
        ("memory.py", TINY, "quantized, node"),
        ("all_reduce.py", ("--cpu", "--sizes", "64K", "--seconds", "0.01"), "0.0625 MiB"),
        (
            "activation_ablation.py",
            ("--cpu", "--no-compile", "--preset", "smoke", "--steps", "20")
            + ("--text", str(BENCHMARKS), "--runs", "full precision:0,agoq:0,uniform 4 bits:0")
            + ("--gradient-errors",),
            "fp8_e4m3",  # of the table of errors
        ),
        (
            "ablation.py",
            ("--cpu", "--preset", "smoke", "--steps", "50", "--node-size", "1")
            + ("--text", str(BENCHMARKS), "--runs", "full precision:0,SDP4Bit:0"),
            "SDP4Bit",
        ),
        (
            "gradient_buffer.py",
            ("--data", "gaussian", "--numel", "4096", "--schemes", "int8-g32-fp32-scales"),
            "int8-g32-fp32-scales",
        ),
        ("host_time.py", ("--layers", "2", "--repeats", "2"), "exchanges us/unit"),
    ],
    ids=lambda value: value if str(value).endswith(".py") else "",
)
def test_script_runs(run: Run, script: str, options: tuple[str, ...], shown: str) -> None:
    assert shown in run(script, *options)


@pytest.mark.parametrize("name", NEEDS_GPU)
def test_script_that_needs_a_gpu_imports(load: Load, name: str) -> None:
    assert callable(load(name).main)


def test_prepared_text_reaches_the_runs(load: Load, run: Run, tmp_path: Path) -> None:
    """From a tree like that of the kernel to tokens, and from those to losses."""
    pytest.importorskip("tokenizers")
    tree, out, report = tmp_path / "linux", tmp_path / "tokens", tmp_path / "report.json"
    for folder in ("Documentation", "kernel", "drivers/net"):
        (tree / folder).mkdir(parents=True)
        for number in range(6):
            code = "".join(
                f"int get_{n}(int a_{number}) {{ return {folder}; }}\n" for n in range(99)
            )
            (tree / folder / f"file{number}.c").write_text(code)
    (tree / "kernel" / "same.c").write_bytes((tree / "kernel" / "file0.c").read_bytes())
    (tree / "drivers" / "registers.h").write_text("#define REG 0x1\n" * 2000)
    text = load("research/kernel_text")
    files = text.select(tree, 10**6)
    assert len(files) == 18, "no table, no copy"
    for folder in (tmp_path / "some", tmp_path / "more"):  # of equal files one is read
        folder.mkdir()
        (folder / "__init__.py").write_text("import os\n")
        (folder / f"{folder.name}.py").write_text(f"{folder.name} = 1\n")
    python = text.python_files([tmp_path / "some", tmp_path / "more"], 10**6)
    assert sorted(f.content for f in python) == [b"import os\n", b"more = 1\n", b"some = 1\n"]
    numbers = text.build(files, vocab_size=300, sample_nbytes=10**5, out=out)
    assert np.load(out / "val.npy").size == numbers["num_tokens"]["val"] > 0
    run(
        *("ablation.py", "--cpu", "--preset", "smoke", "--steps", "50", "--node-size", "1"),
        *("--tokens", str(out), "--runs", "full precision:0", "--json", str(report)),
    )
    results = json.loads(report.read_text())["results"]
    assert results["vocab"] % 8 == 0
    assert results["variants"]["full precision"][0]["val_loss"] < np.log(results["vocab"])


def test_reports_of_equal_runs_are_joined(run: Run, tmp_path: Path) -> None:
    def report(name: str, seq: int, **variants: float) -> str:
        runs = {n: [{"seed": 0, "val_loss": v, "train_s": 1.0}] for n, v in variants.items()}
        results = {"preset": {"seq": seq}, "world_size": 2, "node_size": 1, "variants": runs}
        (tmp_path / name).write_text(json.dumps({"environment": {}, "results": results}))
        return str(tmp_path / name)

    exact = report("a.json", 128, **{"full precision": 2.0, "full precision perturbed": 2.2})
    coded = report("b.json", 128, qW=2.31)
    assert "+10.000%" in run("ablation.py", "--merge", exact, coded)  # of the mean of both
    with pytest.raises(ValueError, match="only reports of equal runs can be joined"):
        run("ablation.py", "--merge", exact, report("c.json", 256, qW=2.31))


def test_perturbed_weights_are_alike_on_all_ranks(load: Load) -> None:
    weights = []
    for _ in range(2):  # as two ranks with one seed
        torch.manual_seed(3)
        module = torch.nn.Linear(64, 64)
        load("ablation").perturb(module, 1e-3)
        weights.append(module.weight.detach())
    torch.testing.assert_close(*weights, rtol=0, atol=0)


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
