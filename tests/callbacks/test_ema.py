"""Averages of the weights under both strategies, against Lightning's on one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    WeightAveraging,
)
from lq_testing.lightning_models import EXACT, PLAIN, SMALL, Losses, TinyModule, loader, run_trainer
from lq_testing.lightning_models import trainer as make_trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from lq_lightning import QuantizedFSDPStrategy, QuantizedPipelineStrategy
from lq_lightning.callbacks import EMA
from lq_lightning.checkpoint.consolidate import consolidate_checkpoint

STRATEGIES: dict[str, Any] = {
    "fsdp": lambda: QuantizedFSDPStrategy(reshard_after_forward=False, **PLAIN),
    "pipeline": lambda: QuantizedPipelineStrategy(
        num_microbatches=2, save_distributed_checkpoint=False, **EXACT
    ),
}
DECAYS = {"fsdp": 0.8, "pipeline": None}


class Values(Callback):
    """Validation losses, and the weights that training has between validations."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.weights: dict[str, Tensor] = {}

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.values.append(trainer.callback_metrics["val"].item())
        self.weights = _weights(module)


class _Looks(TinyModule):
    """Runs forwards after steps and evaluations, which leave units gathered."""

    automatic_optimization = False

    def training_step(self, tokens: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.net(tokens)
        self.manual_backward(loss)
        optimizer.step()
        with torch.no_grad():
            self.net(tokens)
        return {"loss": loss.detach()}

    def on_validation_epoch_end(self) -> None:
        strategy: Any = self.trainer.strategy
        with torch.no_grad(), strategy.root_forward():
            self.net(next(iter(loader(4))))


def _weights(module: pl.LightningModule) -> dict[str, Tensor]:
    return {
        name: p.full_tensor() if isinstance(p, DTensor) else p.detach().clone()
        for name, p in module.named_parameters()
    }


def _fit(
    root: str,
    strategy: Any,
    average: Callback | None,
    path: Any = None,
    model: dict[str, Any] | None = None,
    make: type[TinyModule] = TinyModule,
    **options: Any,
) -> tuple[pl.Trainer, list[float], Values]:
    pl.seed_everything(3, verbose=False)
    losses, values = Losses(), Values()
    defaults: dict[str, Any] = {
        "devices": int(os.environ.get("WORLD_SIZE", "1")),
        "callbacks": [losses, values] if average is None else [average, losses, values],
        "use_distributed_sampler": False,
        "max_epochs": 2,
        "val_check_interval": 2,
    }
    run = make_trainer(strategy, root, **{**defaults, **options})
    module = make(**(model or {}))
    run.fit(module, loader(16), loader(8), ckpt_path=path)
    return run, losses.values, values


def _against_lightning(rank: int, world_size: int, root: str, kind: str) -> Any:
    """Losses of averaged weights, which a checkpoint brings to a new run."""
    decay, make = DECAYS[kind], STRATEGIES[kind]
    looks = _Looks if kind == "fsdp" else TinyModule
    run, _, values = _fit(root, make(), EMA(decay), model={"tied": True}, make=looks)
    losses, path = list(values.values), f"{root}/{kind}.ckpt"
    run.save_checkpoint(path)
    again = make_trainer(make(), root, callbacks=[EMA(decay)], use_distributed_sampler=False)
    (test,) = again.test(TinyModule(tied=True), loader(8), ckpt_path=path, verbose=False)
    assert test["val"] == pytest.approx(losses[-1], rel=1e-5)
    return losses


@pytest.mark.parametrize("kind", STRATEGIES)
def test_averages_are_those_of_lightning(kind: str, tmp_path: Path) -> None:
    decay = DECAYS[kind]
    losses = run_trainer(_against_lightning, 2, str(tmp_path), kind)[0]
    callback = WeightAveraging() if decay is None else EMAWeightAveraging(decay=decay)
    run, _, values = _fit(str(tmp_path), "auto", callback, model={"tied": True})
    assert losses == pytest.approx(values.values, abs=2e-5)
    path = tmp_path / "file.ckpt"
    consolidate_checkpoint(tmp_path / f"{kind}.ckpt", path, averaged=True)
    found = TinyModule.load_from_checkpoint(path).state_dict()
    for name, value in run.lightning_module.state_dict().items():  # Lightning leaves averages
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)


