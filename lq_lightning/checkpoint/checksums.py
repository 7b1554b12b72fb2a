"""Checksums of a checkpoint directory: computed while its files are written, kept in a JSON file.

CRC-32 finds accidental damage: every changed bit, every burst of up to 32 bits, and all but one in
four billion of everything else. It is no protection against somebody who wants to change a file.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "CHECKSUMS_FILENAME",
    "HOW_TO_SKIP",
    "HOW_TO_TRUST",
    "REMEDY",
    "ChecksumFile",
    "FileChecksum",
    "find_damage",
    "read_checksums",
    "write_checksums",
]

CHECKSUMS_FILENAME = "checksums.json"
REMEDY = "Resume from another checkpoint, or copy this one again."
HOW_TO_SKIP = (
    "To load it as it is, turn the check off: `verify_checkpoints=False` of the strategy, or "
    "`--no-verify` of `lq_lightning.checkpoint.consolidate`."
)
HOW_TO_TRUST = (
    "pass `weights_only=False` to `trainer.fit`, `validate`, `test` or `predict`, or "
    "`--no-weights-only` to `lq_lightning.checkpoint.consolidate`"
)
_CHUNK_NBYTES = 1 << 22
_OVERLAPPED_NBYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class FileChecksum:
    """Size and CRC-32 of a file, as ``zlib.crc32`` computes it."""

    nbytes: int
    crc32: int


class ChecksumFile(io.BufferedWriter):
    """A new file that is written from its start to its end, with the checksum of what was written.

    Large pieces are summed by a second thread while they are written, so that only what is faster
    than a core's CRC-32 (1 GB/s with zlib 1.2.13) has to wait for it.

    Args:
        path: The file, replaced if it exists.
    """

    def __init__(self, path: Path) -> None:
        """Open the file."""
        super().__init__(io.FileIO(path, "wb"))
        self._nbytes = self._crc32 = 0
        self._thread = ThreadPoolExecutor(1)

    def write(self, data: Any, /) -> int:
        """Append ``data``."""
        if len(data) < _OVERLAPPED_NBYTES:
            self._crc32 = zlib.crc32(data, self._crc32)
            written = super().write(data)
        else:
            sum_up = self._thread.submit(zlib.crc32, data, self._crc32)
            try:
                written = super().write(data)
            finally:
                self._crc32 = sum_up.result()  # `data` is gone after this call
        self._nbytes += written
        return written

    def seek(self, *args: Any) -> int:
        """Refuse: what is overwritten cannot be taken out of a checksum.

        Raises:
            io.UnsupportedOperation: Always.
        """
        raise io.UnsupportedOperation("this file is written from its start to its end")

    def close(self) -> None:
        """Wait until all is on disk (torch below 2.14 syncs before Python's buffer is written)."""
        if not self.closed:
            self.flush()
            os.fsync(self.fileno())
        self._thread.shutdown()
        super().close()

    def checksum(self) -> FileChecksum:
        """Of everything written so far."""
        return FileChecksum(nbytes=self._nbytes, crc32=self._crc32)


def write_checksums(folder: Path, checksums: Mapping[str, FileChecksum]) -> Path:
    """Write the checksums of the files in ``folder``, by name; returns the new file."""
    path = folder / CHECKSUMS_FILENAME
    files = {
        name: {"nbytes": checksum.nbytes, "crc32": f"{checksum.crc32:08x}"}
        for name, checksum in sorted(checksums.items())
    }
    path.write_text(json.dumps({"algorithm": "crc32", "files": files}, indent=1) + "\n")
    return path


def read_checksums(folder: Path) -> dict[str, FileChecksum] | None:
    """Checksums by file name; ``None`` if the folder has none.

    Raises:
        ValueError: The file is damaged.
    """
    path = folder / CHECKSUMS_FILENAME
    if not path.is_file():
        return None
    try:
        files = json.loads(path.read_text())["files"]
        return {
            name: FileChecksum(nbytes=int(entry["nbytes"]), crc32=int(entry["crc32"], 16))
            for name, entry in files.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"`{folder}` is damaged: {CHECKSUMS_FILENAME} cannot be read ({error}). {REMEDY} "
            f"{HOW_TO_SKIP}"
        ) from error


def find_damage(
    folder: Path, checksums: Mapping[str, FileChecksum], names: Iterable[str]
) -> list[str]:
    """Read files and say of each that is not as it was written what is wrong with it."""
    found = []
    for name in names:
        expected = checksums.get(name)
        if expected is None:
            found.append(f"{name} is not listed in {CHECKSUMS_FILENAME}")
            continue
        try:
            actual = _checksum(folder / name)
        except OSError as error:
            found.append(f"{name} cannot be read ({error})")
            continue
        if actual.nbytes != expected.nbytes:
            found.append(f"{name} is {actual.nbytes} instead of {expected.nbytes} bytes long")
        elif actual.crc32 != expected.crc32:
            found.append(f"{name} holds other bytes than were written")
    return found


def _checksum(path: Path) -> FileChecksum:
    buffer = memoryview(bytearray(_CHUNK_NBYTES))
    nbytes = crc32 = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            nbytes += count
            crc32 = zlib.crc32(buffer[:count], crc32)
    return FileChecksum(nbytes=nbytes, crc32=crc32)
