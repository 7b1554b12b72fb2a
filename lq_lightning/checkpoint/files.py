"""Files and folders that appear under their name only when they are complete."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lq_lightning.checkpoint.checksums import CHECKSUMS_FILENAME

__all__ = [
    "hint_replaced",
    "incomplete_name",
    "is_local",
    "is_sharded_checkpoint",
    "move_into_place",
    "move_links",
    "put_back",
    "remove",
    "remove_at_once",
    "replace_link",
    "sole_writer",
    "sync",
    "write_in_place",
]

_ONE_EACH = (
    "Give each run a folder of its own (`ModelCheckpoint(dirpath=...)` or the Trainer's "
    "`default_root_dir`), or stop one of them."
)
_LONGEST_NAME = 255  # bytes, on nearly all file systems
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # NFS, Lustre and others say these
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

# What this process has put under a name last, to notice that another run replaces it.
_placed: dict[str, tuple[int, int]] = {}


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


def _aside_name(path: Path) -> Path:
    """Where ``path`` is kept while it is replaced, where the two cannot be exchanged.

    A process killed at that moment leaves nothing else, so it is a name that Lightning's search for
    ``ckpt_path="last"`` finds: `last.replaced.ckpt` for `last.ckpt`.
    """
    aside = path.with_name(f"{path.stem}.replaced{path.suffix}")
    return aside if len(os.fsencode(aside.name)) <= _LONGEST_NAME else _sibling(path, "aside")


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


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Refuse to write a path that another process is writing.

    The lock is one of the operating system, which ends with its process however that ends. Where a
    file system has no locks, nothing is refused.

    Raises:
        RuntimeError: Another process is writing it.
    """
    lock = _sibling(path, "writing")
    while True:
        file = lock.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            with file:
                who = file.read() or "unknown"
            raise RuntimeError(
                f"another process ({who}) is writing `{path}` at this moment: two runs save under "
                f"one name. {_ONE_EACH}"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        # The one that had the lock before has removed the file that was opened here.
        if lock.exists() and os.path.samestat(os.fstat(file.fileno()), lock.stat()):
            break
        file.close()
    with file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_UN)  # forked processes have the same lock


def write_in_place(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file under another name and move it to ``path`` when it is on disk.

    What was written before an error is removed: the disk may be full of it.

    Raises:
        RuntimeError: Another process is writing it at this moment.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = incomplete_name(path)
    with sole_writer(path):
        remove(unfinished)
        try:
            write(unfinished)
            sync(unfinished)
        except BaseException:
            remove(unfinished)
            raise
        move_into_place(unfinished, path)


def move_into_place(finished: Path, path: Path) -> None:
    """Give a finished file or directory its final name, replacing what has that name.

    A process may be killed at any point: there is a complete one under the name, or (on file
    systems that cannot exchange two names) the previous one where :func:`put_back` finds it.
    """
    _check_replaced(path)
    # One rename replaces a file or a link by another, but nothing by a folder or the reverse.
    if os.path.lexists(path) and (_is_folder(path) or _is_folder(finished)):
        _replace(finished, path)
    else:
        os.replace(finished, path)
    sync(path.parent)
    _note_placed(path)
    remove(finished)  # after an exchange the previous one
    _remove_at_once(_aside_name(path))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _replace(finished: Path, path: Path) -> None:
    if _exchange(finished, path):
        return
    aside = _aside_name(path)
    _remove_at_once(aside)
    try:
        path.rename(aside)
        os.replace(finished, path)
    except BaseException:
        _put_back(path)
        raise


@cache
def _renameat2() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; returns False where system or file system cannot."""
    rename = _renameat2()
    if rename is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _identity(path: Path) -> tuple[int, int] | None:
    file = path / CHECKSUMS_FILENAME if _is_folder(path) else path
    try:
        found = file.lstat()
    except OSError:  # nothing there, or not a folder of ours
        return None
    return found.st_ino, found.st_mtime_ns


def _note_placed(path: Path) -> None:
    found = _identity(path)
    if found is not None:
        _placed[str(path.absolute())] = found


def _check_replaced(path: Path) -> None:
    """Warn if another process has replaced what this one saved there."""
    known, found = _placed.get(str(path.absolute())), _identity(path)
    if known is not None and found is not None and found != known:
        rank_zero_warn(
            f"`{path}` was replaced since this run has saved it. If another run saves under the "
            f"same name, each replaces the checkpoints of the other. {_ONE_EACH}"
        )


def put_back(path: Path) -> bool:
    """Give a checkpoint its name again if a process was killed while it replaced it.

    Returns:
        Whether that was so.

    Raises:
        RuntimeError: The other process is still replacing it.
    """
    if not _is_set_aside(path):
        return False
    with sole_writer(path):
        back = _put_back(path)
    if back:
        rank_zero_info(f"the previous `{path}` is back, which a killed run was about to replace")
    return back


def _is_set_aside(path: Path) -> bool:
    return os.path.lexists(_aside_name(path)) and not os.path.lexists(path)


def _put_back(path: Path) -> bool:
    back = _is_set_aside(path)
    if back:
        _aside_name(path).rename(path)
        sync(path.parent)
    return back


def remove_at_once(path: Path) -> None:
    """Remove a file, a link or a directory, and an older one set aside for it.

    Each disappears at once, never in parts.
    """
    for found in (_aside_name(path), path):
        _remove_at_once(found)


def _remove_at_once(path: Path) -> None:
    if os.path.lexists(path):
        doomed = _sibling(path, "removed")
        remove(doomed)
        path.rename(doomed)
        remove(doomed)


def replace_link(link: Path, target: Path) -> None:
    """Let a symbolic link point to ``target``, whatever has its name; it is there at any time."""
    new = incomplete_name(link)
    remove(new)
    new.symlink_to(os.path.relpath(target, link.parent))
    move_into_place(new, link)


def move_links(path: Path, newest: Path) -> None:
    """Let links to the last checkpoint not point to one that is about to be removed.

    Lightning removes a checkpoint before it lets `last.ckpt` point to a newer one.

    Args:
        path: What will be removed.
        newest: What they are to point to.
    """
    for link in path.parent.glob("last*"):
        if link.is_symlink() and link.resolve() == path.resolve() != newest.resolve():
            replace_link(link, newest)


def hint_replaced(path: Path) -> str:
    """Where the previous checkpoint is, for the error that there is none under ``path``."""
    aside = _aside_name(path)
    if not os.path.lexists(aside):
        return ""
    return f". The run was killed while it replaced it; the previous one is still at `{aside}`"
