"""Files and folders that appear under their name only once they are complete."""

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
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

_ONE_EACH = (
    "Give each run a folder of its own (`ModelCheckpoint(dirpath=...)` or the Trainer's "
    "`default_root_dir`), or stop one of them."
)
_LONGEST_NAME = 255  # bytes, on nearly all file systems
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants of Linux
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # NFS, Lustre and others say these
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

# Identity of the last file that this process put under each name: another run may replace it.
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
    """Name of the previous ``path`` during a replacement that cannot exchange the two.

    A process killed at that moment leaves nothing else, so Lightning's search for
    ``ckpt_path="last"`` must find it: `last.replaced.ckpt` for `last.ckpt`.
    """
    aside = path.with_name(f"{path.stem}.replaced{path.suffix}")
    return aside if len(os.fsencode(aside.name)) <= _LONGEST_NAME else _sibling(path, "aside")


def incomplete_name(path: Path) -> Path:
    """Name under which ``path`` is written until it is complete; the next attempt reuses it."""
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

    The operating system's lock ends with its process, however that ends. On a file system without
    locks nothing is refused.
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
        # the previous holder of the lock may have removed the file that was opened here
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
    """Let ``write`` make a file under another name and move it to ``path`` once it is on disk.

    It may be read by whom the umask says, however ``write`` makes it. After an error the unfinished
    file is removed, as it may be what filled the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = incomplete_name(path)
    with sole_writer(path):
        remove(unfinished)
        try:
            unfinished.touch()
            mode = unfinished.stat().st_mode
            write(unfinished)  # safetensors puts a file of mode 0600 in its place
            if unfinished.stat().st_mode != mode:
                unfinished.chmod(mode & 0o777)
            sync(unfinished)
        except BaseException:
            remove(unfinished)
            raise
        move_into_place(unfinished, path)


def move_into_place(finished: Path, path: Path) -> None:
    """Give a finished file or directory its final name, replacing any previous one.

    If the process is killed at any point, a complete one is under the name, or (on file systems
    that cannot exchange two names) the previous one is where :func:`put_back` finds it.
    """
    _check_replaced(path)
    # One rename replaces a file or a link by another, but nothing by a folder or the reverse.
    if os.path.lexists(path) and (_is_folder(path) or _is_folder(finished)):
        _replace(finished, path)
    else:
        os.replace(finished, path)
    sync(path.parent)
    if (found := _identity(path)) is not None:
        _placed[str(path.absolute())] = found
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
    paths = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    if rename(*paths, _RENAME_EXCHANGE) == 0:
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


def _check_replaced(path: Path) -> None:
    """Warn if another process has replaced a checkpoint of this one."""
    known, found = _placed.get(str(path.absolute())), _identity(path)
    if known is not None and found is not None and found != known:
        rank_zero_warn(
            f"`{path}` was replaced since this run has saved it. If another run saves under the "
            f"same name, each replaces the checkpoints of the other. {_ONE_EACH}"
        )


def put_back(path: Path) -> bool:
    """Give a checkpoint its name back if a process was killed replacing it; returns whether."""
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
    """Remove a file, a link or a directory, and any set aside for it; never in parts."""
    for found in (_aside_name(path), path):
        _remove_at_once(found)


def _remove_at_once(path: Path) -> None:
    if os.path.lexists(path):
        doomed = _sibling(path, "removed")
        remove(doomed)
        path.rename(doomed)
        remove(doomed)


def replace_link(link: Path, target: Path) -> None:
    """Point a symbolic link to ``target``, replacing anything; its name never disappears."""
    new = incomplete_name(link)
    remove(new)
    new.symlink_to(os.path.relpath(target, link.parent))
    move_into_place(new, link)


def move_links(path: Path, newest: Path) -> None:
    """Point links to the last checkpoint to ``newest`` before ``path`` is removed.

    Lightning removes a checkpoint before it points `last.ckpt` to a newer one.
    """
    for link in path.parent.glob("last*"):
        if link.is_symlink() and link.resolve() == path.resolve() != newest.resolve():
            replace_link(link, newest)


def hint_replaced(path: Path) -> str:
    """End of a "not found" message: where the previous checkpoint still is, if it is."""
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


class FileChecksum(NamedTuple):
    """Size and CRC-32 of a file, as ``zlib.crc32`` computes it."""

    nbytes: int
    crc32: int


class ChecksumFile(io.BufferedWriter):
    """A new file, written from start to end, that computes its checksum.

    A second thread sums large pieces while they are written, so only disks faster than a core's
    CRC-32 (1 GB/s with zlib 1.2.13) have to wait for it.
    """

    def __init__(self, path: Path) -> None:
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
        """Refuse to seek: overwritten bytes cannot be taken out of a checksum."""
        raise io.UnsupportedOperation("this file is written from its start to its end")

    def close(self) -> None:
        """Wait until all is on disk (torch below 2.14 syncs before Python's buffer is written)."""
        if not self.closed:
            self.flush()
            os.fsync(self.fileno())
        self._thread.shutdown()
        super().close()

    def checksum(self) -> FileChecksum:
        """Checksum of everything written so far."""
        return FileChecksum(self._nbytes, self._crc32)


def write_checksums(folder: Path, checksums: Mapping[str, FileChecksum]) -> Path:
    """Write the checksums of the files in ``folder``, by name; returns the new file."""
    path = folder / CHECKSUMS_FILENAME
    items = sorted(checksums.items())
    files = {name: {"nbytes": nbytes, "crc32": f"{crc:08x}"} for name, (nbytes, crc) in items}
    path.write_text(json.dumps({"algorithm": "crc32", "files": files}, indent=1) + "\n")
    return path


def read_checksums(folder: Path) -> dict[str, FileChecksum] | None:
    """Checksums by file name; ``None`` if the folder has none."""
    path = folder / CHECKSUMS_FILENAME
    if not path.is_file():
        return None
    try:
        files = json.loads(path.read_text())["files"].items()
        return {n: FileChecksum(int(e["nbytes"]), int(e["crc32"], 16)) for n, e in files}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"`{folder}` is damaged: {CHECKSUMS_FILENAME} cannot be read ({error}). {REMEDY} "
            f"{HOW_TO_SKIP}"
        ) from error


def find_damage(
    folder: Path, checksums: Mapping[str, FileChecksum], names: Iterable[str]
) -> list[str]:
    """Read files and describe the damage of each that is not as it was written."""
    return [text for name in names if (text := _damage(folder / name, checksums.get(name)))]


def _damage(path: Path, expected: FileChecksum | None) -> str | None:
    if expected is None:
        return f"{path.name} is not listed in {CHECKSUMS_FILENAME}"
    buffer = memoryview(bytearray(_CHUNK_NBYTES))
    nbytes = crc32 = 0
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                nbytes += count
                crc32 = zlib.crc32(buffer[:count], crc32)
    except OSError as error:
        return f"{path.name} cannot be read ({error})"
    if nbytes != expected.nbytes:
        return f"{path.name} is {nbytes} instead of {expected.nbytes} bytes long"
    return None if crc32 == expected.crc32 else f"{path.name} holds other bytes than were written"
