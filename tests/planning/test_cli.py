"""The console script: what it refuses, and what it returns."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lq_lightning.planning import cli, config
from lq_lightning.planning.plan import Plan

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = str(EXAMPLES / "configs" / "quantized_fsdp.yaml")
SHORT = ["--model.decoder.num_layers=1", "--data.block_size=16", "--no-alternatives"]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["plan", *words]) == cli.WRONG_INPUT
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_a_run_is_planned_with_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*SHORT, "--gpu=A100", "--nodes=2", "--gpus-per-node=4", "--network=10gbit"]
    words += ["--data.batch_size=4", "--json=plan.json"]
    assert cli.main(["plan", SMALL, *words]) == cli.FITS
    shown = capsys.readouterr().out
    assert "on 8 x A100-80 on 2 nodes" in shown
    assert "int64[4,17] from TextDataModule.example_batch()" in shown
    assert max(map(len, shown.splitlines())) <= 100
    read = json.loads(Path("plan.json").read_text())
    plan = Plan.from_json(Path("plan.json").read_text())
    assert read["fits"] is plan.fits is True
    assert plan.tokens_per_step == 8 * 4 * 16
    assert plan.layout.data_parallel == 8
    assert plan.step.sent_between_nbytes > 0
    assert plan.price.percent == pytest.approx(read["price"]["percent"])
    assert shown.rstrip("\n") == str(plan)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_what_does_not_fit_has_a_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Large:
        fits = False

        def __str__(self) -> str:
            return "DOES NOT FIT"

    monkeypatch.setattr("lq_lightning.planning.plan.plan_run", lambda *args, **options: Large())
    assert cli.main(["plan", SMALL]) == cli.DOES_NOT_FIT
    assert capsys.readouterr().out == "DOES NOT FIT\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "what should be planned? Give CONFIG.yaml"),
        (["none.yaml"], "There is no file 'none.yaml'"),
        ([SMALL, "--gpu=H1000"], "H1000"),
        ([SMALL, "--nodes=2"], "2 nodes need `network`"),
        ([SMALL, "--nodes=0"], "nodes=0"),
        ([SMALL, "--network=fast"], "fast"),
        ([SMALL, "--gpus=2"], "gpus"),
        ([SMALL, "--model.decoder.layers=2"], "layers"),
        ([SMALL, "--batch=int64"], "is not understood"),
        ([SMALL, "--profile=none.json"], "none.json"),
        (["--model=none.json"], "there is no such file, and nothing is downloaded"),
        (
            [SMALL, *SHORT, "--gpus-per-node=3", "--trainer.strategy.tensor_parallel_size=2"],
            "divide",
        ),
        ([SMALL, *SHORT, "--batch=float32[2,17]"], "float32"),
        (
            [SMALL, *SHORT, "--batch=ids:int64[2,17]"],
            "The batch was taken from `batch`: ids:int64[2",
        ),
    ],
)
def test_wrong_input_is_refused_in_words(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *words)


def test_what_nobody_expects_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("x")

    monkeypatch.setattr(config, "find_program", fail)
    assert "KeyError: 'x' (this is not expected; --debug shows where)" in refused(capsys, SMALL)
    with pytest.raises(KeyError):
        cli.main(["plan", SMALL, "--debug"])


_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def _examples() -> list[Any]:
    page = (EXAMPLES.parent / "docs" / "plan.md").read_text()
    found = re.findall(
        r"```bash\nlq-lightning plan (--model .*?)\n```\n\n```text\n(.*?)```", page, re.S
    )
    return [pytest.param(shlex.split(words), shown, id=words.split()[1]) for words, shown in found]


@pytest.mark.uninitialized_memory_ok  # which is more operators than users have
@pytest.mark.slow
@pytest.mark.parametrize(("words", "shown"), _examples())
def test_examples_of_the_page_are_what_is_printed(
    words: list[str],
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(EXAMPLES.parent)
    cli.main(["plan", *words])
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines if line and not line.startswith("Loss against")]
    words_of, numbers_of = (lambda line: _NUMBER.sub("#", line)), _NUMBER.findall
    expected = {words_of(line): numbers_of(line) for line in shown.splitlines()}
    assert {words_of(line) for line in told} <= set(expected)
    for line in told:  # numbers, but for their last digits; steps are alike
        if line.startswith("  Peak:"):
            continue
        found = [float(number.replace(",", "")) for number in numbers_of(line)]
        page = [float(number.replace(",", "")) for number in expected[words_of(line)]]
        assert found == pytest.approx(page, rel=2e-3, abs=0.05), line
