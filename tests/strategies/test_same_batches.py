"""Ranks that compute one forward together get one batch, and draw alike."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning_utilities.core.apply_func import apply_to_collection
from lq_testing.devices import device
from lq_testing.lightning_models import SMALL, Losses, run_trainer, trainer
from lq_testing.ranks import run_ranks
from lq_testing.tensor_models import ParallelModule, batch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler

from lq_lightning import QuantizedFSDPStrategy
from lq_lightning.strategies.same_batches import BatchCheck, align_random_numbers, draw_alike


@dataclass
class Pair:
    left: Tensor
    right: Any


def _batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "image": torch.randn(2, 3, 8, 1024, generator=generator),
        "mask": torch.rand(5, 300, generator=generator) > 0.5,
        "pair": Pair(torch.arange(4), ["text", 3, None]),
        "wave": torch.complex(torch.ones(3), torch.arange(3.0)),
        "empty": torch.zeros(0, 7, dtype=torch.bfloat16),
    }


def _flip(dim: int) -> Callable[[dict[str, Any]], None]:
    return lambda batch: batch.update(image=batch["image"].flip(dim))


# what rank 1 of a group does to its batch, what names it, and whether only the contents differ
CHANGES: list[tuple[Callable[[dict[str, Any]], None], str, bool]] = [
    (
        lambda batch: batch.pop("mask"),
        r"`batch\['mask'\]` is bool \[5, 300\].*missing on rank",
        False,
    ),
    (lambda batch: batch.update(empty=torch.zeros(7, 0)), r"`batch\['empty'\]`", False),
    (
        lambda batch: batch["pair"].right.__setitem__(0, "other"),
        r"'text' on rank . and 'other'",
        False,
    ),
    (lambda batch: batch["pair"].right.__setitem__(1, 4), r"`batch\['pair'\].right\[1\]`", False),
    (_flip(0), r"`batch\['image'\]`", True),
    (_flip(2), r"`batch\['image'\]`", True),
    (_flip(3), r"`batch\['image'\]`", True),
    (lambda batch: batch["mask"][4].logical_not_(), r"`batch\['mask'\]`", True),
    (lambda batch: batch["pair"].left.add_(1 << 40), r"`batch\['pair'\].left`", True),
    (lambda batch: batch["wave"].imag.mul_(2), r"`batch\['wave'\]`", True),
]


def _compares(rank: int, world: int) -> None:
    place = device()
    mesh = init_device_mesh(place.type, (world // 2, 2), mesh_dim_names=("data", "tensor"))
    group, (replica, number) = mesh.get_group("tensor"), mesh.get_coordinate()
    torch.manual_seed(replica)
    check, late = BatchCheck(group, place), BatchCheck(group, place)
    check._waits, late._waits = True, False  # as on a CPU, as on a GPU
    same = apply_to_collection(_batch(), Tensor, Tensor.to, place)
    if number:  # in another order
        same = dict(reversed(same.items()))
    same["image"] += replica  # groups have batches of their own
    for change, named, only_contents in CHANGES:
        other = copy.deepcopy(same)
        if number:
            change(other)
        check(same)
        with pytest.raises(ValueError, match=f"(?s)tensor-parallel ranks got different.*{named}"):
            check(other)
        if only_contents:  # seen by the next batch, or at the end
            for seen in (late.finish, lambda: late(same)):
                late(other)
                with pytest.raises(ValueError, match=named):
                    seen()
        else:
            with pytest.raises(ValueError, match=named):
                late(other)
        late(same)
    late.finish()
    late(other)
    late.forget()
    late.finish()
    if number:  # alone
        torch.rand(1, device=place)
    for each in (check, late):
        named = f"drawn different random numbers.*torch on {place.type}.*isolate_rng"
        with pytest.raises(ValueError, match=named):
            each(same)
    align_random_numbers(group, place)
    check(same)


def _draws(rank: int, world: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pipeline", "data", "tensor"))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(rank)
    align_random_numbers(mesh.get_group("pipeline"), torch.device("cpu"))
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    seed_everything(1, workers=True, verbose=False)
    torch.manual_seed(rank)
    orders = []
    for sampler in (None, SubsetRandomSampler(range(50))):
        data = DataLoader(range(50), sampler=sampler, shuffle=sampler is None)
        groups = [mesh.get_group("pipeline"), mesh.get_group("data")]
        draw_alike(data, groups, replica=5)
        torch.rand(rank)
        orders.append([int(index) for index in data])
        assert data.worker_init_fn.keywords == {"rank": 5}  # type: ignore[union-attr]
    return drawn, orders


def _all(rank: int, world: int) -> Any:
    _compares(rank, world)
    return _draws(rank, world)


def test_ranks_with_one_batch() -> None:
    found = run_ranks(_all, 4)
    drawn = [numbers for numbers, _ in found]
    assert drawn[0] == drawn[2] != drawn[1] == drawn[3]
    assert all(orders == found[0][1] for _, orders in found)
    assert sorted(found[0][1][0]) == list(range(50)) != found[0][1][0]


@pytest.mark.gpu(2)
def test_two_gpus_with_one_batch() -> None:
    run_ranks(_compares, 2, backend="nccl")


# --- in training ----------------------------------------------------------------------------------


class Sequences(Dataset[Tensor]):
    def __init__(self, start: Callable[[int], int] = int) -> None:
        self.start = start

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Tensor:
        return batch(self.start(index), size=1)[0]


class Stream(IterableDataset[Tensor]):
    def __init__(self, replica: int) -> None:
        self.replica = replica

    def __iter__(self) -> Any:
        return iter(Sequences()[2 * i + self.replica] for i in range(4))


class DrawsAlone(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank % 2:
            torch.rand(1)


def _fit(root: str, data: Any, *callbacks: Callback) -> list[float]:
    losses = Losses()
    strategy = QuantizedFSDPStrategy(**SMALL, tensor_parallel_size=2)
    options: dict[str, Any] = {"use_distributed_sampler": False}
    run = trainer(strategy, root, devices=4, callbacks=[losses, *callbacks], **options)
    module = ParallelModule()
    torch.manual_seed(run.global_rank)
    random.seed(run.global_rank)
    run.fit(module, data, data)
    return losses.values


def _trains(rank: int, world: int, root: str) -> list[Any]:
    found = [
        _fit(root, DataLoader(Sequences(), shuffle=True)),
        _fit(root, DataLoader(Sequences(lambda index: random.getrandbits(9)))),
        _fit(root, DataLoader(Stream(rank // 2))),
    ]
    unseeded = np.random.default_rng(rank)
    differing = (
        DataLoader(Sequences(lambda _: int(unseeded.integers(99)))),
        DataLoader(Stream(rank % 2)),
    )
    for data in differing:
        with pytest.raises(ValueError, match="got different batches: `batch` .*sampler_kwargs"):
            _fit(root, data)
    with pytest.raises(ValueError, match="have drawn different random numbers"):
        _fit(root, DataLoader(Sequences()), DrawsAlone())
    return found


def test_tensor_parallel_ranks_train_on_one_batch(tmp_path: Any) -> None:
    first, *others = run_trainer(_trains, 4, str(tmp_path))
    assert others[0] == first
    assert others[1] == others[2]
    assert all(a != b for a, b in zip(first, others[1], strict=True))
