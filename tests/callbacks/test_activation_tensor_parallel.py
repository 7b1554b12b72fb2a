"""Saved activations as codes under a strategy's tensor parallelism, in a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.activation_models import close
from lq_testing.lightning_models import Losses, trainer
from lq_testing.tensor_models import ParallelModule, batch
from torch.utils.data import DataLoader

from lq_lightning import ActivationQuantization, QuantizedFSDPStrategy
from lq_lightning.activations.sites import sites_of

_SITES = {"net.blocks.0.norm", "net.blocks.0.mlp", "net.blocks.1.norm", "net.blocks.1.mlp"}


class _Sites(pl.Callback):
    """Notes which modules keep codes of how many bits."""

    def __init__(self) -> None:
        self.codes: dict[str, str] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
        found = [site for module in pl_module.modules() for site in sites_of(module)]
        self.codes = {site.name: site.codec.code for site in found if site.codec is not None}


def _fit(root: str, devices: int, **options: Any) -> tuple[list[float], dict[str, str]]:
    losses, sites = Losses(), _Sites()
    callbacks: list[Any] = [losses, sites]
    if options:
        callbacks.append(ActivationQuantization(**options))
    strategy = QuantizedFSDPStrategy(tensor_parallel_size=2, node_size=2, min_quantized_numel=64)
    run = trainer(strategy, root, devices, callbacks=callbacks, max_steps=5)
    tokens: Any = [batch(i) for i in range(10)]
    run.fit(ParallelModule(True), DataLoader(tokens, batch_size=None))
    return losses.values, sites.codes


def _ranks(rank: int, world: int, root: str) -> None:
    expected, codes = _fit(root, world)
    assert not codes
    for options in ({"recipe": "agoq"}, {"recipe": "auto", "adapt": 0.01}, {"recipe": "coat"}):
        losses, codes = _fit(root, world, **options)
        assert losses != expected, options
        assert close(losses, expected, 0.02), options
        assert codes.keys() >= _SITES, options
        every: list[Any] = [None] * world
        dist.all_gather_object(every, (losses, codes))
        for first, second in ((0, 1), (2, 3)):  # a tensor-parallel group sees one batch
            assert every[first] == every[second], options
        assert all(each[1] == codes for each in every), options


def test_two_by_two_ranks(tmp_path: Path) -> None:
    run_ranks(_ranks, 4, str(tmp_path), backend=None, torchrun=True, timeout=240)
