"""Data made at random in a pipeline, and steps that fail on one of its stages."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lq_testing.lightning_models import EXACT, Losses, TinyModule, Tokens, run_trainer, trainer
from lq_testing.models import VOCAB
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lq_lightning import QuantizedPipelineStrategy
from lq_lightning.strategies.failures import LostRankError


class Augmented(Dataset[Tensor]):
    """Tokens that are shifted by random numbers."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return (Tokens()[index] + self.draw(index)) % VOCAB


def _from_globals(index: int) -> int:
    drawn = int(torch.randint(1000, ())), int(np.random.randint(1000)), random.randrange(1000)
    return sum(drawn)


def _by_index(index: int) -> int:
    return int(torch.randint(1000, (), generator=torch.Generator().manual_seed(7 + index)))


def _unseeded(index: int) -> int:
    return int(np.random.default_rng().integers(1000))


def _fit(root: str, draw: Callable[[int], int], module: Any = None) -> tuple[list[float], Any]:
    losses, data = Losses(), DataLoader(Augmented(draw), 8, shuffle=True)
    options = {"use_distributed_sampler": False, "callbacks": [losses], "max_epochs": 2}
    run = trainer(QuantizedPipelineStrategy(**EXACT), root, 2, **options)
    run.fit(TinyModule(layers=4) if module is None else module, data)
    return losses.values, data


def _drawn_by_worker(data: DataLoader[Tensor], worker: int) -> int:
    """What a worker draws, with the seeds that torch gives it."""
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=data.generator))
    torch.manual_seed(seed + worker)
    random.seed(seed + worker)
    assert data.worker_init_fn is not None
    data.worker_init_fn(worker)
    return _from_globals(0)


def _remedies(rank: int, world_size: int, root: str) -> Any:
    """What the error says is done, and works; the ranks' own numbers differ."""
    torch.manual_seed(rank)
    with pytest.raises(RuntimeError, match="digest of the batch.*`seed_everything` with one seed"):
        _fit(root, _unseeded)
    indexed, _ = _fit(root, _by_index)
    seed_everything(1, workers=True, verbose=False)
    drawn, data = _fit(root, _from_globals)
    assert drawn != indexed
    workers = [_drawn_by_worker(data, worker) for worker in range(2)]
    assert len(set(workers)) == 2
    return drawn, workers


def test_random_data_are_the_same_on_all_stages(tmp_path: Any) -> None:
    first, second = run_trainer(_remedies, 2, str(tmp_path))
    assert first == second


class LayerDrop(TinyModule):
    """The last layer is left out in the second batch."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        x = self.net.embed(tokens)
        for index, block in enumerate(self.net.blocks):
            if (index, batch_idx) != (3, 1):
                x = block(x)
        return self.net.head(x * self.net.tiny).square().mean()


def _dropping(rank: int, world_size: int, root: str) -> None:
    told = "rank 0 of 2 stopped because rank 1 failed: RuntimeError: " if rank == 0 else "^"
    with pytest.raises(LostRankError if rank == 0 else RuntimeError, match=told) as error:
        _fit(root, _by_index, LayerDrop(layers=4))
    assert "the step ended without calling `net.blocks.3`" in str(error.value)


def test_all_stages_say_why_one_has_failed(tmp_path: Any) -> None:
    run_trainer(_dropping, 2, str(tmp_path))
