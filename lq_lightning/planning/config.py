"""The user's own run, made as often as it is simulated: by a program, a YAML or from objects.

A program runs as always until it calls ``Trainer.fit``. A YAML without a program of its own runs
through a plain ``LightningCLI``, and objects through a Trainer of their own. So everything that
decides about a run is the user's code: links between options, optimizers, callbacks. Only arguments
of the Trainer are exchanged.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import re
import runpy
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from lq_lightning._compat.simulation import new_fake_mode, restored_generators
from lq_lightning.callbacks.plan_check import PlanCheck
from lq_lightning.planning.simulation import TRAINING_ALONE, Overrides, UserRun

Change = Callable[[dict[str, Any]], dict[str, Any]]

# What changes neither memory nor time of a step, or needs files and loggers.
_LEFT_OUT = (
    *(Checkpoint, DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, PlanCheck),
    *(ModelSummary, ProgressBar, SaveConfigCallback, ThroughputMonitor, Timer),
)
_NOT_USED: dict[str, Any] = {
    **TRAINING_ALONE,
    "limit_train_batches": None,
    "overfit_batches": 0.0,
    "min_steps": None,
    "min_epochs": None,
    "val_check_interval": None,
    "detect_anomaly": False,
    "barebones": False,
    "use_distributed_sampler": False,
    "reload_dataloaders_every_n_epochs": 0,
}
# Hooks in which reports are written and models saved, after the last step.
_ENDINGS = ("on_train_epoch_end", "on_train_end", "on_fit_end", "teardown", "on_exception")
_KEYS = {"seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler", "ckpt_path"}
_BATCH = re.compile(r"(?:([\w.]+):)?(\w+)\[([\d,\s]*)\]")
BATCH_REMEDY = (
    "Say what a batch of one rank is with --batch, such as "
    '--batch "input_ids:int64[4,1024] labels:int64[4,1024]" (a mapping), --batch "int64[4,1025]" '
    "(one tensor); or give the data module a method `example_batch()` that returns one."
)


def as_list(value: Any) -> list[Any]:
    """A list of one, many or no values."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def trainer_arguments(own: Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Arguments of the simulated Trainer: the user's, without logs, files and validation.

    ``overrides`` replace the user's; their ``plugins`` and ``callbacks`` come in addition.

    Raises:
        ValueError: the strategy cannot be simulated.
    """
    strategy = own.get("strategy")
    name = strategy if isinstance(strategy, str) else getattr(strategy, "strategy_name", None)
    if str(name).startswith(("fsdp", "deepspeed")):
        raise ValueError(
            f"Lightning's strategy {name!r} cannot be planned: it runs on GPUs alone. Plan "
            "QuantizedFSDPStrategy(weights='none', gradients='none'), which shards by FSDP2."
        )
    plugins = [*as_list(own.get("plugins")), *as_list(overrides.get("plugins"))]
    kept = [each for each in as_list(own.get("callbacks")) if not isinstance(each, _LEFT_OUT)]
    callbacks = [*kept, *as_list(overrides.get("callbacks"))]
    extra = {"plugins": plugins or None, "callbacks": callbacks or None}
    return {**own, **_NOT_USED, **overrides, **extra}


def _without_endings(run: UserRun) -> UserRun:
    """Let users' own code do nothing when the simulation ends: there is nothing to report or save.

    Callbacks of this package and of Lightning keep their hooks.
    """
    trainer, module, _ = run
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    packages = ("lq_lightning", "lightning")
    own = [each for each in callbacks if type(each).__module__.split(".")[0] not in packages]
    for owner in (module, *own):
        for name in _ENDINGS:
            setattr(owner, name, lambda *unused, **more: None)
    return run


# --- until `fit` ----------------------------------------------------------------------------------


class _FitCalledError(BaseException):
    """Ends the user's program where it calls ``fit``, past every ``except Exception``."""

    def __init__(self, *run: Any) -> None:
        super().__init__()
        self.run: Any = run


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What the user starts to train.

    Attributes:
        start: Makes a Trainer and calls ``fit``.
        name: What errors call it.
        words: Words of the command line, for a ``LightningCLI`` with subcommands or anything else.
        change: Changes the arguments of the Trainer, before others replace them.
        keeps_data: Whether the caller may train with the same data later.
    """

    start: Callable[[], object]
    name: str
    words: Callable[[bool], list[str]] = lambda subcommands: sys.argv[1:]
    change: Change = dict
    keeps_data: bool = False

    def with_change(self, change: Change) -> Program:
        """The same with other arguments of the Trainer."""
        return replace(self, change=lambda own: change(self.change(own)))

    def look(self) -> tuple[dict[str, Any], LightningModule, Any]:
        """The user's arguments of the Trainer, and what ``fit`` is called with; builds no weights.

        Raises:
            ValueError: the program cannot be run until ``fit``.
        """
        seen: dict[str, Any] = {}

        def plain(own: dict[str, Any]) -> dict[str, Any]:
            seen.update(self.change(own))
            return {"accelerator": "cpu", "devices": 1, **_NOT_USED, "max_steps": 1}

        with new_fake_mode():
            _, module, data = self._until_fit(plain)
        return seen, module, data

    def __call__(self, overrides: Overrides) -> UserRun:
        """Run the program until ``fit`` with other arguments of the Trainer."""
        change = partial(trainer_arguments, overrides=overrides)
        return _without_endings(self._until_fit(lambda own: change(self.change(own))))

    def _until_fit(self, change: Change) -> UserRun:
        said = io.StringIO()
        try:
            with _exchanged(change, self.words), contextlib.redirect_stderr(said), _offline():
                self.start()
        except _FitCalledError as called:
            return called.run  # type: ignore[no-any-return]
        except SystemExit as ended:
            _, _, why = f"\n{said.getvalue()}".rpartition("\nerror: ")
            why = " ".join(why.split()) or f"it exits with {ended.code}"
            raise ValueError(f"{self.name} is not accepted: {why}") from ended
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(
                f"{self.name} stopped before `Trainer.fit`: {type(error).__name__}: {error}. "
                "It has to run as far as that without GPU, files and weights."
            ) from error
        raise ValueError(
            f"{self.name} ended without calling `Trainer.fit` of `lightning.pytorch`, so there "
            "is nothing to plan. Give the arguments with which it trains."
        )


@contextlib.contextmanager
def _exchanged(change: Change, words: Callable[[bool], list[str]]) -> Iterator[None]:
    """Let programs make Trainers with other arguments, and end where they call ``fit``.

    Every ``LightningCLI`` gets our words, with a subcommand only where it has some.
    """
    make, make_cli = Trainer.__init__, LightningCLI.__init__

    @functools.wraps(make)
    def init(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        make(trainer, *args, **change(kwargs))

    @functools.wraps(make_cli)
    def init_cli(cli: LightningCLI, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("args") is None:
            sys.argv[1:] = words(kwargs.get("run", True))
        make_cli(cli, *args, **kwargs)

    @functools.wraps(Trainer.fit)
    def fit(
        trainer: Trainer,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> NoReturn:
        data = datamodule if train_dataloaders is None else train_dataloaders
        raise _FitCalledError(trainer, model, data)

    with (
        mock.patch.object(Trainer, "__init__", init),
        mock.patch.object(Trainer, "fit", fit),
        mock.patch.object(LightningCLI, "__init__", init_cli),
        mock.patch.object(sys, "argv", [sys.argv[0], *words(True)]),
    ):
        yield


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Refuse connections to other machines: a plan downloads nothing."""
    connect = socket.socket.connect

    def refuse(own: socket.socket, address: Any) -> None:
        if own.family in (socket.AF_INET, socket.AF_INET6):
            raise ConnectionRefusedError(f"a plan downloads nothing, but {address[0]} is called")
        connect(own, address)

    with mock.patch.object(socket.socket, "connect", refuse):
        yield


