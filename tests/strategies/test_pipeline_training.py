"""A model cut into stages trains, validates and predicts as it does on one device."""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import torch
from lq_testing.lightning_models import (
    EXACT,
    Losses,
    TinyModule,
    Tokens,
    loader,
    run_trainer,
    trainer,
)
from lq_testing.models import VOCAB
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import SumMetric
from torchmetrics.classification import BinaryAUROC

from lq_lightning import QuantizedPipelineStrategy


class Module(TinyModule):
    """Logs, schedules the learning rate, and predicts a row per sample."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.dictionary = self.clips = False
        self.drawn: list[float] = []
        self.tokens_seen, self.auroc = SumMetric(), BinaryAUROC()  # lists of floats and integers

    def training_step(self, tokens: Tensor, batch_idx: int) -> Any:
        self.log("tokens", float(tokens.numel()), reduce_fx="sum", sync_dist=True)
        self.tokens_seen(tokens.numel())  # in front of the layers, where each stage comes
        self.log("tokens_seen", self.tokens_seen, on_step=False, on_epoch=True)
        self.drawn.append(torch.rand(()).item())
        loss = self.net(tokens)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "rows": tokens[:, 0]} if self.dictionary else loss

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        super().validation_step(tokens, batch_idx)
        self.auroc(tokens[:, 0] / VOCAB, tokens[:, 1] % 2)
        self.log("auroc", self.auroc)

    def predict_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        x = self.net.embed(tokens)
        for block in self.net.blocks:
            x = block(x)
        return self.net.head(x * self.net.tiny).square().mean((1, 2))

    def configure_gradient_clipping(self, optimizer: Any, *given: Any, **named: Any) -> None:
        if self.clips:
            self.clip_gradients(optimizer, 0.3, "norm")
        else:
            super().configure_gradient_clipping(optimizer, *given, **named)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Watch(pl.Callback):
    """Keeps the norm of all gradients, and the learning rate, at every optimizer step."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if getattr(trainer.strategy, "pipeline", None) is not None:
            self.norms.append(trainer.strategy.gradient_norm().item())
        else:
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            self.norms.append(torch.nn.utils.get_total_norm(gradients).item())
        self.rates.append(optimizer.param_groups[0]["lr"])


def _module(**options: Any) -> Module:
    torch.manual_seed(0)
    return Module(layers=4, **options)


def _fit(root: str, strategy: Any, devices: int, data: Any = None, **options: Any) -> Any:
    module = options.pop("module", None) or _module()
    losses, watch = Losses(), Watch()
    defaults = {"use_distributed_sampler": False, "num_sanity_val_steps": 2}
    callbacks = [losses, watch]
    run = trainer(strategy, root, devices=devices, callbacks=callbacks, **{**defaults, **options})
    run.fit(module, loader(48, batch_size=8) if data is None else data, loader(20, batch_size=8))
    metrics = {name: value.item() for name, value in run.callback_metrics.items()}
    return run, module, (losses.values, watch.norms, watch.rates, metrics)


def _strategy(world_size: int, schedule: str) -> Any:
    if world_size == 1:
        return "auto"
    several = {"interleaved_1f1b": 2, "zbv": 2}.get(schedule, 1)
    return QuantizedPipelineStrategy(schedule=schedule, stages_per_rank=several, **EXACT)


# --- the same numbers ---------------------------------------------------------------------------


def _everything(rank: int, world_size: int, root: str, schedules: list[str]) -> Any:
    """Numbers of several runs: plain, with accumulation and clipping, tied in bf16, evaluation."""
    found: dict[str, Any] = {}
    for schedule in schedules:
        strategy = functools.partial(_strategy, world_size, schedule)
        run, module, found[f"{schedule} plain"] = _fit(root, strategy(), world_size)
        tested = run.test(module, loader(16, batch_size=8), verbose=False)
        predicted = run.predict(module, loader(24, batch_size=8))
        found[f"{schedule} tested"] = tested[0]["val"]
        found[f"{schedule} predicted"] = torch.cat(predicted).tolist()
    options = {"accumulate_grad_batches": 3}
    module = _module(tied=True)
    module.dictionary = module.clips = True
    found["clipped"] = _fit(root, strategy(), world_size, module=module, **options)[2]
    for precision in ("bf16-true", "bf16-mixed"):
        module = _module(tied=True)
        found[precision] = _fit(root, strategy(), world_size, module=module, precision=precision)[2]
    return found


