"""Checkpoints in one file, in Lightning's own format."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lq_lightning.checkpoint.archives import find_damaged_records, is_archive, load_archive
from lq_lightning.checkpoint.checksums import HOW_TO_SKIP, REMEDY
from lq_lightning.checkpoint.files import (
    hint_replaced,
    is_local,
    remove_at_once,
    write_in_place,
)
from lq_lightning.checkpoint.ranks import ALONE, RankGroup

__all__ = ["AtomicCheckpointIO", "load_full_checkpoint", "naming"]


@contextmanager
def naming(path: object) -> Generator[None, None, None]:
    """Name the checkpoint in every error raised inside, without changing its class.

    Args:
        path: Of the checkpoint; None if it is in memory only.
    """
    try:
        yield
    except Exception as error:
        if path is not None and str(path) not in str(error):
            if isinstance(error, OSError) and error.strerror:
                error.strerror = f"{error.strerror} (checkpoint `{path}`)"
            else:
                text, *rest = error.args or ("",)
                error.args = (f"checkpoint `{path}`: {text}", *rest)
        raise


def _save(obj: object, path: Path) -> None:
    with path.open("wb") as file:  # torch.save refuses hidden names
        torch.save(obj, file)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's default checkpoint files, written under another name and renamed when complete.

    Lightning's own writer moves the file from the system's temporary folder, which is a copy that
    can be interrupted when that is another file system.

    Args:
        verify: Compare local files with the checksums of their records before they are loaded.
    """

    def __init__(self, verify: bool = True) -> None:
        """Keep the option."""
        super().__init__()
        self._verify = verify

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        """Save one file; remote paths go through Lightning's writer."""
        if storage_options is not None or not is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with naming(path):
            write_in_place(Path(path), lambda unfinished: _save(checkpoint, unfinished))

    def load_checkpoint(self, path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        """Load one file, with the arguments of ``TorchCheckpointIO``.

        Raises:
            ValueError: The file is damaged.
        """
        if self._verify and is_local(path):
            _verify(Path(path), ALONE)
        return super().load_checkpoint(path, *args, **options)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file or directory; it disappears at once, never in parts."""
        if is_local(path):
            remove_at_once(Path(path))
        else:
            super().remove_checkpoint(path)


def load_full_checkpoint(
    path: str | Path, weights_only: bool | None, ranks: RankGroup = ALONE, verify: bool = True
) -> dict[str, Any]:
    """Read a full checkpoint without copying its tensors into memory (they are memory-mapped).

    Args:
        path: A local file.
        weights_only: As in ``torch.load``; ``None`` means ``True``.
        ranks: All of them must call this; they share the work of verifying.
        verify: Read the whole file first and compare it with the checksums of its records, which
            ``torch.load`` ignores.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not complete, or damaged.
        pickle.UnpicklingError: It needs ``weights_only=False``.
    """
    given, path = path, Path(path)
    ranks.together(lambda: _check_file(path, given))  # said as Lightning does
    if verify:
        _verify(path, ranks)
    return ranks.together(lambda: load_archive(path, weights_only is not False, mmap=True))


def _check_file(path: Path, given: str | Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"Checkpoint file not found: {given}{hint_replaced(path)}")


def _verify(path: Path, ranks: RankGroup) -> None:
    found = find_damaged_records(path, ranks.rank, ranks.size) if is_archive(path) else []
    problems = [problem for part in ranks.all_gather(found) for problem in part]
    if problems:
        raise ValueError(f"`{path}` is damaged: {'; '.join(problems[:5])}. {REMEDY} {HOW_TO_SKIP}")
