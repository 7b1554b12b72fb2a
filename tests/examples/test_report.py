"""The report, its plot, lines of progress, and what the quickstart prints."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import quickstart
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from pretraining import callbacks, report

from lq_lightning.data_parallel import Traffic


def _runs() -> tuple[report.Report, report.Report]:
    full = report.Report(
        name="full precision", validation=[[10, 3.0], [20, 2.0]], steps=20, tokens_per_s=1000.0
    )
    wire = report.Wire(
        steps=20,
        weights=10e6,
        gradients=10e6,
        baseline_weights=120e6,
        baseline_gradients=40e6,
        bits_per_weight=4.02,
        bits_per_gradient=4.25,
    )
    quantized = report.Report(
        name="4-bit",
        validation=[[10, 3.1], [20, 2.02]],
        steps=20,
        parameters=1_800_000,
        world_size=2,
        tokens_per_s=900.0,
        wire=wire,
        checkpoint="runs/last.ckpt",
    )
    return full, quantized


def test_report_round_trip(tmp_path: Path) -> None:
    for run in _runs():
        run.write(tmp_path / "deep" / "report.json")
        assert report.read(tmp_path / "deep" / "report.json") == run


def test_report_errors(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"wire": null, "other": 1}')
    with pytest.raises(ValueError, match="is not a report"):
        report.read(tmp_path / "report.json")


@pytest.mark.parametrize("case", ["both", "no reference", "no traffic", "nothing"])
def test_plot(case: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws the plot")
    full, quantized = _runs()
    run = {"no traffic": full, "nothing": report.Report(name="empty")}.get(case, quantized)
    path = tmp_path / "plots" / "report.png"
    report.draw(run, full if case == "both" else None, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_callback_counts_training_traffic_only() -> None:
    traffic = Traffic()
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(communication=SimpleNamespace(traffic=lambda: traffic)),
        global_step=0,
    )
    callback = callbacks.RunReport(plot=False)
    traffic.baseline_weights += 1e6  # validation, before the step
    callback._traffic = callbacks.traffic_of(trainer)
    traffic.weights_inter += 1e6
    traffic.gradients_intra += 2e6
    traffic.baseline_weights += 8e6
    traffic.baseline_gradients += 16e6
    traffic.weights_messages, traffic.weights_elements = 500, 1000
    trainer.global_step = 1  # the second of two micro-batches
    callback._count_traffic(trainer)
    assert callback.report.wire == report.Wire(
        steps=1,
        weights=1e6,
        gradients=2e6,
        baseline_weights=8e6,
        baseline_gradients=16e6,
        bits_per_weight=4.0,
    )


def test_callback_without_quantized_communication() -> None:
    for strategy in (SimpleNamespace(), SimpleNamespace(communication=None)):
        trainer = SimpleNamespace(strategy=strategy)
        assert callbacks.traffic_of(trainer) is None
        callback = callbacks.RunReport(plot=False)
        callback._count_traffic(trainer)
        assert callback.report.wire is None


def test_progress_is_few_lines_on_one_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: clock.s)
    metrics = {"loss": 2.1, "tokens/s": 10032.4, "MB/step": 0.9503, "uncompressed": 10.93}

    def trainer(step: int, total: float = 300, **changes: Any) -> Any:
        values = {
            "global_step": step,
            "estimated_stepping_batches": total,
            "loggers": [],
            "progress_bar_metrics": metrics | {"val_loss": 2.2},
            "state": SimpleNamespace(fn="fit"),
            "sanity_checking": False,
        }
        return SimpleNamespace(**(values | changes))

    bar, other_rank = callbacks.ProgressLine(every_s=60), callbacks.ProgressLine(every_s=60)
    other_rank.disable()
    for shown in (bar, other_rank):
        shown.on_train_start(trainer(0), None)
        for step in range(1, 201):
            clock.s += 1
            shown.on_train_batch_end(trainer(step), None)
        shown.on_validation_end(trainer(200), None)
        shown.on_validation_end(trainer(200, sanity_checking=True), None)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("/")[0] for line in lines] == ["1", "61", "121", "181", "200"]
    assert lines[-1].endswith("MB/step 0.9503  uncompressed 10.93  val_loss 2.200")
    assert lines[1].startswith("61/300 (0:03:59 left)  loss 2.100  tokens/s 10032  MB/step 0.9503")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    terminal = callbacks.ProgressLine()
    terminal.on_train_start(trainer(0), None)
    for step in range(1, 12):
        clock.s += 1
        terminal.on_train_batch_end(trainer(step, total=float("inf")), None)
    steps = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert steps == ["step 1", "step 6", "step 11"]


def test_quickstart_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    quickstart.print_comparison(*_runs())
    shown = capsys.readouterr().out
    assert "+1.00 %" in shown
    assert "8.0x less" in shown
    assert "8.00" in shown
    assert "4.02" in shown
    assert max(len(line) for line in shown.splitlines()) <= 100


def test_table_and_plot_have_one_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="draws the plot")
    from matplotlib.axes import Axes

    labels = []
    full, quantized = _runs()
    full.unit = quantized.unit = "nats per byte"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Axes, "set", lambda axes, **values: labels.append(values["ylabel"]))
        report.draw(quantized, full, tmp_path / "report.png")
    quickstart.print_comparison(full, quantized)
    assert labels == ["validation loss (nats per byte)"]
    assert labels[0] in capsys.readouterr().out


def test_quickstart_takes_fewer_steps_on_a_slow_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "time_one_step", lambda: 0.2)
    assert quickstart.choose_steps(300, 240.0, "cpu") == 300
    monkeypatch.setattr(quickstart, "time_one_step", lambda: 0.5)
    steps = quickstart.choose_steps(300, 240.0, "cpu")
    assert "instead of 300" in capsys.readouterr().out
    assert steps % quickstart.VALIDATIONS == 0
    step_s = 0.5 * quickstart.SLOWDOWN
    run_s = quickstart.STARTUP_S + (steps + quickstart.VALIDATION_STEPS) * step_s
    assert 240 - 2 * quickstart.VALIDATIONS * step_s < 2 * run_s <= 240
    assert quickstart.choose_steps(301, 1.0, "gpu") == 300


def test_quickstart_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "NEEDED", ("torch", "no_such_package"))
    with pytest.raises(SystemExit, match=r"(?s)cannot import no_such_package.*'.\[examples\]'"):
        quickstart.check_installed()


@pytest.mark.parametrize("pipeline", [None, "stages"])
def test_a_sample_is_refused_in_a_pipeline_before_training(pipeline: str | None) -> None:
    strategy = SimpleNamespace(pipeline=pipeline)
    trainer: Any = SimpleNamespace(strategy=strategy, fast_dev_run=False)
    module: Any = None
    callbacks.TextSample(max_new_tokens=0).setup(trainer, module, "fit")
    refused = pytest.raises(MisconfigurationException, match="sample.max_new_tokens=0")
    with nullcontext() if pipeline is None else refused:
        callbacks.TextSample().setup(trainer, module, "fit")
