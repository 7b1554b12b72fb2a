"""The picture of a run: validation loss against full precision, and bytes on the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretraining.report import Report, Wire

_RUN_COLOR, _REFERENCE_COLOR, _LIGHT = "#1f6feb", "#57606a", 0.45


def draw(run: Report, reference: Report | None, path: Path) -> Path:
    """Draw a run as a PNG.

    Args:
        run: The run.
        reference: The full-precision run to compare with, if there is one.
        path: Where the picture goes.

    Returns:
        ``path``.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Drawing needs matplotlib: `pip install matplotlib`, or pass `--report.plot=false`."
        ) from error
    figure = Figure(figsize=(10, 4.2), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_curves(curves, run, reference)
    _draw_wire(bars, run, reference)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _draw_curves(axes: Any, run: Report, reference: Report | None) -> None:
    lines = [(run, _RUN_COLOR, "-")]
    if reference is not None:
        lines.insert(0, (reference, _REFERENCE_COLOR, "--"))
    for shown, color, style in lines:
        if shown.validation:
            steps, losses = zip(*shown.validation, strict=True)
            label = f"{shown.name} ({losses[-1]:.4f})"
            axes.plot(steps, losses, style, color=color, label=label, marker=".")
    axes.set(xlabel="optimizer step", ylabel=f"validation loss ({run.unit})")
    axes.set_title("Validation loss")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    else:
        axes.text(0.5, 0.5, "no validation yet", transform=axes.transAxes, ha="center")


def _draw_wire(axes: Any, run: Report, reference: Report | None) -> None:
    axes.set_title("Sent by one rank, per optimizer step")
    wire = run.wire
    if wire is None or wire.steps == 0 or wire.baseline == 0:
        axes.text(0.5, 0.5, "nothing counted", transform=axes.transAxes, ha="center")
        axes.set_axis_off()
        return
    name = "full precision" if reference is None else reference.name
    full = Wire(steps=wire.steps, weights=wire.baseline_weights, gradients=wire.baseline_gradients)
    columns = [(name, full, _REFERENCE_COLOR), (run.name, wire, _RUN_COLOR)]
    for position, (_, column, color) in enumerate(columns):
        weights, gradients = (
            column.weights / column.steps / 1e6,
            column.gradients / column.steps / 1e6,
        )
        axes.bar(position, weights, color=color)
        axes.bar(position, gradients, bottom=weights, color=color, alpha=_LIGHT)
        ratio = "" if position == 0 else f" ({wire.baseline / max(wire.sent, 1):.1f}x less)"
        total = weights + gradients
        axes.text(position, total, f"{total:.2f} MB{ratio}", ha="center", va="bottom")
    axes.set_xticks(range(len(columns)), [label for label, _, _ in columns])
    axes.set_ylabel("MB (dark: weights, light: gradients)")
    axes.margins(y=0.12)
