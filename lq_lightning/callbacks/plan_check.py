"""``Trainer(callbacks=[PlanCheck("plan.json")])``: what was planned, beside what a run measured."""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lq_lightning._compat.layouts import held_by
from lq_lightning._compat.saved_tensors import has_storage, kept_tensors, storage_key
from lq_lightning._compat.tensor_parallel import TENSOR
from lq_lightning.activations.hooks import WeightStorages
from lq_lightning.foundation.parameters import is_copy_of_parameter

_MOST_STEPS = 256  # whose times are kept
_LOSS = ("LogSoftmax", "NllLoss")  # whose tensors the plan counts apart
Unit = Literal["GiB", "ms", "MB", "tokens/s"]
_SCALES: dict[Unit, float] = {"GiB": 2.0**30, "ms": 1e-3, "MB": 1e6, "tokens/s": 1.0}


@dataclass(frozen=True, slots=True)
class CheckedLine:
    """A prediction and its measurement, in bytes, seconds or tokens per second.

    ``measured`` is None where it cannot be known, ``low`` and ``high`` are where the plan has no
    interval. ``note`` says why the two cannot be compared.
    """

    name: str
    unit: Unit
    predicted: float
    measured: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""

    @property
    def difference(self) -> float | None:
        """Relative deviation of the measurement from the plan; None where they are no match."""
        if self.note or self.measured is None or not self.predicted:
            return None
        return self.measured / self.predicted - 1.0

    @property
    def is_inside(self) -> bool | None:
        """Whether the interval contains the measurement; None without one of both."""
        if self.note or self.measured is None or self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high

    def cells(self) -> tuple[str, ...]:
        """Texts of a row: name, predicted, interval, measured, difference, remark."""
        scale = _SCALES[self.unit]

        def text(value: float | None) -> str:
            return "-" if value is None else _number(value / scale)

        interval = "-" if self.low is None else f"{text(self.low)} to {text(self.high)}"
        change = "-" if self.difference is None else f"{100 * self.difference:+.1f}%"
        remark = "outside" if self.is_inside is False else self.note
        measured = text(self.measured)
        return f"{self.name}, {self.unit}", text(self.predicted), interval, measured, change, remark


def _number(value: float) -> str:
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 4
    return f"{value:,.{digits}f}"


def checked_table(lines: Sequence[CheckedLine]) -> str:
    """Return the lines as a table, with the names of those outside of their intervals below."""
    header = ("", "predicted", "interval", "measured", "difference", "")
    rows = [header, *(line.cells() for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    texts = []
    for name, *cells, remark in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:-1], strict=True)]
        texts.append("  ".join([name.ljust(widths[0]), *padded, remark]).rstrip())
    outside = [line.name for line in lines if line.is_inside is False]
    known = sum(line.is_inside is not None for line in lines)
    if known:
        where = f": not {', '.join(outside)}" if outside else ""
        texts.append(
            f"{known - len(outside)} of {known} intervals contain what was measured{where}"
        )
    return "\n".join(texts)


@dataclass(kw_only=True, slots=True)
class Measured:
    """What one rank measured.

    ``peaks`` are the most bytes that were ``"allocated"``, ``"reserved"`` and of the ``"device"``;
    empty without a GPU.
    """

    stage: int = 0  # place in its pipeline, 0 without one
    step_s: float | None = None  # median seconds of the steps after the first; None with one step
    peaks: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)  # bytes of live objects by kind
    sent_within: float | None = None  # the node, bytes per step; None if not all are counted
    sent_between: float | None = None  # nodes, likewise


