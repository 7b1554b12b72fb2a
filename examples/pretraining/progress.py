"""The progress of a run in one line that fits the terminal, or in a few lines of a log file."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar

_REFRESH_S = 0.2
_CLEAR = "\r\x1b[2K"


class ProgressLine(ProgressBar):
    """Shows step, time left and the metrics logged with ``prog_bar=True``.

    On a terminal one line is rewritten, cut to the terminal's width. Elsewhere, as in the log of a
    batch job, and after every validation, a line is printed that stays.

    Args:
        every_s: Seconds between lines where there is no terminal.
    """

    def __init__(self, every_s: float = 60.0) -> None:
        super().__init__()
        self._every_s = every_s
        self._enabled = True
        self._is_open = False  # whether the cursor stands behind a line that is rewritten
        self._shown_s = self._started_s = 0.0
        self._first_step = 0

    def enable(self) -> None:
        """Show progress; the default."""
        self._enabled = True

    def disable(self) -> None:
        """Show nothing; Lightning calls this on all ranks but the first."""
        self._enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on a line of its own, as ``LightningModule.print`` asks for."""
        if self._enabled:
            self.close()
            print(*args, **kwargs)

    def close(self) -> None:
        """Leave the line that is rewritten as it stands."""
        if self._is_open:
            self._is_open = False
            sys.stdout.write("\n")
            sys.stdout.flush()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock of the time left."""
        self._started_s = time.monotonic()
        self._first_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Show the step now and then."""
        if self._is_due():
            self._show(self._training(trainer, pl_module))

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        """Show how far validation is."""
        if self._is_due():
            self._show(f"validating, batch {i + 1}")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the metrics in a line that stays."""
        if self._enabled and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._show(self._training(trainer, pl_module), stays=True)

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        """Show how far the test is."""
        if self._is_due():
            self._show(f"testing, batch {i + 1}")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the line."""
        self.close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Close the line."""
        self.close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Close the line before the error is printed."""
        self.close()

    def _is_due(self) -> bool:
        wait_s = _REFRESH_S if sys.stdout.isatty() else self._every_s
        return self._enabled and time.monotonic() - self._shown_s >= wait_s

    def _training(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str:
        total, done = trainer.estimated_stepping_batches, trainer.global_step
        parts = [f"step {done}"]
        if total != float("inf"):
            elapsed_s = time.monotonic() - self._started_s
            left_s = elapsed_s / max(1, done - self._first_step) * (total - done)
            parts = [f"{done}/{total:.0f} ({_clock(left_s)} left)"]
        metrics = self.get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return "  ".join(parts + [f"{name} {_short(value)}" for name, value in metrics.items()])

    def _show(self, line: str, *, stays: bool = False) -> None:
        """Write a line, in place of the open one where there is a terminal."""
        self._shown_s = time.monotonic()
        if not sys.stdout.isatty():
            print(line, flush=True)
            return
        width = shutil.get_terminal_size().columns - 1
        while len(line) > width and "  " in line:
            line = line.rpartition("  ")[0]
        sys.stdout.write(_CLEAR + line[:width] + ("\n" if stays else ""))
        sys.stdout.flush()
        self._is_open = not stays


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:#.4g}"
