"""Additions to torch.distributed.checkpoint: checksums, restricted unpickling.

Import this module late: torch.distributed.checkpoint takes 0.1 s.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from lq_lightning.checkpoint.files import CHECKSUMS_FILENAME, ChecksumFile, FileChecksum

_MARK = "lq_lightning_checksums"  # attribute of the pickled StorageMeta; other readers ignore it


def has_checksums(metadata: Metadata) -> bool:
    """Whether the checkpoint was written with a file of checksums."""
    return getattr(metadata.storage_meta, _MARK, None) == CHECKSUMS_FILENAME


def first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """Return the first rank (of the group) that failed in DCP, and its error."""
    rank = min(error.failures)
    return rank, error.failures[rank][0]


class _ChecksumFileSystem(FileSystem):
    """Local files; keeps the checksums of the files that it writes."""

    def __init__(self) -> None:
        self.checksums: dict[str, FileChecksum] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """Open a file; one that is written starts empty."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with ChecksumFile(Path(path)) as file:
            yield file
        self.checksums[Path(path).name] = file.checksum()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file that was written."""
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


class ChecksumWriter(FileSystemWriter):
    """Writes one file per rank, with its checksum."""

    def __init__(self, path: Path) -> None:
        """Make a writer for one checkpoint."""
        super().__init__(path, single_file_per_rank=True)
        self._files = _ChecksumFileSystem()
        self.fs = self._files

    @property
    def checksums(self) -> dict[str, FileChecksum]:
        """Of the files that this rank has written so far, by name."""
        return self._files.checksums

    def storage_meta(self) -> StorageMeta | None:
        """Describe the checkpoint, with a note that there are checksums."""
        described = super().storage_meta()
        setattr(described, _MARK, CHECKSUMS_FILENAME)
        return described


class GivenMetadataReader(FileSystemReader):
    """Reads data files, whose description was read before, safely."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        """Make a reader."""
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description; DCP's own method unpickles it without restriction."""
        return self._metadata


class SafeLoadPlanner(DefaultLoadPlanner):
    """Fills a flat state dict; its leaves that are no tensors are unpickled with ``weights_only``.

    DCP itself reads tensors with ``weights_only=True``.
    """

    def __init__(self, weights_only: bool) -> None:
        """Make a planner for a flat state dict."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle one leaf."""
        leaf = torch.load(value, map_location="cpu", weights_only=self._weights_only)
        self.state_dict[read_item.dest_index.fqn] = leaf