class PlanCheck(Callback):
    """Shows what ``lq-lightning plan`` predicted beside what was measured when ``fit`` ends.

    Memory is the peak since the Trainer started and, by kind, the sizes of objects that live:
    parameters, replicas, optimizer states, gradients, gradient sums, and what the graph of the
    first micro-batch saves for backward. A step is the median of all after the first. Bytes are
    those that the strategy counts. Without a GPU, memory of the device has no measurement.

    Args:
        plan: File of ``lq-lightning plan --json``, or its content. A file is read when training
            ends, and need not exist before.
        quiet: Whether to show no table; ``lines`` has it.

    Attributes:
        lines: Predictions and measurements of the last ``fit``; empty before it ends.
        measured: What each rank measured.
    """

    def __init__(self, plan: str | Path | Mapping[str, Any], quiet: bool = False) -> None:
        super().__init__()
        self._plan, self._quiet = plan, quiet
        self._device = torch.device("cpu")
        self._marks: deque[Any] = deque(maxlen=_MOST_STEPS)
        self._steps, self._casts = 0, 0
        self._now = Measured()
        self._traffic: Any = None
        self.lines: list[CheckedLine] = []
        self.measured: list[Measured] = []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget the last run, and count peaks of memory from here on."""
        self._now, self._traffic, self._steps, self._casts = Measured(), None, 0, 0
        self._marks.clear()
        self._device = trainer.strategy.root_device
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: Any, loss: Tensor) -> None:
        in_parts = getattr(trainer.strategy, "pipeline", None) is not None
        if self._steps == 0 and not in_parts and "saved activations" not in self._now.kinds:
            self._note_saved(pl_module, loss)

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
        if self._steps == 0:
            gradients = (p.grad for p in pl_module.parameters() if p.grad is not None)
            self._now.kinds["gradients"] = _nbytes(gradients)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
        buffer = getattr(trainer.precision_plugin, "gradient_buffer", None)
        if buffer is not None and self._steps <= 1:
            kept = max(self._now.kinds.get("gradient sums", 0), buffer.nbytes)
            self._now.kinds["gradient sums"] = kept
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        self._marks.append(_mark(self._device))
        if self._traffic is None:  # the first step gathers weights in full precision
            self._traffic = _traffic(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure what is left, gather it, and show the table."""
        self._finish(trainer, pl_module)
        gathered: list[Any] = [self._now]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, self._now)
        self.measured = gathered
        if not trainer.is_global_zero:
            return
        plan = self._read()
        if plan:
            self.lines = compare(plan, self.measured)
            if not self._quiet:
                rank_zero_info(f"{type(self).__name__}\n{checked_table(self.lines)}")

    def _read(self) -> Mapping[str, Any] | None:
        if isinstance(self._plan, Mapping):
            return self._plan
        try:
            return dict(json.loads(Path(self._plan).read_text()))
        except (OSError, ValueError) as error:
            rank_zero_warn(
                f"`{type(self).__name__}({str(self._plan)!r})` has nothing to compare with: "
                f"{error}. `lq-lightning plan CONFIG.yaml --json FILE` writes a plan."
            )
            return None

    def _note_saved(self, module: pl.LightningModule, loss: Tensor) -> None:
        """Count what a graph keeps, but for the loss: activations, and autocast's weights."""
        weights, kept = WeightStorages(module), [*kept_tensors(loss, _LOSS)]
        saved = _nbytes(tensor for tensor in kept if not weights.holds(tensor))
        self._now.kinds["saved activations"] = saved
        copies = [tensor for tensor in kept if is_copy_of_parameter(tensor)]
        own = [*module.parameters()]
        self._casts = _nbytes([*own, *copies]) - _nbytes(own)

    def _finish(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        now, strategy = self._now, trainer.strategy
        pipeline = getattr(strategy, "pipeline", None)
        now.stage = 0 if pipeline is None else pipeline.rank
        now.kinds["weights"] = _nbytes(module.parameters()) + self._casts
        now.kinds["optimizer states"] = sum(_state_nbytes(o) for o in trainer.optimizers)
        communication = getattr(strategy, "communication", None)
        now.kinds["replica"] = 0 if communication is None else communication.replica_nbytes
        times = _seconds(self._marks)
        now.step_s = statistics.median(times) if times else None
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            now.peaks["allocated"] = torch.cuda.max_memory_allocated(self._device)
            now.peaks["reserved"] = torch.cuda.max_memory_reserved(self._device)
            now.peaks["device"] = total - free
        if self._traffic is not None and self._steps > 1 and _counts_all(trainer):
            sent = _traffic(trainer).since(self._traffic)
            if sent.weights_messages and sent.gradients_messages:
                steps = self._steps - 1
                now.sent_within = (sent.weights_intra + sent.gradients_intra) / steps
                now.sent_between = (sent.weights_inter + sent.gradients_inter) / steps


def _mark(device: torch.device) -> Any:
    """Note this moment: on CUDA of the stream, so that the host runs ahead as in training."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(marks: Iterable[Any]) -> list[float]:
    """Seconds between marks; waits for the device."""
    pairs = [*pairwise(marks)]
    if not pairs or isinstance(pairs[0][0], float):
        return [b - a for a, b in pairs]
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairs]


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of distinct storages, of DTensors those of this rank."""
    held = (held_by(tensor) for tensor in tensors)
    storages = {storage_key(t): t.untyped_storage().nbytes() for t in held if has_storage(t)}
    return sum(storages.values())


def _state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    entries = optimizer.state.values()
    return _nbytes(v for entry in entries for v in entry.values() if isinstance(v, Tensor))


def _traffic(trainer: pl.Trainer) -> Any:
    communication = getattr(trainer.strategy, "communication", None)
    return None if communication is None else communication.traffic()


def _counts_all(trainer: pl.Trainer) -> bool:
    """Whether the quantized collectives count everything that is sent."""
    mesh = getattr(trainer.strategy, "device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    alone = mesh is None or TENSOR not in names or mesh[TENSOR].size() == 1
    return alone and getattr(trainer.strategy, "pipeline", None) is None


# --- predicted beside measured --------------------------------------------------------------------

# Kinds of the plan that objects of a run are counted as.
_KINDS = {
    "weights": ("weights", "master weights"),
    "replica": ("replica",),
    "optimizer states": ("optimizer states",),
    "gradient sums": ("gradient sums",),
    "gradients": ("gradients",),
    "saved activations": ("saved activations",),
}
_NO_GPU = "there is no GPU"


def compare(plan: Mapping[str, Any], measured: Sequence[Measured]) -> list[CheckedLine]:
    """Return the predictions of a plan's JSON beside what its ranks measured, in their order.

    Of each stage and node the largest counts.
    """
    lines: list[CheckedLine] = []
    for peak in plan["memory"]:
        of_stage = [each for each in measured if each.stage == peak["stage"]]
        where = f" of stage {peak['stage']}" if len(plan["memory"]) > 1 else ""
        lines += _memory_lines(peak, of_stage, where)
    return [*lines, *_step_lines(plan, measured)]


def _memory_lines(
    peak: Mapping[str, Any], ranks: Sequence[Measured], where: str
) -> Iterator[CheckedLine]:
    intervals = {
        "allocated": peak.get("allocated_interval", (None, None)),
        "reserved": (None, None),
        "device": (peak["low_nbytes"], peak["high_nbytes"]),
    }
    for kind, (low, high) in intervals.items():
        found = max((rank.peaks[kind] for rank in ranks if kind in rank.peaks), default=None)
        note = _NO_GPU if found is None else ""
        predicted = peak[f"{kind}_nbytes"]
        yield CheckedLine(f"peak {kind}{where}", "GiB", predicted, found, low, high, note)
    for kind, parts in _KINDS.items():
        values = [rank.kinds[kind] for rank in ranks if kind in rank.kinds]
        predicted = sum(peak["most"].get(part, 0) for part in parts)
        if values and (predicted or max(values)):
            yield CheckedLine(kind + where, "GiB", predicted, max(values))


def _step_lines(plan: Mapping[str, Any], ranks: Sequence[Measured]) -> Iterator[CheckedLine]:
    step, tokens = plan["step"], plan["tokens_per_step"]
    times = [rank.step_s for rank in ranks if rank.step_s is not None]
    took = max(times, default=None)
    note = "" if any(rank.peaks for rank in ranks) else _NO_GPU
    seconds, low, high = step["seconds"], step["low_s"], step["high_s"]
    yield CheckedLine("step", "ms", seconds, took, low, high, note)
    speed = None if took is None else tokens / took
    yield CheckedLine(
        "speed", "tokens/s", tokens / seconds, speed, tokens / high, tokens / low, note
    )
    for where in ("within", "between"):
        nodes: dict[int, float] = defaultdict(float)
        for place, rank in enumerate(ranks):
            sent = getattr(rank, f"sent_{where}")
            if sent is not None:
                nodes[place // plan["machine"]["gpus_per_node"]] += sent
        predicted, found = step[f"sent_{where}_nbytes"], max(nodes.values(), default=None)
        if predicted or found:
            note = "not all of it is counted" if found is None else ""
            yield CheckedLine(f"sent {where} nodes", "MB", predicted, found, note=note)
