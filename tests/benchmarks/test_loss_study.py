"""The loss study runs every variant; its report counts seeds; its paths tell tensors apart."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lq_lightning.data_parallel import GradientQuantization

Load = Callable[[str], ModuleType]
Run = Callable[..., str]

WORLD = 4
TEXT = ("--cpu", "--text", str(Path(__file__).resolve().parents[2] / "benchmarks"))


def test_every_variant_runs(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ("--preset", "llama_smoke", "--steps", "2", "--seeds", "0,1", "--json", str(report))
    assert "2 bits" in run("loss_study.py", *TEXT, *options)
    other = tmp_path / "other.json"
    other.write_text(report.read_text())
    shown = run("loss_study.py", "--merge", str(report), str(report), "--details")
    assert "full precision perturbed" in shown
    assert "2 bits" in run("table.py", str(report))
    results = json.loads(report.read_text())["results"]
    losses = {name: [run["val_loss"] for run in of] for name, of in results["variants"].items()}
    assert [run["seed"] for run in results["variants"]["both"]] == [0, 1, 0, 1]
    exact = losses["full precision"] + losses["full precision perturbed"]
    assert exact != losses["differences"] != losses["both"]
    default = results["vocabulary_code"].removeprefix("int")
    assert losses[f"gradients, vocabulary {default}"] == losses["both"]
    assert losses["gradients, vocabulary 4"] != losses["both"]
    results["preset"]["steps"] = 3
    report.write_text(json.dumps({"environment": {}, "results": results}))
    with pytest.raises(ValueError, match="only reports of equal runs can be joined"):
        run("loss_study.py", "--merge", str(other), str(report))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seeds", "3-1"), "'3-1' has no seeds: give 1-3"),
        (("--variants", "both"), "nothing to compare with: add 'full precision'"),
    ],
)
def test_runs_that_would_say_nothing_are_refused(
    options: tuple[str, str], message: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("loss_study.py", "--cpu", "--preset", "gpt_smoke", "--steps", "1", *options)
    assert message in capsys.readouterr().err


def test_processes_share_seeds_that_go_on_from_trunks(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Processes are runs of the script one after the other, here: importing torch takes longer."""

    popen, started = subprocess.Popen, []

    def start(command: list[str], **options: Any) -> Any:
        if command[0] != sys.executable:
            return popen(command, **options)
        argv = sys.argv
        started.append(command[2:])
        run(Path(command[1]).name, *command[2:])
        monkeypatch.setattr("sys.argv", argv)
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr("subprocess.Popen", start)
    report, variants = tmp_path / "report.json", "full precision;full precision perturbed;both"
    options = (*TEXT, "--preset", "gpt_smoke", "--steps", "9", "--seeds", "0-1", "--starts", "1")
    options = (*options, "--variants", variants, "--json", str(report))
    losses = {}
    for trunk, more in (("0", ()), ("2", ("--processes", "2", "--details"))):
        shown = run("loss_study.py", *options, "--trunk-steps", trunk, *more)
        found = json.loads(report.read_text())["results"]["variants"]
        assert [each["seed"] for each in found["both"]] == [0, 1]
        losses[trunk] = {name: [run["val_loss"] for run in runs] for name, runs in found.items()}
    assert [options[-1] for options in started] == ["0", "1"]
    # What follows a trunk in full precision is the same run, up to the size of products.
    exact = [losses[trunk]["full precision"] for trunk in losses]
    assert exact[0] == pytest.approx(exact[1], rel=1e-6)
    assert len({ends[0] for ends in losses["2"].values()}) == 3
    assert losses["2"]["both"] != pytest.approx(losses["0"]["both"], rel=1e-6)
    both = found["both"][0]
    assert both["curve"][0][0] == both["grad_norms"][-1][0] == 9
    assert both["val_loss"] != both["details"]["loss_of_main_weights"]
    assert "seed 1" in shown


@pytest.mark.parametrize("bits", [4, 2, 6])
def test_gradients_are_those_of_the_library(load: Load, bits: int) -> None:
    variants, library = load("loss_variants"), GradientQuantization(inter_bits=bits)
    codes = variants.VARIANTS["both" if bits == 4 else f"{bits} bits"].gradients
    for level in ("intra", "inter"):
        specs = [library.codec(level, vocabulary=words) for words in (False, True)]
        assert codes.of(level) == specs


def test_a_training_does_not_depend_on_those_beside_it(load: Load) -> None:
    training, variants = load("stacked_training"), load("loss_variants")
    corpus = load("corpus").load(None, Path(TEXT[2]), 32)
    preset = replace(variants.PRESETS["gpt_smoke"], steps=3)
    lanes = [training.Lane(3), training.Lane(5, 1)]
    ends = []
    for some in (lanes, lanes[1:]):
        run = training.StackedTraining(corpus, torch.device("cpu"), preset, some, 2, 2)
        for _ in range(preset.steps):
            run.take_step(variants.BOTH)
        ends.append(run.validate()[-1])
    # Products of a batch round as its size has it, and a value between two codes then either way.
    torch.testing.assert_close(*ends, rtol=1e-5, atol=0)


def test_every_rank_reads_blocks_of_its_own(load: Load) -> None:
    training = load("stacked_training")
    preset = replace(load("loss_variants").PRESETS["gpt_smoke"], steps=3, batch=2)
    order = training.order_of(30, preset, 5, WORLD)
    assert order.shape == (3, WORLD, 2)
    assert len(set(order.flatten().tolist())) == 24
    assert torch.equal(order, training.order_of(30, preset, 5, WORLD))
    with pytest.raises(ValueError, match="give more text, fewer steps or more passes"):
        training.order_of(20, preset, 5, WORLD)
    twice = training.order_of(20, replace(preset, passes=2), 5, WORLD).flatten()
    assert twice.bincount(minlength=20).max() == 2


def test_words_are_numbered_for_all_splits(load: Load) -> None:
    corpus = load("corpus")
    bytewise, words = (corpus.standard_library(16, Path(TEXT[2]), n) for n in (0, 512))
    assert words.vocab == 512
    assert int(words.train.max()) < 512
    assert len(words.train) < 0.7 * len(bytewise.train)
