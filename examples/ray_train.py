"""Train on two workers of Ray Train; a run goes on after a worker's death.

    pip install 'lq-lightning[ray]'
    python examples/ray_train.py --storage /shared/runs

The storage is a folder that all nodes see. Ray starts the workers, and starts them again up to
twice if one dies; each attempt continues from the newest checkpoint.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lq_lightning.integrations.ray import (
    RayCheckpoints,
    RayQuantizedFSDPStrategy,
    newest_checkpoint,
)


class Model(LightningModule):
    """A small model of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(256, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 256)
        )

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of the next byte."""
        logits = self.net(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(config: dict[str, Any]) -> None:
    """Run on each worker."""
    seed_everything(0)
    trainer = Trainer(
        strategy=RayQuantizedFSDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayCheckpoints()],
        max_epochs=config["epochs"],
        logger=False,
        enable_checkpointing=False,
    )
    data = DataLoader(torch.randint(256, (256, 33)), batch_size=4)  # type: ignore[arg-type]
    trainer.fit(Model(), data, ckpt_path=newest_checkpoint())


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--storage", default=None, help="folder that all nodes see")
    options = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": options.epochs},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            storage_path=options.storage, failure_config=FailureConfig(max_failures=2)
        ),
    )
    print(trainer.fit().checkpoint)


if __name__ == "__main__":
    main()