SCHEDULES = ["1f1b", "interleaved_1f1b", "zero_bubble", "zbv"]


def test_two_stages_equal_one_device(tmp_path: Any) -> None:
    (alone,) = run_trainer(_everything, 1, str(tmp_path), SCHEDULES[:1])
    for together in run_trainer(_everything, 2, str(tmp_path), SCHEDULES):
        for name, values in together.items():
            expected = alone[name.replace(name.split()[0], "1f1b") if " " in name else name]
            loose = name.startswith("bf16")
            torch.testing.assert_close(
                values,
                expected,
                rtol=0.03 if loose else 1e-4,
                atol=0.03 if loose else 1e-6,
                msg=name,
            )
        losses, norms, rates, metrics = together["1f1b plain"]
        assert len(losses) == len(norms) == 6
        assert rates[:4] == [1e-2, 1e-2, 5e-3, 5e-3]
        names = {"loss_step", "loss_epoch", "val", "tokens", "tokens_seen", "auroc"}
        assert names <= metrics.keys()


def _replicas(rank: int, world_size: int, root: str) -> Any:
    found = []
    layers = {f"net.blocks.{2 * (rank // 2) + index}" for index in range(2)}
    others = {"net.head" if rank > 1 else "net.embed"}
    for schedule, units in (("1f1b", None), ("zero_bubble", ["Embedding", "Block", "net.head"])):
        strategy = QuantizedPipelineStrategy(
            pipeline_size=2,
            schedule=schedule,
            weights="none",
            gradients="none",
            units=units,
            **EXACT,
        )
        data = Tokens(48)
        sampler = DistributedSampler(data, num_replicas=2, rank=rank % 2, shuffle=False)
        batches = DataLoader(data, batch_size=4, sampler=sampler)
        _, module, (_, norms, _, _) = _fit(
            root, strategy, world_size, batches, module=_module(tied=True), gradient_clip_val=0.3
        )
        found.append((norms, module.drawn))
        assert strategy.sharding_plan is not None
        assert set(strategy.sharding_plan.units) == (layers | others if units else layers)
    return found


def _alone(rank: int, world_size: int, root: str) -> Any:
    return _fit(root, "auto", 1, module=_module(tied=True), gradient_clip_val=0.3)[2][1]


def test_pipelines_beside_each_other_equal_one_device(tmp_path: Any) -> None:
    """Two stages of two ranks each, the replicas on different halves of each batch."""
    (expected,) = run_trainer(_alone, 1, str(tmp_path))
    ranks = run_trainer(_replicas, 4, str(tmp_path))
    for found in ranks:
        for norms, _ in found:
            torch.testing.assert_close(norms, expected, rtol=1e-4, atol=1e-6)
    for run in range(2):  # random numbers are those of a pipeline, on all of its stages
        drawn = [set(found[run][1]) for found in ranks]
        assert drawn[2] <= drawn[0]  # where the first layer is looked at, too
        assert drawn[3] <= drawn[1]
        assert not drawn[2] & drawn[3]


# --- what is not finite -------------------------------------------------------------------------


class Bad(Module):
    """One gradient of the last stage is infinite in the second batch."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(tokens)
        return loss * float("inf") if batch_idx == 1 else loss


def _not_finite(rank: int, world_size: int, root: str) -> None:
    torch.manual_seed(0)
    strategy = QuantizedPipelineStrategy(skip_nonfinite_steps=True, **EXACT)
    clipping = {"gradient_clip_val": 1e6, "gradient_clip_algorithm": "value"}
    run, module, _ = _fit(root, strategy, world_size, module=Bad(layers=2), **clipping)
    assert strategy.num_skipped_steps == 1
    assert run.global_step == 6
    assert all(p.isfinite().all() for p in module.parameters())
    strategy = QuantizedPipelineStrategy(**EXACT)
    options = {"module": Bad(layers=2), "gradient_clip_val": 1.0, "limit_train_batches": 2}
    _, module, _ = _fit(root, strategy, world_size, **options)
    assert all(p.isnan().any() for p in module.parameters() if p.grad is not None)


def test_infinite_gradients_reach_all_ranks(tmp_path: Any) -> None:
    run_trainer(_not_finite, 2, str(tmp_path))
