"""Fine-tune adapters of a causal language model whose frozen trunk a server holds.

python examples/split_learning/client.py --certificate alice.pem --connect SERVER:5600
python examples/split_learning/client.py --help
"""

from __future__ import annotations

import argparse
import functools
import logging
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pretraining.callbacks import ProgressLine
from pretraining.data import TextDataModule

from split_learning.callbacks import SplitLearning, WireReport
from split_learning.lightning_module import FineTuning
from split_learning.model import SplitModel
from split_learning.models import tokenizer_file
from split_learning.runs import Run
from split_learning.settings import (
    DEFAULT_ADDRESS,
    OptionError,
    add_options,
    read_options,
    starting,
)
from split_learning.wire.client import connect
from split_learning.wire.errors import AddressError, CertificateError, UnsendableMessage, WireError
from split_learning.wire.identity import add_certificate_options, chosen_identity
from split_learning.wire.settings import Retry, parse_address

# How the data module calls options of this program.
_OPTIONS = {
    "--data.text": "--text",
    "--data.tokenizer": "--tokenizer",
    "--data.block_size": "--sequence",
    "--data.batch_size": "--batch-size",
}
_OF_DATA = re.compile("|".join(map(re.escape, _OPTIONS)))


def read_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="client.py",
        description="Fine-tune adapters of a causal language model whose trunk a server holds.",
    )
    add = functools.partial(_add, parser)
    add("--connect", DEFAULT_ADDRESS, "host:port of the server")
    add("--run", "runs/split_learning", "folder for checkpoints, logs and adapters")
    add("--steps", 100, "optimizer steps; a run that was ended before goes on", least=1)
    add("--accumulate", 1, "batches per optimizer step; adapters are sent once per step", least=1)
    add("--batch-size", 16, "samples of a batch", least=1)
    add("--sequence", 128, "tokens of a sample", least=3)
    add("--text", None, "folder with text (default: the Python standard library)", kind=str)
    add("--tokenizer", None, "tokenizer.json, or byte (default: that of the model)", kind=str)
    add("--learning-rate", 1e-3, "of AdamW")
    add("--clip", 1.0, "norm of gradients, at most")
    add("--beta", None, "how strongly AMAQ pulls bits down (default: 0.02)", kind=float)
    add("--gate-learning-rate", None, "of AMAQ's gates (default: 0.01)", kind=float)
    add("--start-bits", None, "of AMAQ (default: 8 for 4 bits, 6 for 3)", kind=float)
    add("--save-every", 50, "steps between checkpoints", least=1)
    add("--validate-every", 0, "steps between validations; 0: at the end only", least=0)
    add("--validation-batches", 8, "batches of a validation; 0: none", least=0)
    add("--accelerator", "auto", "cpu or gpu, of the client's own computations")
    add("--report", None, "JSON file for bytes, seconds and memory of every batch", kind=str)
    add("--seed", 0, "of the first adapters and the order of the text")
    add_certificate_options(parser, "client")
    add_options(parser)
    return parser.parse_args(arguments)


def _add(
    parser: argparse.ArgumentParser,
    name: str,
    default: Any,
    text: str,
    kind: Any = None,
    least: int | None = None,
) -> None:
    if least is not None:
        kind = functools.partial(_whole_number, least=least)
    shown = text if default is None else f"{text} (default: {default})"
    parser.add_argument(name, default=default, type=kind or type(default), help=shown)


def _whole_number(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"'{text}' is not {least} or more")
    return int(text)


def main(arguments: list[str] | None = None) -> None:
    """Train, from the last checkpoint in the folder of the run if there is one."""
    options = read_arguments(arguments)
    _quiet()
    identity, settings = chosen_identity(options, "client"), read_options(options)
    run = Run.open(options)
    report = WireReport(options.report)  # which counts memory from here on
    pl.seed_everything(options.seed, verbose=False)
    dial = functools.partial(connect, parse_address(options.connect), identity, retry=Retry())
    given = {
        "beta": options.beta,
        "learning_rate": options.gate_learning_rate,
        "start_bits": options.start_bits,
    }
    gates = {name: value for name, value in given.items() if value is not None}
    with starting():
        model = SplitModel(settings, lambda agreement: dial(configuration=agreement), **gates)
    data = _open_data(options, settings.model)
    module = FineTuning(model, options.learning_rate)
    module.save_hyperparameters(run.record(data.corpus.fingerprint))
    if run.saved is not None:
        left = "" if run.step < options.steps else ", which are all that `--steps` asks for"
        print(f"the run in {run.folder} goes on after {run.step} steps{left}")
    trainer = _make_trainer(options, run.folder, report)
    trainer.fit(module, data, ckpt_path=None if run.saved is None else run.checkpoint)
    trainer.save_checkpoint(run.checkpoint)
    model.save_adapters(run.folder / "adapters")
    if options.validation_batches:
        trainer.validate(module, data, verbose=False)
        print(f"validation loss {float(trainer.callback_metrics['val_loss']):.4f}")
    print(f"adapters are in {run.folder / 'adapters'}")


def _make_trainer(options: argparse.Namespace, folder: Path, report: WireReport) -> pl.Trainer:
    checkpoints = ModelCheckpoint(
        dirpath=folder,
        filename="last",
        every_n_train_steps=options.save_every,
        save_on_train_epoch_end=False,
        enable_version_counter=False,
    )
    return pl.Trainer(
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
        default_root_dir=folder,
        logger=CSVLogger(folder, "logs"),
        callbacks=[SplitLearning(), report, checkpoints, ProgressLine()],
    )


def _open_data(options: argparse.Namespace, model: str) -> TextDataModule:
    try:
        with starting():
            data = TextDataModule(
                text=options.text,
                tokenizer=options.tokenizer or tokenizer_file(model),
                block_size=options.sequence - 1,
                batch_size=options.batch_size,
                shuffle_seed=options.seed,
                cache_dir=str(Path(options.run) / "data"),
            )
            data.prepare_data()
            data.setup("fit")
            data.train_dataloader()
            if options.validation_batches:
                data.val_dataloader()
            return data
    except OptionError as error:
        raise OptionError(_OF_DATA.sub(lambda found: _OPTIONS[found[0]], str(error))) from error


def _quiet() -> None:
    """Hide warnings that a user cannot act on."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for text in (
        "Your `IterableDataset` has",
        "`isinstance.treespec",
        "`is_gradient_checkpointing`",
        "Checkpoint directory .* exists",
        ".*does not have many workers",
        "Be aware that when using `ckpt_path`",  # another `--save-every`
    ):
        warnings.filterwarnings("ignore", message=text)


_USER_ERRORS = (AddressError, CertificateError, OptionError, UnsendableMessage, WireError)

if __name__ == "__main__":
    try:
        main()
    except _USER_ERRORS as error:  # which say what to do
        sys.exit(f"{type(error).__name__}: {error}")
