"""Real steps beside their plan, on the CPU: sizes and bytes are exact there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lq_testing.lightning_models import SMALL, run_trainer
from torch import Tensor, nn

import lq_lightning as lq
from lq_lightning.callbacks.plan_check import CheckedLine
from lq_lightning.planning.check import check_run
from lq_lightning.planning.config import OneBatch, python_program
from lq_lightning.planning.plan import plan_run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(48), nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(320, 48)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(48, 320, bias=False)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def example_batch(self) -> Tensor:
        return torch.zeros(2, 64, dtype=torch.int64)


def _check(nodes: int, gpus_per_node: int, **options: Any) -> tuple[str, list[CheckedLine]]:
    run = python_program(Model, {"strategy": lq.QuantizedFSDPStrategy(**options)})
    machine = {"gpu": "H100", "nodes": nodes, "gpus_per_node": gpus_per_node, "network": "10gbit"}
    plan = plan_run(run, machine, alternatives=False)
    return check_run(run, plan, machine)


def _off(lines: list[CheckedLine]) -> dict[str, float]:
    """Lines whose measurement is more than 1.5% away: storages are rounded to 512 bytes."""
    assert lines
    found = {line.name: line.difference for line in lines if line.difference is not None}
    return {name: difference for name, difference in found.items() if abs(difference) > 0.015}


def test_one_process_holds_what_its_plan_says() -> None:
    note, lines = _check(1, 1)
    assert note == ""
    names = {"weights", "optimizer states", "gradients", "saved activations"}
    assert names <= {line.name for line in lines}
    assert _off(lines) == {}


def test_other_ranks_than_planned_are_planned() -> None:
    note, lines = _check(2, 4, **SMALL)
    assert note.startswith("The plan is of 2 nodes of 4 ranks, and one rank trained here")
    assert not any(line.name.startswith("sent") for line in lines)


def _two_ranks(rank: int, world: int, root: str) -> tuple[dict[str, float], list[str]]:
    _, lines = _check(1, 2, gradients="TLq-HS", weights="qWD", replica="full", **SMALL)
    if rank:
        return {}, [str(len(lines))]
    return _off(lines), [line.name for line in lines if line.difference is not None]


def test_two_ranks_hold_and_send_what_their_plan_says(tmp_path: Path) -> None:
    (off, names), (_, lines) = run_trainer(_two_ranks, 2, str(tmp_path))
    assert off == {}
    assert {"weights", "optimizer states", "sent within nodes"} <= set(names)
    assert lines == ["0"], "rank 0 has the table"


def test_a_plan_of_a_file_is_compared_at_the_end_of_fit(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    lq.plan(Model, trainer={}, gpus_per_node=1, alternatives=False).to_json(file)
    assert json.loads(file.read_text())["memory"]
    check = lq.callbacks.PlanCheck(file)
    trainer = Trainer(
        accelerator="cpu", callbacks=[check], max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), OneBatch(Model().example_batch()))
    weights = next(line for line in check.lines if line.name == "weights")
    assert weights.difference == pytest.approx(0, abs=0.015)
