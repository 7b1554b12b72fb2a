"""Write checkpoints so that a killed run leaves none half-written, and read both kinds.

A *full* checkpoint is one file in Lightning's own format. A *sharded* checkpoint is a directory:
``.metadata`` and ``__<rank>_0.distcp`` hold tensors in the format of torch.distributed.checkpoint
(``state_dict.<name>``, ``optimizer_<i>.state.<name>.<key>``, ``replica.<name>``), ``meta.pt`` holds
everything else that Lightning saves.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO

if TYPE_CHECKING:  # torch.distributed.checkpoint takes 0.1 s to import: not before it is needed
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = [
    "AtomicCheckpointIO",
    "ShardedCheckpoint",
    "is_local",
    "is_sharded_checkpoint",
    "load_full_checkpoint",
    "raise_together",
    "save_sharded_checkpoint",
    "write_in_place",
]

META_FILENAME = "meta.pt"
_METADATA_FILENAME = ".metadata"


def is_local(path: str | os.PathLike[str]) -> bool:
    """Whether the path is on a file system of this machine rather than behind a URL."""
    return "://" not in str(path)


def is_sharded_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a directory, so cannot be a full checkpoint."""
    return is_local(path) and Path(path).is_dir()


# --- writing ----------------------------------------------------------------------------------


def _sibling(path: Path, prefix: str) -> Path:
    """A hidden name next to ``path``, always the same one, that no checkpoint search matches."""
    digest = hashlib.sha256(path.name.encode()).hexdigest()[:16]
    return path.parent / f".{prefix}-{digest}"


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _save(obj: object, path: Path) -> None:
    with path.open("wb") as file:  # torch.save refuses hidden names
        torch.save(obj, file)


