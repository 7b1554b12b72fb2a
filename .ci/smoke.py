"""Train with the installed package on two CPU ranks, as `.ci/task wheel` does on each Python.

`.ci/task package` trains its model by `lq-lightning train` instead.

Run it outside of the checkout, so that what is imported is what was installed.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn

import lq_lightning
from lq_lightning.strategies import QuantizedFSDPStrategy


class Model(LightningModule):
    """Two equal blocks that learn to return their input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss."""
        loss = nn.functional.mse_loss(self.blocks(batch), batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the default optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Data(LightningDataModule):
    """Random numbers."""

    def train_dataloader(self) -> Iterable[Tensor]:
        """Return batches of 16."""
        return torch.utils.data.DataLoader(torch.randn(256, 64), batch_size=16)


def import_everything() -> int:
    """Import every module that needs no further package, and return how many there are."""
    every = pkgutil.walk_packages(lq_lightning.__path__, "lq_lightning.")
    found = [module.name for module in every if ".integrations." not in module.name]
    return sum(importlib.import_module(name) is not None for name in found)


def main() -> None:
    """Import all modules, then train."""
    warnings.simplefilter("ignore")
    modules = import_everything()
    torch.manual_seed(0)
    model = Model()
    strategy = QuantizedFSDPStrategy(weights="qWD", gradients="TLq-HS", node_size=1)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, Data())
    communication = strategy.communication
    if communication is None or not model.losses[-1] < 0.5 * model.losses[0]:
        raise SystemExit(f"The package does not train: losses {model.losses}, {communication}.")
    if trainer.is_global_zero:
        bits = communication.traffic().bits_per_weight
        print(
            f"lq-lightning {lq_lightning.__version__} in {Path(lq_lightning.__file__).parent}: "
            f"Python {sys.version.split()[0]}, torch {torch.__version__}, {modules} modules, loss "
            f"{model.losses[0]:.3f} to {model.losses[-1]:.3f} with {bits:.2f} bits per weight"
        )


if __name__ == "__main__":
    main()
