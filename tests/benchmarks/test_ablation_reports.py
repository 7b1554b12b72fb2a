"""Ablations join reports, and wrong options are refused before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

Shown = Callable[..., str]


@pytest.fixture(scope="module")
def ablation(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("ablation")


@pytest.fixture
def run(
    ablation: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shown:
    """A function that runs the command line and returns what it printed."""

    def main(*options: str) -> str:
        monkeypatch.setattr("sys.argv", ["ablation.py", *options])
        ablation.main()
        return capsys.readouterr().out

    return main


def _report(path: Path, variants: dict[str, Any], seq: int = 128) -> str:
    results = {"preset": {"seq": seq}, "world_size": 4, "node_size": 2, "variants": variants}
    path.write_text(json.dumps({"environment": {}, "results": results}))
    return str(path)


def _outcome(seed: int, val_loss: float) -> dict[str, Any]:
    return {"seed": seed, "val_loss": val_loss, "train_s": 1.0}


def test_merge_pairs_seeds_and_takes_the_later_of_two(run: Shown, tmp_path: Path) -> None:
    exact = [_outcome(0, 2.0), _outcome(1, 2.02)]
    first = _report(tmp_path / "a.json", {"full precision": exact, "qW": [_outcome(0, 9.0)]})
    second = _report(tmp_path / "b.json", {"qW": [_outcome(0, 2.2), _outcome(2, 5.0)]})
    shown = run("--merge", first, second)
    lines = {line[:14].strip(): line.split() for line in shown.splitlines()}
    assert "+10.000%" in lines["qW"]  # seed 2 has no counterpart
    assert "0.704%" in lines["full precision"]  # 0.0141421 / 2.01


def test_full_precision_is_the_mean_of_its_runs(run: Shown, tmp_path: Path) -> None:
    variants = {
        "full precision": [_outcome(0, 2.0), _outcome(1, 3.0)],
        "full precision perturbed": [_outcome(0, 2.2)],
        "qW": [_outcome(0, 2.31), _outcome(1, 3.3)],
    }
    report = _report(tmp_path / "a.json", variants)
    lines = {line[:25].strip(): line.split() for line in run("--merge", report).splitlines()}
    assert "+10.000%" in lines["qW"]  # of 2.1 and of 3.0
    assert "+10.000%" in lines["full precision perturbed"]
    assert "+0.000%" in lines["full precision"]


def test_training_is_compared_with_the_mean_of_full_precision(
    load_benchmark: Callable[[str], ModuleType],
) -> None:
    report = load_benchmark("ablation_report")

    def run_of(*losses: float) -> list[Any]:
        return [report.Outcome(0, 1.0, 1.0, tuple(zip((50, 100), losses, strict=False)))]

    outcomes = {
        "full precision": run_of(2.0, 4.0),
        "full precision perturbed": run_of(3.0, 4.4),
        "qW": run_of(2.75, 4.62),
    }
    found = report.training_changes(outcomes, "qW", last=1.0)
    assert found == pytest.approx([10.0])  # of 2.5 and of 4.2
    perturbed = report.training_changes(outcomes, "full precision perturbed")
    assert perturbed == pytest.approx([10.0])  # of 4.0
    outcomes["full precision perturbed"] = run_of(3.0)  # it was stopped
    assert report.training_changes(outcomes, "qW", last=1.0) == pytest.approx([10.0])


def test_merged_reports_can_be_merged_again(run: Shown, tmp_path: Path) -> None:
    paths = [
        _report(tmp_path / f"{seed}.json", {"full precision": [_outcome(seed, 2.0)]})
        for seed in range(3)
    ]
    joined = str(tmp_path / "joined.json")
    for sources in (paths[:2], [joined, paths[2]]):
        run("--merge", *sources, "--json", joined)
    report = json.loads(Path(joined).read_text())
    assert [run["seed"] for run in report["results"]["variants"]["full precision"]] == [0, 1, 2]
    assert len(report["environments"]) == 3


def test_merge_refuses_reports_of_different_presets(run: Shown, tmp_path: Path) -> None:
    first = _report(tmp_path / "a.json", {"qW": [_outcome(0, 2.0)]})
    second = _report(tmp_path / "b.json", {"qW": [_outcome(0, 2.0)]}, seq=256)
    with pytest.raises(ValueError, match="only reports of equal runs can be joined"):
        run("--merge", first, second)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--runs", "SDP4Bit"), "NAME:SEED"),
        (("--runs", "SDP5Bit:0"), "unknown variants"),
        (("--tokens", "/nowhere"), "kernel_text.py"),
    ],
)
def test_wrong_options_are_explained(
    run: Shown, capsys: pytest.CaptureFixture[str], options: tuple[str, str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_update_error_wants_prepared_tokens(
    load_benchmark: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("sys.argv", ["update_error.py", "--tokens", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        load_benchmark("update_error").main()
    assert stopped.value.code == 2
    assert "has no corpus.json: make it with kernel_text.py" in capsys.readouterr().err


def test_perturbed_weights_are_alike_on_all_ranks(ablation: ModuleType) -> None:
    weights = []
    for _ in range(2):  # as two ranks with one seed
        torch.manual_seed(3)
        module = torch.nn.Linear(512, 512)
        exact = module.weight.detach().clone()
        ablation.perturb(module, 1e-3)
        weights.append(module.weight.detach())
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    relative = weights[0] / exact - 1
    assert 0.99e-3 < float(relative.std()) < 1.01e-3
    assert abs(float(relative.mean())) < 1e-5


def test_sensitivity_names_its_variants(
    load_benchmark: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "corpus.json").write_text("{}")
    options = ["--tokens", str(tmp_path), "--variants", "1 bit,2 bits"]
    monkeypatch.setattr("sys.argv", ["sensitivity.py", *options])
    with pytest.raises(SystemExit, match="2"):
        load_benchmark("sensitivity").main()
    error = capsys.readouterr().err
    assert "unknown variants ['1 bit']: choose among full precision" in error


def test_sensitivity_knows_the_kinds_of_parameters(
    load_benchmark: Callable[[str], ModuleType],
) -> None:
    sensitivity = load_benchmark("sensitivity")
    config = load_benchmark("gpt").GPTConfig(layers=2, hidden=8, heads=2, seq=4, vocab=16)
    names: dict[str, list[str]] = {}
    for name, _ in load_benchmark("gpt").GPT(config).named_parameters():
        names.setdefault(sensitivity.kind_of(name), []).append(name)
    assert names["embedding"] == ["tokens.weight"]
    assert names["head"] == ["head.weight"]
    assert {"positions.weight", "blocks.1.down.weight"} < set(names["blocks"])
    bits = {
        k: c.inter_bits for k, c in sensitivity.VARIANTS["2 bits (embedding and head 8)"].items()
    }
    assert bits == {"embedding": 8, "head": 8, "blocks": 2}
