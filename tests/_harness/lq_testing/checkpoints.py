"""Short runs of the tiny module that save and load checkpoints, and what they must restore."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lq_testing.lightning_models import SMALL, Losses, TinyModule, loader, trainer


def strategy(full: bool = False, **options: Any) -> Any:
    """A quantizing strategy that saves single files (``full``) or directories."""
    from lq_lightning import QuantizedFSDPStrategy

    return QuantizedFSDPStrategy(**{**SMALL, **options}, save_distributed_checkpoint=not full)


def module(**options: Any) -> TinyModule:
    """A module that always starts with the same weights."""
    torch.manual_seed(0)
    return TinyModule(**options)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights(of: pl.LightningModule) -> dict[str, Tensor]:
    return {n: _whole(p).detach().clone() for n, p in of.named_parameters()}


def moments(run: pl.Trainer) -> list[Tensor]:
    states = run.optimizers[0].state.values()
    return [_whole(v).clone() for state in states for v in state.values()]


def fit(root: str, model: TinyModule, use: Any, **options: Any) -> tuple[Any, list[float]]:
    """Train; returns the Trainer and the loss of each batch."""
    losses = Losses()
    arguments = {"ckpt_path": options.pop("ckpt_path", None)}
    if "weights_only" in options:
        arguments["weights_only"] = options.pop("weights_only")
    run = trainer(use, root, callbacks=[losses, *options.pop("callbacks", [])], **options)
    run.fit(model, loader(), **arguments)
    return run, losses.values


def save_both(rank: int, world_size: int, root: str) -> None:
    """Write ``fullTrue.ckpt`` (a file), ``fullFalse.ckpt`` (a directory), and what they hold."""
    for full in (False, True):
        model = module()
        run, _ = fit(root, model, strategy(full))
        run.save_checkpoint(f"{root}/full{full}.ckpt")
        expected = (weights(model), moments(run))
        if rank == 0:
            torch.save(expected, f"{root}/expected{full}.pt")
        dist.barrier()


class StateAtStart(pl.Callback):
    """Keeps what a run starts from."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.moments: list[Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights, self.moments = weights(pl_module), moments(trainer)
