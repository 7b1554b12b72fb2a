"""The user's own run, made as often as it is simulated: from a program, a YAML or a model's config.

A program runs as always until it calls ``Trainer.fit``; a YAML without a program of its own runs
through a plain ``LightningCLI``. So everything that decides about a run is the user's code: links
between options, optimizers, callbacks. Only arguments of the Trainer are exchanged.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import io
import re
import runpy
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lq_lightning._compat.simulation import new_fake_mode, restored_generators
from lq_lightning.callbacks.plan_check import PlanCheck
from lq_lightning.planning.simulation import TRAINING_ALONE
from lq_lightning.planning.simulation import Build as Build
from lq_lightning.planning.simulation import Overrides as Overrides
from lq_lightning.planning.simulation import UserRun as UserRun

Change = Callable[[dict[str, Any]], dict[str, Any]]

# What changes neither memory nor time of a step, or needs files and loggers.
_LEFT_OUT = (
    *(Checkpoint, DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, PlanCheck),
    *(ModelSummary, ProgressBar, ThroughputMonitor, Timer),
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


def _same(own: dict[str, Any]) -> dict[str, Any]:
    return own


def as_list(value: Any) -> list[Any]:
    """A list of one, many or no values."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def trainer_arguments(own: Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Arguments of the simulated Trainer: the user's, without logs, files and validation.

    ``overrides`` replace the user's; their ``plugins`` and ``callbacks`` come in addition.
    """
    plugins = [*as_list(own.get("plugins")), *as_list(overrides.get("plugins"))]
    kept = [each for each in as_list(own.get("callbacks")) if not isinstance(each, _LEFT_OUT)]
    kept = [each for each in kept if type(each).__name__ != "SaveConfigCallback"]
    callbacks = [*kept, *as_list(overrides.get("callbacks"))]
    extra = {"plugins": plugins or None, "callbacks": callbacks or None}
    return {**own, **_NOT_USED, **overrides, **extra}


def without_endings(run: UserRun) -> UserRun:
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


# --- programs and YAML ----------------------------------------------------------------------------


class _FitCalledError(BaseException):
    """Ends the user's program where it calls ``fit``, past every ``except Exception``."""

    def __init__(self, trainer: Trainer, module: LightningModule, data: Any) -> None:
        super().__init__()
        self.run = trainer, module, data


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What the user starts to train: a script, or a ``LightningCLI`` for a YAML.

    Attributes:
        script: Python file, which runs as ``__main__``; None for a plain ``LightningCLI``.
        config: YAML of a ``LightningCLI``.
        arguments: Words of the command line after these.
        module_class: Class of the model for a plain ``LightningCLI``; None reads ``class_path``.
        change: Changes the arguments of the Trainer, before others replace them.
        title: Name of the run, if it is not that of a file.
    """

    script: Path | None = None
    config: Path | None = None
    arguments: tuple[str, ...] = ()
    module_class: type[LightningModule] | None = None
    change: Change = field(default=_same)
    title: str = ""

    @property
    def name(self) -> str:
        """What errors call it."""
        return self.title or str(self.config or self.script)

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
        return without_endings(self._until_fit(lambda own: change(self.change(own))))

    def _until_fit(self, change: Change) -> UserRun:
        said = io.StringIO()
        try:
            with _exchanged(change, self._words), contextlib.redirect_stderr(said), _offline():
                self._start()
        except _FitCalledError as called:
            return called.run
        except SystemExit as ended:
            _, _, why = f"\n{said.getvalue()}".rpartition("\nerror: ")
            why = " ".join(why.split()) or f"it exits with {ended.code}"
            raise ValueError(f"{self.name} is not accepted by {self._runner}: {why}") from ended
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(
                f"{self._runner} stopped before `Trainer.fit`: {type(error).__name__}: {error}. "
                "It has to run as far as that without GPU, files and weights."
            ) from error
        raise ValueError(
            f"{self._runner} ended without calling `Trainer.fit` of `lightning.pytorch`, so there "
            "is nothing to plan. Give the arguments with which it trains."
        )

    @property
    def _runner(self) -> str:
        return f"'{self.script}'" if self.script else "LightningCLI"

    def _words(self, subcommands: bool) -> list[str]:
        if self.config is None and self.module_class is None:
            return list(self.arguments)
        given = [] if self.config is None else ["--config", str(self.config)]
        if not subcommands:
            return [*given, *self.arguments]
        inside = self.config is None or "fit" not in read_yaml(self.config)
        fit = ["fit", *given] if inside else [*given, "fit"]
        return [*fit, *self.arguments]

    def _start(self) -> None:
        folder = str(self.script.resolve().parent) if self.script else str(Path.cwd())
        with mock.patch.object(sys, "path", [folder, *sys.path]):
            if self.script is not None:
                runpy.run_path(str(self.script), run_name="__main__")
                return
            from lightning.pytorch.cli import LightningCLI

            LightningCLI(self.module_class, save_config_callback=None)


@contextlib.contextmanager
def _exchanged(change: Change, words: Callable[[bool], list[str]]) -> Iterator[None]:
    """Let programs make Trainers with other arguments, and end where they call ``fit``."""
    make = Trainer.__init__

    @functools.wraps(make)
    def init(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        make(trainer, *args, **change(kwargs))

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

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Trainer, "__init__", init))
        stack.enter_context(mock.patch.object(Trainer, "fit", fit))
        stack.enter_context(mock.patch.object(sys, "argv", [sys.argv[0], *words(True)]))
        if importlib.util.find_spec("jsonargparse") is not None:
            stack.enter_context(_arguments_of_cli(words))
        yield


@contextlib.contextmanager
def _arguments_of_cli(words: Callable[[bool], list[str]]) -> Iterator[None]:
    """Give every ``LightningCLI`` our words, with a subcommand only where it has some."""
    from lightning.pytorch.cli import LightningCLI

    make = LightningCLI.__init__

    @functools.wraps(make)
    def init(cli: LightningCLI, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("args") is None:
            sys.argv[1:] = words(kwargs.get("run", True))
        make(cli, *args, **kwargs)

    with mock.patch.object(LightningCLI, "__init__", init):
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
        return Program(script=path, arguments=tuple(arguments))
    content = read_yaml(path)
    content = content.get("fit", content)
    _require_jsonargparse()
    parts = [content.get("model"), content.get("data")]
    words = any(isinstance(part, dict) and "class_path" not in part for part in parts)
    if program is None and (words or parts[0] is None or not set(content) <= _KEYS):
        program = _search_program(path)
    return Program(script=program, config=path, arguments=tuple(arguments))


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


def _require_jsonargparse() -> None:
    if importlib.util.find_spec("jsonargparse") is None:
        raise ValueError(
            "A YAML is read by LightningCLI, which needs jsonargparse: "
            "pip install 'jsonargparse[signatures]'"
        )


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
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        """Build the model, in the dtype of the Trainer's precision."""
        if self.model is None:
            from transformers import AutoModelForCausalLM

            config = hugging_face_config(self.path)
            config.use_cache = False
            dtype = torch.get_default_dtype()
            make: Any = AutoModelForCausalLM.from_config
            self.model = make(config, dtype=dtype)
            self.model.train()

    def training_step(self, tokens_BT: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of ``[B, T]`` int64 tokens."""
        if self.model is None:
            raise RuntimeError("`HuggingFaceModule` has no model before `configure_model`.")
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
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("--model needs transformers: pip install 'lq-lightning[hf]'")
    from transformers import AutoConfig

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
    _require_jsonargparse()
    own = [f"--model.path={model}", f"--model.seq={seq}", f"--model.micro_batch={micro_batch}"]

    def change(given: dict[str, Any]) -> dict[str, Any]:
        plugins = as_list(given.get("plugins"))
        if given.get("precision") is None and not any(isinstance(p, Precision) for p in plugins):
            given = {**given, "precision": "bf16-mixed"}
        if given.get("strategy", "auto") == "auto" and given.get("devices") != 1:
            given = {**given, "strategy": "quantized_fsdp"}
        return given

    return Program(
        config=config,
        arguments=(*own, *arguments),
        module_class=HuggingFaceModule,
        change=change,
        title=model,
    )


# --- Python ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonRun:
    """A run that is given as objects.

    Attributes:
        module: The module, or a function that makes one.
        trainer: Arguments of the Trainer.
        data: As ``fit`` takes it.
        change: Changes the arguments of the Trainer, before others replace them.
    """

    module: LightningModule | Callable[[], LightningModule]
    trainer: Mapping[str, Any]
    data: Any = None
    change: Change = field(default=_same)

    @property
    def name(self) -> str:
        """What errors call it."""
        return getattr(self.module, "__name__", type(self.module).__name__)

    def with_change(self, change: Change) -> PythonRun:
        """The same with other arguments of the Trainer."""
        return replace(self, change=lambda own: change(self.change(own)))

    def look(self) -> tuple[dict[str, Any], LightningModule, Any]:
        """Arguments of the Trainer, the module and its data."""
        with new_fake_mode():
            return dict(self.trainer), self._module(), self.data

    def __call__(self, overrides: Overrides) -> UserRun:
        """Make a Trainer and a module for one simulation."""
        own = self.change(copy.deepcopy(dict(self.trainer)))
        trainer = Trainer(**trainer_arguments(own, overrides))
        return without_endings((trainer, self._module(), self.data))

    def _module(self) -> LightningModule:
        if not isinstance(self.module, LightningModule):
            try:
                return self.module()
            except Exception as error:
                raise ValueError(
                    f"the model cannot be built: {type(error).__name__}: {error}. It is built from "
                    "tensors that have shapes but no values."
                ) from error
        known: dict[int, Any] = {}
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, tensor.requires_grad)
            known[id(tensor)] = empty
        return copy.deepcopy(self.module, known)


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


def find_batch(module: LightningModule, data: Any) -> tuple[Any, str]:
    """Return the first batch of a rank, and where it is from; data are neither made nor loaded.

    Raises:
        ValueError: there is none without files or downloads.
    """
    failed = ""
    for owner in (data, module):
        if callable(make := getattr(owner, "example_batch", None)):
            return make(), f"{type(owner).__name__}.example_batch()"
    try:
        with restored_generators(), _offline(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if (loader := _loader(module, data)) is not None:
                return _first_batch(loader), "the first batch of the training data"
    except Exception as error:
        failed = f" The data could not be read: {type(error).__name__}: {error}."
    if module.example_input_array is not None:
        return module.example_input_array, "example_input_array of the model"
    raise ValueError(f"No batch was found.{failed} {BATCH_REMEDY}")


def _first_batch(loader: Any) -> Any:
    """Read a batch; training after the plan draws the same ones as without it."""
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
