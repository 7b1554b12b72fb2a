"""Gradients of different parameters on different ranks are named before they are used."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lq_testing.lightning_models import loader, run_trainer, trainer
from torch import Tensor, nn

from lq_lightning import QuantizedFSDPStrategy
from lq_lightning.strategies.parts import sharded

CODECS = ({"weights": "none", "gradients": "none"}, {"min_quantized_numel": 1, "node_size": 1})


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        for index in chosen:
            x = x + self.experts[index](x)
        return x


class Routed(pl.LightningModule):
    """Ranks call the experts that ``choose(step, rank)`` says."""

    def __init__(self, choose: Any, automatic: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Mixture() for _ in range(2))
        self.choose = choose
        self.automatic_optimization = automatic
        self.steps = 0
        self.gradients: list[bool] = []

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor | None:
        x = tokens[:, :8] / 30
        chosen = self.choose(batch_idx, self.global_rank)
        loss: Tensor = self.blocks[1](self.blocks[0](x, (0,)), chosen).square().mean()
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        self.optimizers().step()  # type: ignore[union-attr]
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps += 1
        self.gradients.append(self.blocks[1].experts[1].weight.grad is not None)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Late(Routed):
    def on_train_start(self) -> None:
        agreement = sharded(self).agreement  # type: ignore[union-attr]
        agreement._waits = False  # type: ignore[union-attr]


def _fit(module: pl.LightningModule, root: str, options: dict[str, Any], **more: Any) -> None:
    run = trainer(QuantizedFSDPStrategy(**options), root, use_distributed_sampler=False, **more)
    run.fit(module, loader(16))


def _different_experts(rank: int, world: int, root: str) -> None:
    named = r"of the unit `blocks\.1`, .*On rank {} there are gradients of `blocks\.1\.experts\.{}"
    for options in CODECS:
        for automatic in (True, False):
            module = Routed(lambda step, rank: (rank,), automatic)
            with pytest.raises(RuntimeError, match=named.format(rank, rank)):
                _fit(module, root, options)
            assert module.steps == 0, "the gradients were used"
        # alike on all ranks, and different from step to step, until the last one
        module = Routed(lambda step, rank: (step % 2, 0) if step < 3 else (rank,))
        with pytest.raises(RuntimeError, match=named.format(rank, rank)):
            _fit(module, root, options)
        assert module.gradients == [False, True, False]
        # experts that are units of their own
        units = [f"blocks.{block}.experts.{expert}" for block in (0, 1) for expert in (0, 1, 2)]
        of_experts: dict[str, Any] = {**options, "units": units}
        for chosen, error in (
            ((rank,), r"of the unit `blocks\.1\.experts\.0` \(and 1 more\)"),
            ((rank, 1 - rank), "reduced the gradients of units in different orders"),
        ):
            module = Routed(lambda *_, chosen=chosen: chosen)  # type: ignore[misc]
            with pytest.raises(RuntimeError, match=error):
                _fit(module, root, of_experts)
    # accumulated: alike in the end, whichever micro-batch it was; then unlike
    module = Routed(lambda step, rank: (0, 1) if step % 2 == rank else (0,))
    _fit(module, root, CODECS[0], accumulate_grad_batches=2)
    assert module.gradients == [True, True]
    for reduce in (True, False):
        module = Routed(lambda step, rank: (0, rank + 1) if step == 2 else (0,))
        more = {**CODECS[0], "reduce_every_microbatch": reduce}
        with pytest.raises(RuntimeError, match="On rank .*experts.0"):
            _fit(module, root, more, accumulate_grad_batches=2)
        assert module.steps == 1
    # as on GPUs: what ranks have packed before is compared one step late, or at the end
    for batches in (3, 4):
        module = Late(lambda step, rank: ((0,), (1,), (rank,), (0,))[step])
        with pytest.raises(RuntimeError, match=named.format(rank, rank)):
            _fit(module, root, CODECS[0], limit_train_batches=batches)
        assert module.steps == 3
    _different_modules(rank, root)


def _different_modules(rank: int, root: str) -> None:
    frozen, swapped = (Routed(lambda step, rank: (0, 1)) for _ in range(2))
    frozen.blocks[1].experts[rank].requires_grad_(False)
    names = (
        r"`blocks.1.experts.0.weight` .* not trained on the first rank, but .* trained on rank 1"
    )
    with pytest.raises(ValueError, match=names):
        _fit(frozen, root, CODECS[0])
    if rank == 1:
        swapped.blocks[0].experts.bias = nn.Parameter(torch.ones(8))
    with pytest.raises(ValueError, match=r"number 1 of .* but `blocks.0.experts.bias` of shape"):
        _fit(swapped, root, CODECS[0])


def test_experts_that_only_some_ranks_call_are_named(tmp_path: Any) -> None:
    run_trainer(_different_experts, 2, str(tmp_path))
