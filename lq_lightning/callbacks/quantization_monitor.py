"""Log what quantized communication sends, saves and loses."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torchmetrics import MeanMetric, Metric
from typing_extensions import override

from lq_lightning.data_parallel import QuantizedCommunication, Traffic

__all__ = ["QuantizationMonitor", "RelativeError"]

_BYTES = ("weights_intra", "weights_inter", "gradients_intra", "gradients_inter")


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
    """Log the traffic and the error of ``quantized_fsdp`` under ``quant/``.

    Logged per rank and optimizer step, averaged over ranks and the steps since the last time:
    ``quant/bytes_{weights,gradients}_{intra,inter}`` (bytes sent within the node and to other
    nodes), ``quant/compression`` (bytes of plain FSDP2 over bytes sent), ``quant/bits_per_weight``
    and ``quant/bits_per_gradient`` (on the wire, scales included). Logged as totals:
    ``quant/skipped_steps``, ``quant/outside_writes`` (weights changed by something other than an
    optimizer, each refreshed in full precision). Logged for the step itself:
    ``quant/weights_error`` and ``quant/gradients_error``, relative L2 errors over all ranks. With
    error feedback the latter also counts what earlier steps left out, although it is no loss.

    Args:
        every_n_steps: Optimizer steps between two entries; the Trainer's ``log_every_n_steps`` by
            default.
        measure_errors: Whether to measure the relative errors. Costs an exact reduction of the
            gradients and some passes over the weights on the steps that are logged.
    """

    def __init__(self, every_n_steps: int | None = None, measure_errors: bool = True) -> None:
        super().__init__()
        if every_n_steps is not None and every_n_steps < 1:
            raise MisconfigurationException(
                f"`QuantizationMonitor(every_n_steps={every_n_steps})` is not valid: give a "
                "positive number, or None for the Trainer's `log_every_n_steps`."
            )
        self._every_n_steps = every_n_steps
        self._measure_errors = measure_errors
        self._before = Traffic()
        self._logged_step = 0
        self.metrics: dict[str, Metric] = {
            **{f"bytes_{name}": MeanMetric() for name in _BYTES},
            "compression": MeanMetric(),
            "bits_per_weight": MeanMetric(nan_strategy="ignore"),
            "bits_per_gradient": MeanMetric(nan_strategy="ignore"),
            "weights_error": RelativeError(),
            "gradients_error": RelativeError(),
        }

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse strategies that have nothing to monitor.

        Raises:
            MisconfigurationException: The strategy is not ``quantized_fsdp``.
        """
        if not hasattr(trainer.strategy, "communication"):
            raise MisconfigurationException(
                f"`QuantizationMonitor` reads the traffic of `quantized_fsdp`, but the strategy is "
                f"`{type(trainer.strategy).__name__}`. Use `Trainer(strategy='quantized_fsdp')` or "
                "remove the callback."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting from here."""
        communication = self._communication(trainer)
        if communication is None:
            rank_zero_info(
                "QuantizationMonitor: one rank communicates nothing, so there is nothing to log."
            )
            return
        self._before = communication.traffic()
        self._logged_step = trainer.global_step
        for metric in self.metrics.values():
            metric.to(trainer.strategy.root_device)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measure errors on the step that will be logged."""
        communication = self._communication(trainer)
        if communication is not None and self._measure_errors:
            communication.measure_errors = self._is_due(trainer, trainer.global_step + 1)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log after every ``every_n_steps``-th optimizer step."""
        communication = self._communication(trainer)
        step = trainer.global_step
        if communication is None or step == self._logged_step or not self._is_due(trainer, step):
            return
        steps = step - self._logged_step
        traffic = communication.traffic()
        counted = traffic.since(self._before)
        self._before, self._logged_step = traffic, step
        self._update(counted, steps, communication)
        values = {f"quant/{name}": self._read(metric) for name, metric in self.metrics.items()}
        values["quant/skipped_steps"] = float(getattr(trainer.strategy, "num_skipped_steps", 0))
        values["quant/outside_writes"] = float(sum(communication.outside_writes.values()))
        pl_module.log_dict({k: v for k, v in values.items() if not math.isnan(v)})

    def _update(self, counted: Traffic, steps: int, communication: QuantizedCommunication) -> None:
        for name in _BYTES:
            self.metrics[f"bytes_{name}"].update(getattr(counted, name) / steps)
        self.metrics["compression"].update(counted.baseline / counted.sent if counted.sent else 1.0)
        self.metrics["bits_per_weight"].update(counted.bits_per_weight)
        self.metrics["bits_per_gradient"].update(counted.bits_per_gradient)
        if self._measure_errors:
            errors = communication.errors()
            communication.measure_errors = False
            self.metrics["weights_error"].update(*errors[:2])
            self.metrics["gradients_error"].update(*errors[2:])

    @staticmethod
    def _read(metric: Metric) -> float:
        value = float(metric.compute()) if metric.update_called else float("nan")
        metric.reset()
        return value

    def _is_due(self, trainer: pl.Trainer, step: int) -> bool:
        every: int = self._every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every > 0 and step % every == 0

    @staticmethod
    def _communication(trainer: pl.Trainer) -> QuantizedCommunication | None:
        communication: QuantizedCommunication | None = trainer.strategy.communication  # type: ignore[attr-defined]
        return communication
