"""The line of progress: when it is printed, and what it shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pretraining import progress
from pretraining.progress import ProgressLine


def _trainer(step: int, **changes: Any) -> Any:
    metrics = {"loss": 2.1, "tokens/s": 10032.4, "MB/step": 0.9503, "uncompressed": 10.93}
    values = {
        "global_step": step,
        "estimated_stepping_batches": 300,
        "loggers": [],
        "progress_bar_metrics": metrics | {"val_loss": 2.2},
        "state": SimpleNamespace(fn="fit"),
        "sanity_checking": False,
    }
    return SimpleNamespace(**(values | changes))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds that pass when the test says so."""
    clock = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.s)
    return clock


def test_log_gets_few_lines_and_only_on_one_rank(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    bar, other_rank = ProgressLine(every_s=60), ProgressLine(every_s=60)
    other_rank.disable()
    for shown in (bar, other_rank):
        shown.on_train_start(_trainer(0), None)
        for step in range(1, 201):
            clock.s += 1
            shown.on_train_batch_end(_trainer(step), None)
        shown.on_validation_end(_trainer(200), None)
        shown.on_validation_end(_trainer(200, sanity_checking=True), None)
        shown.on_train_end(_trainer(200), None)
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split("/")[0] for line in lines]
    assert steps == ["1", "61", "121", "181", "200"]
    assert lines[-1].endswith("MB/step 0.9503  uncompressed 10.93  val_loss 2.200")
    assert lines[1].startswith("61/300 (0:03:59 left)  loss 2.100  tokens/s 10032  MB/step 0.9503")


def test_terminal_gets_more_lines(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    bar = ProgressLine()
    bar.on_train_start(_trainer(0), None)
    for step in range(1, 12):
        clock.s += 1
        bar.on_train_batch_end(_trainer(step, estimated_stepping_batches=float("inf")), None)
    steps = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert steps == ["step 1", "step 6", "step 11"]
