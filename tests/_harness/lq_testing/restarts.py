"""A run whose ranks are killed at random, for torch's elastic agent (what `torchrun` runs)."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lq_testing.lightning_models import SMALL, TinyModule, trainer
from lq_testing.models import batch


class _BatchOfStep(TinyModule):
    """Trains step ``i`` on the same batches whenever it does, as a stateful loader would."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch(self.global_step, self.global_rank), batch_idx)


class _Record(Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        with Path(self.folder, f"losses{trainer.global_rank}").open("a") as file:
            file.write(f"{trainer.global_step} {outputs['loss'].item().hex()}\n")


class _Kill(Callback):
    """Kills one rank of each start but the last, some steps later."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.rank = self.random.randrange(trainer.world_size)
        self.step = trainer.global_step + self.random.randint(1, 3)
        self.where = self.random.choice(("batch", "backward", "save"))

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._kill(trainer, "batch")

    def on_after_backward(self, trainer: pl.Trainer, *args: Any) -> None:
        self._kill(trainer, "backward")

    def on_save_checkpoint(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.where == "save" and trainer.global_step >= self.step:
            _kill_before_rename()  # of the first rank, which renames the folder

    def _kill(self, trainer: pl.Trainer, where: str) -> None:
        reached = trainer.global_rank == self.rank and trainer.global_step >= self.step
        if where == self.where and reached:
            _die()


def _die(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_before_rename() -> None:
    from lq_lightning.checkpoint import folder

    folder.move_into_place = _die  # type: ignore[assignment]


def train(folder: str, steps: int, kills: int, seed: int) -> int:
    """What each rank of each start runs; returns the step at which this start began."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    import lq_lightning

    rank_zero_only.rank = int(os.environ["RANK"])  # read on import, by the fork server
    torch.manual_seed(0)
    torch.set_num_threads(1)
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    callbacks: list[Callback] = [_Record(folder)]
    if start < kills:
        callbacks.append(_Kill(seed * 1000 + start))
    callbacks.append(
        ModelCheckpoint(f"{folder}/saved", every_n_train_steps=1, save_top_k=1, save_last=True)
    )
    run = trainer(
        lq_lightning.QuantizedFSDPStrategy(**SMALL, timeout=20),
        folder,
        int(os.environ["LOCAL_WORLD_SIZE"]),
        callbacks=callbacks,
        enable_checkpointing=True,
        max_steps=steps,
    )
    began: list[int] = []
    note: Callable[..., None] = lambda *args: began.append(run.global_step)  # noqa: E731
    callbacks[0].on_train_start = note  # type: ignore[method-assign]
    run.fit(_BatchOfStep(), DataLoader([torch.zeros(1)] * 1000), ckpt_path="last")
    return began[0]
