"""A small LightningModule, deterministic data and a quiet Trainer for tests of the strategies."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lq_testing.models import TinyLM, batch
from lq_testing.ranks import SHARED_GPUS, run_ranks

PLAIN: dict[str, Any] = {"weights": "none", "gradients": "none"}
SMALL: dict[str, Any] = {"min_quantized_numel": 64}
EXACT: dict[str, Any] = {"forward_codec": "none", "backward_codec": "none"}  # boundaries

run_trainer = functools.partial(run_ranks, backend=None, torchrun=True, timeout=120.0)


class Tokens(Dataset[Tensor]):
    """Sequence ``i`` is always the same."""

    def __init__(self, size: int = 32) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return batch(index, 0, size=1)[0]


class TinyModule(pl.LightningModule):
    """`TinyLM` with a choice of optimizer; `net` is created in `__init__`."""

    def __init__(self, optimizer: str = "adamw", lr: float = 1e-2, **model: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["block"])
        self.optimizer_name, self.lr = optimizer, lr
        self.net = TinyLM(**model)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(tokens)
        self.log("loss", loss)
        return loss

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        self.log("val", self.net(tokens), sync_dist=True)

    test_step = validation_step

    def predict_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(tokens)
        return loss

    def configure_optimizers(self) -> Any:
        make: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "adamw": torch.optim.AdamW,
            "sgd": torch.optim.SGD,
        }
        return make[self.optimizer_name](self.parameters(), lr=self.lr)


class Losses(Callback):
    """Keeps the training losses as exact floats."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        self.values.append(outputs["loss"].item())


class Fails(Callback):
    """Some ranks raise after some steps, before the next."""

    def __init__(self, step: int, *ranks: int) -> None:
        self.step, self.ranks = step, ranks

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank in self.ranks:
            raise KeyError("of this rank")


def loader(size: int = 32, batch_size: int = 4) -> DataLoader[Tensor]:
    return DataLoader(Tokens(size), batch_size=batch_size)


def quiet() -> None:
    """Silence what Lightning tells users about every run."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message="(?s)weights: .*gradients: ")  # the plan
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")


def trainer(strategy: Any, root: str, devices: int = 2, **options: Any) -> pl.Trainer:
    """A CPU Trainer without logger, progress bar and checkpoints."""
    quiet()
    shared = SHARED_GPUS in os.environ
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1 if shared else devices,
        "num_nodes": devices if shared else 1,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": root,
    }
    return pl.Trainer(strategy=strategy, **{**defaults, **options})
