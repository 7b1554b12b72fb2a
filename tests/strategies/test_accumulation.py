"""Where a micro-batch lies in its window, which all parts of the package learn from one place."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lq_testing.lightning_models import TinyModule, loader, trainer

from lq_lightning._compat.lightning import Window, accumulation_window


class Windows(Callback):
    def __init__(self) -> None:
        self.rows: list[Window] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        self.rows.append(accumulation_window(trainer))


def test_windows_end_at_optimizer_steps_and_epochs(tmp_path: Any) -> None:
    windows = Windows()
    scheduler = GradientAccumulationScheduler({0: 3, 1: 1})
    run = trainer("auto", str(tmp_path), 1, callbacks=[windows, scheduler], max_epochs=2)
    run.fit(TinyModule(), loader(20))
    only = Window(first=True, last=True)
    first, middle, last = Window(True, False), Window(False, False), Window(False, True)
    assert windows.rows == [first, middle, last, first, last] + 5 * [only]
