"""Checkpoint directories that all ranks write together, and that load at any world size.

``.metadata`` and ``__<rank>_0.distcp`` hold tensors in the format of torch.distributed.checkpoint
(``state_dict.<name>``, ``optimizer_<i>.state.<name>.<key>``, ``replica.<name>``), and under
``ties.<name>`` the first name of a tied weight; ``meta.pt`` holds everything else that Lightning
saves; ``checksums.json`` lists the checksum of each of these files.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import warnings
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

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

META_FILENAME, METADATA_FILENAME = "meta.pt", ".metadata"
_MARK = "lq_lightning_checksums"  # attribute of the pickled StorageMeta; other readers ignore it


# --- writing ----------------------------------------------------------------------------------


def check_folder(path: str | Path, storage_options: Any | None) -> None:
    """Refuse URLs and ``storage_options``, which do not apply to checkpoint directories."""
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

    All ``ranks`` call it with the same path, and all raise an error of one.

    Args:
        tensors: Nested dictionaries with (D)Tensors and small Python values as leaves. Ranks may
            have different keys. A value that is no DTensor is taken from the first rank with its
            key.
        meta: Everything else, saved by the first rank.
        ranks: DTensors may be sharded over fewer.
    """
    with ExitStack() as held:

        def begin() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(sole_writer(path))

        _on_first(ranks, path, begin)
        _write(tensors, meta, path, ranks)


def _write(tensors: dict[str, Any], meta: dict[str, Any], path: Path, ranks: RankGroup) -> None:
    unfinished = incomplete_name(path)

    def begin() -> None:
        remove(unfinished)
        unfinished.mkdir()

    _on_first(ranks, path, begin)
    writer = _ChecksumWriter(unfinished)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        with _dcp_arguments(ranks) as among:
            save(tensors, storage_writer=writer, planner=planner, **among)
    except CheckpointException as error:  # DCP raises it on all ranks
        _on_first(ranks, path, lambda: remove(unfinished))
        rank, cause = _first_failure(error)
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
def _dcp_arguments(ranks: RankGroup) -> Generator[dict[str, Any], None, None]:
    """The ranks as arguments of DCP, without its warning about single processes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield {"process_group": ranks.group, "no_dist": ranks.size == 1}


def _on_first(ranks: RankGroup, path: Path, work: Callable[[], None]) -> None:
    """Run ``work`` on the first rank; all ranks raise its error."""

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
        weights_only: As in ``torch.load``; ``None`` means ``True``. False unpickles *everything* in
            the folder without restriction, its metadata included.
        ranks: All of them construct it and call :meth:`load`.
        verify: Compare all files with their checksums, if any; each file is read by one rank.

    Attributes:
        paths: Path in the nested state by flat key of a stored leaf.
        entries: DCP's description (size and dtype of a tensor) by flat key.
    """

    def __init__(
        self,
        path: Path,
        weights_only: bool | None = None,
        ranks: RankGroup = ALONE,
        verify: bool = True,
    ) -> None:
        self.path = path
        self.ranks = ranks
        self._weights_only = weights_only is not False
        self._metadata, needed, checksums = ranks.together(lambda: self._open(verify))
        self.entries = self._metadata.state_dict_metadata
        self.paths: dict[str, tuple[Any, ...]] = self._metadata.planner_data or {}
        if checksums is not None:  # each rank reads its share of the data files
            names = sorted(needed, key=lambda name: (-needed[name], name))
            found = find_damage(path, checksums, names[ranks.rank :: ranks.size])
            self._raise([problem for part in ranks.all_gather(found) for problem in part])

    def _open(
        self, verify: bool
    ) -> tuple[Metadata, dict[str, int], dict[str, FileChecksum] | None]:
        """Check everything small, the same on every rank; return metadata, sizes, checksums."""
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
        checksums = read_checksums(self.path) if verify else None
        if checksums is not None:  # before anything is unpickled
            self._raise(find_damage(self.path, checksums, small))
        metadata = read_metadata(self.path, self._weights_only)
        if verify and checksums is None:
            self._check_mark(metadata)
        needed = _needed_nbytes(self.path, metadata)
        for name, size in needed.items():
            file = self.path / name
            found = file.stat().st_size if file.is_file() else -1
            if found < size:
                state = "missing" if found < 0 else f"{found} of at least {size} bytes long"
                raise ValueError(
                    f"`{self.path}` is no complete checkpoint directory: {name} is {state}. "
                    f"{REMEDY}"
                )
        return metadata, needed, checksums

    def _check_mark(self, metadata: Metadata) -> None:
        if getattr(metadata.storage_meta, _MARK, None) == CHECKSUMS_FILENAME:
            self._raise([f"{CHECKSUMS_FILENAME} is missing"])
        rank_zero_info(
            f"`{self.path}` has no {CHECKSUMS_FILENAME}, as other programs write checkpoints: its "
            "bytes are not verified"
        )

    def _raise(self, problems: list[str]) -> None:
        if problems:
            raise ValueError(
                f"`{self.path}` is damaged: {'; '.join(problems)}. {REMEDY} {HOW_TO_SKIP}"
            )

    def read_meta(self) -> dict[str, Any]:
        """Everything that is not a tensor."""
        return self.ranks.together(
            lambda: load_archive(self.path / META_FILENAME, self._weights_only)
        )

    def keys_under(self, *prefix: str) -> dict[str, tuple[Any, ...]]:
        """Flat keys of the leaves below a path, with the rest of their path."""
        depth = len(prefix)
        return {k: p[depth:] for k, p in self.paths.items() if p[:depth] == prefix}

    def tensor(self, key: str) -> tuple[torch.Size, torch.dtype] | None:
        """Shape and dtype of a stored tensor; ``None`` for other values."""
        entry = self.entries[key]
        if isinstance(entry, TensorStorageMetadata):
            return entry.size, entry.properties.dtype
        return None

    def load(self, flat: dict[str, Any]) -> None:
        """Fill the tensors of ``flat`` in place and replace its other values.

        All ``ranks`` must call it; their keys may differ. All raise an error of one.
        """
        reader = _MetadataReader(self.path, self._metadata)
        planner = _SafeLoadPlanner(self._weights_only)
        try:
            with _dcp_arguments(self.ranks) as among:
                load(flat, storage_reader=reader, planner=planner, **among)
        except CheckpointException as error:  # DCP raises it on all ranks
            rank, cause = _first_failure(error)
            if isinstance(cause, pickle.UnpicklingError):
                raise explain_unpickling(self.path, cause) from error
            why = f"{type(cause).__name__}: {cause}"
            raise ValueError(
                f"rank {rank} could not read the checkpoint `{self.path}`: {why}. {REMEDY}"
            ) from error