# --- programs, YAML and objects -------------------------------------------------------------------


def python_program(
    module: LightningModule | Callable[[], LightningModule],
    trainer: Mapping[str, Any],
    data: Any = None,
) -> Program:
    """Return a program that trains a module, or one that a function makes, as ``fit`` takes data.

    Trainers get copies of the arguments, and of a module that was made before.
    """

    def start() -> None:
        Trainer(**copy.deepcopy(dict(trainer))).fit(_new_module(module), data)

    name = getattr(module, "__name__", type(module).__name__)
    return Program(start=start, name=name, keeps_data=True)


def _new_module(module: LightningModule | Callable[[], LightningModule]) -> LightningModule:
    if not isinstance(module, LightningModule):
        try:
            return module()
        except Exception as error:
            raise ValueError(
                f"the model cannot be built: {type(error).__name__}: {error}. It is built from "
                "tensors that have shapes but no values."
            ) from error
    known: dict[int, Any] = {}
    for tensor in chain(module.parameters(), module.buffers()):
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, tensor.requires_grad)
        known[id(tensor)] = empty
    return copy.deepcopy(module, known)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping of a YAML file.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise ValueError(f"There is no file '{path}'. Give the YAML of your LightningCLI.")
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"'{path}' is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"'{path}' holds no options such as `trainer:` and `model:`.")
    return content


