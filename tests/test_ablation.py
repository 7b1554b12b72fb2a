"""The ablation trains every variant alike, keeps finished runs, and joins and draws reports."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
ABLATION = ROOT / "benchmarks" / "ablation.py"
KERNEL_TEXT = ROOT / "benchmarks" / "kernel_text.py"
WORDS = [
    f"{verb}_{noun}" for verb in ("get", "put", "map") for noun in ("page", "inode", "skb", "irq")
]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def _function(rng: random.Random) -> str:
    body = "".join(f"\t{rng.choice(WORDS)}({rng.choice('abc')});\n" for _ in range(8))
    return f"/* Takes one reference. */\nvoid {rng.choice(WORDS)}(int a)\n{{\n{body}}}\n\n"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out like kernel sources: 1.3 MB of code, a table, a copy and an odd file."""
    root = tmp_path_factory.mktemp("linux")
    rng = random.Random(0)
    for folder in ("Documentation", "kernel", "drivers/net"):
        (root / folder).mkdir(parents=True)
        for number in range(30):
            code = "".join(_function(rng) for _ in range(80))
            (root / folder / f"file{number}.c").write_text(code)
    registers = "".join(f"#define REG_{n} {n:#x}\n" for n in range(2000))
    (root / "drivers/net/registers.h").write_text(registers)
    shutil.copy(root / "kernel/file0.c", root / "kernel/same.c")
    (root / "kernel/picture.svg").write_text("<svg/>")
    return root


def _tokens(tree: Path, out: Path, *options: str) -> Path:
    command = (sys.executable, str(KERNEL_TEXT), str(tree), str(out), "--vocab-size", "300")
    done = _run(*command, *options)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def tokens(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tree became, packed and unpacked."""
    pytest.importorskip("tokenizers", reason="BPE needs tokenizers")
    archive = tmp_path_factory.mktemp("packed") / "tokens.tar.xz"
    out = _tokens(
        tree, tmp_path_factory.mktemp("tokens") / "kernel_tokens", "--archive", str(archive)
    )
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as packed:
        packed.extractall(unpacked, filter="data")
    shutil.rmtree(out)
    return unpacked / "kernel_tokens"


def test_text_leaves_out_tables_copies_and_part_of_the_drivers(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    select = importlib.import_module("kernel_text").select
    paths = {file.path for file in select(tree, 10**9)}
    assert len(paths) == 90
    assert "drivers/net/registers.h" not in paths
    assert len(paths & {"kernel/file0.c", "kernel/same.c"}) == 1
    assert "kernel/picture.svg" not in paths
    fewer = {file.path for file in select(tree, 10**6)}
    assert fewer < paths
    assert {path for path in paths if not path.startswith("drivers/")} < fewer
    with pytest.raises(ValueError, match="unpacked Linux source tree"):
        select(tree / "kernel", 10**6)


def test_text_is_reproducible(tree: Path, tokens: Path, tmp_path: Path) -> None:
    again = _tokens(tree, tmp_path / "again")
    numbers = json.loads((again / "corpus.json").read_text())
    assert numbers == json.loads((tokens / "corpus.json").read_text())
    for split in ("train", "val", "test"):
        stored = np.load(again / f"{split}.npy")
        assert stored.dtype == np.uint16
        assert len(stored) == numbers["num_tokens"][split]
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(
        str(tokens / "tokenizer.json")
    )
    text = tokenizer.decode(np.load(tokens / "val.npy").tolist())
    assert text.startswith("/* Takes one reference. */\nvoid ")


def _ablation(tokens: Path, report: Path, runs: str, *options: str) -> str:
    done = _run(
        *(sys.executable, str(ABLATION), "--cpu", "--ranks", "2", "--node-size", "1"),
        *("--preset", "smoke", "--tokens", str(tokens), "--json", str(report), "--runs", runs),
        *options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_runs_out_of_time_are_named_and_can_be_added(tokens: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    runs = "full precision:0,SDP4Bit:0"
    moments = tmp_path / "moments.pt"
    shown = _ablation(tokens, first, runs, "--time-budget", "0.001", "--moments", str(moments))
    saved = torch.load(moments, weights_only=True)["state"]
    assert sorted(saved) == ["down.weight", "out.weight", "qkv.weight", "up.weight"]
    assert saved["up.weight"]["exp_avg_sq"].shape == (64, 32)  # half of 128 rows
    assert (saved["up.weight"]["exp_avg_sq"] >= 0).all()
    assert 'no time for --runs "SDP4Bit:0"' in shown
    results = json.loads(first.read_text())["results"]
    assert list(results["variants"]) == ["full precision"]
    assert results["vocab"] == 304
    assert results["val_tokens"] == 64 * 32
    (exact,) = results["variants"]["full precision"]
    assert [step for step, _ in exact["curve"]] == [50]
    assert exact["val_loss"] < exact["curve"][0][1] < np.log(304)

    short = tmp_path / "short.json"
    shown = _ablation(
        tokens, short, "full precision:0,qW:0", "--steps", "100", "--stop-after", "50"
    )
    results = json.loads(short.read_text())["results"]
    assert results["train_tokens"] == 50 * 2 * 4 * 32
    (stopped,) = results["variants"]["full precision"]
    assert [step for step, _ in stopped["curve"]] == [50]
    assert stopped["curve"][0][1] != exact["curve"][0][1], "the schedule is that of 100 steps"
    (line,) = (line for line in shown.splitlines() if line.startswith("qW "))
    losses = [results["variants"][name][0]["curve"][0][1] for name in ("qW", "full precision")]
    assert f"{100 * (losses[0] / losses[1] - 1):+.3f}%" in line

    _ablation(tokens, second, "SDP4Bit:0,AdamW expanded_fp8:0,full precision perturbed:0")
    joined, figure = tmp_path / "joined.json", tmp_path / "figure.png"
    merge = ("--merge", str(first), str(second), "--json", str(joined), "--figure", str(figure))
    done = _run(sys.executable, str(ABLATION), *merge)
    assert done.returncode == 0, done.stderr
    assert figure.stat().st_size > 1000
    variants = json.loads(joined.read_text())["results"]["variants"]
    others = ("full precision perturbed", "SDP4Bit", "AdamW expanded_fp8")
    assert list(variants) == ["full precision", *others]
    # same model, data and order: codes change the loss, as other weights do, but only a little
    for name in others:
        change = variants[name][0]["val_loss"] / exact["val_loss"] - 1
        assert 0 < abs(change) < 0.05


def test_sensitivity_names_the_kinds_that_suffer(tokens: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    script = str(ROOT / "benchmarks" / "sensitivity.py")
    sizes = ("--layers", "1", "--hidden", "32", "--heads", "2", "--seq", "32", "--batch", "4")
    length = ("--steps", "50", "--val-blocks", "64", "--lr", "5e-3", "--tokens", str(tokens))
    variants = "2 bits,full precision,2 bits (blocks alone),full precision perturbed"
    options = ("--variants", variants, "--json", str(report))
    done = _run(sys.executable, script, *sizes, *length, *options)
    assert done.returncode == 0, done.stderr
    results = json.loads(report.read_text())["results"]
    loss = {name: runs[0]["val_loss"] for name, runs in results["variants"].items()}
    assert next(iter(loss)) == "full precision"  # in the order of the table, not that of the end
    exact = loss["full precision"]
    assert abs(loss["full precision perturbed"] - exact) < 0.2 * abs(loss["2 bits"] - exact)
    assert loss["2 bits (blocks alone)"] not in (exact, loss["2 bits"])
    assert list(results["codecs"]["2 bits (blocks alone)"]) == ["blocks"]
