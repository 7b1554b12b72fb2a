"""The callback with a memory budget: what it chooses, and that measuring leaves no trace."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lq_testing import run_ranks
from lq_testing.lightning_models import Losses, trainer
from lq_testing.small_llama import VOCAB, SmallLlama
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lq_lightning import ActivationPolicy, ActivationQuantization, QuantizedFSDPStrategy
from lq_lightning.activations import MemoryBudget
from lq_lightning.activations.sites import sites_of

LARGE = MemoryBudget("1GiB", scope="activations")
SMALL = MemoryBudget("1200KiB", scope="activations", recompute=False)


class Counting(pl.LightningModule):
    """Logs, counts, collects, draws and changes its batch in each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = SmallLlama(2, dropout=0.1)
        self.mean, self.steps, self.losses = MeanMetric(), 0, list[Tensor]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss: Tensor = self.net(batch.pop("tokens")) * (1 + 1e-3 * random.random())
        self.mean(loss)
        self.steps += 1
        self.losses.append(loss.detach() * np.random.rand())
        self.log("mean", self.mean, prog_bar=True)
        self.log_dict({"loss": loss, f"loss_{self.steps}": loss})
        if self.logger is not None:
            self.logger.log_metrics({"own": self.steps}, self.steps)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]


class Sharded(Counting):
    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            for block in self.net.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class TensorParallel(Counting):
    def configure_model(self) -> None:
        plan = {name: ColwiseParallel() for name in ("gate_proj", "up_proj")}
        plan["down_proj"] = RowwiseParallel()
        for block in self.net.blocks:
            parallelize_module(block.mlp, self.device_mesh["tensor_parallel"], plan)