def find_program(path: Path, program: Path | None, arguments: Sequence[str]) -> Program:
    """Return what trains with a YAML or as a script.

    Raises:
        ValueError: files are missing, or it is not clear which program reads the YAML.
    """
    if program is not None and not program.is_file():
        raise ValueError(f"There is no file '{program}'. --program is the script that trains.")
    if path.suffix == ".py":
        if not path.is_file():
            raise ValueError(f"There is no file '{path}'.")
        start = partial(_run, path)
        return Program(start=start, name=str(path), words=lambda subcommands: [*arguments])
    content = read_yaml(path)
    content = content.get("fit", content)
    parts = [content.get("model"), content.get("data")]
    unnamed = any(isinstance(part, dict) and "class_path" not in part for part in parts)
    if program is None and (unnamed or parts[0] is None or not set(content) <= _KEYS):
        program = _search_program(path)
    start = partial(_run, program)
    return Program(start=start, name=str(path), words=partial(_words, path, arguments))


def _run(script: Path | None, module_class: type[LightningModule] | None = None) -> None:
    """Run a script as ``__main__``, or a plain ``LightningCLI``."""
    folder = Path.cwd() if script is None else script.resolve().parent
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        if script is None:
            LightningCLI(module_class, save_config_callback=None)
        else:
            runpy.run_path(str(script), run_name="__main__")


def _words(config: Path | None, arguments: Sequence[str], subcommands: bool) -> list[str]:
    """Words for a ``LightningCLI``; the options of a YAML may be those of its subcommand."""
    given = [] if config is None else ["--config", str(config)]
    if subcommands:
        inside = config is None or "fit" not in read_yaml(config)
        given = ["fit", *given] if inside else [*given, "fit"]
    return [*given, *arguments]


def _search_program(config: Path) -> Path:
    folders = dict.fromkeys([config.resolve().parent, config.resolve().parent.parent, Path.cwd()])
    scripts = chain.from_iterable(sorted(folder.glob("*.py")) for folder in folders)
    found = [script for script in scripts if "LightningCLI" in script.read_text(errors="replace")]
    if len(found) != 1:
        names = ", ".join(f"'{script.name}'" for script in found)
        what = f"several programs could ({names})" if found else "no program was found"
        raise ValueError(
            f"'{config}' names no `class_path` of its model or has options of its own, so the "
            f"program that reads it is needed, and {what} beside it. Give --program SCRIPT.py."
        )
    return found[0]


# --- Hugging Face configs -------------------------------------------------------------------------


