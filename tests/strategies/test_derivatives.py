"""Derivatives with respect to inputs within a step, and second ones, on two ranks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lq_testing.lightning_models import loader, run_trainer, trainer
from torch import Tensor, nn

from lq_lightning import QuantizedFSDPStrategy

REFUSED = "gradient through the unit `{}` was asked for with `create_graph=True`"


class Penalized(pl.LightningModule):
    """A critic with a penalty on the gradient of its input.

    Args:
        penalty: ``"first"`` (a constant for backward), ``"second"`` or ``"manual"``, the same with
            manual optimization; ``"backward"`` differentiates parameters with a graph.
        units: Whether the critic has units.
    """

    def __init__(self, penalty: str, units: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Tanh()) for _ in range(2)]
        self.blocks = nn.Sequential(*(layers if units else layers[0][0]))
        self.head = nn.Linear(8, 1)
        self.penalty = penalty
        self.automatic_optimization = penalty in ("first", "second")
        self.seen: list[Tensor] = []

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor | None:
        x = (tokens[:, :8] / 30).requires_grad_()
        score = self.head(self.blocks(x).tanh())
        second = self.penalty in ("second", "manual")
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=second, retain_graph=True)
        loss: Tensor = score.square().mean() + slope.square().sum()
        if not second:
            attacked = self.head(self.blocks(x.detach() + slope.sign()).tanh())
            loss = loss + attacked.square().mean()
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss, create_graph=self.penalty == "backward")
        self.optimizers().step()  # type: ignore[union-attr]
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        self.seen.append(torch.cat([g.detach().reshape(-1) for g in whole]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _gradients(penalty: str, units: bool, root: str, devices: int, **options: Any) -> Tensor:
    module = Penalized(penalty, units)
    plain = {"weights": "none", "gradients": "none", **options}
    strategy: Any = QuantizedFSDPStrategy(**plain) if devices > 1 else "auto"
    run = trainer(strategy, root, devices=devices, use_distributed_sampler=False)
    run.fit(module, loader(8))
    return torch.stack(module.seen)


RIGHT = [("first", True), ("first", False), ("second", False), ("manual", False)]
WRONG = [("second", True, "blocks.1"), ("manual", True, "blocks.1"), ("backward", True, "root")]


def _on_two_ranks(rank: int, world: int, root: str, expected: list[Tensor]) -> None:
    for (penalty, units), gradients in zip(RIGHT, expected, strict=True):
        found = _gradients(penalty, units, root, 2)
        torch.testing.assert_close(found, gradients, msg=lambda m, p=penalty: f"{p}: {m}")
    for penalty, units, unit in WRONG:
        for keep in (False, True):
            with pytest.raises(RuntimeError, match=REFUSED.format(unit)):
                _gradients(penalty, units, root, 2, reshard_after_forward=not keep)
    with pytest.raises(RuntimeError, match=REFUSED.format("blocks.1")):
        _gradients("second", True, root, 2, weights="qWD", gradients="TLq-HS")
    torch.testing.assert_close(_gradients(*RIGHT[0], root, 2), expected[0])  # after an error


def test_second_derivatives_are_right_or_refused(tmp_path: Any) -> None:
    expected = [_gradients(*case, str(tmp_path), 1) for case in RIGHT]
    run_trainer(_on_two_ranks, 2, str(tmp_path), expected)
