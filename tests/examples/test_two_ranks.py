"""The example on two ranks with quantized communication."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from lq_testing.lightning_models import run_trainer
from pretraining import report


def _main(rank: int, world: int, examples: str, root: str, arguments: list[str]) -> None:
    """Run ``pretrain.py`` as torchrun does, what it prints going to a file."""
    os.chdir(root)
    sys.path.insert(0, examples)
    sys.argv = [f"{examples}/pretrain.py", *arguments]
    with open(f"shown{rank}", "w") as shown:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(shown.fileno(), stream.fileno())
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.stdout.flush()


def _run(stage: str, config: str, examples: Path, tmp_path: Path, *options: str) -> str:
    """Run ``pretrain.py`` on two gloo ranks with a small model and return what it printed."""
    values = {
        "trainer.limit_val_batches": 2,
        "trainer.log_every_n_steps": 1,
        "model.decoder.num_layers": 1,
        "model.decoder.hidden_size": 64,
        "model.decoder.num_heads": 2,
        "data.text": tmp_path / "text",
        "data.block_size": 16,
        "data.batch_size": 2,
        "data.cache_dir": tmp_path / "data",
        "sample.max_new_tokens": 5,
    }
    arguments = [stage, f"--config={examples}/configs/{config}.yaml"]
    arguments += [f"--{name}={value}" for name, value in values.items()]
    run_trainer(_main, 2, str(examples), str(tmp_path), [*arguments, *options], timeout=240.0)
    return "".join((tmp_path / f"shown{rank}").read_text() for rank in range(2))


@pytest.mark.usefixtures("text_folder")
def test_quantized_run(examples: Path, tmp_path: Path) -> None:
    """Communication, states, gradient sums and activations in few bits, seen in the report."""
    pytest.importorskip("matplotlib", reason="draws the plot")
    steps = ["--trainer.max_steps=4", "--trainer.val_check_interval=8"]
    shown = _run("fit", "everything", examples, tmp_path, *steps)
    assert "4-bit differences" in shown
    assert "are expanded_fp8/expanded_fp8 codes" in shown
    assert "are kept in 8 bits between micro-batches" in shown
    assert "ActivationQuantization('agoq')" in shown
    assert "Generated text" in shown
    root = tmp_path / "runs" / "everything"
    result = report.read(root / "report.json")
    assert result.world_size == 2
    assert [step for step, _ in result.validation] == [2, 4]
    wire = result.wire
    assert wire is not None
    assert wire.steps == 4  # optimizer steps, not their four micro-batches
    assert wire.baseline > 4 * wire.sent > 0
    # Messages of this small model are short, so the padding of their groups shows.
    assert wire.bits_per_weight is not None
    assert 4 < wire.bits_per_weight < 8
    assert wire.bits_per_gradient is not None
    assert 4 < wire.bits_per_gradient < 8
    lines = [line for line in shown.splitlines() if "val_loss" in line]
    assert [line.split()[0] for line in lines] == ["2/4", "4/4"]
    (rate,) = re.findall(r"tokens/s ([\d.]+)", lines[-1])
    assert float(rate) == pytest.approx(result.tokens_per_s, rel=1e-3)
    assert f"MB/step {wire.sent / wire.steps / 1e6:#.4g}" in lines[-1]
    assert (root / "report.png").is_file()
    assert (root / "checkpoints" / "last.ckpt").is_dir()


@pytest.mark.usefixtures("text_folder")
def test_pipeline(examples: Path, tmp_path: Path) -> None:
    """Two stages; the report counts all weights once, and tokens of the one batch."""
    options = ["--trainer.max_steps=4", "--trainer.val_check_interval=2", "--report.plot=false"]
    options += ["--model.decoder.num_layers=2", "--data.batch_size=4", "--sample.max_new_tokens=0"]
    shown = _run("fit", "pipeline", examples, tmp_path, *options)
    assert "2 layers in 2 stages" in shown
    assert re.search(r"forward as tah5 \(\d\.\d+ bits per value\), backward as int5 \(5\.5", shown)
    result = report.read(tmp_path / "runs" / "pipeline" / "report.json")
    assert [step for step, _ in result.validation] == [2, 4]
    assert result.parameters == 123712
    assert (tmp_path / "runs" / "pipeline" / "checkpoints" / "last.ckpt").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "micro_batches"), [("quantized_fsdp", 1), ("quantized_precision", 4)]
)
@pytest.mark.usefixtures("text_folder")
def test_resumed_run_and_predictions(
    config: str, micro_batches: int, examples: Path, tmp_path: Path
) -> None:
    """A run that continues from its middle ends with the losses of the whole run."""
    options = [f"--trainer.val_check_interval={4 * micro_batches}", "--report.plot=false"]
    fit = ("fit", config, examples, tmp_path, "--trainer.max_steps=8", *options)
    every = ("--checkpoint.filename={step}", "--checkpoint.save_top_k=-1")
    _run(*fit, "--trainer.default_root_dir=whole", *every)
    middle = tmp_path / "whole" / "checkpoints" / "4.ckpt"
    _run(*fit, "--trainer.default_root_dir=resumed", f"--ckpt_path={middle}")
    curves = [report.read(tmp_path / name / "report.json") for name in ("whole", "resumed")]
    assert curves[0].validation == curves[1].validation
    shown = _run(
        "predict",
        config,
        examples,
        tmp_path,
        f"--ckpt_path={tmp_path}/resumed/checkpoints/last.ckpt",
        "--model.max_new_tokens=3",
        '--data.prompts=["one", "two", "three"]',
    )
    assert [f"Prompt {i} continued" in shown for i in (1, 2, 3)] == [True] * 3
