"""Tensor and sequence parallelism under FSDP2 against one process."""

from __future__ import annotations

import copy
import os
import pickle
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lq_testing.lightning_models import PLAIN, SMALL, Losses, run_trainer, trainer
from lq_testing.tensor_models import Feeds, Norms, ParallelModule, plan, unlike
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torchmetrics import SumMetric

from lq_lightning import GradientQuantization, QuantizedFSDPStrategy

STEPS = 6


def _fit(
    root: str, strategy: Any, devices: int, module: Any = None, **options: Any
) -> tuple[Any, list[float], list[float]]:
    module = ParallelModule(None) if module is None else module
    losses, norms = Losses(), Norms()
    callbacks = [losses, norms, *options.pop("callbacks", [])]
    options = {"max_steps": STEPS, "gradient_clip_val": 1.0, **options}
    trainer(strategy, root, devices, callbacks=callbacks, **options).fit(module, Feeds(160))
    return module, losses.values, norms.values


def _train(rank: int, world: int, root: str) -> dict[str, Any]:
    stochastic = {"weights": "qWD", "gradients": GradientQuantization(rounding="stochastic")}
    kinds: dict[str, Any] = {"exact": PLAIN, "stochastic": {**SMALL, **stochastic}}
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
            values = found["stochastic", sequence][0]
            assert abs(values[-1] - found["exact", sequence][0][-1]) < 0.1
            assert found["stochastic", sequence, "plan"] == whole
            for kind in ("exact", "stochastic"):
                assert found[kind, sequence][2] == []


# --- what only some ranks do --------------------------------------------------------------------


class NormOfOwnTokens(ParallelModule):
    """The last norm is left out of the plan, and gets this rank's tokens."""

    def configure_model(self) -> None:
        rest = plan(self.depth, sequence=True)
        del rest["norm"]
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], rest)  # type: ignore[index]


class BeginsWithZeros(NormOfOwnTokens):
    """Nothing can be told from the first gradients."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return min(batch_idx, 1) * super().training_step(tokens, batch_idx)


class OnOneRank(ParallelModule):
    """Tensor-parallel ranks have gradients of different parameters."""

    def __init__(self, sequence: bool | None) -> None:
        super().__init__(sequence)
        self.extra = nn.Linear(4, 4)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        value = self.extra(torch.ones(4)).sum()
        value = value if self.global_rank % 2 else value.detach()
        return super().training_step(tokens, batch_idx) + value


class Untied(ParallelModule):
    def __init__(self, sequence: bool | None) -> None:
        super().__init__(sequence)
        self.net.head.weight = self.net.embedding.weight


class NearlyAlike(ParallelModule):
    """As a scale of many tokens: those of each rank say nearly the same."""

    def on_after_backward(self) -> None:
        if self.global_rank % 2:
            self.net.norm.weight.grad.mul_(1.03)  # type: ignore[union-attr]


class Uneven(ParallelModule):
    def configure_model(self) -> None:
        mlp: Any = self.net.blocks[0].mlp
        mlp.up, mlp.down = nn.Linear(16, 63), nn.Linear(63, 16)
        super().configure_model()


class Counts(ParallelModule):
    def __init__(self) -> None:
        super().__init__(True)
        self.seen = SumMetric()

        for norm in (self.net.norm, self.net.blocks[0].norm):
            norm.requires_grad_(False)

    def configure_model(self) -> None:
        super().configure_model()
        number = self.device_mesh.get_local_rank("tensor_parallel")  # type: ignore[union-attr]
        self.register_buffer("number", torch.tensor([number]))

    def on_fit_start(self) -> None:
        self.late = SumMetric()

    def on_train_epoch_start(self) -> None:
        self.copy = copy.deepcopy(self.seen)
        self.metrics = [self.seen, self.late, self.copy]
        loader: Any = self.trainer.train_dataloader
        self.worker_rank = loader.worker_init_fn.keywords["rank"]

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        self.log("n", float(len(tokens)), reduce_fx="sum", sync_dist=True, on_epoch=True)
        for metric in self.metrics:
            metric(float(len(tokens)))
        return super().training_step(tokens, batch_idx)

    def on_train_end(self) -> None:
        self.totals = [metric.compute().item() for metric in self.metrics]
        pickle.loads(pickle.dumps(self.seen))


class WritesOnOneRank(Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1:
            with torch.no_grad():
                module.net.norm.weight.to_local().add_(1.0)


REFUSED: dict[str, tuple[type[ParallelModule], bool | None, dict[str, Any]]] = {
    r"gradient of `net.norm.(weight|bias)` and 1 more differs": (NormOfOwnTokens, True, {}),
    r"gradient of `net.norm.bias` and 1 more differs": (BeginsWithZeros, True, {}),
    r"ranks have gradients of different parameters of the unit `root`": (OnOneRank, False, {}),
    r"gradient of `net.norm.weight` differs .* by 1% of its mean": (NearlyAlike, False, {}),
    r"`net.embedding.weight` and `net.head.weight` were one parameter": (Untied, True, {}),
    r"`net.blocks.0.mlp.up.weight` has 63 elements along dimension 0": (Uneven, False, {}),
    r"no parameter of .* is sharded over tensor-parallel ranks": (ParallelModule, None, {}),
    r"=3\)` does not divide .* Allowed here: \[1, 2, 4\]": (
        *(ParallelModule, True),
        {"tensor_parallel_size": 3},
    ),
}


def _special(rank: int, world: int, root: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    options: dict[str, Any] = {**SMALL, "tensor_parallel_size": 2}
    for message, (kind, sequence, own) in REFUSED.items():
        errors = (ValueError, RuntimeError)  # and NotImplementedError
        with pytest.raises(errors, match=message):
            _fit(root, QuantizedFSDPStrategy(**{**options, **own}), world, kind(sequence))
    strategy = QuantizedFSDPStrategy(check_replicas_every_n_steps=4, **options)
    with (
        pytest.warns(UserWarning, match="differ between tensor-parallel ranks")
        if rank == 0
        else nullcontext()
    ):
        module, *_ = _fit(root, strategy, world, ParallelModule(), callbacks=[WritesOnOneRank()])
    found["unlike"] = unlike(module)
    with patch.dict(os.environ, PL_SEED_WORKERS="1"):
        module, *_ = _fit(root, QuantizedFSDPStrategy(**options), world, Counts(), max_steps=4)
    found["n"] = *module.totals, float(module.trainer.callback_metrics["n_epoch"])
    found["frozen"] = sum(not p.requires_grad for p in module.parameters())
    found["numbers"] = module.worker_rank, module.number.item()
    strategy = QuantizedFSDPStrategy(
        node_size=2, local_steps=2, check_replicas_every_n_steps=3, **options
    )
    # written before an outer step, and found after it
    writes = [WritesOnOneRank()]
    module, losses, _ = _fit(
        root, strategy, world, ParallelModule(True), callbacks=writes, max_steps=20
    )
    found["local"] = (
        losses,
        unlike(module),
        float(sum(p.to_local().detach().sum() for p in module.parameters())),
    )
    return found


def test_ranks_that_differ_are_refused_or_mended(tmp_path: Any) -> None:
    ranks = run_trainer(_special, 4, str(tmp_path))
    for rank, found in enumerate(ranks):
        assert found["unlike"] == []
        assert set(found["n"]) == {32.0}  # every sequence once
        assert found["frozen"] == 4  # weights and biases of norms
        assert found["numbers"] == divmod(rank, 2)
        assert found["local"][0][-1] < 2.2
        assert found["local"][1] == []
    assert ranks[0]["local"][2] == ranks[2]["local"][2]  # nodes have one model in the end
