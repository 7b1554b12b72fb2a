"""The client's command."""

from __future__ import annotations

import argparse
import functools
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from pretraining.data import TextDataModule
from pretraining.progress import ProgressLine

from .callbacks import SplitLearning, WireReport
from .lightning_module import FineTuning
from .model import SplitModel
from .models import tokenizer_file
from .serve import DEFAULT_ADDRESS
from .settings import add_options, read_options
from .wire import Retry, add_secret_options, chosen_secret, connect, parse_address


def read_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="client.py",
        description="Fine-tune adapters of a causal language model whose trunk a server holds.",
    )
    add = functools.partial(_add, parser)
    add("--connect", DEFAULT_ADDRESS, "host:port of the server")
    add("--run", "runs/split_learning", "folder for checkpoints, logs and adapters")
    add("--steps", 100, "optimizer steps; a run that was ended before goes on")
    add("--accumulate", 1, "batches per optimizer step; adapters are sent once per step")
    add("--batch-size", 16, "samples of a batch")
    add("--sequence", 128, "tokens of a sample")
    add("--text", None, "folder with text (default: the Python standard library)", kind=str)
    add("--tokenizer", None, "tokenizer.json (default: that of the model)", kind=str)
    add("--learning-rate", 1e-3, "of AdamW")
    add("--clip", 1.0, "norm of gradients, at most")
    add("--beta", None, "how strongly AMAQ pulls bits down (default: 0.02)", kind=float)
    add("--gate-learning-rate", None, "of AMAQ's gates (default: 0.01)", kind=float)
    add("--start-bits", None, "of AMAQ (default: 8 for 4 bits, 6 for 3)", kind=float)
    add("--save-every", 50, "steps between checkpoints")
    add("--validate-every", 0, "steps between validations; 0: at the end only")
    add("--validation-batches", 8, "batches of a validation")
    add("--accelerator", "auto", "cpu or gpu, for what the client computes")
    add("--report", None, "JSON file for bytes, seconds and memory of every batch", kind=str)
    add("--seed", 0, "of the first adapters and the order of the text")
    add_secret_options(parser)
    add_options(parser)
    return parser.parse_args(arguments)


def _add(
    parser: argparse.ArgumentParser, name: str, default: Any, text: str, kind: Any = None
) -> None:
    shown = text if default is None else f"{text} (default: {default})"
    parser.add_argument(name, default=default, type=kind or type(default), help=shown)


def main(arguments: list[str] | None = None) -> None:
    """Train, from the last checkpoint in the folder of the run if there is one."""
    options = read_arguments(arguments)
    _quiet()
    secret, settings = chosen_secret(options), read_options(options)
    report = WireReport(options.report)
    pl.seed_everything(options.seed, verbose=False)
    dial = functools.partial(connect, parse_address(options.connect), secret, retry=Retry())
    given = {
        "beta": options.beta,
        "learning_rate": options.gate_learning_rate,
        "start_bits": options.start_bits,
    }
    gates = {name: value for name, value in given.items() if value is not None}
    model = SplitModel(settings, lambda agreement: dial(configuration=agreement), **gates)
    run = Path(options.run)
    checkpoints = ModelCheckpoint(
        dirpath=run,
        filename="last",
        every_n_train_steps=options.save_every,
        save_on_train_epoch_end=False,
        enable_version_counter=False,
    )
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=1,
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=options.clip,
        val_check_interval=options.validate_every * options.accumulate or None,
        check_val_every_n_epoch=None,
        limit_val_batches=options.validation_batches,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        enable_model_summary=False,
        default_root_dir=run,
        logger=CSVLogger(run, "logs"),
        callbacks=[SplitLearning(), report, checkpoints, ProgressLine()],
    )
    data = _open_data(options, settings.model)
    module = FineTuning(model, options.learning_rate)
    last = run / "last.ckpt"
    trainer.fit(module, data, ckpt_path=last if last.exists() else None)
    trainer.save_checkpoint(last)
    model.save_adapters(run / "adapters")
    if options.validation_batches:
        trainer.validate(module, data, verbose=False)
        print(f"validation loss {float(trainer.callback_metrics['val_loss']):.4f}")
    print(f"adapters are in {run / 'adapters'}")


def _open_data(options: argparse.Namespace, model: str) -> TextDataModule:
    return TextDataModule(
        text=options.text,
        tokenizer=options.tokenizer or tokenizer_file(model),
        block_size=options.sequence - 1,
        batch_size=options.batch_size,
        shuffle_seed=options.seed,
        cache_dir=str(Path(options.run) / "data"),
    )


def _quiet() -> None:
    """Show what a user can act on."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for text in (
        "Your `IterableDataset` has",
        "`isinstance.treespec",
        "`is_gradient_checkpointing`",
        "Checkpoint directory .* exists",
        ".*does not have many workers",
    ):
        warnings.filterwarnings("ignore", message=text)
