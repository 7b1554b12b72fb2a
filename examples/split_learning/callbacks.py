"""Callbacks for a `SplitModel`: gates, checkpoints, and a report of what crossed."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from .model import SplitModel
from .settings import SplitSettings


class SplitLearning(pl.Callback):
    """Trains the gates of AMAQ beside the optimizer of any LightningModule with a `SplitModel`.

    Their state goes into checkpoints. Whatever the module's own optimizer does to its learning rate
    and gradients, it does not to gates. At the end of ``fit`` the connection is closed.

    Raises:
        NotImplementedError: several devices, or several optimizers.
        ValueError: the module has no `SplitModel`, or more than one.
    """

    def __init__(self) -> None:
        self._model: SplitModel | None = None

    @property
    def model(self) -> SplitModel:
        """The model of the run."""
        if self._model is None:
            raise RuntimeError("`SplitLearning.model` exists once a Trainer has begun.")
        return self._model

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the model."""
        self._model = _find(pl_module)
        if trainer.world_size > 1:
            raise NotImplementedError(
                f"A client with {trainer.world_size} devices: each would train adapters of its own."
                " Give the Trainer `devices=1`; several clients can train at one server."
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse more than one optimizer, whose steps would be more than one of the gates."""
        if self.model.gates is not None and len(trainer.optimizers) > 1:
            raise NotImplementedError(
                f"{len(trainer.optimizers)} optimizers with `--codec amaq`: gates step with one. "
                "Use one optimizer with several parameter groups."
            )

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        """Step the gates; widths change before the next batch."""
        if self.model.gates is None:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        gates = self.model.gates.optimizer
        gates.step(scale=1.0 if scaler is None else scaler.get_scale())
        pl_module.log("adaptive_bits/mean", gates.mean)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End the connection."""
        self.model.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the gates' state and the settings that it belongs to."""
        if self._model is None:
            return {}
        gates = self._model.gates
        return {
            "settings": _lasting(self._model.settings),
            "gates": None if gates is None else gates.optimizer.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue bit for bit where a run with the same settings stopped, but for AQ-SGD."""
        own, saved = _lasting(self.model.settings), state_dict["settings"]
        for name, value in own.items():
            if saved[name] != value:
                raise ValueError(
                    f"The checkpoint was written with `{name}={saved[name]!r}`, but this run has "
                    f"`{name}={value!r}`. Use the same, or another folder for a new run."
                )
        if self.model.gates is not None:
            self.model.gates.optimizer.load_state_dict(state_dict["gates"])
        if self.model.settings.codec == "aq_sgd":
            rank_zero_warn(
                "AQ-SGD: what both ends have kept is in no checkpoint. Adapters and samples travel "
                "in full precision once again, so this run does not go on bit for bit, as it would "
                "with any other codec."
            )


def _find(pl_module: pl.LightningModule) -> SplitModel:
    found = [module for module in pl_module.modules() if isinstance(module, SplitModel)]
    if len(found) != 1:
        raise ValueError(
            f"The LightningModule needs one `SplitModel`, but has {len(found)}. Use it where a "
            "model of transformers would be."
        )
    return found[0]


def _lasting(settings: SplitSettings) -> dict[str, Any]:
    """Return the settings that a checkpoint depends on; the model may be in another folder."""
    return {name: value for name, value in asdict(settings).items() if name != "model"}


class WireReport(pl.Callback):
    """Logs the bytes that each batch sends and receives, and writes a report at the end.

    Args:
        path: JSON file for settings, the loss, seconds and bytes of every batch by kind of message
            in both directions, and the client's peak of memory. None only logs.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.batches: list[dict[str, Any]] = []
        self._base_nbytes = resident_nbytes()
        self._before: Counter[tuple[str, str]] = Counter()
        self._started = 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Note the counts before the batch."""
        self._before, self._started = _counts(_find(pl_module)), time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Log and keep what the batch added."""
        model = _find(pl_module)
        seconds, added = time.perf_counter() - self._started, _counts(model) - self._before
        batch: dict[str, Any] = {"step": trainer.global_step, "seconds": seconds}
        for way in ("sent", "received"):
            batch[way] = {kind: nbytes for (one, kind), nbytes in added.items() if one == way}
            pl_module.log(f"wire/{way}_mb", sum(batch[way].values()) / 1e6)
        pl_module.log("wire/seconds", seconds)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:  # with manual optimization nothing need be returned
            batch["loss"] = float(loss)
        if model.gates is not None:
            batch["mean_bits"] = model.gates.optimizer.mean
        self.batches.append(batch)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the file."""
        if self.path is None:
            return
        model, on_gpu = _find(pl_module), pl_module.device.type == "cuda"
        report = {
            "settings": asdict(model.settings),
            "batches": self.batches,
            "reconnections": model.link.reconnections,
            "memory": {
                "imported_nbytes": self._base_nbytes,
                # two counters of the kernel, which lag by a few pages
                "peak_nbytes": max(peak_nbytes(), self._base_nbytes),
                "peak_gpu_nbytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
            },
        }
        self.path.write_text(json.dumps(report, indent=1))


def _counts(model: SplitModel) -> Counter[tuple[str, str]]:
    """Return bytes by direction and kind of message."""
    traffic = model.link.traffic
    ways = {"sent": traffic.sent, "received": traffic.received}
    return Counter(
        {(way, kind): one.nbytes for way, kinds in ways.items() for kind, one in kinds.items()}
    )


def peak_nbytes() -> int:
    """Return the most memory that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_nbytes() -> int:
    """Return the memory that this process has now, or the most it has had where nothing says."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return peak_nbytes()
    return int(statm.read_text().split()[1]) * resource.getpagesize()