def write_in_place(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file under another name and move it to ``path`` when it is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _sibling(path, "incomplete")
    _remove(unfinished)
    write(unfinished)
    _sync(unfinished)
    _move_into_place(unfinished, path)


def _move_into_place(finished: Path, path: Path) -> None:
    """Give a finished file or directory its final name, replacing what has that name."""
    aside = _sibling(path, "replaced")
    if path.is_dir() and not path.is_symlink():
        _remove(aside)
        path.rename(aside)  # a directory cannot be replaced in one step
    elif path.is_symlink() and finished.is_dir():
        path.unlink()
    os.replace(finished, path)
    _sync(path.parent)
    _remove(aside)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's default checkpoint files, written under another name and renamed when complete.

    Lightning's own writer moves the file from the system's temporary folder, which is a copy that
    can be interrupted when that is another file system.
    """

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Save one file; remote paths go through Lightning's writer."""
        if storage_options is not None or not is_local(path):
            super().save_checkpoint(checkpoint, str(path), storage_options)
            return
        write_in_place(Path(path), lambda unfinished: _save(checkpoint, unfinished))

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a file or directory; it disappears at once, never in parts."""
        target = Path(path)
        if not is_local(path) or target.is_symlink() or not target.is_dir():
            super().remove_checkpoint(str(path))
            return
        aside = _sibling(target, "replaced")
        _remove(aside)
        target.rename(aside)
        _remove(aside)


def save_sharded_checkpoint(tensors: dict[str, Any], meta: dict[str, Any], path: Path) -> None:
    """Write a checkpoint directory from all ranks; it appears under ``path`` when complete.

    Args:
        tensors: Nested dictionaries with (D)Tensors and small Python values as leaves. Values that
            are not DTensors are taken from rank 0.
        meta: Everything else, saved by rank 0.
        path: The same on every rank, on a file system that all ranks see.

    Raises:
        RuntimeError: Rank 0 could not write or rename; raised on every rank.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    rank_zero = dist.get_rank() == 0
    unfinished = _sibling(path, "incomplete")
    error: list[str | None] = [None]
    if rank_zero:
        try:
            _remove(unfinished)
            unfinished.mkdir(parents=True)
        except OSError as exception:
            error = [f"{type(exception).__name__}: {exception}"]
    raise_together(error, path)
    save(
        tensors,
        storage_writer=FileSystemWriter(unfinished, single_file_per_rank=True),
        planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
    )
    if rank_zero:  # `save` returned, so every rank has written its file
        try:
            _save(meta, unfinished / META_FILENAME)
            _sync(unfinished / META_FILENAME)
            _sync(unfinished)
            _move_into_place(unfinished, path)
        except (
            OSError,
            RuntimeError,
            TypeError,
            pickle.PicklingError,
            AttributeError,
        ) as exception:
            error = [f"{type(exception).__name__}: {exception}"]
    raise_together(error, path)


def raise_together(error: list[str | None], path: str | os.PathLike[str]) -> None:
    """Raise on every rank what failed on rank 0, so that none waits for it.

    Args:
        error: One element, looked at on rank 0: a message, or ``None`` if all went well.
        path: The checkpoint.

    Raises:
        RuntimeError: Rank 0 reported an error.
    """
    dist.broadcast_object_list(error, src=0)
    if error[0] is not None:
        raise RuntimeError(f"rank 0 could not write the checkpoint `{path}`: {error[0]}")


# --- reading ----------------------------------------------------------------------------------


def _explain_unpickling(path: Path, error: Exception) -> pickle.UnpicklingError:
    lines = [line.strip() for line in str(error).splitlines()]
    cause = next((line for line in lines if line.startswith("WeightsUnpickler error")), lines[0])
    return pickle.UnpicklingError(
        f"`{path}` holds objects that `weights_only=True` (the default) does not load: {cause}\n"
        "If you trust the file, pass `weights_only=False` to `trainer.fit`, `validate`, `test` or "
        "`predict`."
    )


def load_full_checkpoint(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Read a full checkpoint without copying its tensors into memory (they are memory-mapped).

    Args:
        path: A local file.
        weights_only: As in ``torch.load``; ``None`` means ``True``.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not complete.
        pickle.UnpicklingError: It needs ``weights_only=False``.
    """
    if not path.is_file():
        raise FileNotFoundError(f"Checkpoint file not found: {path}{_hint_replaced(path)}")
    safe, is_zip = weights_only is not False, zipfile.is_zipfile(path)
    with path.open("rb") as file:
        if file.read(2) == b"PK" and not is_zip:  # the directory at its end is missing
            raise ValueError(f"`{path}` is no complete checkpoint file. Resume from another one.")
    try:
        checkpoint: dict[str, Any] = torch.load(
            path, map_location="cpu", mmap=is_zip, weights_only=safe
        )
    except pickle.UnpicklingError as error:
        raise _explain_unpickling(path, error) from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(
            f"`{path}` is no complete checkpoint file ({error}). Resume from another one."
        ) from error
    return checkpoint


def _hint_replaced(path: Path) -> str:
    aside = _sibling(path, "replaced")
    if not aside.exists():
        return ""
    return f". The run was killed while it replaced it; the previous one is still at `{aside}`"


class ShardedCheckpoint:
    """A complete checkpoint directory, opened for reading.

    Args:
        path: The directory.
        weights_only: As in ``torch.load``; ``None`` means ``True``.

    Attributes:
        paths: Flat key of every stored leaf -> its path in the nested state.
        entries: Flat key -> DCP's description (size and dtype of a tensor).

    Raises:
        FileNotFoundError: There is no such directory.
        ValueError: The directory is no sharded checkpoint, or not a complete one.
    """

    def __init__(self, path: Path, weights_only: bool | None = None) -> None:
        """Read DCP's metadata and check that all files are there."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        if not path.exists():
            raise FileNotFoundError(f"Checkpoint not found: {path}{_hint_replaced(path)}")
        self.path = path
        self._weights_only = weights_only is not False
        missing = [n for n in (META_FILENAME, _METADATA_FILENAME) if not (path / n).is_file()]
        if missing:
            raise ValueError(
                f"`{path}` is no complete checkpoint directory: {' and '.join(missing)} "
                "missing. The run that wrote it was killed, or it is something else. Resume from "
                "another checkpoint."
            )
        metadata: Metadata = FileSystemReader(path).read_metadata()
        self._check_files(metadata)
        self.entries = metadata.state_dict_metadata
        self.paths: dict[str, tuple[Any, ...]] = metadata.planner_data or {}

    def _check_files(self, metadata: Metadata) -> None:
        needed: dict[str, int] = {}
        for info in (metadata.storage_data or {}).values():
            end = info.offset + info.length
            needed[info.relative_path] = max(end, needed.get(info.relative_path, 0))
        for name, size in needed.items():
            file = self.path / name
            found = file.stat().st_size if file.is_file() else -1
            if found < size:
                state = "missing" if found < 0 else f"{found} of at least {size} bytes long"
                raise ValueError(
                    f"`{self.path}` is no complete checkpoint directory: {name} is {state}. Resume "
                    "from another checkpoint, or copy this one again."
                )

    def read_meta(self) -> dict[str, Any]:
        """Everything that is not a tensor.

        Raises:
            pickle.UnpicklingError: It needs ``weights_only=False``.
        """
        file = self.path / META_FILENAME
        try:
            meta: dict[str, Any] = torch.load(
                file, map_location="cpu", weights_only=self._weights_only
            )
        except pickle.UnpicklingError as error:
            raise _explain_unpickling(file, error) from error
        return meta

    def keys_under(self, *prefix: str) -> dict[str, tuple[Any, ...]]:
        """Flat keys of the leaves below a path, with the rest of their path."""
        depth = len(prefix)
        return {k: p[depth:] for k, p in self.paths.items() if p[:depth] == prefix}

    def size(self, key: str) -> torch.Size | None:
        """Shape of a stored tensor; ``None`` for other values."""
        size: torch.Size | None = getattr(self.entries[key], "size", None)
        return size

    def dtype(self, key: str) -> torch.dtype | None:
        """Dtype of a stored tensor; ``None`` for other values."""
        properties = getattr(self.entries[key], "properties", None)
        return None if properties is None else properties.dtype

    def load(self, flat: dict[str, Any]) -> None:
        """Fill the tensors of ``flat`` in place and replace its other values.

        Every rank must call this with the same keys, if a process group exists.
        """
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        from lq_lightning.checkpoint.load_planner import SafeLoadPlanner

        load(
            flat,
            storage_reader=FileSystemReader(self.path),
            planner=SafeLoadPlanner(self._weights_only),
            no_dist=not dist.is_initialized(),
        )