def _same_training(rank: int, world_size: int, root: str, kind: str) -> Any:
    """Evaluation leaves training as it is, and a resumed run has the same averages."""
    make = {
        "fsdp": lambda: QuantizedFSDPStrategy(**SMALL),
        "nodes": lambda: QuantizedFSDPStrategy(**SMALL, node_size=1, local_steps=3),
        "pipeline": lambda: QuantizedPipelineStrategy(
            pipeline_size=2, num_microbatches=2, **SMALL, **EXACT
        ),
    }[kind]
    _, expected, _ = _fit(root, make(), None, limit_val_batches=0)
    whole = EMA(0.9)
    run, losses, validated = _fit(root, make(), whole)
    if kind != "nodes":  # where a validation ends a cycle
        assert losses == expected
        assert not any(run.strategy.communication.external_weight_updates.values())
    path = f"{root}/{kind}.ckpt"
    run.save_checkpoint(path)
    with whole.applied():
        averages = _weights(run.lightning_module)
        run.save_checkpoint(f"{root}/averages.ckpt", weights_only=True)
        with pytest.raises(RuntimeError, match="averaged weights beside the state of optimizers"):
            run.save_checkpoint(f"{root}/refused.ckpt")
    half, again = EMA(0.9), EMA(0.9)
    part, _, _ = _fit(root, make(), half, max_epochs=1)
    part.save_checkpoint(f"{root}/half.ckpt")
    resumed, _, rest = _fit(root, make(), again, f"{root}/half.ckpt")
    assert rest.values == validated.values[2:]
    with again.applied():
        found = _weights(resumed.lightning_module)
    assert all(torch.equal(found[name], averages[name]) for name in averages)
    return validated.values


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("fsdp", 2),
        pytest.param("nodes", 2, marks=pytest.mark.slow),
        pytest.param("pipeline", 4, marks=pytest.mark.slow),
    ],
)
def test_evaluation_leaves_training_as_it_is(kind: str, ranks: int, tmp_path: Path) -> None:
    values = run_trainer(_same_training, ranks, str(tmp_path), kind)[0]
    consolidate_checkpoint(tmp_path / f"{kind}.ckpt", tmp_path / "file.ckpt", averaged=True)
    consolidate_checkpoint(tmp_path / "averages.ckpt", tmp_path / "saved.ckpt")
    module = TinyModule.load_from_checkpoint(tmp_path / "file.ckpt")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(saved[n], v) for n, v in module.state_dict().items())
    with torch.no_grad():  # evaluations compute with the averages, not with old replicas
        losses = [module.net(batch).item() for batch in loader(8)]
    assert sum(losses) / len(losses) == pytest.approx(values[-1], rel=1e-3)
    # one rank goes on with them
    average = EMA(0.9)
    run, _, _ = _fit(
        str(tmp_path), QuantizedFSDPStrategy(), average, tmp_path / f"{kind}.ckpt", max_epochs=2
    )
    with average.applied():
        assert all(torch.equal(saved[n], v) for n, v in run.lightning_module.state_dict().items())


class _Fails(TinyModule):
    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        raise KeyError("of this test")


def test_weights_come_back_after_an_error(tmp_path: Path) -> None:
    average, module = EMA(0.5), _Fails()
    run = make_trainer(QuantizedFSDPStrategy(), str(tmp_path), devices=1, callbacks=[average])
    with pytest.raises(KeyError):
        run.fit(module, loader(8), loader(4))
    trained = _weights(module)
    with average.applied():
        assert not torch.equal(trained["net.head.weight"], _weights(module)["net.head.weight"])
    assert all(torch.equal(trained[name], value) for name, value in _weights(module).items())


class _Nests(Callback):
    def __init__(self, average: EMA) -> None:
        self.average = average

    def on_validation_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        before = module.net.head.weight.clone()
        with self.average.applied():
            assert torch.equal(module.net.head.weight, before)
        assert torch.equal(module.net.head.weight, before), "weights of training are evaluated"


class _Renames(TinyModule):
    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        super().validation_step(tokens, batch_idx)
        self.evaluated = self.net.head.weight.clone()

    def on_validation_epoch_end(self) -> None:
        assert torch.equal(self.net.head.weight, self.evaluated)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {n.removeprefix("net."): value for n, value in state.items()}


def test_what_is_evaluated_and_saved_is_said(tmp_path: Path) -> None:
    average = EMA(0.5)
    saves = ModelCheckpoint(tmp_path, save_weights_only=True)
    options: dict[str, Any] = {"devices": 1, "enable_checkpointing": True}
    callbacks = [average, _Nests(average), saves]
    run = make_trainer(QuantizedFSDPStrategy(), str(tmp_path), callbacks=callbacks, **options)
    with pytest.warns(UserWarning, match="`save_weights_only=True` saves the weights of training"):
        run.fit(_Renames(), loader(8), loader(8))
    run.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="renamed or removed"):
        consolidate_checkpoint(tmp_path / "a.ckpt", tmp_path / "b.ckpt", averaged=True)


def test_refusals(tmp_path: Path) -> None:
    for options in ({"decay": 1.0}, {"decay": "0.9"}, {"every_n_steps": 0}, {"start_step": -1}):
        with pytest.raises(ValueError, match=f"EMA\\({next(iter(options))}="):
            EMA(**options)
    with pytest.raises(ValueError, match=r"2 `EMA`.*one average"):
        make_trainer("auto", str(tmp_path), devices=1, callbacks=[EMA(), EMA(None)])
    run = make_trainer("auto", str(tmp_path), devices=1, callbacks=[EMA()])
    with pytest.raises(ValueError, match=r"SingleDeviceStrategy.*EMAWeightAveraging"):
        run.fit(TinyModule(), loader(8))
    run = make_trainer(QuantizedFSDPStrategy(), str(tmp_path), devices=1)
    run.fit(TinyModule(), loader(8))
    run.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="holds no averages"):
        consolidate_checkpoint(tmp_path / "a.ckpt", tmp_path / "b.ckpt", averaged=True)
