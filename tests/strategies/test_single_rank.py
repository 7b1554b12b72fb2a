"""On one rank the strategy is an ordinary single-device run."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner
from lq_testing import run_ranks
from lq_testing.lightning_models import Losses, TinyModule, Tokens, loader, trainer
from lq_testing.models import TinyLM
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from lq_lightning import QuantizedFSDPStrategy


class Noisy(TinyModule):
    """Dropout, and a scalar parameter that FSDP2 could not shard."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        noise = self.dropout(torch.ones(8)).mean()
        loss: Tensor = super().training_step(tokens, batch_idx) * self.temperature * noise
        return loss


class Odd(BatchSampler):
    """A batch sampler that Lightning cannot make again with another sampler."""

    def __init__(self, secret: int) -> None:
        super().__init__(RandomSampler(range(secret)), 4, drop_last=False)


def _run(root: str, strategy: Any, data: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    pl.seed_everything(3, verbose=False)
    module = Noisy()
    losses = Losses()
    callbacks = [losses, *options.pop("callbacks", [])]
    run = trainer(strategy, root, devices=1, callbacks=callbacks, max_epochs=2, **options)
    run.fit(module, data or DataLoader(Tokens(), batch_size=4, shuffle=True), loader(8))
    return run, module, losses.values


def _same(rank: int, world_size: int, root: str) -> None:
    cases: list[dict[str, Any]] = [
        {"precision": "32-true"},
        {"precision": "bf16-mixed", "gradient_clip_val": 0.5},
        {"precision": "bf16-true", "accumulate_grad_batches": 4},
        {"data": DataLoader(Tokens(), batch_sampler=Odd(32))},
    ]
    for case in cases:
        _, reference, expected = _run(root, "auto", **case)
        for strategy in ("quantized_fsdp", QuantizedFSDPStrategy()):
            run, module, losses = _run(root, strategy, **case)
            assert losses == expected, case
            mine = dict(module.named_parameters())
            assert all(torch.equal(mine[n], p) for n, p in reference.named_parameters())
            assert not any(isinstance(p, DTensor) for p in module.parameters())
            assert run.strategy.communication is None
            assert run.strategy.launcher is None
    predictions = run.predict(module, loader(8))
    assert torch.equal(torch.stack(predictions), torch.stack(_predict(reference)))


def _predict(module: pl.LightningModule) -> list[Tensor]:
    with torch.no_grad():
        return [module.predict_step(tokens, 0) for tokens in loader(8)]


def _single_device_programs(rank: int, world_size: int, root: str) -> None:
    # checkpoints are files that stock Lightning reads, and continue exactly
    saves = ModelCheckpoint(f"{root}/a", every_n_epochs=1, save_top_k=-1)
    options: dict[str, Any] = {"callbacks": [saves], "enable_checkpointing": True}
    _run(root, "quantized_fsdp", plugins=[AsyncCheckpointIO()], **options)
    first = str(next(Path(root, "a").glob("epoch=0*")))
    assert torch.load(first, weights_only=True)["global_step"] == 8
    Noisy.load_from_checkpoint(first)
    stock = trainer("auto", root, devices=1, max_epochs=2)
    stock.fit(Noisy(), loader(), ckpt_path=first)
    ours = trainer("quantized_fsdp", root, devices=1, max_epochs=2)
    again = Noisy()
    ours.fit(again, loader(), ckpt_path=first)
    assert ours.global_step == stock.global_step == 16
    # averaging, deepcopy, learning rate finder, compiled module
    copy.deepcopy(again)
    for callback in (WeightAveraging(), StochasticWeightAveraging(swa_lrs=1e-3)):
        _run(root, "quantized_fsdp", callbacks=[callback])
    run = trainer("quantized_fsdp", root, devices=1)
    found = Tuner(run).lr_find(Noisy(), loader(64), num_training=5, update_attr=False)
    assert len(found.results["lr"]) >= 5
    pl.seed_everything(3, verbose=False)
    compiled, losses = torch.compile(Silent(), backend="eager"), Losses()
    trainer("quantized_fsdp", root, devices=1, callbacks=[losses]).fit(compiled, loader())
    pl.seed_everything(3, verbose=False)
    expected = Losses()
    trainer("auto", root, devices=1, callbacks=[expected]).fit(Silent(), loader())
    assert losses.values == expected.values
    # options of sharding mean the same here
    pl.seed_everything(3, verbose=False)
    original, torch.compile = torch.compile, functools.partial(torch.compile, backend="eager")
    try:
        module, losses = Silent(), Losses()
        strategy = QuantizedFSDPStrategy(compile_units=True)
        trainer(strategy, root, devices=1, callbacks=[losses]).fit(module, loader())
    finally:
        torch.compile = original
    assert losses.values == expected.values
    assert "forward" in module.net.blocks[0].__dict__
    with pytest.raises(ValueError, match=r"no submodule of class \['Blok'\]"):
        _saving_trainer(QuantizedFSDPStrategy(units=["Blok"]), root).fit(Silent(), loader())
    assert not Path(root, "on_exception.ckpt").exists()  # nothing has been trained
    failing = Failing()
    run = _saving_trainer(QuantizedFSDPStrategy(), root, failing)
    with pytest.raises(ZeroDivisionError):
        run.fit(Silent(), loader())
    assert torch.load(f"{root}/on_exception.ckpt", weights_only=True)["global_step"] == 1
    Path(root, "on_exception.ckpt").unlink()
    failing.at_start = True
    with pytest.raises(ZeroDivisionError):
        run.fit(Silent(), loader())
    assert not Path(root, "on_exception.ckpt").exists()  # nothing has been trained this time
    # meta device
    module = MetaModule()
    trainer("quantized_fsdp", root, devices=1).fit(module, loader(64))
    # the user's own fully_shard
    sharded = OwnSharding()
    run = trainer("quantized_fsdp", root, devices=1)
    run.fit(sharded, loader(), loader(8))
    assert isinstance(sharded, FSDPModule)
    run.save_checkpoint(f"{root}/own.ckpt")
    TinyModule.load_from_checkpoint(f"{root}/own.ckpt")
    run.test(sharded, loader(8), ckpt_path=f"{root}/own.ckpt", verbose=False)


def _saving_trainer(strategy: Any, root: str, *callbacks: Callback) -> pl.Trainer:
    every = [OnExceptionCheckpoint(root), *callbacks]
    return trainer(strategy, root, devices=1, callbacks=every, enable_checkpointing=True)


class Failing(Callback):
    at_start = False

    def setup(self, *args: Any, **kwargs: Any) -> None:
        if self.at_start:
            raise ZeroDivisionError

    def on_train_batch_end(self, *args: Any) -> None:
        raise ZeroDivisionError


class Silent(TinyModule):
    """Logs nothing: Dynamo cannot trace `self.log` in a compiled step."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(tokens)
        return loss


class MetaModule(pl.LightningModule):
    def configure_model(self) -> None:
        with torch.device("meta"):
            self.layers = nn.Sequential(
                *(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
            )

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(tokens[:, :4] / 30).square().mean()
        assert torch.isfinite(loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnSharding(TinyModule):
    def configure_model(self) -> None:
        self.net = TinyLM()
        for block in self.net.blocks:
            fully_shard(block)


def _alone(rank: int, world_size: int, root: str) -> None:
    _same(rank, world_size, root)
    _single_device_programs(rank, world_size, root)


def test_one_rank_is_a_single_device(tmp_path: Path) -> None:
    run_ranks(_alone, 1, str(tmp_path), backend=None, timeout=240.0)


def _meta_on_two(rank: int, world_size: int, root: str) -> None:
    module = MetaModule()
    run = trainer(QuantizedFSDPStrategy(min_quantized_numel=1), root)
    run.fit(module, loader(64))
    halves = module.layers[0][0].weight.full_tensor().chunk(2)
    assert not torch.allclose(*halves)  # ranks drew different numbers
    run.save_checkpoint(f"{root}/meta.ckpt")
    other = MetaModule()
    trainer(QuantizedFSDPStrategy(), root, max_epochs=2).fit(
        other, loader(64), ckpt_path=f"{root}/meta.ckpt"
    )
    assert all(torch.isfinite(p.full_tensor()).all() for p in other.parameters())


def test_meta_device_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(_meta_on_two, 2, str(tmp_path), backend=None, torchrun=True)
