from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import Precision
from lq_testing import run_ranks
from lq_testing.lightning_models import TinyModule, loader, trainer

import lq_lightning
from lq_lightning.callbacks import QuantizationMonitor, RelativeError
from lq_lightning.foundation.reporting import QuantizationReport


def fit(root: Path, monitor: QuantizationMonitor, devices: int = 1, **options: Any) -> pl.Trainer:
    options = {"callbacks": [monitor], "strategy": "auto", "log_every_n_steps": 1} | options
    logger = CSVLogger(root, name="", version="")
    run = trainer(options.pop("strategy"), str(root), devices, logger=logger, **options)
    run.fit(TinyModule(), loader(24 * devices))
    return run


def _monitored(rank: int, world: int, folder: str) -> list[dict[str, float]]:
    seen: list[dict[str, float]] = []

    class Spy(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *unused: object) -> None:
            found = trainer.callback_metrics.items()
            seen.append({k: float(v) for k, v in found if k.startswith("quant/")})

    monitor = QuantizationMonitor(every_n_steps=2)
    strategy = lq_lightning.QuantizedFSDPStrategy(
        node_size=1, min_quantized_numel=256, weights=lq_lightning.WeightQuantization(group_size=64)
    )
    fit(Path(folder), monitor, world, strategy=strategy, callbacks=[monitor, Spy()])
    assert not strategy.communication.measure_errors
    traffic = strategy.communication.traffic()
    last = seen[-1]
    assert last["quant/bytes_gradients_inter"] == traffic.gradients_inter / 6
    assert last["quant/bytes_gradients_intra"] == 0
    return seen


def test_logs_traffic_and_errors_of_two_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(
        _monitored, 2, str(tmp_path), backend=None, torchrun=True, timeout=120
    )
    assert "quant/bits_per_weight" not in first[0], "step 1 is not due"
    for step in (1, 3, 5):
        values = first[step]
        assert values == second[step], "values are means over ranks"
        assert 4 < values["quant/bits_per_weight"] < 12
        assert 4 < values["quant/bits_per_gradient"] < 12
        assert 1e-5 < values["quant/weights_error"] < 0.1
        assert 0.01 < values["quant/gradients_error"] < 0.5
        assert values["quant/skipped_steps"] == 0
        assert values["quant/outside_writes"] == 0
    assert first[5]["quant/compression"] > 2
    header = (tmp_path / "metrics.csv").read_text().splitlines()[0]
    assert "quant/gradients_error" in header


class Reporter(pl.Callback):
    """A callback that quantizes something of its own."""

    def __init__(self, name: str = "saved") -> None:
        self.name, self.steps, self.measures, self.measured = name, 0, False, []

    def on_train_batch_end(self, *unused: object) -> None:
        self.steps += 1
        self.measured.append(self.measures)

    def quantization_report(self) -> QuantizationReport:
        return QuantizationReport(
            counts={f"{self.name}_bytes": 10.0 * self.steps},
            ratios={
                f"{self.name}_bits": (self.steps**2, self.steps),
                f"{self.name}_never": (5.0, 0.0),
            },
            totals={f"{self.name}_layers": 3},
            errors={f"{self.name}_error": (1.0, 4.0) if self.measures else (0.0, 0.0)},
        )

    def measure_quantization_errors(self, measure: bool) -> None:
        self.measures = measure


class ReportingPrecision(Precision):
    """A precision plugin that quantizes something of its own."""

    def quantization_report(self) -> QuantizationReport:
        return QuantizationReport(totals={"sums": 7})

    def measure_quantization_errors(self, measure: bool) -> None:
        pass


@pytest.mark.parametrize("errors", [True, False])
def test_logs_every_part_that_reports(tmp_path: Path, errors: bool) -> None:
    parts = Reporter("saved"), Reporter("boundary")
    monitor = QuantizationMonitor(every_n_steps=2, measure_errors=errors)
    # a monitor sees what ran before it
    plugins = [ReportingPrecision()]
    run = fit(tmp_path, monitor, callbacks=[*parts, monitor], plugins=plugins)
    values = {k: float(v) for k, v in run.callback_metrics.items() if k.startswith("quant/")}
    assert values.pop("quant/sums") == 7
    assert values == {
        f"quant/{name}_{kind}": value
        for name in ("saved", "boundary")
        for kind, value in (("bytes", 10.0), ("bits", 10.0), ("layers", 3.0), ("error", 0.5))
        if errors or kind != "error"
    }
    assert all(part.measured == [False, errors] * 3 for part in parts)
    assert not any(part.measures for part in parts)


def test_two_parts_cannot_report_one_name(tmp_path: Path) -> None:
    monitor = QuantizationMonitor()
    with pytest.raises(ValueError, match=r"`quant/saved_bytes`.*again"):
        fit(tmp_path, monitor, callbacks=[Reporter(), Reporter(), monitor])


def test_one_rank_has_nothing_to_log(tmp_path: Path) -> None:
    run = fit(tmp_path, QuantizationMonitor(), strategy="quantized_fsdp")
    assert not [name for name in run.callback_metrics if name.startswith("quant/")]


def test_other_strategies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="SingleDeviceStrategy.*quantized_fsdp"):
        fit(tmp_path, QuantizationMonitor())


def test_interval_must_be_positive() -> None:
    with pytest.raises(ValueError, match="every_n_steps=0"):
        QuantizationMonitor(every_n_steps=0)


def test_relative_error_sums_before_it_divides() -> None:
    metric = RelativeError()
    metric.update(1.0, 3.0)
    metric.update(0.0, 1.0)
    assert float(metric.compute()) == pytest.approx(0.5)
    metric.reset()
    metric.update(0.0, 0.0)
    assert math.isnan(float(metric.compute()))
