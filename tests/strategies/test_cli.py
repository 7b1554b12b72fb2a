"""Strings, objects, command line and YAML."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lq_testing.lightning_models import TinyModule, quiet

from lq_lightning import (
    FullyShardedPrecision,
    GradientQuantization,
    QuantizedFSDPStrategy,
    WeightQuantization,
)
from lq_lightning.strategies.parts import WeightOption

CLASS = "lq_lightning.QuantizedFSDPStrategy"
PIPELINE = "lq_lightning.QuantizedPipelineStrategy"


def _strategy(arguments: list[str]) -> Any:
    quiet()
    defaults = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]
    arguments = [*defaults, *arguments]
    cli = LightningCLI(TinyModule, run=False, args=arguments, save_config_callback=None)
    return cli.trainer.strategy


def test_by_string() -> None:
    quiet()
    for name in ("quantized_fsdp", "Quantized_FSDP"):
        run = Trainer(strategy=name, accelerator="cpu", devices=2, logger=False)
        assert type(run.strategy) is QuantizedFSDPStrategy
        assert type(run.precision_plugin) is FullyShardedPrecision
    with pytest.raises(ValueError, match="'32-true', 'bf16-true', 'bf16-mixed'"):
        Trainer(strategy=name, accelerator="cpu", devices=2, precision="64-true")


def test_by_object() -> None:
    quiet()
    for precision in ("32-true", "bf16-mixed"):
        strategy = QuantizedFSDPStrategy()
        assert strategy.settings()["precision"] == "32-true"  # looking does not decide
        options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False}
        run = Trainer(strategy=strategy, precision=precision, **options)
        assert run.precision == precision


def test_by_class_path_and_options() -> None:
    strategy = _strategy(
        [
            f"--trainer.strategy={CLASS}",
            "--trainer.strategy.gradients=TLq",
            "--trainer.strategy.node_size=1",
            "--trainer.strategy.units=[Block]",
            "--trainer.strategy.start_timeout=60",
            "--trainer.precision=bf16-mixed",
        ]
    )
    assert strategy._timeout == timedelta(minutes=1)
    assert strategy.settings()["gradients"] == GradientQuantization(method="TLq")
    assert strategy.settings()["weights"] == WeightOption("auto", "auto")
    assert strategy.settings()["precision"] == "bf16-mixed"
    assert _strategy(["--trainer.strategy=quantized_fsdp"]).settings()["node_size"] == 2


YAML = f"""
trainer:
  strategy:
    class_path: {CLASS}
    init_args:
      weights: {{bits: 3, replica: node}}
      gradients:
        method: TLq
        inter_bits: 5
      reshard_after_forward: false
      skip_nonfinite_steps: true
      start_timeout: 00:01:30
model:
  lr: 0.5
"""


def test_yaml_with_nested_configs(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(YAML)
    arguments = [f"--config={tmp_path / 'a.yaml'}", "--trainer.strategy.init_args.node_size=1"]
    strategy = _strategy(arguments)
    settings = strategy.settings()
    assert settings["weights"] == WeightQuantization(bits=3, replica="node")
    assert settings["gradients"] == GradientQuantization(method="TLq", inter_bits=5)
    assert settings["reshard_after_forward"] is False
    assert strategy._timeout == timedelta(seconds=90)


def test_yaml_of_a_pipeline_is_flat(tmp_path: Path) -> None:
    times = {"embed": 0.25, "blocks.0": 0.001, "blocks.1": 2.0}
    lines = ["trainer:", "  strategy:", "    class_path: lq_lightning.QuantizedPipelineStrategy"]
    lines += ["    init_args:", "      split:", *(f"        {n}: {t}" for n, t in times.items())]
    lines += ["      weights: {bits: 3}", "      start_timeout: 60", "      units: [Block]"]
    (tmp_path / "a.yaml").write_text("\n".join(lines))
    strategy = _strategy([f"--config={tmp_path / 'a.yaml'}"])
    settings = strategy.settings()
    assert settings["split"] == times
    assert settings["weights"] == WeightQuantization(bits=3)
    assert settings["reshard_after_forward"] is False
    assert strategy._timeout == timedelta(minutes=1)
    assert strategy.given.keys() == {"split", "weights", "start_timeout", "units"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer.strategy.gradients=TLQ"], "gradients"),
        (["--trainer.strategy.gradients={inter_bits: 9}"], "gradients"),
        (["--trainer.strategy.replica=rank"], "replica"),
        (["--trainer.strategy.weight_bits=4"], "weight_bits"),
        (["--trainer.strategy.compile_units=perhaps"], "compile_units"),
        ([f"--trainer.strategy={PIPELINE}", "--trainer.strategy.local_steps=4"], "local_steps"),
        ([f"--trainer.strategy={PIPELINE}", "--trainer.strategy.seed=x"], "seed"),
    ],
)
def test_wrong_values_stop_with_an_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ValueError)) as error:
        _strategy([f"--trainer.strategy={CLASS}", *arguments])
    assert message in capsys.readouterr().err + str(error.value)


@pytest.mark.parametrize("name", [CLASS, PIPELINE])
def test_help_explains_every_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _strategy([f"--trainer.strategy.help={name}"])
    text = capsys.readouterr().out
    for option in ("weights", "gradients", "replica", "check_replicas_every_n_steps", "timeout"):
        line = next(part for part in text.split("\n  --") if f".{option} " in part)
        assert len(line.split("(type")[0]) > 40, line


def test_wrong_device_or_backend_is_explained() -> None:
    quiet()
    strategy = QuantizedFSDPStrategy(process_group_backend="nccl")
    run = Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
    with pytest.raises(ValueError, match=r"process_group_backend='nccl'.*accelerator='cuda'"):
        run.fit(TinyModule())
    if not torch.cuda.is_available():
        with pytest.raises(MisconfigurationException, match=r"available.*\['cpu'\]"):
            Trainer(strategy="quantized_fsdp", accelerator="cuda", devices=1)
