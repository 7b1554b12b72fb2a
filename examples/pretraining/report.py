"""Measurements of a run: kept during training, written as JSON, and drawn."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_COLORS = ("#57606a", "#1f6feb")  # the reference, the run


@dataclass(slots=True, kw_only=True)
class Wire:
    """Bytes that one rank sent in ``steps`` optimizer steps, and bits per element with scales.

    Attributes:
        baseline_weights: Bytes that plain FSDP2 would have sent for the same weights.
        baseline_gradients: Likewise for gradients.
        bits_per_weight: Mean over the quantized weight exchanges.
        bits_per_gradient: Mean over the slowest level of the gradient exchanges.
    """

    steps: int = 0
    weights: float = 0.0
    gradients: float = 0.0
    baseline_weights: float = 0.0
    baseline_gradients: float = 0.0
    bits_per_weight: float | None = None
    bits_per_gradient: float | None = None

    @property
    def sent(self) -> float:
        """All bytes sent."""
        return self.weights + self.gradients

    @property
    def baseline(self) -> float:
        """All bytes that plain FSDP2 would have sent."""
        return self.baseline_weights + self.baseline_gradients


@dataclass(slots=True, kw_only=True)
class Report:
    """Measurements of one run.

    Attributes:
        name: Name of the run in pictures.
        unit: Unit of the losses.
        validation: ``[step, loss]`` after every validation.
        steps: Optimizer steps of the whole run.
        parameters: Number of weights of the model.
        world_size: Number of ranks.
        tokens_per_s: Training tokens per second over all ranks, from the fourth step of this
            process to the last and without validation.
        train_s: Seconds inside training steps.
        wire: Traffic; ``None`` where nothing was counted (one rank, or another strategy).
        checkpoint: Path of the last checkpoint.
    """

    name: str
    unit: str = "nats per token"
    validation: list[list[float]] = field(default_factory=list)
    steps: int = 0
    parameters: int = 0
    world_size: int = 1
    tokens_per_s: float | None = None
    train_s: float = 0.0
    wire: Wire | None = None
    checkpoint: str | None = None

    @property
    def val_loss(self) -> float | None:
        """The last validation loss."""
        return self.validation[-1][1] if self.validation else None

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read(path: Path) -> Report:
    """Read a report."""
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        wire = values.pop("wire")
        return Report(**values, wire=None if wire is None else Wire(**wire))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"'{path}' is not a report of examples/pretrain.py: {error!r}.") from error


def draw(run: Report, reference: Report | None, path: Path) -> None:
    """Draw losses and bytes of a run as a PNG, beside those of a full-precision run if given."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    for shown, color, style in zip((reference, run), _COLORS, ("--", "-"), strict=True):
        if shown is not None and shown.validation:
            steps, losses = zip(*shown.validation, strict=True)
            label = f"{shown.name} ({losses[-1]:.4f})"
            curves.plot(steps, losses, style, color=color, label=label, marker=".")
    curves.set(xlabel="optimizer step", ylabel=f"validation loss ({run.unit})")
    curves.set_title("Validation loss")
    curves.grid(alpha=0.3)
    if curves.lines:
        curves.legend()
    _draw_wire(bars, run, "full precision" if reference is None else reference.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_wire(axes: Any, run: Report, reference: str) -> None:
    axes.set_title("Sent by one rank, per optimizer step")
    wire = run.wire
    if wire is None or wire.steps == 0 or wire.baseline == 0:
        axes.text(0.5, 0.5, "nothing counted", transform=axes.transAxes, ha="center")
        axes.set_axis_off()
        return
    labels = ["", f" ({wire.baseline / max(wire.sent, 1):.1f}x less)"]
    sent = [(wire.baseline_weights, wire.baseline_gradients), (wire.weights, wire.gradients)]
    for position, (both, label, color) in enumerate(zip(sent, labels, _COLORS, strict=True)):
        weights, gradients = (nbytes / wire.steps / 1e6 for nbytes in both)
        axes.bar(position, weights, color=color)
        axes.bar(position, gradients, bottom=weights, color=color, alpha=0.45)
        total = weights + gradients
        axes.text(position, total, f"{total:.2f} MB{label}", ha="center", va="bottom")
    axes.set_xticks(range(2), [reference, run.name])
    axes.set_ylabel("MB (dark: weights, light: gradients)")
    axes.margins(y=0.12)
