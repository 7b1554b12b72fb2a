"""The folder of a client's run, and whether a run in it can go on with the given options."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .settings import OptionError

# Options that may change when a run goes on.
_FREE = {
    *("connect", "run", "steps", "save_every", "validate_every", "validation_batches"),
    *("accelerator", "report", "certificate", "no_authentication"),
}
_PATHS = {"model", "text", "tokenizer"}
# Files that may move as long as they give the same tokens.
_DATA = ("text", "tokenizer")
_CONTENT = "digest of the tokens"
_NOT_GIVEN = "not given"


def _plain(name: str, value: Any) -> Any:
    if value is None:
        return _NOT_GIVEN
    if isinstance(value, tuple):
        return ",".join(value)
    if name in _PATHS and Path(value).expanduser().exists():
        return str(Path(value).expanduser().resolve())
    return value


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a client: its folder, its options and its progress.

    Attributes:
        folder: of the run.
        options: of the client, without those that may change.
        step: optimizer steps that are done; 0 for a new run.
        saved: options that the run was begun with; None for a new run.
    """

    folder: Path
    options: dict[str, Any]
    step: int
    saved: Mapping[str, Any] | None

    @classmethod
    def open(cls, options: argparse.Namespace) -> Run:
        """Look for a checkpoint in the folder.

        Raises:
            OptionError: the run there was begun with other options, or is none of this program.
        """
        folder = Path(options.run)
        own = {n: _plain(n, value) for n, value in vars(options).items() if n not in _FREE}
        last = folder / "last.ckpt"
        if not last.exists():
            return cls(folder, own, 0, None)
        try:
            checkpoint = torch.load(last, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise OptionError(
                f"{last} is no checkpoint, or a part of one. Give another `--run`, or restore it."
            ) from error
        saved = checkpoint.get("hyper_parameters")
        if saved is None:
            raise OptionError(f"{last} is not of this program. Give another `--run`.")
        run = cls(folder, own, int(checkpoint["global_step"]), saved)
        run._check({name: value for name, value in own.items() if name not in _DATA})
        return run

    @property
    def checkpoint(self) -> Path:
        """Path of the last state of the run."""
        return self.folder / "last.ckpt"

    def record(self, content: str) -> dict[str, Any]:
        """Return the hyperparameters by which a checkpoint's run is recognized.

        Args:
            content: a digest of the text.

        Raises:
            OptionError: the run was begun with other text.
        """
        if self.saved is not None and self.saved.get(_CONTENT) != content:
            self._check({name: self.options[name] for name in _DATA})
            self._check({_CONTENT: content})  # the same folder, with other text
        return {**self.options, _CONTENT: content}

    def _check(self, given: Mapping[str, Any]) -> None:
        if self.saved is None:
            return
        begun = {name: self.saved.get(name, _NOT_GIVEN) for name in given}
        other = [name for name, value in given.items() if begun[name] != value]
        if not other:
            return
        pairs = (f"{_shown(name, begun[name])}, not {_shown(name, given[name])}" for name in other)
        raise OptionError(
            f"The run in {self.folder} was begun with {'; '.join(pairs)}. It has done {self.step} "
            "steps: give what it was begun with to go on, or another `--run` to begin anew."
        )


def _shown(name: str, value: Any) -> str:
    if name == _CONTENT:
        return f"text whose tokens have the digest {value}"
    option = f"--{name.replace('_', '-')}"
    if value == _NOT_GIVEN or value is False:
        return f"no `{option}`"
    return f"`{option}`" if value is True else f"`{option} {value}`"
