"""Files that ``torch.save`` wrote: read with helpful errors, compared with their checksums."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lq_lightning.checkpoint.checksums import HOW_TO_TRUST, REMEDY

__all__ = ["explain_unpickling", "find_damaged_records", "is_archive", "load_archive"]

_CHUNK_NBYTES = 1 << 22
# how a file starts that torch.save wrote with `_use_new_zipfile_serialization=False`
_LEGACY_START = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)


def is_archive(path: Path) -> bool:
    """Whether the file is a zip archive with its directory, hence not cut off."""
    return zipfile.is_zipfile(path)


def find_damaged_records(path: Path, rank: int = 0, size: int = 1) -> list[str]:
    """Compare an archive's records with the CRC-32 that it holds of each.

    Args:
        path: An archive.
        rank: Which part to look at: all parts are about equally large.
        size: Number of parts.

    Returns:
        What is wrong with each damaged record; nothing for archives written without checksums
        (``torch.serialization.set_crc32_options(False)``).
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = sorted(archive.infolist(), key=lambda info: (-info.file_size, info.filename))
            if all(info.CRC == 0 for info in records):
                rank_zero_info(f"`{path}` has no checksums, so its bytes are not verified")
                return []
            return [text for info in records[rank::size] if (text := _damage(archive, info))]
    except Exception as error:  # damaged names and lengths raise many kinds
        return [f"its directory cannot be read ({error})"]


def _damage(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> str | None:
    try:
        with archive.open(info) as record:
            while record.read(_CHUNK_NBYTES):
                pass
    except Exception as error:  # as above
        return f"record {info.filename} ({info.file_size} bytes): {error}"
    return None


def explain_unpickling(path: Path, error: pickle.UnpicklingError) -> Exception:
    """What to raise instead of what ``torch.load`` says of a file."""
    lines = [line.strip() for line in str(error).splitlines()]
    signs = ("WeightsUnpickler error", "unsupported GLOBAL")  # else the pickle itself is broken
    refused = [line for line in lines if any(sign in line for sign in signs)]
    if not refused:
        return ValueError(f"`{path}` is damaged ({lines[0]}). {REMEDY}")
    return pickle.UnpicklingError(
        f"`{path}` holds objects that `weights_only=True` (the default) does not load: "
        f"{refused[0]}\nIf you trust the file, {HOW_TO_TRUST}."
    )


def load_archive(path: Path, weights_only: bool, mmap: bool = False) -> dict[str, Any]:
    """Read a file that ``torch.save`` wrote.

    Args:
        path: A local file.
        weights_only: As in ``torch.load``.
        mmap: Map tensors into memory instead of copying them.

    Raises:
        ValueError: The file is not complete or damaged.
        pickle.UnpicklingError: It needs ``weights_only=False``.
    """
    complete = is_archive(path)
    if not complete:
        with path.open("rb") as file:
            if file.read(len(_LEGACY_START)) != _LEGACY_START:
                raise ValueError(
                    f"`{path}` is no complete checkpoint file: it is cut off, damaged or something "
                    f"else. {REMEDY}"
                )
    try:
        content = torch.load(
            path, map_location="cpu", mmap=mmap and complete, weights_only=weights_only
        )
    except pickle.UnpicklingError as error:
        raise explain_unpickling(path, error) from error
    except (RuntimeError, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"`{path}` is no complete checkpoint file ({error}). {REMEDY}") from error
    if not isinstance(content, dict):
        raise ValueError(f"`{path}` holds a {type(content).__name__}, not a checkpoint. {REMEDY}")
    return content
