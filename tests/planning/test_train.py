"""``lq-lightning init`` and ``train``: a run from a YAML alone."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI
from lq_testing.lightning_models import quiet

from lq_lightning.planning import cli
from lq_lightning.planning.train import GOALS

OWN = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader


class Model(LightningModule):
    def __init__(self, lr: float = 0.1, outputs: int = 1):
        super().__init__()
        self.layer, self.lr = torch.nn.Linear(4, outputs), lr

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(torch.ones(8, 4))
"""
HERE = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]


@pytest.fixture(autouse=True)
def _own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    Path("own_module.py").write_text(OWN)


def _init(goal: str) -> int:
    classes = ["--model=own_module.Model", "--data=own_module.Data"]
    return cli.main(["init", goal, f"--output={goal}.yaml", *classes])


@pytest.mark.parametrize("goal", GOALS)
def test_every_yaml_is_read(goal: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _init(goal) == 0
    said = capsys.readouterr().out
    assert f"lq-lightning plan {goal}.yaml" in said
    assert f"lq-lightning train --config {goal}.yaml" in said
    assert "class_path" not in said
    quiet()
    sys.path.insert(0, ".")
    arguments = [f"--config={goal}.yaml", *HERE]
    cli_of_user = LightningCLI(run=False, args=arguments, save_config_callback=None)
    assert type(cli_of_user.model).__name__ == "Model"
    assert cli_of_user.trainer.max_steps == 1000
    assert max(map(len, Path(f"{goal}.yaml").read_text().splitlines())) <= 100


def test_a_yaml_trains_without_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    quiet()
    _init("one-host")
    more = ["--trainer.max_steps=2", "--model.lr=0.5", "--trainer.enable_progress_bar=false"]
    with warnings.catch_warnings():
        assert cli.main(["train", "--config=one-host.yaml", *HERE, *more]) == 0
    assert list(Path("runs/one-host").rglob("last.ckpt"))
    assert cli.main(["init", "one-host", "--output=one-host.yaml"]) == cli.WRONG_INPUT
    assert "exists: give another name" in capsys.readouterr().err
    assert cli.main(["init", "one-host", "--modle=my.Model"]) == cli.WRONG_INPUT
    assert "no option --modle" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["init", "nothing"])


def test_what_cannot_begin_says_so_in_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: str) -> str:
        assert cli.main(words) == cli.WRONG_INPUT
        return capsys.readouterr().err

    assert "no option --modle=own_module.Model" in refused(
        "init", "one-host", "--modle=own_module.Model"
    )
    assert not Path("run.yaml").exists()
    assert "Give --config FILE" in refused("train")
    monkeypatch.setattr("lq_lightning.planning.train.find_spec", lambda name: None)
    assert "pip install 'jsonargparse[signatures]'" in refused("train", "--config=one-host.yaml")
    assert cli.main(["init", "one-host", "--model=own_module.Model"]) == 0
    assert "Set `class_path` of `data`, then plan" in capsys.readouterr().out


def test_a_yaml_with_local_steps_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    _init("two-hosts-1gb")
    words = ["two-hosts-1gb.yaml", "--nodes=2", "--gpus-per-node=1", "--network=1gbit"]
    words += ["--no-alternatives"]
    assert cli.main(["plan", *words]) == cli.WRONG_INPUT
    assert "so small that nothing of it is simulated" in capsys.readouterr().err
    status = cli.main(["plan", *words, "--model.outputs=1024"])
    assert status == cli.FITS, capsys.readouterr().err