class HuggingFaceModule(LightningModule):
    """A causal language model with random weights, by its config alone, and AdamW.

    Args:
        path: A ``config.json``, or the folder that holds one.
        seq: Tokens of a sequence.
        micro_batch: Sequences of a micro-batch and rank.
    """

    def __init__(self, path: str, seq: int = 4096, micro_batch: int = 1) -> None:
        super().__init__()
        self.path, self.shape = path, (micro_batch, seq)
        self.model: Any = None

    def configure_model(self) -> None:
        """Build the model, in the dtype of the Trainer's precision."""
        if self.model is None:
            from transformers import AutoModelForCausalLM

            config = hugging_face_config(self.path)
            config.use_cache = False
            make: Any = AutoModelForCausalLM.from_config
            self.model = make(config, dtype=torch.get_default_dtype()).train()

    def training_step(self, tokens_BT: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of ``[B, T]`` int64 tokens."""
        loss: Tensor = self.model(input_ids=tokens_BT, labels=tokens_BT).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-4, weight_decay=0.1)

    def example_batch(self) -> Tensor:
        """Tokens of a micro-batch."""
        return torch.zeros(self.shape, dtype=torch.int64)


def hugging_face_config(path: str) -> Any:
    """Read a config from a file or folder; nothing is downloaded.

    Raises:
        ValueError: there is none, or transformers does not know it.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ValueError("--model needs transformers: `pip install transformers`") from error
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(
            f"--model {path}: there is no such file, and nothing is downloaded. Give a "
            "config.json, or the folder that holds one."
        )
    try:
        return AutoConfig.from_pretrained(str(file), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--model {path} is no config that transformers knows: {error}") from error


def hugging_face_program(
    model: str, seq: int, micro_batch: int, config: Path | None, arguments: Sequence[str]
) -> Program:
    """Return a program that trains a Hugging Face model; a YAML may have options of the Trainer."""
    hugging_face_config(model)
    own = [f"--model.path={model}", f"--model.seq={seq}", f"--model.micro_batch={micro_batch}"]

    def change(given: dict[str, Any]) -> dict[str, Any]:
        plugins = as_list(given.get("plugins"))
        if given.get("precision") is None and not any(isinstance(p, Precision) for p in plugins):
            given = {**given, "precision": "bf16-mixed"}
        if given.get("strategy", "auto") == "auto" and given.get("devices") != 1:
            given = {**given, "strategy": "quantized_fsdp"}
        return given

    words = partial(_words, config, [*own, *arguments])
    start = partial(_run, None, HuggingFaceModule)
    return Program(start=start, name=model, words=words, change=change)


# --- batches --------------------------------------------------------------------------------------


def parse_batch(spec: str) -> Any:
    """Return zeros as ``"input_ids:int64[4,1024] labels:int64[4,1024]"`` says.

    Names make a mapping; one tensor without a name is the batch, several are a tuple.
    """
    named: list[tuple[str | None, Tensor]] = []
    rest = _BATCH.sub("", spec).replace(",", " ").strip()
    for name, dtype, sizes in _BATCH.findall(spec):
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f'--batch "{spec}": `{dtype}` is no dtype, such as int64 or bfloat16.')
        shape = [int(size) for size in sizes.split(",") if size.strip()]
        named.append((name or None, torch.zeros(shape, dtype=getattr(torch, dtype))))
    names = [name for name, _ in named]
    if rest or not named or (None in names and any(names)):
        raise ValueError(f'--batch "{spec}" is not understood. {BATCH_REMEDY}')
    if all(names):
        return dict(named)
    tensors = tuple(tensor for _, tensor in named)
    return tensors[0] if len(tensors) == 1 else tensors


def describe(batch: Any) -> str:
    """Shapes of a batch, as :func:`parse_batch` reads them."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}".replace(" ", "")
    if isinstance(batch, Mapping):
        return " ".join(f"{name}:{describe(part)}" for name, part in batch.items())
    if isinstance(batch, (list, tuple)):
        return " ".join(map(describe, batch))
    return type(batch).__name__


class OneBatch:
    """A loader that gives the same batch again and again."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        """Yield copies, as a step may change its batch."""
        while True:
            yield copy.deepcopy(self.batch)


def find_batch(
    module: LightningModule, data: Any, keeps: bool = False, given: Any = None
) -> tuple[Any, str]:
    """Return the first batch of a rank, and where it is from; data are neither made nor loaded.

    With ``keeps``, training with the same data may follow, which then gets all of them. Where a
    batch is ``given``, perhaps as :func:`parse_batch` reads it, it is that.

    Raises:
        ValueError: there is none without files or downloads.
    """
    if given is not None:
        return parse_batch(given) if isinstance(given, str) else given, "`batch`"
    failed = ""
    for owner in (data, module):
        if callable(make := getattr(owner, "example_batch", None)):
            return make(), f"{type(owner).__name__}.example_batch()"
    try:
        with restored_generators(), _offline(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if (loader := _loader(module, data)) is not None:
                return _first_batch(loader, keeps), "the first batch of the training data"
    except Exception as error:
        failed = f" The data could not be read: {type(error).__name__}: {error}."
    if module.example_input_array is not None:
        return module.example_input_array, "example_input_array of the model"
    raise ValueError(f"No batch was found.{failed} {BATCH_REMEDY}")


def _first_batch(loader: Any, keeps: bool) -> Any:
    """Read a batch; training after the plan draws the same ones as without it."""
    dataset = getattr(loader, "dataset", None)
    if keeps and (isinstance(loader, Iterator) or isinstance(dataset, IterableDataset)):
        try:
            loader = copy.deepcopy(loader)
        except Exception as error:
            what = type(loader if dataset is None else dataset).__name__
            raise ValueError(
                f"`{what}` is a stream that cannot be copied ({error}), so training would miss "
                "the batch that the plan reads"
            ) from error
    owners = (loader, getattr(loader, "sampler", None))
    held = {id(g): g for g in (getattr(owner, "generator", None) for owner in owners)}
    states = [(g, g.get_state()) for g in held.values() if isinstance(g, torch.Generator)]
    try:
        return next(iter(loader))
    finally:
        for generator, state in states:
            generator.set_state(state)


def _loader(module: LightningModule, data: Any) -> Any:
    if isinstance(data, LightningDataModule):
        data.setup("fit")  # `prepare_data`, which may download, is not called
        return data.train_dataloader()
    if data is None and is_overridden("train_dataloader", module):
        return module.train_dataloader()
    return data
