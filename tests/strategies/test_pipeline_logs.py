"""Logs of a step in parts: one call for each name, the same on every rank."""

from __future__ import annotations

import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lq_testing.lightning_models import loader, trainer
from torch import Tensor
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lq_lightning.strategies.pipelines.logs import (
    LogRecorder,
    replay,
    sum_over_pipelines,
    unchanged,
)


class Logging(pl.LightningModule):
    """`steps` says which micro-batches a batch has, or None for a step as a whole."""

    def __init__(self, parts: int | None = None, *, other_stage: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.inner = torch.nn.Module()
        self.inner.mean = MeanMetric()
        self.collection = MetricCollection({"sum": SumMetric(), "other": MeanMetric()})
        self.parts, self.other_stage = parts, other_stage
        self.recorder = LogRecorder(self)
        self.seen: list[dict[str, float]] = []

    def step(self, tokens: Tensor) -> Tensor:
        x = tokens.float()
        self.log("loss", x.mean(), prog_bar=True, batch_size=len(x))
        self.log("largest", x.max(), True, reduce_fx=max)
        self.log("count", len(x) * 1.0, on_epoch=True, on_step=True, reduce_fx="sum")
        self.inner.mean(x)
        self.log("mean", self.inner.mean, on_step=True, on_epoch=True)
        self.collection.update(x)
        self.log_dict(self.collection, on_epoch=True, on_step=False)
        return self.weight.sum() + x.mean()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        if self.parts is None:
            return self.step(tokens)
        with self.recorder.muted():
            self.log("probe", 1.0)
        losses = []
        for part in tokens.chunk(self.parts):
            with self.recorder.recording():
                losses.append(self.step(part))
        logged = pickle.loads(pickle.dumps(self.recorder.take()))
        if self.other_stage:
            self.inner.mean.reset()
            self.collection.reset()
        replay(self, logged)
        return torch.stack(losses).mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append({k: v.item() for k, v in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(module: Logging, folder: Any) -> Logging:
    fitting = trainer("auto", str(folder), devices=1, limit_train_batches=3)
    fitting.fit(module, loader(batch_size=4))
    module.seen.append({k: v.item() for k, v in module.trainer.callback_metrics.items()})
    return module


@pytest.mark.filterwarnings("error:The ``compute`` method")
def test_parts_log_what_the_whole_step_logs(tmp_path: Any) -> None:
    whole = fit(Logging(), tmp_path).seen
    parts = fit(Logging(2), tmp_path).seen
    names = {"loss", "largest", "count", "mean", "sum", "other"}
    assert names <= whole[-1].keys()
    assert [log.keys() for log in parts] == [log.keys() for log in whole]
    for log, expected in zip(parts, whole, strict=True):
        assert log == pytest.approx(expected)
    other = fit(Logging(2, other_stage=True), tmp_path).seen
    assert [log.keys() for log in other] == [log.keys() for log in whole]
    assert other[1]["mean_step"] == pytest.approx(whole[1]["mean_step"])  # known on each stage


def test_what_was_recorded() -> None:
    module = Logging()
    recorder = LogRecorder(module)
    for size in (1, 3):
        with recorder.recording():
            module.log("a", torch.tensor(float(size)), batch_size=size, reduce_fx=torch.sum)
            module.log("b", 2, prog_bar=True)
            module.inner.mean.update(1.0)
            module.log("c", module.inner.mean)
    logged = recorder.take()
    assert [call.name for call in logged.calls] == ["a", "b", "c"]
    assert [call.metric for call in logged.calls] == [None, None, "inner.mean"]
    assert [call.has_value for call in logged.calls] == [True, True, False]
    assert dict(logged.calls[0].arguments) == {"batch_size": 4, "reduce_fx": "sum"}
    assert dict(logged.calls[1].arguments) == {"prog_bar": True, "reduce_fx": "mean"}
    assert logged.values[:2].tolist() == [4.0, 2.0]
    assert logged.values.dtype == torch.float64
    assert recorder.take().calls == ()
    assert "log" not in vars(module)


@pytest.mark.parametrize(
    ("value", "arguments", "error", "message"),
    [
        ("text", {}, ValueError, "logs a `str`"),
        (torch.zeros(2), {}, ValueError, r"tensor of shape \(2,\)"),
        (1.0, {"reduce_fx": len}, NotImplementedError, "reduce_fx=<built-in function len>"),
        (1.0, {"sync_dist_group": object()}, NotImplementedError, "sync_dist_group"),
        (MeanMetric(), {}, ValueError, "no attribute of `Logging`"),
        (MeanMetric(dist_sync_on_step=True), {}, NotImplementedError, "dist_sync_on_step"),
    ],
)
def test_calls_that_cannot_be_recorded(
    value: Any, arguments: dict[str, Any], error: type, message: str
) -> None:
    module = Logging()
    with (
        pytest.raises(error, match=f"`self.log\\('x', ...\\)`.*{message}"),
        module.recorder.recording(),
    ):
        module.log("x", value, **arguments)
    assert "log" not in vars(module)


def test_one_name_has_one_meaning() -> None:
    module = Logging()
    with module.recorder.recording():
        module.log("x", 1.0, prog_bar=True)
        with pytest.raises(ValueError, match="different arguments in one step.*prog_bar"):
            module.log("x", 1.0)


def test_metrics_of_parts() -> None:
    module = Logging()
    metrics = [module.inner.mean, module.collection]
    with unchanged(metrics):
        assert module.inner.mean(3.0).isnan()
        assert all(value.isnan() for value in module.collection(3.0).values())
        module.collection.update(3.0)
    assert not module.inner.mean.update_called
    assert module.inner.mean(5.0) == 5.0
    assert module.collection(5.0)["sum"] == module.collection["sum"].compute() == 5.0
    module.inner.mean.add_state("boxes", [], dist_reduce_fx=None)
    with pytest.raises(NotImplementedError, match="metric `inner.mean`.*dist_reduce_fx='cat'"):
        sum_over_pipelines(module, None, lambda state: state)
