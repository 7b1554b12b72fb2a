"""Pipelines on GPUs with NCCL: the same promises as on CPU ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lq_testing import run_ranks
from lq_testing.lightning_models import Losses, Tokens, trainer
from lq_testing.small_llama import SmallLlama
from torch import Tensor
from torch.utils.data import DataLoader

from lq_lightning import (
    ActivationQuantization,
    AdaptiveBits,
    QuantizedPipelineStrategy,
    QuantizedPrecision,
    StageBitCompensation,
)

run_trainer = functools.partial(run_ranks, backend=None, torchrun=True, timeout=300.0)
EXACT = {"forward_codec": "none", "backward_codec": "none", "weights": "none", "gradients": "none"}
SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zero_bubble", "zbv")


class Llama(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = SmallLlama(layers=4, width=128)
        self.net.embedding.weight.data.mul_(0.02)
        self.net.head.weight = self.net.embedding.weight

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(tokens)
        self.log("loss", loss)
        return loss

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        self.log("val", self.net(tokens), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def _fit(root: str, world: int, strategy: Any, epochs: int = 2, **options: Any) -> Any:
    losses, path = Losses(), options.pop("ckpt_path", None)
    data = {"use_distributed_sampler": False, "num_sanity_val_steps": 1, "gradient_clip_val": 1.0}
    callbacks = [losses, *options.pop("callbacks", [])]
    options |= {"accelerator": "gpu", "max_epochs": epochs, "callbacks": callbacks}
    run = trainer(strategy, root, devices=world, **{**data, **options})
    loaders = [DataLoader(Tokens(64), batch_size=16) for _ in range(2)]
    run.fit(Llama(), *loaders, ckpt_path=path)
    return run, losses.values


def _alone(rank: int, world: int, root: str) -> list[float]:
    losses: list[float] = _fit(root, 1, "auto")[1]
    return losses


def _together(rank: int, world: int, root: str, size: int) -> dict[str, list[float]]:
    found = {}
    for schedule in SCHEDULES:
        several = 2 if schedule in ("interleaved_1f1b", "zbv") else 1
        options = {"schedule": schedule, "stages_per_rank": several, "pipeline_size": size}
        found[schedule] = _fit(root, world, QuantizedPipelineStrategy(**options, **EXACT))[1]
        coded = QuantizedPipelineStrategy(**options, min_quantized_numel=64)
        callbacks = [ActivationQuantization()]
        if schedule not in ("zero_bubble", "zbv"):
            callbacks.append(StageBitCompensation())
        precision = QuantizedPrecision("bf16-mixed")
        _, losses = _fit(root, world, coded, 8, callbacks=callbacks, plugins=[precision])
        assert sum(losses[-4:]) < 0.9 * sum(losses[:4]), (schedule, losses)
    for full in (False, True):
        make = functools.partial(
            QuantizedPipelineStrategy, pipeline_size=size, save_distributed_checkpoint=not full
        )
        whole = _fit(root, world, make())[1]
        run, first = _fit(root, world, make(), 1)
        run.save_checkpoint(f"{root}/{full}.ckpt")
        resumed = _fit(root, world, make(), 2, ckpt_path=f"{root}/{full}.ckpt")[1]
        assert first + resumed == whole, (first, resumed, whole)
    return found


def _adaptive(rank: int, world: int, root: str, size: int) -> list[Any]:
    """Widths that are learned, on both ends; a resumed run has those of one that was not cut."""
    found = []
    for schedule, several in (("1f1b", 1), ("zbv", 2)):
        make = functools.partial(
            QuantizedPipelineStrategy,
            schedule=schedule,
            stages_per_rank=several,
            pipeline_size=size,
            forward_codec="amaq",
            backward_codec="bf16",
            min_quantized_numel=64,
        )
        bits = [
            AdaptiveBits(learning_rate=0.2, beta=0.1, histogram_every_n_steps=0) for _ in range(3)
        ]
        options = {"precision": "bf16-mixed"}
        run, losses = _fit(root, world, make(), 8, callbacks=[bits[0]], **options)
        assert sum(losses[-4:]) < 0.9 * sum(losses[:4]), (schedule, losses)
        path = f"{root}/{schedule}.ckpt"
        cut, first = _fit(root, world, make(), 4, callbacks=[bits[1]], **options)
        cut.save_checkpoint(path)
        options["ckpt_path"] = path
        resumed, last = _fit(root, world, make(), 8, callbacks=[bits[2]], **options)
        assert first + last == losses, (first, last, losses)
        tables = [dict(each.strategy._run.codecs[0].tables) for each in (run, resumed)]
        assert tables[0] == tables[1]
        optimizer = bits[0].optimizer
        assert optimizer is not None
        assert optimizer.reached
        assert abs(optimizer.mean - 4.0) <= 0.1 + 1e-3
        found.append((tables[0], losses))
    return found


def _check_adaptive(tmp_path: Path, world: int, size: int) -> None:
    ranks = run_trainer(_adaptive, world, str(tmp_path), size)
    for found in zip(*ranks, strict=True):
        for index in {index for tables, _ in found for index in tables}:
            assert len({tables[index] for tables, _ in found if index in tables}) == 1


@pytest.mark.gpu(2)
def test_learned_widths_on_two_gpus(tmp_path: Path) -> None:
    _check_adaptive(tmp_path, 2, 2)


@pytest.mark.gpu(4)
def test_learned_widths_on_two_by_two_gpus(tmp_path: Path) -> None:
    _check_adaptive(tmp_path, 4, 2)


@pytest.mark.gpu(2)
def test_two_gpus_in_two_stages(tmp_path: Path) -> None:
    _check(tmp_path, 2, 2)


@pytest.mark.gpu(4)
def test_two_by_two_gpus(tmp_path: Path) -> None:
    _check(tmp_path, 4, 2)


def _check(tmp_path: Path, world: int, size: int) -> None:
    (expected,) = run_trainer(_alone, 1, str(tmp_path))
    for found in run_trainer(_together, world, str(tmp_path), size):
        for schedule, losses in found.items():
            torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-3, msg=schedule)
