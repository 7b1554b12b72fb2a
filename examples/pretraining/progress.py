"""The progress of a run in lines that a terminal and the log of a batch job show alike."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar


class ProgressLine(ProgressBar):
    """Prints step, time left and the metrics logged with ``prog_bar=True``.

    Args:
        every_s: Seconds between lines; by default 5 on a terminal and 60 elsewhere. A line follows
            every validation, too.
    """

    def __init__(self, every_s: float | None = None) -> None:
        super().__init__()
        self._every_s = every_s or (5.0 if sys.stdout.isatty() else 60.0)
        self._enabled = True
        self._shown_s = self._started_s = 0.0
        self._first_step = 0

    def enable(self) -> None:
        """Show progress; the default."""
        self._enabled = True

    def disable(self) -> None:
        """Show nothing; Lightning calls this on all ranks but the first."""
        self._enabled = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock of the time left."""
        self._started_s = time.monotonic()
        self._first_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Show the step now and then."""
        if time.monotonic() - self._shown_s >= self._every_s:
            self._show(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the metrics."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._show(trainer, pl_module)

    def _show(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._enabled:
            return
        self._shown_s = time.monotonic()
        total, done = trainer.estimated_stepping_batches, trainer.global_step
        parts = [f"step {done}"]
        if total != float("inf"):
            step_s = (self._shown_s - self._started_s) / max(1, done - self._first_step)
            left = timedelta(seconds=round(step_s * (total - done)))
            parts = [f"{done}/{total:.0f} ({left} left)"]
        metrics = self.get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        print("  ".join(parts + [f"{k} {_short(v)}" for k, v in metrics.items()]), flush=True)


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:#.4g}"
