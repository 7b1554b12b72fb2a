"""Files and folders that appear under their name only when they are complete."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = [
    "hint_replaced",
    "incomplete_name",
    "is_local",
    "is_sharded_checkpoint",
    "move_into_place",
    "remove",
    "remove_at_once",
    "sync",
    "write_in_place",
]


def is_local(path: str | os.PathLike[str]) -> bool:
    """Whether the path is on a file system of this machine rather than behind a URL."""
    return "://" not in str(path)


def is_sharded_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a directory, so cannot be a full checkpoint."""
    return is_local(path) and Path(path).is_dir()


def _sibling(path: Path, prefix: str) -> Path:
    """A hidden name next to ``path``, always the same one, that no checkpoint search matches."""
    digest = hashlib.sha256(path.name.encode()).hexdigest()[:16]
    return path.parent / f".{prefix}-{digest}"


def incomplete_name(path: Path) -> Path:
    """Where ``path`` is written before it is complete; the next attempt reuses the name."""
    return _sibling(path, "incomplete")


def remove(path: Path) -> None:
    """Remove a file, a link or a directory, if there is one."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def sync(path: Path) -> None:
    """Wait until a file or directory is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_in_place(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file under another name and move it to ``path`` when it is on disk.

    What was written before an error is removed: the disk may be full of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = incomplete_name(path)
    remove(unfinished)
    try:
        write(unfinished)
        sync(unfinished)
    except BaseException:
        remove(unfinished)
        raise
    move_into_place(unfinished, path)


def move_into_place(finished: Path, path: Path) -> None:
    """Give a finished file or directory its final name, replacing what has that name."""
    aside = _sibling(path, "replaced")
    if path.is_dir() and not path.is_symlink():
        remove(aside)
        path.rename(aside)  # a directory cannot be replaced in one step
    elif path.is_symlink() and finished.is_dir():
        path.unlink()
    os.replace(finished, path)
    sync(path.parent)
    remove(aside)


def remove_at_once(path: Path) -> None:
    """Remove a directory; it disappears at once, never in parts."""
    aside = _sibling(path, "replaced")
    remove(aside)
    path.rename(aside)
    remove(aside)


def hint_replaced(path: Path) -> str:
    """Where the previous checkpoint is, for the error that there is none under ``path``."""
    aside = _sibling(path, "replaced")
    if not aside.exists():
        return ""
    return f". The run was killed while it replaced it; the previous one is still at `{aside}`"
