"""Damage files as disks and interrupted copies do."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path


def flip_bit(path: Path, offset: int, bit: int = 6) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def truncate(path: Path, nbytes: int) -> None:
    path.write_bytes(path.read_bytes()[:nbytes])


def weight_offset(path: Path) -> int:
    """Return where in a file the largest tensor's bytes lie, of its first archive.

    A data file of torch.distributed.checkpoint is a sequence of archives; a zip file's directory is
    found from its end, so the whole file reads as its last archive.
    """
    content = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        tensors = [info for info in archive.infolist() if "/data/" in info.filename]
        largest = max(tensors, key=lambda info: info.file_size)
        with archive.open(largest) as record:
            data = record.read(64)
    return content.index(data) + 3
