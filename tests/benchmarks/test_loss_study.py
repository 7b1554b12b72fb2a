"""The loss study runs every variant; its report counts seeds; its paths tell tensors apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lq_lightning.data_parallel import GradientQuantization

Load = Callable[[str], ModuleType]
Run = Callable[..., str]

ENDS = ("main_weights", "average")
WORLD = 4
TEXT = ("--cpu", "--text", str(Path(__file__).resolve().parents[2] / "benchmarks"))


def test_every_variant_runs(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ("--preset", "llama_smoke", "--steps", "2", "--seeds", "0,1", "--json", str(report))
    assert "2 bits" in run("loss_study.py", *TEXT, *options)
    shown = run("loss_study.py", "--merge", str(report))
    assert "full precision perturbed" in shown
    assert "2 bits" in run("table.py", str(report))
    runs = json.loads(report.read_text())["results"]["variants"]
    assert [run["seed"] for run in runs["both"]] == [0, 1, 0, 1]
    # Full precision for as long as a run lasts is full precision, and other codes are others.
    losses = {name: [run["val_loss"] for run in found] for name, found in runs.items()}
    exact = losses["full precision"] + losses["full precision perturbed"]
    assert losses["both from 10"] == exact != losses["both"]
    assert losses["both until 20"] == losses["both"] != losses["differences"] != exact
    assert losses["both, 8 bits early"] != losses["both"]
    default = json.loads(report.read_text())["results"]["vocabulary_code"].removeprefix("int")
    assert losses[f"gradients, vocabulary {default}"] == losses["both"]
    assert losses["gradients, vocabulary 4"] != losses["both"]


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


def test_processes_share_seeds_that_go_on_from_trunks(run: Run, tmp_path: Path) -> None:
    report, variants = tmp_path / "report.json", "full precision;full precision perturbed;both"
    options = (*TEXT, "--preset", "gpt_smoke", "--steps", "9", "--seeds", "0-1", "--starts", "1")
    options = (*options, "--variants", variants, "--average", "1.0", "--json", str(report))
    losses = {}
    for trunk, more in (("0", ()), ("2", ("--processes", "2", "--details"))):
        shown = run("loss_study.py", *options, "--trunk-steps", trunk, *more)
        found = json.loads(report.read_text())["results"]["variants"]
        assert [run["seed"] for run in found["both"]] == [0, 1]
        losses[trunk] = {name: [run["val_loss"] for run in runs] for name, runs in found.items()}
    # What follows a trunk in full precision is the same run, up to the size of products.
    exact = [losses[trunk]["full precision"] for trunk in losses]
    assert exact[0] == pytest.approx(exact[1], rel=1e-6)
    assert len({ends[0] for ends in losses["2"].values()}) == 3
    assert losses["2"]["both"] != pytest.approx(losses["0"]["both"], rel=1e-6)
    both = found["both"][0]
    assert both["curve"][0][0] == both["grad_norms"][-1][0] == 9
    assert len({both["val_loss"], *(both["details"][f"loss_of_{n}"] for n in ENDS)}) == 3
    assert "seed 1" in shown
    assert "gradient norms" in shown


@pytest.mark.parametrize("which", ["first", "second", "norm"])
def test_the_optimizer_gets_exact_values(load: Load, which: str) -> None:
    training, variants = load("stacked_training"), load("loss_variants")
    data = load("ablation_data").load(None, Path(TEXT[2]), 32, torch.device("cpu"))
    run = training.StackedTraining(data, variants.PRESETS["gpt_smoke"], [training.Lane(0)], 1, 1)
    run.take_step(variants.Plan())
    name = "blocks.0.up.weight"
    before = {n: v.clone() for n, v in run.optimizer.state[run.masters[name]].items()}
    generator = torch.Generator().manual_seed(0)
    given, exact = (
        {n: s * torch.randn(w.shape, generator=generator) for n, w in run.masters.items()}
        for s in (1e-5, 1e-6)
    )
    exact["norm.bias"] += 2.0  # this norm clips, the other does not
    run.update(given, variants.Plan(optimizer=which), exact)
    after = run.optimizer.state[run.masters[name]]
    first, second = given[name], given[name]
    if which == "norm":
        first = second = given[name] / float(
            torch.cat([x.flatten() for x in exact.values()]).norm()
        )
    elif which == "first":
        first = exact[name]
    else:
        second = exact[name]
    torch.testing.assert_close(after["exp_avg"], 0.9 * before["exp_avg"] + 0.1 * first)
    square = 0.95 * before["exp_avg_sq"] + 0.05 * second.square()
    torch.testing.assert_close(after["exp_avg_sq"], square, rtol=1e-4, atol=0)


@pytest.mark.parametrize("bits", [4, 2, 6])
def test_gradients_are_those_of_the_library(load: Load, bits: int) -> None:
    variants, library = load("loss_variants"), GradientQuantization(inter_bits=bits)
    codes = variants.VARIANTS["both" if bits == 4 else f"{bits} bits"].plan.gradients
    for level in ("intra", "inter"):
        specs = [library.codec(level, vocabulary=words) for words in (False, True)]
        assert [code.spec for code in codes.of(level)] == specs


def test_a_training_does_not_depend_on_those_beside_it(load: Load) -> None:
    training, variants = load("stacked_training"), load("loss_variants")
    data = load("ablation_data").load(None, Path(TEXT[2]), 32, torch.device("cpu"))
    preset = replace(variants.PRESETS["gpt_smoke"], steps=3)
    plan = variants.VARIANTS["both"].plan
    lanes = [training.Lane(3), training.Lane(5, 1)]
    ends = []
    for some in (lanes, lanes[1:]):
        run = training.StackedTraining(data, preset, some, 2, 2)
        for _ in range(preset.steps):
            run.take_step(plan)
        ends.append(run.validate()[-1])
    # Products of a batch round as its size has it, and a value between two codes then either way.
    torch.testing.assert_close(*ends, rtol=1e-5, atol=0)


def test_ranks_read_what_batches_yields(load: Load) -> None:
    data, training = load("ablation_data"), load("stacked_training")
    preset = replace(load("loss_variants").PRESETS["gpt_smoke"], steps=3, batch=2)
    blocks = torch.arange(60).view(30, 2)
    order = training.order_of(30, preset, 5, WORLD)
    for rank in range(WORLD):
        rows = data.batches(blocks, 2, 5, rank, WORLD)
        for step in range(3):
            inputs, _ = next(rows)
            assert torch.equal(blocks[order[step, rank]][:, :1], inputs)
    with pytest.raises(ValueError, match="give more text or fewer steps"):
        training.order_of(20, preset, 5, WORLD)


def test_runs_of_one_seed_count_once(load: Load) -> None:
    made, report = load("ablation_report"), load("loss_report")

    def runs(*values: float) -> list[object]:
        return [made.Outcome(seed, 1 + value / 100, 1.0) for seed, value in enumerate(values)]

    outcomes = {
        made.BASELINE: runs(-0.1, 0.1, -0.1),
        made.PERTURBED: runs(0.1, -0.1, 0.1),
        "both": runs(0.0, 0.1, 0.2) + runs(0.0, 0.3, 0.4),
    }
    mean, error = report.mean_and_error(report.changes(outcomes, "both"))
    assert (mean, error) == pytest.approx((0.5 / 3, 0.1 * (7 / 3) ** 0.5 / 3**0.5))
    row = dict(zip(report.HEADER, report.rows(outcomes)[-1], strict=True))
    assert (row["runs"], row["seeds"], row["beyond 0.3%"]) == ("6", "3", "1 of 6")
    assert (row["median"], row["worst"]) == ("+0.150%", "+0.400%")


def test_words_are_numbered_for_all_splits(load: Load) -> None:
    corpus = load("corpus")
    bytewise, words = (corpus.standard_library(16, Path(TEXT[2]), n) for n in (0, 512))
    assert words.vocab == 512
    assert int(words.train.max()) < 512
    assert len(words.train) < 0.7 * len(bytewise.train)


def test_paths_show_which_tensors_are_quantized(run: Run, tmp_path: Path) -> None:
    raw, report = tmp_path / "raw.pt", tmp_path / "paths.json"
    options = ("--preset", "gpt_smoke", "--steps", "4", "--seeds", "0-2", "--raw", str(raw))
    shown = run("loss_paths.py", *TEXT, *options, "--json", str(report))
    assert "leaves after" in shown
    kept = torch.load(raw)
    names = kept["names"]
    gradient = {name: kept["gradient"][:, index].float() for index, name in enumerate(names)}
    assert gradient["blocks.1.up.weight"].shape == (4, 3)
    assert (gradient["blocks.1.up.weight"] > 0.03).all()
    assert (gradient["blocks.1.norm1.weight"] < 1e-3).all()
    assert (kept["chance"][0] > 0).any()
    assert kept["loss"].shape == (4, 3, 3)
    # A first step from equal weights: the losses of the variant are those of full precision.
    assert torch.equal(kept["loss"][0, 0], kept["loss"][0, 2])
