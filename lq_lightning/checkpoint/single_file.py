"""Checkpoints in one file, in Lightning's own format."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_info

from lq_lightning.checkpoint.files import (
    HOW_TO_SKIP,
    HOW_TO_TRUST,
    REMEDY,
    hint_replaced,
    is_local,
    remove_at_once,
    write_in_place,
)
from lq_lightning.checkpoint.ranks import ALONE, RankGroup


@contextmanager
def naming(path: object) -> Generator[None, None, None]:
    """Name the checkpoint in every error raised inside, without changing its class.

    Args:
        path: Path of the checkpoint; None if it is in memory only.
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


_CHUNK_NBYTES = 1 << 22
# how a file starts that torch.save wrote with `_use_new_zipfile_serialization=False`
_LEGACY_START = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)


def is_archive(path: Path) -> bool:
    """Whether the file is a zip archive with its directory, hence not cut off."""
    return zipfile.is_zipfile(path)


def find_damaged_records(path: Path, rank: int = 0, size: int = 1) -> list[str]:
    """Compare an archive's records with the CRC-32 that it holds of each.

    Args:
        rank, size: Part to look at, and number of parts, which are about equally large.

    Returns:
        Description of each damaged record; none for archives written without checksums
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
    except Exception as error:  # damage raises many kinds
        return f"record {info.filename} ({info.file_size} bytes): {error}"
    return None


def explain_unpickling(path: Path, error: pickle.UnpicklingError) -> Exception:
    """Return a clearer error than the one of ``torch.load``."""
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
