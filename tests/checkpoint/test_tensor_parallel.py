"""Checkpoints of tensor-parallel ranks: any sizes, whole files, pretrained weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lq_testing.lightning_models import PLAIN, Losses, run_trainer, trainer
from lq_testing.tensor_models import WIDTH, ParallelModule, batch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lq_lightning import QuantizedFSDPStrategy
from lq_lightning.checkpoint.consolidate import consolidate_checkpoint

HIDDEN = 50  # 25 for each of two tensor-parallel ranks, so 13 and 12 for two data-parallel ones


class Uneven(ParallelModule):
    """Tied embedding, and shards of several sizes, some of them empty."""

    def __init__(self, parallel: bool = True, lr: float = 1e-2) -> None:
        super().__init__(True if parallel else None)
        self.lr = lr
        for block in self.net.blocks:
            block.mlp.up, block.mlp.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.net.tiny = nn.Parameter(torch.ones(3))
        self.net.register_buffer("seen", torch.zeros(2))
        self.net.head.weight = self.net.embedding.weight

    def configure_model(self) -> None:
        super().configure_model()
        self.net.head.weight = self.net.embedding.weight  # each was cut by itself

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        self.net.seen += 1
        return super().training_step(tokens, batch_idx) + self.net.tiny.square().sum()


class Saves(Callback):
    """Saves what a run starts from."""

    def __init__(self, path: str | None) -> None:
        self.path = path

    def on_train_start(self, run: pl.Trainer, module: pl.LightningModule) -> None:
        if self.path is not None:
            run.save_checkpoint(self.path)


def _fit(
    root: str, use: Any, devices: int, start: str | None, save: str | None, **options: Any
) -> tuple[pl.Trainer, list[float]]:
    losses = Losses()
    several = isinstance(use, QuantizedFSDPStrategy) and use._tensor.size > 1
    module = Uneven(several, lr=1e-2 if start is None else 0.5)
    callbacks = [losses, Saves(save and f"{root}/{save}")]
    run = trainer(
        use, root, devices=devices, callbacks=callbacks, use_distributed_sampler=False, **options
    )
    data = DataLoader([batch(i, size=1)[0] for i in range(16)], batch_size=4)
    run.fit(module, data, ckpt_path=start and f"{root}/{start}")
    return run, losses.values


RUNS = {  # tensor-parallel ranks, single file?, checkpoint to start from
    4: [(2, False, "one"), (1, False, "4a"), (2, True, "4b"), (1, True, "4c"), (2, False, "4d")],
    2: [(2, False, "4a"), (1, False, "2a"), (2, True, "2b"), (1, True, "4a")],
}


def _train(rank: int, world: int, root: str) -> list[list[float]]:
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch.distributed.tensor._redistribute").addHandler(handler)
    found = []
    for (size, full, start), name in zip(RUNS[world], "abcde", strict=False):
        use = QuantizedFSDPStrategy(
            tensor_parallel_size=size, save_distributed_checkpoint=not full, **PLAIN
        )
        _, losses = _fit(root, use, world, f"{start}.ckpt", f"{world}{name}.ckpt", max_epochs=2)
        found.append(losses)
    assert not warned
    return found


def _tensors(content: Any) -> dict[str, Tensor]:
    (states,) = content["optimizer_states"]
    found = {f"weight {name}": t for name, t in content["state_dict"].items()}
    for position, entry in states["state"].items():
        name = states["parameter_names"][position]
        found |= {f"{key} {name}": t for key, t in entry.items()}
    return found


def test_checkpoints_of_all_sizes_hold_and_restore_the_same(tmp_path: Path) -> None:
    root = str(tmp_path)
    first, _ = _fit(root, "auto", 1, None, None)
    first.save_checkpoint(f"{root}/plain.ckpt")
    _, losses = _fit(root, "auto", 1, "plain.ckpt", None, max_epochs=2)
    # ours holds the names of states
    own = QuantizedFSDPStrategy()
    assert _fit(root, own, 1, "plain.ckpt", "one.ckpt", max_epochs=2)[1] == losses
    expected = _tensors(torch.load(f"{root}/one.ckpt", weights_only=True))
    assert len(expected) > 60
    for world, runs in RUNS.items():
        for found in run_trainer(_train, world, root):
            for values in found:
                torch.testing.assert_close(values, losses, rtol=1e-5, atol=1e-6)
        for (_, full, _), name in zip(runs, "abcde", strict=False):
            path = one = tmp_path / f"{world}{name}.ckpt"
            assert path.is_dir() is not full
            if not full:
                one = tmp_path / "joined.ckpt"
                consolidate_checkpoint(path, one)
            tensors = _tensors(torch.load(one, weights_only=True))
            assert tensors.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(tensors[key], value), (path.name, key)
        assert _fit(root, "auto", 1, "joined.ckpt", None, max_epochs=2)[1] == losses
