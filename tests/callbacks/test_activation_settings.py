"""The callback before training starts: what it refuses, and how it is set."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lq_testing.activation_models import INT8, Module, fit, snapshot
from lq_testing.lightning_models import TinyModule, quiet
from lq_testing.models import WIDTH
from torch import nn

from lq_lightning import (
    ActivationPolicy,
    ActivationQuantization,
    ActivationRule,
    quantize_activations,
)
from lq_lightning.activations import MemoryBudget
from lq_lightning.callbacks import activation_quantization
from lq_lightning.callbacks.training_loss import count_values


class Linears(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(31, 8), nn.Linear(8, 8))  # type: ignore[assignment]


class KeepsItsArguments(Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net  # type: ignore[assignment]
        self.save_hyperparameters()


def test_modules_among_hyperparameters_are_refused(tmp_path: Path) -> None:
    """Checkpoints hold them pickled; without codes that works."""
    module = KeepsItsArguments(Module().net)
    before = snapshot(module)
    with pytest.raises(ValueError, match=r"holds the module `net`.*ignore=\['net'\]"):
        fit(module, tmp_path, INT8)
    assert snapshot(module) == before


class Replacing(Precision):
    def convert_module(self, module: Any) -> nn.Module:
        for block in module.net.blocks:
            block.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        return module


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="recipe='fp4'.*'agoq', 'auto', 'coat', 'fp8-4bit'"):
        ActivationQuantization("fp4")  # type: ignore[arg-type]
    two = [ActivationQuantization(), ActivationQuantization("coat")]
    with pytest.raises(ValueError, match="two `ActivationQuantization`"):
        fit(Module(), tmp_path, callbacks=two)
    with pytest.raises(ValueError, match="64-true"):
        fit(Module(), tmp_path, "agoq", precision="64-true")
    for module, policy in (
        (Linears(), "agoq"),
        (Module(), ActivationPolicy(rules=[ActivationRule(module="*")])),
    ):
        before = snapshot(module)
        with pytest.raises(ValueError, match="finds nothing to quantize"):
            fit(module, tmp_path, policy)
        assert snapshot(module) == before
    module = Module()
    with pytest.raises(RuntimeError, match=r"`net.blocks.0.norm` and 1 more.*`Replacing`"):
        fit(module, tmp_path, "agoq", plugins=[Replacing()])
    handle = quantize_activations(module)
    with pytest.raises(RuntimeError, match="quantized already"):
        fit(module, tmp_path, "agoq")
    handle.remove()

    def start(quantization: ActivationQuantization, strategy: Any) -> None:
        run = SimpleNamespace(callbacks=[quantization], strategy=strategy, precision="32-true")
        quantization.setup(run, Module(), "fit")  # type: ignore[arg-type]

    old = "float8_matmul_available", lambda device: "This GPU is too old."
    monkeypatch.setattr(activation_quantization, *old)
    mixed = ActivationPolicy(rules=[ActivationRule(module="*", codec="int8", matmul="float8")])
    for recipe in ("coat", mixed):
        with pytest.raises(ValueError, match="This GPU is too old"):
            start(ActivationQuantization(recipe), SingleDeviceStrategy("cpu"))
    start(ActivationQuantization("agoq"), SingleDeviceStrategy("cpu"))


# --- command line -------------------------------------------------------------------------------


def _callback(*arguments: str) -> ActivationQuantization:
    quiet()
    defaults = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    cli = LightningCLI(
        TinyModule, run=False, args=[*defaults, *arguments], save_config_callback=None
    )
    found = [c for c in cli.trainer.callbacks if isinstance(c, ActivationQuantization)]
    return found[0]


POLICY = """
trainer:
  callbacks:
    - class_path: lq_lightning.ActivationQuantization
      init_args:
        recipe:
          norm: int8
          activation: {code: int4, group_size: 64}
          matmul: float8
          rules:
            - {module: "net.blocks.0.*", kind: norm}
            - {module: "*.mlp", codec: fp8_e4m3, matmul: native}
"""


BUDGET = """
trainer:
  callbacks:
    - class_path: lq_lightning.ActivationQuantization
      init_args:
        recipe: fp8-4bit
        budget: {size: 60GiB, time_weight: 0.5}
"""
NAME = "--trainer.callbacks=lq_lightning.ActivationQuantization"


def test_policies_on_the_command_line_and_in_yaml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _callback(NAME)._policy.matmul == "native"
    assert _callback(NAME, "--trainer.callbacks.recipe=coat")._policy.norm == "int8_hadamard"
    (tmp_path / "a.yaml").write_text(POLICY)
    policy: Any = _callback(f"--config={tmp_path}/a.yaml")._policy
    assert (policy.norm, policy.matmul) == ("int8", "float8")
    assert policy.activation.group_size == 64
    assert policy.codec("norm", "net.blocks.0.norm") is None
    assert policy.codec("activation", "net.blocks.0.act").group_size == 64
    assert policy.codec("activation", "net.blocks.1.mlp").code == "fp8_e4m3"
    for wrong in ("fp4", "{norms: int8}", "{norm: int99}", "{matmul: fp8}"):
        with pytest.raises((SystemExit, ValueError)) as error:
            _callback(NAME, f"--trainer.callbacks.recipe={wrong}")
        assert "recipe" in capsys.readouterr().err + str(error.value)


def test_budgets_on_the_command_line_and_in_yaml(tmp_path: Path) -> None:
    for text, size in (("60GiB", "60GiB"), ("0.9", 0.9), ("1000000", 1000000)):
        found = _callback(NAME, f"--trainer.callbacks.budget={text}")
        assert found._budget == MemoryBudget(size)
    (tmp_path / "a.yaml").write_text(BUDGET)
    found = _callback(f"--config={tmp_path}/a.yaml")
    assert found._budget == MemoryBudget("60GiB", time_weight=0.5)
    assert found._policy.matmul == "float8"
    assert _callback(NAME)._budget is None


def test_values_of_a_batch_are_counted_in_what_checks_its_arguments() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    assert count_values({"x": packed, "y": (torch.ones(4), "name")}) == 10 + 3 + 4
