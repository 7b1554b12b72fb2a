"""Files and folders that appear under their name only when they are complete."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

_ONE_EACH = (
    "Give each run a folder of its own (`ModelCheckpoint(dirpath=...)` or the Trainer's "
    "`default_root_dir`), or stop one of them."
)
_LONGEST_NAME = 255  # bytes, on nearly all file systems
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants of Linux
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # NFS, Lustre and others say these
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

# Identity of the last file that this process has put under a name: another run may replace it.
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

    After an error the unfinished file is removed: the disk may be full of it.

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
    """Give a finished file or directory its final name, replacing any previous one.

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
    """Warn if another process has replaced a checkpoint of this one."""
    known, found = _placed.get(str(path.absolute())), _identity(path)
    if known is not None and found is not None and found != known:
        rank_zero_warn(
            f"`{path}` was replaced since this run has saved it. If another run saves under the "
            f"same name, each replaces the checkpoints of the other. {_ONE_EACH}"
        )


def put_back(path: Path) -> bool:
    """Give a checkpoint its name again if a process was killed while it replaced it.

    Returns:
        Whether it had lost its name.

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
    """A new file, written from start to end, that computes its checksum.

    Large pieces are summed by a second thread while they are written, so only disks faster than
    a core's CRC-32 (1 GB/s with zlib 1.2.13) have to wait for it.
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
        """Refuse: overwritten bytes cannot be taken out of a checksum.

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
    """Read files and describe the damage of each that is not as it was written."""
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
