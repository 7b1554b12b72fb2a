"""Callbacks of the example: lines of progress, the report with its plot, and a text sample."""

from __future__ import annotations

import importlib.util
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from pretraining import report
from pretraining.data import TextDataModule
from pretraining.lightning_module import CausalLM

_WARMUP_BATCHES = 3  # the first ones gather in full precision, allocate and compile


class ProgressLine(ProgressBar):
    """Prints step, time left and the metrics logged with ``prog_bar=True``, one line at a time.

    Lines read alike on a terminal and in the log of a batch job.

    Args:
        every_s: Seconds between lines; by default 5 on a terminal and 60 elsewhere. A line follows
            every validation, too.
    """

    def __init__(self, every_s: float | None = None) -> None:
        super().__init__()
        self._every_s = every_s or (5.0 if sys.stdout.isatty() else 60.0)
        self._enabled = True
        self._shown_s = self._started_s = 0.0
        self._first_step = 0

    def enable(self) -> None:
        """Show progress; the default."""
        self._enabled = True

    def disable(self) -> None:
        """Show nothing; Lightning calls this on all ranks but the first."""
        self._enabled = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock of the time left."""
        self._started_s = time.monotonic()
        self._first_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Show the step now and then."""
        if time.monotonic() - self._shown_s >= self._every_s:
            self._show(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the metrics."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._show(trainer, pl_module)

    def _show(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._enabled:
            return
        self._shown_s = time.monotonic()
        total, done = trainer.estimated_stepping_batches, trainer.global_step
        parts = [f"step {done}"]
        if total != float("inf"):
            step_s = (self._shown_s - self._started_s) / max(1, done - self._first_step)
            left = timedelta(seconds=round(step_s * (total - done)))
            parts = [f"{done}/{total:.0f} ({left} left)"]
        for name, value in self.get_metrics(trainer, pl_module).items():
            if isinstance(value, float):
                value = f"{value:.0f}" if abs(value) >= 1000 else f"{value:#.4g}"
            if name != "v_num":
                parts.append(f"{name} {value}")
        print("  ".join(parts), flush=True)


def traffic_of(trainer: pl.Trainer) -> Any | None:
    """Return a snapshot of what this rank sent, or ``None`` where nothing is counted."""
    communication = getattr(trainer.strategy, "communication", None)
    return None if communication is None else communication.traffic().snapshot()


class RunReport(pl.Callback):
    """Measures a run, shows it in the progress bar and logs, and writes a report with a plot.

    Bar and logs get tokens per second and, with quantized communication, the megabytes that a rank
    sends per optimizer step beside those of plain FSDP2, averaged over the run so far; the logs
    also get the bits per weight and per gradient on the wire. The report goes to
    ``<trainer.default_root_dir>/report.json``, the plot next to it.

    Args:
        name: Name of the run in the plot; empty is the name of its folder.
        reference: ``report.json`` of a full-precision run to compare with in the plot.
        plot: Draw ``report.png`` at the end of ``fit`` (needs matplotlib).
    """

    def __init__(
        self, name: str | None = None, reference: str | None = None, plot: bool = True
    ) -> None:
        self.reference = None if reference is None else Path(reference)
        self.plot = plot
        self.report = report.Report(name=name or "")
        self._started_s = 0.0
        self._traffic: Any = None
        self._step = self._batches = self._counted_tokens = 0
        self._counted_s = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check before training what the end of training needs."""
        if stage == "fit" and self.plot and importlib.util.find_spec("matplotlib") is None:
            raise MisconfigurationException(
                "`RunReport(plot=True)` needs matplotlib: `pip install matplotlib`, or pass "
                "`--report.plot=false`."
            )

    def state_dict(self) -> dict[str, Any]:
        """Keep the validation curve in checkpoints, so that a resumed run shows all of it."""
        return {"validation": self.report.validation}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the validation curve."""
        self.report.validation = state["validation"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Describe the run, and count the weights of all stages, if there is a pipeline."""
        self.report.name = self.report.name or Path(trainer.default_root_dir).name
        self.report.world_size = trainer.world_size
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, TextDataModule) and data.settings.tokenizer == "byte":
            self.report.unit = "nats per byte"
        own = sum(parameter.numel() for parameter in pl_module.parameters())
        self.report.parameters = getattr(trainer.strategy, "num_parameters", None) or own

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Start the clock; what happens between steps, such as validation, is not counted."""
        self._traffic, self._step = traffic_of(trainer), trainer.global_step
        self._started_s = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Tensor,
        _: int,
    ) -> None:
        """Count the batch and show the running numbers."""
        seconds = time.perf_counter() - self._started_s
        self._batches += 1
        self.report.steps = trainer.global_step
        self.report.train_s += seconds
        if self._batches <= _WARMUP_BATCHES:
            return
        # All stages of a pipeline share one batch.
        shares = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        self._counted_tokens += batch[:, 1:].numel() * shares.get("num_replicas", 1)
        self._counted_s += seconds
        self.report.tokens_per_s = self._counted_tokens / self._counted_s
        self._count_traffic(trainer)
        self._show(pl_module)

    def _count_traffic(self, trainer: pl.Trainer) -> None:
        now = traffic_of(trainer)
        if now is None or self._traffic is None:
            return
        batch = now.since(self._traffic)
        wire = self.report.wire = self.report.wire or report.Wire()
        wire.steps += trainer.global_step - self._step
        wire.weights += batch.weights_intra + batch.weights_inter
        wire.gradients += batch.gradients_intra + batch.gradients_inter
        wire.baseline_weights += batch.baseline_weights
        wire.baseline_gradients += batch.baseline_gradients
        if now.weights_elements:
            wire.bits_per_weight = now.bits_per_weight
        if now.gradients_elements:
            wire.bits_per_gradient = now.bits_per_gradient

    def _show(self, pl_module: pl.LightningModule) -> None:
        """Log the numbers of the report so far, so that bar, logs and report end with the same."""
        wire = self.report.wire
        shown = {"tokens/s": self.report.tokens_per_s}
        logged = {"tokens_per_s": self.report.tokens_per_s}
        if wire is not None and wire.steps:
            shown["MB/step"] = wire.sent / wire.steps / 1e6
            shown["uncompressed"] = wire.baseline / wire.steps / 1e6
            logged["MB_per_step"] = shown["MB/step"]
            logged["MB_per_step_uncompressed"] = shown["uncompressed"]
            logged["bits_per_weight"] = wire.bits_per_weight
            logged["bits_per_gradient"] = wire.bits_per_gradient
        for name, value in shown.items():
            pl_module.log(name, value, prog_bar=True, logger=False, rank_zero_only=True)
        for name, value in logged.items():
            if value is not None:
                pl_module.log(f"progress/{name}", value, rank_zero_only=True)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add a point to the validation curve and write the report so far."""
        loss = trainer.callback_metrics.get("val_loss")
        if trainer.sanity_checking or trainer.state.fn != "fit" or loss is None:
            return
        point = [trainer.global_step, float(loss)]
        earlier = [kept for kept in self.report.validation if kept[0] < point[0]]
        self.report.validation = [*earlier, point]
        self._write(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the final report and draw the plot."""
        checkpoint = getattr(trainer.checkpoint_callback, "last_model_path", "")
        self.report.checkpoint = checkpoint or None
        path = self._write(trainer)
        if not self.plot or not trainer.is_global_zero:
            return
        reference = None
        if self.reference is not None and self.reference.is_file():
            reference = report.read(self.reference)
        elif self.reference is not None:
            rank_zero_info(
                f"No full-precision run to compare with at '{self.reference}'; the plot shows this "
                "run alone. Train one with `--config examples/configs/full_precision.yaml`."
            )
        report.draw(self.report, reference, path.with_suffix(".png"))
        rank_zero_info(f"Wrote the plot to '{path.with_suffix('.png')}'.")

    def _write(self, trainer: pl.Trainer) -> Path:
        path = Path(trainer.default_root_dir, "report.json")
        if trainer.is_global_zero and not trainer.fast_dev_run:
            self.report.write(path)
        return path


class TextSample(pl.Callback):
    """Generates text at the end of ``fit`` and prints what ``predict`` generates.

    All ranks take part, because a sharded model only works on all of them together.

    Args:
        prompt: Text to continue at the end of ``fit``.
        max_new_tokens: Tokens to add; 0 leaves the sample out.
        temperature: Sampling temperature; 0 always takes the likeliest token.
    """

    def __init__(
        self,
        prompt: str = "def ",
        max_new_tokens: NonNegativeInt = 200,
        temperature: NonNegativeFloat = 0.8,
    ) -> None:
        if not prompt:
            raise ValueError("`--sample.prompt` is empty: give a text to continue.")
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self._predicted: dict[int, list[int]] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse before training what the end of training cannot do."""
        in_stages = getattr(trainer.strategy, "pipeline", None) is not None
        if stage == "fit" and in_stages and self.max_new_tokens and not trainer.fast_dev_run:
            raise MisconfigurationException(
                "`TextSample` generates text with the whole model, of which each rank of a "
                "pipeline has only some stages: pass `--sample.max_new_tokens=0`, and use the "
                "trained model without a pipeline."
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: CausalLM) -> None:
        """Generate the sample, print it, and write it to the logs and to ``sample.txt``."""
        if self.max_new_tokens == 0 or trainer.fast_dev_run:
            return
        tokenizer = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        tokens = torch.from_numpy(tokenizer.encode(self.prompt.encode()))
        was_training = pl_module.training
        pl_module.eval()
        with trainer.precision_plugin.forward_context():
            tokens = pl_module.generate(tokens, self.max_new_tokens, self.temperature)
        pl_module.train(was_training)
        text = tokenizer.decode(tokens.tolist())
        rank_zero_info(f"Generated text:\n{_quoted(text)}")
        if trainer.is_global_zero:
            Path(trainer.default_root_dir).mkdir(parents=True, exist_ok=True)
            Path(trainer.default_root_dir, "sample.txt").write_text(text, encoding="utf-8")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                logger.experiment.add_text("sample", _quoted(text), trainer.global_step)

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: dict[str, Tensor],
        *_: Any,
    ) -> None:
        """Keep this rank's predictions."""
        self._predicted[int(outputs["index"])] = outputs["tokens"].tolist()

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the predictions of all ranks, in the order of the prompts."""
        shares = [self._predicted]
        if trainer.world_size > 1:
            shares = [{} for _ in range(trainer.world_size)]
            torch.distributed.all_gather_object(shares, self._predicted)
        merged = {index: tokens for share in shares for index, tokens in share.items()}
        tokenizer = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        for index in sorted(merged):
            text = tokenizer.decode(merged[index])
            rank_zero_info(f"Prompt {index + 1} continued:\n{_quoted(text)}")
        self._predicted = {}


def _quoted(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
