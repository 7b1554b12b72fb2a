"""Tensor and sequence parallelism under FSDP2 against one process."""

from __future__ import annotations

from typing import Any

import torch
from lq_testing.lightning_models import PLAIN, SMALL, Losses, run_trainer, trainer
from lq_testing.tensor_models import Feeds, Norms, ParallelModule, unlike

from lq_lightning import GradientQuantization, QuantizedFSDPStrategy, WeightQuantization

STEPS = 20


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
    run.fit(module, Feeds(8 * STEPS))
    return module, losses.values, norms.values


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
            results[kind, sequence] = losses, norms, unlike(module)
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
