"""Trained bit widths on two ranks: one gradient, one collective per step, equal gates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lq_testing import run_ranks
from lq_testing.lightning_models import Losses, TinyModule, loader, trainer
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from lq_lightning import AdaptiveBits, QuantizedFSDPStrategy
from lq_lightning.callbacks import gate_placement

FAST: dict[str, Any] = {"start_bits": 5.0, "learning_rate": 0.03, "beta": 1.0}
PLAIN = {"weights": "none", "gradients": "none"}


def model(kind: type[TinyModule] = TinyModule) -> Any:
    torch.manual_seed(0)
    return kind("sgd")


class Sharded(TinyModule):
    """Sharded by its user."""

    def configure_model(self) -> None:
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


def _fit(
    strategy: Any, root: str, kind: Any = TinyModule, resume: str | None = None, **options: Any
) -> tuple[AdaptiveBits, list[float]]:
    bits, losses = AdaptiveBits(**FAST), Losses()
    callbacks = [bits, losses, *options.pop("callbacks", [])]
    run = trainer(strategy, root, callbacks=callbacks, **options)
    run.fit(model(kind), loader(), loader(8), ckpt_path=resume)
    return bits, losses.values


def _states(bits: AdaptiveBits) -> dict[str, Tensor]:
    return {site: gate.state.clone() for site, gate in bits.gates.items()}


def _check_equal_on_ranks(bits: AdaptiveBits, world: int) -> None:
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, (_states(bits), bits.metrics()["adaptive_bits/mean"]))
    torch.testing.assert_close(gathered[0], gathered[1], rtol=0, atol=0)


def _strategies(rank: int, world: int, root: str) -> None:
    calls: list[Any] = []
    average = gate_placement._average

    def counted(values: Tensor) -> Tensor:
        calls.append(tuple(values.shape))
        return average(values)

    gate_placement._average = counted
    found = {}
    for name, strategy, kind in (
        ("ddp", "ddp", TinyModule),
        ("fsdp", QuantizedFSDPStrategy(**PLAIN), TinyModule),
        ("quantized", QuantizedFSDPStrategy(node_size=1, min_quantized_numel=64), TinyModule),
        ("stock", ModelParallelStrategy(2, 1), Sharded),
    ):
        calls.clear()
        bits, losses = _fit(strategy, root, kind, max_epochs=2)
        assert calls == [(3, 48)] * 8, name  # sums and values of both sites at once, per step
        assert losses[-1] < losses[0]
        _check_equal_on_ranks(bits, world)
        found[name] = _states(bits)
        for state in found[name].values():  # a mean over ranks of 4 sequences of 8
            assert state[4].tolist() == [32.0] * 24
    for name in ("fsdp", "stock"):
        torch.testing.assert_close(found[name], found["ddp"], rtol=1e-3, atol=1e-5)


def _resume(rank: int, world: int, root: str) -> None:
    def run(folder: str, steps: int, resume: str | None = None) -> Any:
        saved = ModelCheckpoint(f"{root}/{folder}", every_n_train_steps=4, filename="{step}")
        strategy = QuantizedFSDPStrategy(node_size=1, min_quantized_numel=64)
        options = {"enable_checkpointing": True, "callbacks": [saved], "max_epochs": -1}
        bits, losses = _fit(strategy, root, resume=resume, max_steps=steps, **options)
        return _states(bits), losses

    whole = run("whole", 8)
    run("half", 4)
    rest = run("rest", 8, f"{root}/half/step=4.ckpt")
    torch.testing.assert_close(rest[0], whole[0], rtol=0, atol=0)
    assert rest[1] == whole[1][4:]


class Uneven(TinyModule):
    """Runs a site on one rank only, at first."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        if self.global_rank == 0:
            self.net.blocks[0].norm(torch.zeros(1, 24))
        loss: Tensor = self.net.head(self.net.embed(tokens)).square().mean()
        return loss


def _uneven(rank: int, world: int, root: str) -> None:
    bits = AdaptiveBits(sites=["net.embed", "net.blocks.0.norm"])
    run = trainer("ddp_find_unused_parameters_true", root, callbacks=[bits])
    with pytest.raises(
        RuntimeError, match="`net.blocks.0.norm:output` in the first step on rank 1"
    ):
        run.fit(model(Uneven), loader())


def test_strategies(tmp_path: Path) -> None:
    run_ranks(_strategies, 2, str(tmp_path), backend=None, torchrun=True, timeout=120)


def test_resuming_sharded_runs_is_exact_to_the_bit(tmp_path: Path) -> None:
    run_ranks(_resume, 2, str(tmp_path), backend=None, torchrun=True, timeout=120)


def test_a_site_that_one_rank_does_not_run_is_named_on_both(tmp_path: Path) -> None:
    run_ranks(_uneven, 2, str(tmp_path), backend=None, torchrun=True, timeout=120)