# --- torch.distributed.checkpoint with checksums and restricted unpickling ---------------------


def _first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    rank = min(error.failures)  # of the group
    return rank, error.failures[rank][0]


class _ChecksumFileSystem(FileSystem):
    """Local files, and the checksums of those written."""

    def __init__(self) -> None:
        self.checksums: dict[str, FileChecksum] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        if mode == "wb":
            with ChecksumFile(Path(path)) as file:
                yield file
            self.checksums[Path(path).name] = file.checksum()
        else:
            with super().create_stream(path, mode) as stream:
                yield stream

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


class _ChecksumWriter(FileSystemWriter):
    """Writes one file per rank; ``checksums`` are of this rank's files, by name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, single_file_per_rank=True)
        self.fs = files = _ChecksumFileSystem()
        self.checksums = files.checksums

    def storage_meta(self) -> StorageMeta | None:
        described = super().storage_meta()
        setattr(described, _MARK, CHECKSUMS_FILENAME)
        return described


class _MetadataReader(FileSystemReader):
    """Reads data files whose metadata was read before."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata; DCP's own method unpickles it without restriction."""
        return self._metadata


class _SafeLoadPlanner(DefaultLoadPlanner):
    """Fills a flat state dict and unpickles its non-tensor leaves with ``weights_only``.

    DCP itself reads tensors with ``weights_only=True``.
    """

    def __init__(self, weights_only: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        leaf = torch.load(value, map_location="cpu", weights_only=self._weights_only)
        self.state_dict[read_item.dest_index.fqn] = leaf


# --- metadata -----------------------------------------------------------------------------------

# Metadata names the folder it was written to: pure paths, readable on another system or Python.
_PATHS: dict[str, type[pathlib.PurePath]] = {
    **dict.fromkeys(("Path", "PosixPath", "PurePosixPath"), pathlib.PurePosixPath),
    **dict.fromkeys(("WindowsPath", "PureWindowsPath"), pathlib.PureWindowsPath),
}
_PATH_MODULES = ("pathlib", "pathlib._local")  # Python 3.13 has moved the classes
_VALUES = (torch.dtype, torch.layout, torch.memory_format)
_CAN_BE_CHANGED = 1 << 9  # Py_TPFLAGS_HEAPTYPE; other classes refuse new attributes
_OF_CLASSES = ("__name__", "__qualname__", "__bases__")  # attributes that `vars` does not show


class _RefusedError(Exception):
    """The pickle asks for something that no metadata needs."""


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the classes of DCP's metadata and nothing else."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._attributes: dict[int, tuple[Any, dict[str, Any]]] = {}

    def load(self) -> Any:
        try:
            return super().load()
        finally:
            self._check_classes()

    def find_class(self, module: str, name: str) -> Any:
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

    def _check_classes(self) -> None:
        """Undo and refuse changes to classes and enum members, as a pickle can make them."""
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


def read_metadata(folder: Path, weights_only: bool) -> Metadata:
    """Read DCP's metadata; without ``weights_only`` this runs any code in the file."""
    path = folder / METADATA_FILENAME
    content = path.read_bytes()
    try:
        metadata = _MetadataUnpickler(content).load() if weights_only else pickle.loads(content)
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


def _needed_nbytes(folder: Path, metadata: Metadata) -> dict[str, int]:
    """Least size of each data file, by name; refuses metadata that refers to other folders."""
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
