"""Modules that FSDP2 has no place for: layouts, classes of outputs, the meta device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lq_testing.lightning_models import loader, run_trainer, trainer
from torch import Tensor, nn
from torch.distributions import Normal

from lq_lightning import QuantizedFSDPStrategy
from lq_lightning.strategies.checks import check_shardable


class Result:
    """A class of which pytree knows nothing."""

    __slots__ = ("parts",)

    def __init__(self, x: Tensor) -> None:
        self.parts = [SimpleNamespace(x=x)]


class Hiding(nn.Module):
    """Returns its results in an object; their consumer takes them out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.kind = kind

    def forward(self, given: Any) -> Any:
        x = given
        if isinstance(given, Normal):
            x = given.loc * given.scale
        elif isinstance(given, Result):
            x = given.parts[0].x
        x = x + self.inner(x)
        return Normal(x, x.sigmoid()) if self.kind == "distribution" else Result(x)


class Unusual(pl.LightningModule):
    """A module of each kind, the same on every rank and in one process."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.gradients: list[Tensor] = []
        if kind in ("object", "distribution"):
            self.blocks = nn.ModuleList(Hiding(kind) for _ in range(3))
        else:
            self.blocks = nn.ModuleList(_convolution(kind) for _ in range(2))

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        x: Any = tokens[:, :8] / 30
        if not isinstance(self.blocks[0], Hiding):
            x = x.view(-1, 2, 2, 2)
        for block in self.blocks:
            x = block(x)
        if isinstance(x, Normal):
            x = x.loc + x.scale
        elif isinstance(x, Result):
            x = x.parts[0].x
        loss: Tensor = x.square().mean()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.parameters()]
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        self.gradients.append(torch.cat([g.reshape(-1) for g in whole]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _convolution(kind: str) -> nn.Module:
    block = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Sequential(nn.Conv2d(2, 2, 1)))
    if kind == "channels_last":
        block = block.to(memory_format=torch.channels_last)
    elif kind == "transposed":
        block[0].weight = nn.Parameter(torch.randn(3, 3, 2, 2).permute(3, 2, 0, 1))
    return block


def _gradients(kind: str, root: str, strategy: Any, devices: int) -> Tensor:
    module = Unusual(kind)
    trainer(strategy, root, devices=devices, use_distributed_sampler=False).fit(module, loader(8))
    return torch.stack(module.gradients)


KINDS = ("object", "distribution", "channels_last", "transposed")


def _like_one_process(rank: int, world: int, root: str, expected: dict[str, Tensor]) -> None:
    for kind in KINDS:
        strategy = QuantizedFSDPStrategy(weights="none", gradients="none")
        torch.testing.assert_close(
            _gradients(kind, root, strategy, 2), expected[kind], msg=lambda m, k=kind: f"{k}: {m}"
        )


def test_unusual_outputs_and_layouts_compute_what_one_process_does(tmp_path: Any) -> None:
    expected = {kind: _gradients(kind, str(tmp_path), "auto", 1) for kind in KINDS}
    run_trainer(_like_one_process, 2, str(tmp_path), expected)


def test_expanded_parameters_are_named() -> None:
    module = nn.Module()
    module.layer = nn.Linear(4, 4)
    module.layer.weight = nn.Parameter(torch.ones(4, 1).expand(4, 4))
    with pytest.raises(ValueError, match=r"`layer.weight` of shape \(4, 4\).*several elements"):
        check_shardable(module)


class Rotating(pl.LightningModule):
    """Starts on the meta device, with a buffer that only its ``__init__`` fills."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
            self.register_buffer("frequencies", 1.0 / torch.arange(1, 5), persistent=False)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(tokens[:, :4] * self.frequencies).square().mean()
        assert torch.isfinite(loss)
        return loss

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        self.training_step(tokens, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Filled(Rotating):
    def on_fit_start(self) -> None:
        self.frequencies.copy_(1.0 / torch.arange(1, 5))


def _meta_start(rank: int, world: int, root: str) -> None:
    run = trainer(QuantizedFSDPStrategy(), root, devices=world)
    run.fit(Filled(), loader(8))
    run.save_checkpoint(f"{root}/{world}.ckpt")  # holds no such buffer
    for path in (None, f"{root}/{world}.ckpt"):
        with pytest.raises(RuntimeError, match="buffer `frequencies` was made on the meta device"):
            trainer(QuantizedFSDPStrategy(), root, devices=world, max_epochs=2).fit(
                Rotating(), loader(8), ckpt_path=path
            )
    with pytest.raises(RuntimeError, match="buffer `frequencies` was made on the meta device"):
        trainer(QuantizedFSDPStrategy(), root, devices=world).validate(Rotating(), loader(8))


@pytest.mark.parametrize("world", [1, 2])
def test_buffers_that_a_meta_start_leaves_empty_are_refused(world: int, tmp_path: Any) -> None:
    run_trainer(_meta_start, world, str(tmp_path))