class Watch(pl.Callback):
    """What a run shows of itself after its steps."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.codecs: dict[str, Any] = {}
        self.plan: Any = None

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *unused: Any) -> None:
        numbers = {k: float(v) for k, v in trainer.callback_metrics.items()}
        numbers["mean so far"] = float(module.mean.compute())
        self.seen.append((numbers, module.steps, torch.rand(1).item(), *map(float, module.losses)))
        self.codecs = {s.name: s.codec for m in module.modules() for s in sites_of(m)}
        for callback in trainer.callbacks:
            if isinstance(callback, ActivationQuantization):
                self.plan = callback.plan


def _loader(length: int = 64) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = [{"tokens": torch.randint(VOCAB, (length,), generator=generator)} for _ in range(8)]
    return DataLoader(data, batch_size=2)  # type: ignore[arg-type]


def _fit(
    root: Any,
    budget: Any,
    strategy: Any = "auto",
    devices: int = 1,
    kind: type[Counting] = Counting,
    **options: Any,
) -> tuple[pl.Trainer, Counting, Watch, list[float]]:
    module, watch, losses = kind(), Watch(), Losses()
    callbacks = [watch, losses, *options.pop("callbacks", [])]
    if budget is not None:
        callbacks.append(ActivationQuantization(budget=budget))
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(3)
    resume = options.pop("ckpt_path", None)
    run = trainer(strategy, str(root), devices, callbacks=callbacks, **options)
    run.fit(module, _loader(), ckpt_path=resume)
    return run, module, watch, losses.values


def test_a_budget_that_keeps_all_trains_exactly_as_without(tmp_path: Path) -> None:
    """Logs, loggers, metrics, counts, random numbers, batches and gradients stay as they are."""
    runs = []
    for name, budget in (("a", None), ("b", LARGE)):
        logger = CSVLogger(tmp_path / name, flush_logs_every_n_steps=1)
        options = {"logger": logger, "log_every_n_steps": 1, "accumulate_grad_batches": 2}
        _, module, watch, losses = _fit(tmp_path, budget, **options)
        text = (Path(logger.log_dir) / "metrics.csv").read_text()
        assert "log" not in vars(module)
        runs.append((losses, watch.seen, text, [p.tolist() for p in module.parameters()]))
        assert (watch.plan is None) == (budget is None)
    assert runs[0] == runs[1]


def test_chooses_before_the_first_step_and_in_every_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    saved = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    options = {"callbacks": [saved], "enable_checkpointing": True}
    caplog.set_level("INFO")
    run, module, watch, _ = _fit(tmp_path, SMALL, **options)
    assert watch.plan.measured_nbytes <= 1200 * 1024 < watch.plan.calibration.saved_nbytes({})[0]
    coded = {name for name, codec in watch.codecs.items() if codec is not None}
    assert coded == set(watch.plan.allocation.codecs)
    assert len(coded) > 1
    assert "x int" in watch.plan.summary()
    assert "recomputed modules: 0." in watch.plan.summary()
    quantization = next(c for c in run.callbacks if isinstance(c, ActivationQuantization))
    assert quantization.plan is None
    assert not [s for m in module.modules() for s in sites_of(m)]
    first, watch.plan = watch.plan, None
    run.fit_loop.max_epochs = 2
    run.fit(module, _loader())
    assert watch.plan is not None
    assert watch.plan is not first
    _, _, resumed, _ = _fit(tmp_path, SMALL, ckpt_path=f"{tmp_path}/step=2.ckpt")
    assert resumed.plan is not None
    assert len(resumed.seen) == 2


def test_a_larger_batch_is_noticed_once(tmp_path: Path) -> None:
    data = [{"tokens": torch.ones(2, n, dtype=torch.long)} for n in (32, 16, 48, 64)]
    run = trainer("auto", str(tmp_path), 1, callbacks=[ActivationQuantization(budget=LARGE)])
    with pytest.warns(UserWarning, match="64 values, but batch 2 has 96") as warned:
        run.fit(Counting(), DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    assert sum("needs more memory" in str(w.message) for w in warned) == 1


def test_compiled_units_follow_the_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks of a class share one compiled function, whose variants torch limits to eight."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    limits: list[int] = []

    class Limit(pl.Callback):
        def on_train_batch_end(self, *unused: Any) -> None:
            limits.append(torch._dynamo.config.recompile_limit)

    before = torch._dynamo.config.recompile_limit
    expected = _fit(tmp_path, SMALL)[3]
    strategy = QuantizedFSDPStrategy(weights="none", gradients="none", compile_units=True)
    torch._dynamo.utils.counters.clear()
    _, _, watch, losses = _fit(tmp_path, SMALL, strategy, callbacks=[Limit()])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert watch.plan.allocation.codecs
    assert all(abs(a / b - 1) < 0.02 for a, b in zip(losses, expected, strict=True))
    assert limits[0] == 16 + 6
    assert torch._dynamo.config.recompile_limit == before


def _ranks(rank: int, world: int, root: str) -> None:
    plain = functools.partial(QuantizedFSDPStrategy, weights="none", gradients="none")
    for strategy, kind in (
        (lambda: "ddp", Counting),
        (lambda: ModelParallelStrategy(2, 1), Sharded),
        (plain, Counting),
        (lambda: ModelParallelStrategy(1, 2), TensorParallel),
    ):
        runs = []
        for budget in (None, LARGE):
            _, _, watch, losses = _fit(root, budget, strategy(), world, kind)
            runs.append((losses, watch.seen))
        assert runs[0] == runs[1]
        if kind is Sharded:
            continue
        _, _, watch, losses = _fit(root, SMALL, strategy(), world, kind)
        assert watch.plan is not None
        plans: list[Any] = [None] * world
        dist.all_gather_object(plans, watch.plan.policy)
        assert plans[0] == plans[1]
        assert plans[0].rules
        assert losses != runs[0][0]
        assert all(abs(a / b - 1) < 0.02 for a, b in zip(losses, runs[0][0], strict=True))


def test_two_ranks(tmp_path: Path) -> None:
    run_ranks(_ranks, 2, str(tmp_path), backend=None, torchrun=True, timeout=120)


class Manual(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Iterating(Counting):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


class Lossless(Counting):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a policy says what the budget is to choose"):
        ActivationQuantization(ActivationPolicy(), budget="1GiB")
    with pytest.raises(ValueError, match="'60'.* is no amount of memory"):
        ActivationQuantization(budget="60")
    fit = functools.partial(_fit, tmp_path, LARGE)
    with pytest.raises(ValueError, match="manual optimization"):
        fit(kind=Manual)
    with pytest.raises(ValueError, match="dataloader_iter"):
        fit(kind=Iterating)
    with pytest.raises(RuntimeError, match="returned NoneType without a loss"):
        fit(kind=Lossless)
    with pytest.raises(RuntimeError, match="the least that would do"):
        _fit(tmp_path, "1MiB")
