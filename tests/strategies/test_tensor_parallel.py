"""Tensor and sequence parallelism under FSDP2 against one process."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lq_testing.lightning_models import PLAIN, SMALL, Losses, run_trainer, trainer
from lq_testing.ranks import RankError
from lq_testing.tensor_models import ParallelModule, batch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lq_lightning import GradientQuantization, QuantizedFSDPStrategy, WeightQuantization

STEPS = 20


class Batches(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, index: int) -> Tensor:
        return batch(index, size=1)[0]


class Feeds(pl.LightningDataModule):
    """Every data-parallel rank gets each second sequence, in order."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        strategy: Any = self.trainer.strategy  # type: ignore[union-attr]
        several = self.trainer.world_size > 1  # type: ignore[union-attr]
        kwargs = strategy.distributed_sampler_kwargs if several else {"num_replicas": 1, "rank": 0}
        sampler = DistributedSampler(Batches(), shuffle=False, **kwargs)
        return DataLoader(Batches(), batch_size=8 // kwargs["num_replicas"], sampler=sampler)


class Norms(Callback):
    """Keeps the gradient norm of each step as all ranks see it."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.world_size > 1:
            norm = trainer.strategy.gradient_norm()  # type: ignore[attr-defined]
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
        self.values.append(float(norm))


def _fit(
    root: str, strategy: Any, devices: int, module: ParallelModule | None = None, **options: Any
) -> tuple[ParallelModule, list[float], list[float]]:
    module = module or ParallelModule(None)
    losses, norms = Losses(), Norms()
    options = {
        "callbacks": [losses, norms],
        "max_steps": STEPS,
        "gradient_clip_val": 1.0,
        **options,
    }
    options["callbacks"] = [losses, norms]
    run = trainer(strategy, root, devices=devices, **options)
    run.fit(module, Feeds())
    return module, losses.values, norms.values


def _unlike(module: nn.Module) -> list[str]:
    """Replicated parameters whose shards differ between the two tensor-parallel ranks."""
    found = []
    group = module.device_mesh.get_group("tensor_parallel")  # type: ignore[union-attr]
    for name, parameter in module.named_parameters():
        local = parameter.to_local().detach()  # type: ignore[attr-defined]
        every = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(every, local.contiguous(), group=group)
        sharded = any(
            a == "tensor_parallel" and not p.is_replicate()
            for a, p in zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True)  # type: ignore[attr-defined]
        )
        if not sharded and not torch.equal(*every):
            found.append(name)
    return found


def _train(rank: int, world: int, root: str) -> dict[str, Any]:
    stochastic: dict[str, Any] = {
        "weights": WeightQuantization(rounding="stochastic"),
        "gradients": GradientQuantization(rounding="stochastic"),
    }
    kinds = {"exact": PLAIN, "codes": SMALL, "stochastic": {**SMALL, **stochastic}}
    results: dict[str, Any] = {}
    for sequence in (False, True):
        for kind, options in kinds.items():
            # ranks start from other values: the first one's count
            module = ParallelModule(sequence, seed=0 if rank == 0 else 5)
            strategy = QuantizedFSDPStrategy(tensor_parallel_size=2, node_size=2, **options)
            module, losses, norms = _fit(root, strategy, world, module)
            results[kind, sequence] = losses, norms, _unlike(module)
            plan = strategy.communication and strategy.communication.plan
            results[kind, sequence, "plan"] = plan and {t.name: t.numel for t in plan.trained}
    return results


def test_2x2_ranks_train_as_one_process_does(tmp_path: Any) -> None:
    _, losses, norms = _fit(str(tmp_path), "auto", 1)
    whole = {n: p.numel() for n, p in ParallelModule(None).named_parameters()}
    for found in (ranks := run_trainer(_train, 4, str(tmp_path))):
        for sequence in (False, True):
            # a rank's loss is of its half of the batch
            both = [ranks[0]["exact", sequence][0], ranks[2]["exact", sequence][0]]
            mean = torch.tensor(both).mean(0)
            torch.testing.assert_close(mean, torch.tensor(losses), rtol=2e-6, atol=2e-6)
            exact = torch.tensor(found["exact", sequence][1])
            torch.testing.assert_close(exact, torch.tensor(norms), rtol=1e-5, atol=1e-6)
            for kind in ("codes", "stochastic"):
                values, _, _ = found[kind, sequence]
                assert abs(values[-1] - found["exact", sequence][0][-1]) < 0.1
                assert found[kind, sequence, "plan"] == whole
            for kind in ("exact", "codes", "stochastic"):
                assert found[kind, sequence][2] == []
