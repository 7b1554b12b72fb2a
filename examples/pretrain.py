"""Pretrain a causal language model on real text with quantized communication.

    python examples/pretrain.py fit --config examples/configs/quantized_fsdp.yaml
    python examples/pretrain.py fit --help

``fit``, ``validate``, ``test`` and ``predict`` take the same configuration files; every option can
be overridden on the command line, such as ``--trainer.strategy.gradients=TLq``.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from pretraining.callbacks import ProgressLine, RunReport, TextSample
from pretraining.data import TextDataModule
from pretraining.lightning_module import CausalLM

import lq_lightning  # noqa: F401 - registers the strategy names

# A checkpoint whenever validation ran, and a stable name for the newest, which resuming takes.
CHECKPOINT_DEFAULTS = {
    "checkpoint.monitor": "val_loss",
    "checkpoint.mode": "min",
    "checkpoint.save_top_k": 1,
    "checkpoint.save_last": True,
    "checkpoint.enable_version_counter": False,
    "checkpoint.filename": "best",
    "checkpoint.auto_insert_metric_name": False,
}


class PretrainCLI(LightningCLI):
    """LightningCLI with the example's callbacks and one folder per run.

    Logs, checkpoints, report and sample go to ``trainer.default_root_dir``.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the callbacks and tie the model's shape to the data's."""
        parser.add_lightning_class_args(RunReport, "report")
        parser.add_lightning_class_args(TextSample, "sample")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(CHECKPOINT_DEFAULTS)
        parser.link_arguments("data.block_size", "model.block_size")
        parser.link_arguments("data.model_vocab_size", "model.vocab_size", apply_on="instantiate")

    def before_instantiate_classes(self) -> None:
        """Put everything that a run writes into its folder, and check that the run ends."""
        config = self.config[self.subcommand]
        root = Path(config.trainer.default_root_dir or "runs/pretrain")
        config.trainer.default_root_dir = str(root)
        if config.checkpoint.dirpath is None:
            config.checkpoint.dirpath = str(root / "checkpoints")
        ends = (config.trainer.max_steps != -1, config.trainer.max_epochs, config.trainer.max_time)
        if self.subcommand == "fit" and not any(ends) and not config.trainer.fast_dev_run:
            self.parser.error(
                "how long to train? Give `--config examples/configs/quantized_fsdp.yaml` (or "
                "another one from there), or an end such as `--trainer.max_steps=500`"
            )

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Create the Trainer, by default with CSV and TensorBoard logs in the run's folder."""
        config = self.config_init[self.subcommand].trainer
        callbacks = config.callbacks or []
        callbacks = list(callbacks) if isinstance(callbacks, list) else [callbacks]
        own_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if config.enable_progress_bar is not False and not own_bar:
            callbacks.append(ProgressLine())
        logs = self.subcommand == "fit" and not config.fast_dev_run
        if config.logger in (None, True):
            kwargs["logger"] = _loggers(Path(config.default_root_dir)) if logs else False
            if logs:
                callbacks.append(LearningRateMonitor("step"))
        return super().instantiate_trainer(callbacks=callbacks, **kwargs)


def _loggers(root: Path) -> list[CSVLogger | TensorBoardLogger]:
    """Return CSV and, where TensorBoard is installed, TensorBoard logs under one new version."""
    taken = [re.fullmatch(r"version_(\d+)", path.name) for path in root.glob("logs/version_*")]
    version = max((int(match[1]) + 1 for match in taken if match), default=0)
    loggers: list[CSVLogger | TensorBoardLogger] = [CSVLogger(root, "logs", version)]
    if importlib.util.find_spec("tensorboard") is not None:
        loggers.append(TensorBoardLogger(root, "logs", version))
    return loggers


def main(args: list[str] | None = None) -> None:
    """Run the command line, by default with the words that the program was started with."""
    # Between Lightning 2.6 and torch 2.13; nothing that a user could act on.
    warnings.filterwarnings("ignore", message="`isinstance.treespec, LeafSpec.` is deprecated")
    settings: dict[str, Any] = {"description": __doc__.partition("\n")[0]}
    for stage in ("fit", "validate", "test", "predict"):  # no list of all options in errors
        settings[stage] = {"usage": f"pretrain.py {stage} --config FILE [--OPTION=VALUE ...]"}
    PretrainCLI(
        CausalLM,
        TextDataModule,
        seed_everything_default=42,
        auto_configure_optimizers=False,
        save_config_kwargs={"overwrite": True},
        parser_kwargs=settings,
        args=args,
    )


if __name__ == "__main__":
    main()
