"""Checkpoints that all ranks write into one directory, and read at any world size.

``.metadata`` and ``__<rank>_0.distcp`` hold tensors in the format of torch.distributed.checkpoint
(``state_dict.<name>``, ``optimizer_<i>.state.<name>.<key>``, ``replica.<name>``), and under
``ties.<name>`` the first name of a tied weight; ``meta.pt`` holds everything else that Lightning
saves, ``checksums.json`` the checksum of each of these files.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import warnings
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lq_lightning._compat.checkpoint import LAYOUT_BY_NAME, METADATA_CLASSES
from lq_lightning.checkpoint.files import (
    CHECKSUMS_FILENAME,
    HOW_TO_SKIP,
    HOW_TO_TRUST,
    REMEDY,
    ChecksumFile,
    FileChecksum,
    find_damage,
    hint_replaced,
    incomplete_name,
    is_local,
    move_into_place,
    read_checksums,
    remove,
    sole_writer,
    sync,
    write_checksums,
)
from lq_lightning.checkpoint.ranks import ALONE, RankGroup
from lq_lightning.checkpoint.single_file import explain_unpickling, load_archive

if TYPE_CHECKING:  # torch.distributed.checkpoint takes 0.1 s to import: not before it is needed
    from torch.distributed.checkpoint.metadata import Metadata


META_FILENAME = "meta.pt"


# --- writing ----------------------------------------------------------------------------------


def check_folder(path: str | Path, storage_options: Any | None) -> None:
    """Refuse to write a checkpoint directory to where none can be.

    Raises:
        TypeError: ``storage_options`` are given.
        ValueError: ``path`` is a URL.
    """
    if storage_options is not None:
        raise TypeError(
            "`save_checkpoint(storage_options=...)` does not apply to sharded checkpoints, "
            "which are written to a file system: leave it out, or set "
            "`save_distributed_checkpoint=False` and use a `CheckpointIO` that takes it."
        )
    if not is_local(path):
        raise ValueError(
            f"`{path}`: sharded checkpoints go to a file system that all ranks see. Use a "
            "path without URL scheme, or `save_distributed_checkpoint=False`."
        )


def save_sharded_checkpoint(
    tensors: dict[str, Any], meta: dict[str, Any], path: Path, ranks: RankGroup
) -> None:
    """Write a checkpoint directory from several ranks; it appears as ``path`` when complete.

    Args:
        tensors: Nested dictionaries with (D)Tensors and small Python values as leaves. Ranks may
            have different keys. A value that is no DTensor is taken from the first rank that has
            its key.
        meta: Everything else, saved by the first rank.
        path: The same on every rank, on a file system that all ranks see.
        ranks: The ranks that write and call this together. DTensors may be sharded over fewer.

    Raises:
        RuntimeError: A rank could not write, or the first one not rename, or another process is
            writing the same checkpoint; raised on every rank.
    """
    with ExitStack() as held:

        def begin() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(sole_writer(path))

        _on_first(ranks, path, begin)
        _write(tensors, meta, path, ranks)


def _write(tensors: dict[str, Any], meta: dict[str, Any], path: Path, ranks: RankGroup) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import save

    from lq_lightning.checkpoint.dcp import ChecksumWriter, first_failure

    unfinished = incomplete_name(path)

    def begin() -> None:
        remove(unfinished)
        unfinished.mkdir()

    _on_first(ranks, path, begin)
    writer = ChecksumWriter(unfinished)
    try:
        with _alone_is_no_surprise():
            save(
                tensors,
                storage_writer=writer,
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=ranks.group,
                no_dist=ranks.size == 1,
            )
    except CheckpointException as error:  # DCP raises it on all ranks
        _on_first(ranks, path, lambda: remove(unfinished))
        rank, cause = first_failure(error)
        why = f"{type(cause).__name__}: {cause}"
        raise RuntimeError(f"rank {rank} could not write the checkpoint `{path}`: {why}") from error
    checksums = {n: c for part in ranks.all_gather(writer.checksums) for n, c in part.items()}

    def finish() -> None:  # every rank has written its file
        try:
            with ChecksumFile(unfinished / META_FILENAME) as file:
                torch.save(meta, file)
            checksums[META_FILENAME] = file.checksum()
            sync(write_checksums(unfinished, checksums))
            sync(unfinished)
        except BaseException:
            remove(unfinished)
            raise
        move_into_place(unfinished, path)

    _on_first(ranks, path, finish)


@contextmanager
def _alone_is_no_surprise() -> Generator[None, None, None]:
    """Without DCP's warning about single processes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _on_first(ranks: RankGroup, path: Path, work: Callable[[], None]) -> None:
    """Do something on the first rank; all ranks raise its error."""

    def explained() -> None:
        try:
            work()
        except (OSError, RuntimeError, TypeError, AttributeError, pickle.PicklingError) as error:
            why = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"rank 0 could not write the checkpoint `{path}`: {why}") from error

    ranks.together(explained if ranks.is_first else lambda: None)


# --- reading ----------------------------------------------------------------------------------


