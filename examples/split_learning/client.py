"""Fine-tune adapters of a causal language model whose frozen trunk a server holds.

python examples/split_learning/client.py --certificate alice.pem --connect SERVER:5600
python examples/split_learning/client.py --help
"""

from __future__ import annotations

import argparse
import functools
import logging
import pickle
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pretraining.callbacks import ProgressLine
from pretraining.data import TextDataModule

from split_learning.callbacks import SplitLearning, WireReport
from split_learning.model import SplitModel
from split_learning.models import tokenizer_file
from split_learning.settings import (
    DEFAULT_ADDRESS,
    OptionError,
    add_options,
    read_options,
    starting,
)
from split_learning.wire.client import connect
from split_learning.wire.common import (
    AddressError,
    CertificateError,
    Retry,
    UnsendableMessage,
    WireError,
    parse_address,
)
from split_learning.wire.identity import add_certificate_options, chosen_identity

# How the data module calls options of this program.
_OPTIONS = {
    "--data.text": "--text",
    "--data.tokenizer": "--tokenizer",
    "--data.block_size": "--sequence",
    "--data.batch_size": "--batch-size",
}
_OF_DATA = re.compile("|".join(map(re.escape, _OPTIONS)))
# Options that may change when a run goes on.
_FREE = {
    *("connect", "run", "steps", "save_every", "validate_every", "validation_batches"),
    *("accelerator", "report", "certificate", "no_authentication"),
}
_FILES = {"text", "tokenizer"}  # may move as long as they give the same tokens
_TOKENS = "digest of the tokens"
_NOT_GIVEN = "not given"


class FineTuning(pl.LightningModule):
    """A causal language model, trained on blocks of tokens; nothing in it knows of the split."""

    def __init__(self, model: nn.Module, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of ``[B, T]`` tokens."""
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        """Log the loss of ``[B, T]`` tokens."""
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("val_loss", loss, prog_bar=True, batch_size=len(tokens))

    def configure_optimizers(self) -> Any:
        """Return AdamW over all trained parameters."""
        trained = [value for value in self.parameters() if value.requires_grad]
        return torch.optim.AdamW(trained, self.learning_rate, weight_decay=0.0)


def read_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="client.py",
        description="Fine-tune adapters of a causal language model whose trunk a server holds.",
    )

    def add(name: str, default: Any, text: str, kind: Any = None, least: int | None = None) -> None:
        if least is not None:
            kind = functools.partial(_whole_number, least=least)
        shown = text if default is None else f"{text} (default: {default})"
        parser.add_argument(name, default=default, type=kind or type(default), help=shown)

    add("--connect", DEFAULT_ADDRESS, "host:port of the server")
    add("--run", "runs/split_learning", "folder for checkpoints, logs and adapters")
    add("--steps", 100, "optimizer steps; a run that was ended before goes on", least=1)
    add("--accumulate", 1, "batches per optimizer step; adapters are sent once per step", least=1)
    add("--batch-size", 16, "samples per batch", least=1)
    add("--sequence", 128, "tokens per sample", least=3)
    add("--text", None, "folder with text (default: the Python standard library)", kind=str)
    add("--tokenizer", None, "tokenizer.json, or byte (default: the model's own)", kind=str)
    add("--learning-rate", 1e-3, "learning rate of AdamW")
    add("--clip", 1.0, "largest norm of gradients")
    add("--beta", None, "how strongly AMAQ pulls bits down (default: 0.02)", kind=float)
    add("--gate-learning-rate", None, "learning rate of AMAQ's gates (default: 0.01)", kind=float)
    add(
        "--start-bits",
        None,
        "bits that AMAQ starts with (default: 8 for 4 bits, 6 for 3)",
        kind=float,
    )
    add("--save-every", 50, "steps between checkpoints", least=1)
    add("--validate-every", 0, "steps between validations; 0: at the end only", least=0)
    add("--validation-batches", 8, "batches per validation; 0: none", least=0)
    add("--accelerator", "auto", "cpu or gpu, for the client's own computations")
    add("--report", None, "JSON file for bytes, seconds and memory of every batch", kind=str)
    add("--seed", 0, "seed of the first adapters and of the order of the text")
    add_certificate_options(parser, "client")
    add_options(parser)
    return parser.parse_args(arguments)


def _whole_number(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"'{text}' is not {least} or more")
    return int(text)


def main(arguments: list[str] | None = None) -> None:
    """Train, from the last checkpoint in the folder of the run if there is one."""
    options = read_arguments(arguments)
    _quiet()
    identity, settings = chosen_identity(options, "client"), read_options(options)
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
    data, folder = _open_data(options, settings.model), Path(options.run)
    record, done = _resume(options, folder / "last.ckpt", data.corpus.fingerprint)
    module = FineTuning(model, options.learning_rate)
    module.save_hyperparameters(record)
    if done is not None:
        left = "" if done < options.steps else ", which are all that `--steps` asks for"
        print(f"the run in {folder} goes on after {done} steps{left}")
    trainer = _make_trainer(options, folder, report)
    trainer.fit(module, data, ckpt_path=None if done is None else folder / "last.ckpt")
    trainer.save_checkpoint(folder / "last.ckpt")
    model.save_adapters(folder / "adapters")
    if options.validation_batches:
        trainer.validate(module, data, verbose=False)
        print(f"validation loss {float(trainer.callback_metrics['val_loss']):.4f}")
    print(f"adapters are in {folder / 'adapters'}")


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


def _resume(
    options: argparse.Namespace, last: Path, tokens: str
) -> tuple[dict[str, Any], int | None]:
    """Return the options that checkpoints record, and the steps of the run that goes on, if any."""
    own = {name: _plain(name, value) for name, value in vars(options).items() if name not in _FREE}
    own[_TOKENS] = tokens
    if not last.exists():
        return own, None
    try:
        checkpoint = torch.load(last, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise OptionError(
            f"{last} is no checkpoint, or a part of one. Give another `--run`, or restore it."
        ) from error
    if (saved := checkpoint.get("hyper_parameters")) is None:
        raise OptionError(f"{last} is not of this program. Give another `--run`.")
    begun = {name: saved.get(name, _NOT_GIVEN) for name in own}
    other = {name for name, value in own.items() if begun[name] != value}
    # Other files matter if their tokens do, and explain them; the same files may have changed.
    other -= {_TOKENS} if _TOKENS in other and other & _FILES else _FILES
    if other:
        pairs = (
            f"{_shown(name, begun[name])}, not {_shown(name, own[name])}"
            for name in own
            if name in other
        )
        raise OptionError(
            f"The run in {last.parent} was begun with {'; '.join(pairs)}. It has done "
            f"{checkpoint['global_step']} steps: give what it was begun with to go on, or another "
            "`--run` to begin anew."
        )
    return own, int(checkpoint["global_step"])


def _plain(name: str, value: Any) -> Any:
    if value is None:
        return _NOT_GIVEN
    if isinstance(value, tuple):
        return ",".join(value)
    if name in {"model", *_FILES} and Path(value).expanduser().exists():
        return str(Path(value).expanduser().resolve())
    return value


def _shown(name: str, value: Any) -> str:
    if name == _TOKENS:
        return f"text whose tokens have the digest {value}"
    option = f"--{name.replace('_', '-')}"
    if value == _NOT_GIVEN or value is False:
        return f"no `{option}`"
    return f"`{option}`" if value is True else f"`{option} {value}`"


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
