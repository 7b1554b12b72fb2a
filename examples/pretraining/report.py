"""What a run measured: kept during training, written as JSON, drawn by ``pretraining.plots``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True, kw_only=True)
class Wire:
    """Bytes that one rank sent during training steps.

    Attributes:
        steps: Optimizer steps counted.
        weights: Bytes of weights sent.
        gradients: Bytes of gradients sent.
        baseline_weights: What plain FSDP2 would have sent for the same weights.
        baseline_gradients: What plain FSDP2 would have sent for the same gradients.
        bits_per_weight: Bits per element of the quantized weight exchanges, scales included.
        bits_per_gradient: Bits per element of the gradients on the slowest level, scales included.
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
    """Results of one run.

    Attributes:
        name: What the run is called in plots and tables.
        unit: What the losses are measured in.
        validation: ``[step, loss]`` pairs.
        steps: Optimizer steps done.
        parameters: Number of weights.
        world_size: Number of ranks.
        tokens_per_s: Training tokens per second over all ranks, from the fourth step of this
            process to the last and without validation.
        train_s: Seconds inside training steps.
        wire: Traffic; ``None`` where nothing was counted (one rank, or another strategy).
        checkpoint: The last checkpoint.
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
    """Read a report.

    Args:
        path: What ``Report.write`` wrote.

    Returns:
        The report.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no report.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no report at '{path}'. Every `fit` of examples/pretrain.py writes one to "
            "`<trainer.default_root_dir>/report.json`."
        )
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        wire = values.pop("wire")
        return Report(**values, wire=None if wire is None else Wire(**wire))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"'{path}' is not a report of examples/pretrain.py: {error!r}.") from error