class ShardedCheckpoint:
    """A complete checkpoint directory, opened for reading.

    Args:
        weights_only: As in ``torch.load``; ``None`` means ``True``. With False *everything* in the
            folder is unpickled without restriction, the description of its files included.
        ranks: The ranks that read it: all of them construct it and call :meth:`load`.
        verify: Compare all files with their checksums, if there are any. Each file is read by one
            rank.

    Attributes:
        paths: Path in the nested state by flat key of a stored leaf.
        entries: DCP's description (size and dtype of a tensor) by flat key.

    Raises:
        FileNotFoundError: There is no such directory.
        ValueError: The directory is no sharded checkpoint, not a complete one, or damaged.
        pickle.UnpicklingError: It needs ``weights_only=False``.
    """

    def __init__(
        self,
        path: Path,
        weights_only: bool | None = None,
        ranks: RankGroup = ALONE,
        verify: bool = True,
    ) -> None:
        """Read DCP's metadata and check that all files are there."""
        self.path = path
        self.ranks = ranks
        self._weights_only = weights_only is not False
        self._checksums: dict[str, FileChecksum] | None = None
        self._metadata = ranks.together(lambda: self._open(verify))
        self.entries = self._metadata.state_dict_metadata
        self.paths: dict[str, tuple[Any, ...]] = self._metadata.planner_data or {}
        if verify:
            self._verify_data()

    def _open(self, verify: bool) -> Metadata:
        """Check all that is small; the same on every rank."""
        if not self.path.exists():
            hint = hint_replaced(self.path)
            raise FileNotFoundError(f"Checkpoint file not found: {self.path}{hint}")
        small = [META_FILENAME, METADATA_FILENAME]
        missing = [name for name in small if not (self.path / name).is_file()]
        if missing:
            raise ValueError(
                f"`{self.path}` is no complete checkpoint directory: {' and '.join(missing)} "
                "missing. The run that wrote it was killed, or it is something else. Resume from "
                "another checkpoint."
            )
        if verify:
            self._checksums = read_checksums(self.path)
            if self._checksums is not None:  # before anything is unpickled
                self._raise(find_damage(self.path, self._checksums, small))
        metadata = read_metadata(self.path, self._weights_only)
        if verify and self._checksums is None:
            self._check_mark(metadata)
        self._check_sizes(metadata)
        return metadata

    def _check_mark(self, metadata: Metadata) -> None:
        from lq_lightning.checkpoint.dcp import has_checksums

        if has_checksums(metadata):
            self._raise([f"{CHECKSUMS_FILENAME} is missing"])
        rank_zero_info(
            f"`{self.path}` has no {CHECKSUMS_FILENAME}, as other programs write checkpoints: its "
            "bytes are not verified"
        )

    def _check_sizes(self, metadata: Metadata) -> None:
        for name, size in needed_nbytes(self.path, metadata).items():
            file = self.path / name
            found = file.stat().st_size if file.is_file() else -1
            if found < size:
                state = "missing" if found < 0 else f"{found} of at least {size} bytes long"
                raise ValueError(
                    f"`{self.path}` is no complete checkpoint directory: {name} is {state}. "
                    f"{REMEDY}"
                )

    def _verify_data(self) -> None:
        """Let every rank read its share of the data files."""
        if self._checksums is None:
            return
        needed = needed_nbytes(self.path, self._metadata)
        names = sorted(needed, key=lambda name: (-needed[name], name))
        found = find_damage(self.path, self._checksums, names[self.ranks.rank :: self.ranks.size])
        self._raise([problem for part in self.ranks.all_gather(found) for problem in part])

    def _raise(self, problems: list[str]) -> None:
        if problems:
            raise ValueError(
                f"`{self.path}` is damaged: {'; '.join(problems)}. {REMEDY} {HOW_TO_SKIP}"
            )

    def read_meta(self) -> dict[str, Any]:
        """Everything that is not a tensor.

        Raises:
            ValueError: The file is not complete.
            pickle.UnpicklingError: It needs ``weights_only=False``.
        """
        file = self.path / META_FILENAME
        return self.ranks.together(lambda: load_archive(file, self._weights_only))

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

        All ``ranks`` must call this; their keys may differ.

        Raises:
            ValueError: A rank could not read; raised on every rank.
            pickle.UnpicklingError: It needs ``weights_only=False``.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        from lq_lightning.checkpoint.dcp import GivenMetadataReader, SafeLoadPlanner, first_failure

        try:
            with _alone_is_no_surprise():
                load(
                    flat,
                    storage_reader=GivenMetadataReader(self.path, self._metadata),
                    planner=SafeLoadPlanner(self._weights_only),
                    process_group=self.ranks.group,
                    no_dist=self.ranks.size == 1,
                )
        except CheckpointException as error:  # DCP raises it on all ranks
            rank, cause = first_failure(error)
            if isinstance(cause, pickle.UnpicklingError):
                raise explain_unpickling(self.path, cause) from error
            why = f"{type(cause).__name__}: {cause}"
            raise ValueError(
                f"rank {rank} could not read the checkpoint `{self.path}`: {why}. {REMEDY}"
            ) from error


