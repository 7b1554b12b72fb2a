"""The line of progress: where it fits, where it stays, and what it shows."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from pretraining import progress
from pretraining.progress import ProgressLine


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


def _screen(written: str) -> list[str]:
    """Return the lines as a terminal shows them: what was cleared is gone."""
    return [line.rpartition("\x1b[2K")[2] for line in written.rstrip("\n").split("\n")]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds that pass when the test says so."""
    clock = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.s)
    return clock


def test_terminal_shows_one_line_of_its_width(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = _Terminal()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("COLUMNS", "80")
    bar = ProgressLine()
    bar.on_train_start(_trainer(0), None)
    for step in range(1, 121):
        clock.s += 0.1
        bar.on_train_batch_end(_trainer(step), None)
    (line,) = _screen(out.getvalue())
    assert line.startswith("119/300 (0:18 left)  loss 2.100  tokens/s 10032  MB/step 0.9503")
    assert len(line) < 80
    assert out.getvalue().count("\x1b") == 60  # not more often than a reader can see
    bar.on_validation_end(_trainer(120), None)
    bar.print("words")
    clock.s += 1
    bar.on_train_batch_end(_trainer(130, estimated_stepping_batches=float("inf")), None)
    bar.on_exception(_trainer(130), None, RuntimeError())
    shown = _screen(out.getvalue())
    assert [line.split("  ")[0] for line in shown] == ["120/300 (0:18 left)", "words", "step 130"]
    assert out.getvalue().endswith("\n")


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
    assert "\x1b" not in "".join(lines)


def test_times() -> None:
    assert [progress._clock(s) for s in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]
