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
    """Name the checkpoint in every error raised inside, without changing its class."""
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


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's default checkpoint files, written under another name and renamed when complete.

    Lightning's own writer moves the file from the system's temporary folder: where that is another
    file system, this is a copy that can be interrupted.

    Args:
        verify: Compare local files with the checksums of their records before they are loaded.
    """

    def __init__(self, verify: bool = True) -> None:
        super().__init__()
        self._verify = verify

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save one file; remote paths go through Lightning's writer."""

        def write(unfinished: Path) -> None:
            with unfinished.open("wb") as file:  # torch.save refuses hidden names
                torch.save(checkpoint, file)

        if storage_options is not None or not is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with naming(path):
            write_in_place(Path(path), write)

    def load_checkpoint(self, path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        """Load one file, with the arguments of ``TorchCheckpointIO``."""
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
    """
    file = Path(path)

    def check() -> None:
        if not file.is_file():  # said as Lightning does
            raise FileNotFoundError(f"Checkpoint file not found: {path}{hint_replaced(file)}")

    ranks.together(check)
    if verify:
        _verify(file, ranks)
    return ranks.together(lambda: load_archive(file, weights_only is not False, mmap=True))


def _verify(path: Path, ranks: RankGroup) -> None:
    found = _find_damaged_records(path, ranks) if zipfile.is_zipfile(path) else []
    problems = [problem for part in ranks.all_gather(found) for problem in part]
    if problems:
        raise ValueError(f"`{path}` is damaged: {'; '.join(problems[:5])}. {REMEDY} {HOW_TO_SKIP}")


_CHUNK_NBYTES = 1 << 22
# how a file starts that torch.save wrote with `_use_new_zipfile_serialization=False`
_LEGACY_START = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)


def _find_damaged_records(path: Path, ranks: RankGroup) -> list[str]:
    """Compare this rank's share of an archive's records with their CRC-32; describe the damaged.

    Archives written without checksums (``torch.serialization.set_crc32_options(False)``) pass.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = sorted(archive.infolist(), key=lambda info: (-info.file_size, info.filename))
            if all(info.CRC == 0 for info in records):
                rank_zero_info(f"`{path}` has no checksums, so its bytes are not verified")
                return []
            own = records[ranks.rank :: ranks.size]  # parts of about equal size
            return [text for info in own if (text := _damage(archive, info))]
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
    """Translate an error of ``torch.load`` into a clearer one."""
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
    """Read a checkpoint that ``torch.save`` wrote, on the CPU; arguments as in ``torch.load``."""
    complete = zipfile.is_zipfile(path)  # has its directory, hence is not cut off
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