METADATA_FILENAME = ".metadata"

# Where the checkpoint was written: pure paths, so that another system or Python can read them.
_PATHS = {
    "Path": pathlib.PurePosixPath,
    "PosixPath": pathlib.PurePosixPath,
    "PurePosixPath": pathlib.PurePosixPath,
    "WindowsPath": pathlib.PureWindowsPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}
_PATH_MODULES = ("pathlib", "pathlib._local")  # Python 3.13 has moved the classes
_VALUES = (torch.dtype, torch.layout, torch.memory_format)
_CAN_BE_CHANGED = 1 << 9  # Py_TPFLAGS_HEAPTYPE; other classes refuse new attributes
_OF_CLASSES = ("__name__", "__qualname__", "__bases__")  # attributes that `vars` does not show


class _RefusedError(Exception):
    """The pickle asks for something that no metadata needs."""


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the classes of DCP's metadata and nothing else."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._attributes: dict[int, tuple[Any, dict[str, Any]]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class or value.

        Raises:
            _RefusedError: It is not one.
        """
        found = self._find(module, name)
        if isinstance(found, type) and found.__flags__ & _CAN_BE_CHANGED:
            for shared in (found, *getattr(found, "__members__", {}).values()):
                self._attributes.setdefault(id(shared), (shared, _attributes(shared)))
        return found

    def _find(self, module: str, name: str) -> Any:
        if module in _PATH_MODULES and name in _PATHS:
            return _PATHS[name]
        if module == "torch" and isinstance(getattr(torch, name, None), _VALUES):
            return getattr(torch, name)
        if (module, name) == LAYOUT_BY_NAME:  # torch's own function has a cache to write to
            layouts = {str(v): v for v in vars(torch).values() if isinstance(v, torch.layout)}
            return layouts.__getitem__
        if (module, name) in METADATA_CLASSES:
            return super().find_class(module, name)
        raise _RefusedError(f"`{module}.{name}`")

    def check_classes(self) -> None:
        """Undo changes of classes and enum members, whose attributes a pickle can set.

        Raises:
            _RefusedError: Something was.
        """
        found = []
        for shared, before in self._attributes.values():
            after = _attributes(shared)
            changed = [key for key in after if key not in before or after[key] is not before[key]]
            for key in changed:
                if key in before:
                    setattr(shared, key, before[key])
                else:
                    delattr(shared, key)
                found.append(f"an attribute `{key}` of `{shared}`")
        if found:
            raise _RefusedError(found[0])


def _attributes(shared: Any) -> dict[str, Any]:
    attributes = dict(vars(shared))
    if isinstance(shared, type):
        attributes |= {key: getattr(shared, key) for key in _OF_CLASSES}
    return attributes


def _restricted(content: bytes) -> Any:
    unpickler = _MetadataUnpickler(io.BytesIO(content))
    try:
        return unpickler.load()
    finally:
        unpickler.check_classes()


def read_metadata(folder: Path, weights_only: bool) -> Metadata:
    """Read DCP's description of a checkpoint directory.

    Args:
        weights_only: Build nothing but the description. False runs whatever the file says.

    Raises:
        pickle.UnpicklingError: It needs ``weights_only=False``.
        ValueError: It is cut off, damaged or something else.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    path = folder / METADATA_FILENAME
    content = path.read_bytes()
    try:
        metadata = _restricted(content) if weights_only else pickle.loads(content)
    except _RefusedError as error:
        raise pickle.UnpicklingError(
            f"`{path}` asks for {error}, which the description of a checkpoint does not need: it "
            f"may be an attack. Nothing was run. If you trust the whole folder, {HOW_TO_TRUST}."
        ) from error
    except Exception as error:  # a damaged pickle raises nearly everything
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"`{path}` is cut off or damaged ({reason}). {REMEDY}") from error
    if not isinstance(metadata, Metadata):
        kind = type(metadata).__name__
        raise ValueError(f"`{path}` holds a {kind} instead of DCP's Metadata. {REMEDY}")
    return metadata


def needed_nbytes(folder: Path, metadata: Metadata) -> dict[str, int]:
    """How long each data file must at least be, by name.

    Raises:
        ValueError: The description does not have its usual form, or refers to other folders.
    """
    needed: dict[str, int] = {}
    try:
        for info in (metadata.storage_data or {}).values():
            end = info.offset + info.length
            needed[info.relative_path] = max(end, needed.get(info.relative_path, 0))
        outside = [name for name in needed if Path(name).name != name]
        for part in (metadata.state_dict_metadata, metadata.planner_data or {}):
            part.items()
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"`{folder / METADATA_FILENAME}` is damaged or was not written by "
            f"torch.distributed.checkpoint ({error}). {REMEDY}"
        ) from error
    if outside:
        raise ValueError(
            f"`{folder / METADATA_FILENAME}` refers to `{outside[0]}`: data files lie in the "
            f"folder itself. {REMEDY}"
        )
    return needed
