"""Log what quantization sends, saves and loses."""

from __future__ import annotations

import math
from types import NoneType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torchmetrics import MeanMetric, Metric
from typing_extensions import override

from lq_lightning.foundation.checks import check_count
from lq_lightning.foundation.reporting import QuantizationReport, ReportsQuantization


class RelativeError(Metric):
    """Relative L2 error over ranks and updates: ``sqrt(sum(|a - b|^2) / sum(|b|^2))``.

    NaN before the first update and where the exact values are all zero.
    """

    squared_error: Tensor
    squared_norm: Tensor
    full_state_update = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        zero = torch.zeros((), dtype=torch.float64)
        self.add_state("squared_error", zero.clone(), dist_reduce_fx="sum")
        self.add_state("squared_norm", zero.clone(), dist_reduce_fx="sum")

    @override
    def update(self, squared_error: float, squared_norm: float) -> None:
        """Add the sums of squared errors and of squared exact values."""
        self.squared_error += squared_error
        self.squared_norm += squared_norm

    @override
    def compute(self) -> Tensor:
        """Return the relative error so far, a scalar."""
        return (self.squared_error / self.squared_norm).sqrt()


class QuantizationMonitor(Callback):
    """Log what the strategy, its precision plugin and other callbacks report under ``quant/``.

    Anything with the two methods of ``ReportsQuantization`` takes part. ``quantized_fsdp`` reports,
    per rank and optimizer step, averaged over ranks and the steps since the last entry:
    ``quant/bytes_{weights,gradients}_{intra,inter}`` (bytes sent within the node and to other
    nodes), ``quant/compression`` (bytes of plain FSDP2 over bytes sent), ``quant/bits_per_weight``
    and ``quant/bits_per_gradient`` (on the wire, scales included). Logged as totals:
    ``quant/skipped_steps``, ``quant/outside_writes`` (weights changed by something other than an
    optimizer, each refreshed in full precision). Logged for the step itself:
    ``quant/weights_error`` and ``quant/gradients_error``, relative L2 errors over all ranks.
    ``quantized_pipeline`` adds ``quant/bytes_boundary_{forward,backward}`` (sent to neighbouring
    stages), ``quant/bits_per_hidden_{value,gradient}`` and ``quant/bytes_tied_gradients``; with
    learned widths ``quant/bytes_boundary_tables``, which the bits include.

    Args:
        every_n_steps: Optimizer steps between two entries; the Trainer's ``log_every_n_steps`` by
            default.
        measure_errors: Whether to measure the relative errors. Costs an exact reduction of the
            gradients and some passes over the weights on the steps that are logged.

    Raises:
        ValueError: ``every_n_steps`` is not positive; or, before training starts, nothing reports,
            or two parts report one name.
    """

    def __init__(self, every_n_steps: int | None = None, measure_errors: bool = True) -> None:
        super().__init__()
        check_count("QuantizationMonitor", "every_n_steps", every_n_steps, 1, NoneType)
        self._every_n_steps = every_n_steps
        self._measure_errors = measure_errors
        self._before: list[QuantizationReport | None] = []
        self._logged_step = 0
        self._metrics: dict[str, Metric] = {}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a run in which nothing reports."""
        if not _reporters(trainer):
            raise ValueError(
                "`QuantizationMonitor` logs what quantized parts of a run report, but neither the "
                f"strategy `{type(trainer.strategy).__name__}` nor a plugin or callback does. Use "
                "`Trainer(strategy='quantized_fsdp')` or remove the callback."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting; refuse two reports of one name."""
        reporters = _reporters(trainer)
        self._before = [reporter.quantization_report() for reporter in reporters]
        self._logged_step = trainer.global_step
        owners: dict[str, str] = {}
        for reporter, report in zip(reporters, self._before, strict=True):
            for name in () if report is None else report.names:
                owner = type(reporter).__name__
                if name in owners:
                    raise ValueError(
                        f"`quant/{name}` is reported by `{owners[name]}` and again by `{owner}`: "
                        "one name can only stand for one thing. Remove one of them."
                    )
                owners[name] = owner
        self._metrics = {}
        if not owners:
            rank_zero_info(
                "QuantizationMonitor: nothing is quantized in this run (one rank communicates "
                "nothing), so there is nothing to log."
            )

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
        if self._measure_errors:
            is_due = self._is_due(trainer, trainer.global_step + 1)
            for reporter in _reporters(trainer):
                reporter.measure_quantization_errors(is_due)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
        step = trainer.global_step
        if step == self._logged_step or not self._is_due(trainer, step):
            return
        reporters = _reporters(trainer)
        reports = [reporter.quantization_report() for reporter in reporters]
        steps, device = step - self._logged_step, trainer.strategy.root_device
        values: dict[str, float] = {}
        for report, before in zip(reports, self._before, strict=True):
            if report is not None and before is not None:
                values |= self._values(report, before, steps, device)
        if self._measure_errors:
            for reporter in reporters:
                reporter.measure_quantization_errors(False)
        self._before, self._logged_step = reports, step
        logged = {f"quant/{k}": v for k, v in values.items() if not math.isnan(v)}
        pl_module.log_dict(logged)

    def _values(
        self,
        report: QuantizationReport,
        before: QuantizationReport,
        steps: int,
        device: torch.device,
    ) -> dict[str, float]:
        """Means over ranks of what one part reports; collective."""
        updates: dict[str, tuple[type[Metric], tuple[float, ...]]] = {}
        for name, count in report.counts.items():
            updates[name] = (MeanMetric, ((count - before.counts.get(name, 0.0)) / steps,))
        for name, ratio in report.ratios.items():
            earlier = before.ratios.get(name, (0.0, 0.0))
            above, below = ratio[0] - earlier[0], ratio[1] - earlier[1]
            updates[name] = (MeanMetric, (above / below if below else math.nan,))
        if self._measure_errors:
            updates |= {name: (RelativeError, sums) for name, sums in report.errors.items()}
        values = {}
        for name, (kind, numbers) in updates.items():
            if name not in self._metrics:
                options = {"nan_strategy": "ignore"} if kind is MeanMetric else {}
                self._metrics[name] = kind(**options).to(device)
            metric = self._metrics[name]
            metric.update(*numbers)
            values[name] = float(metric.compute())
            metric.reset()
        return values | {name: float(total) for name, total in report.totals.items()}

    def _is_due(self, trainer: pl.Trainer, step: int) -> bool:
        every: int = self._every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every > 0 and step % every == 0


def _reporters(trainer: pl.Trainer) -> list[ReportsQuantization]:
    parts = (trainer.strategy, trainer.precision_plugin, *trainer.callbacks)  # type: ignore[attr-defined]
    return [part for part in parts if isinstance(part, ReportsQuantization)]
