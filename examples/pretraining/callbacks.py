"""Callbacks of the example: the running numbers, the report with its plot, and a text sample."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from pretraining import report
from pretraining.data import TextDataModule
from pretraining.lightning_module import CausalLM
from pretraining.text import Tokenizer

_WARMUP_BATCHES = 3  # the first ones gather in full precision, allocate and compile


def traffic_of(trainer: pl.Trainer) -> Any | None:
    """Return a snapshot of what this rank sent, or ``None`` where nothing is counted."""
    communication = getattr(trainer.strategy, "communication", None)
    return None if communication is None else communication.traffic().snapshot()


def replicas_of(trainer: pl.Trainer) -> int:
    """Return how many batches are trained on at a time; all stages of a pipeline share one."""
    shares = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(shares.get("num_replicas", trainer.world_size))


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
        self.name = name
        self.reference = None if reference is None else Path(reference)
        self.plot = plot
        self.report = report.Report(name=name or "")
        self._started_s = 0.0
        self._traffic: Any = None
        self._step = self._batches = self._counted_tokens = 0
        self._counted_s = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check before training what the end of training needs."""
        if stage != "fit":
            return
        if self.plot and importlib.util.find_spec("matplotlib") is None:
            raise MisconfigurationException(
                "`RunReport(plot=True)` needs matplotlib: `pip install matplotlib`, or pass "
                "`--report.plot=false`."
            )
        self.report.name = self.name or Path(trainer.default_root_dir).name
        self.report.world_size = trainer.world_size
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, TextDataModule) and data.settings.tokenizer == "byte":
            self.report.unit = "nats per byte"

    def state_dict(self) -> dict[str, Any]:
        """Keep the validation curve in checkpoints, so that a resumed run shows all of it."""
        return {"validation": self.report.validation}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the validation curve."""
        self.report.validation = state["validation"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count the weights once they exist, those of all stages if there is a pipeline."""
        own = sum(parameter.numel() for parameter in pl_module.parameters())
        self.report.parameters = getattr(trainer.strategy, "num_parameters", None) or own

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Tensor, batch_idx: int
    ) -> None:
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
        self._counted_tokens += batch[:, 1:].numel() * replicas_of(trainer)
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
        if trainer.sanity_checking or not trainer.training and trainer.state.fn != "fit":
            return
        loss = trainer.callback_metrics.get("val_loss")
        if loss is not None:
            point = [trainer.global_step, float(loss)]
            earlier = [kept for kept in self.report.validation if kept[0] < point[0]]
            self.report.validation = [*earlier, point]
            self._write(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the final report and draw the plot."""
        checkpoint = getattr(trainer.checkpoint_callback, "last_model_path", "")
        self.report.checkpoint = checkpoint or None
        self._write(trainer)
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
        path = report.draw(self.report, reference, self._path(trainer, "png"))
        rank_zero_info(f"Wrote the plot to '{path}'.")

    def _write(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero and not trainer.fast_dev_run:
            self.report.write(self._path(trainer, "json"))

    @staticmethod
    def _path(trainer: pl.Trainer, ending: str) -> Path:
        return Path(trainer.default_root_dir) / f"report.{ending}"


class TextSample(pl.Callback):
    """Generates text at the end of ``fit`` and prints what ``predict`` generates.

    All ranks take part, because a sharded model only works on all of them together.

    Args:
        prompt: Text to continue at the end of ``fit``.
        max_new_tokens: Tokens to add; 0 leaves the sample out.
        temperature: Sampling temperature; 0 always takes the likeliest token.
    """

    def __init__(
        self, prompt: str = "def ", max_new_tokens: int = 200, temperature: float = 0.8
    ) -> None:
        if not prompt or max_new_tokens < 0 or temperature < 0:
            raise MisconfigurationException(
                f"`TextSample(prompt={prompt!r}, max_new_tokens={max_new_tokens}, "
                f"temperature={temperature})` needs a prompt and no negative numbers."
            )
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self._predicted: dict[int, list[int]] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Generate the sample, print it, and write it to the logs and to ``sample.txt``."""
        if self.max_new_tokens == 0 or trainer.fast_dev_run:
            return
        if not isinstance(pl_module, CausalLM):
            raise MisconfigurationException(
                f"`TextSample` generates with `CausalLM`, not with `{type(pl_module).__name__}`."
            )
        tokenizer = _tokenizer(trainer)
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
        tokenizer = _tokenizer(trainer)
        for index in sorted(merged):
            text = tokenizer.decode(merged[index])
            rank_zero_info(f"Prompt {index + 1} continued:\n{_quoted(text)}")
        self._predicted = {}


def _tokenizer(trainer: pl.Trainer) -> Tokenizer:
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, TextDataModule):
        raise MisconfigurationException(
            "`TextSample` needs the tokenizer of a `TextDataModule`; pass `datamodule=`."
        )
    return data.tokenizer


def _quoted(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
