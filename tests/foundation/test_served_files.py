"""Files that other nodes read while their owner trains."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lq_lightning.foundation import served_files
from lq_lightning.foundation.served_files import ServedFolder, fetch, is_served, own_address

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def folder() -> Iterator[ServedFolder]:
    made = ServedFolder(HOST)
    yield made
    made.close()


@contextmanager
def _answers(reply: bytes | None, stays: float = 0.0) -> Iterator[str]:
    """Another process at a port, which says something, or nothing, to whoever connects."""
    with socket.create_server((HOST, 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(reply or b"")
                time.sleep(stays)

        if reply is not None:
            threading.Thread(target=answer, daemon=True).start()
        yield f"http://{HOST}:{server.getsockname()[1]}/x"


def test_files_are_copied(folder: ServedFolder, tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    place = folder.path / "state 1.ckpt" / "rank#0"
    place.parent.mkdir()
    place.write_bytes(content)
    (folder.path / "round-1").write_bytes(b"x")
    assert folder.files("state 1.ckpt") == {"state 1.ckpt/rank#0": len(content)}
    assert folder.files("round-1") == {"round-1": 1}
    target = tmp_path / "new" / "copy"
    assert fetch(folder.url, "state 1.ckpt/rank#0", target, 5) == len(content)
    assert target.read_bytes() == content
    folder.remove("state 1.ckpt", "round-1", "never")
    assert folder.files("") == {}
    with pytest.raises(OSError, match="404"):
        fetch(folder.url, "round-1", target, 5)


@pytest.mark.parametrize(
    ("reply", "stays", "message"),
    [
        (b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nhalf", 0.0, "after 4 of 9 bytes"),  # killed
        (b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nhalf", 1.0, "timed out"),  # cut off
        (b"HTTP/1.0 200 OK\r\n\r\nall", 0.0, "after 3 of -1 bytes"),
        (b"220 another protocol\r\n", 0.0, "220 another protocol"),
    ],
)
def test_a_file_that_does_not_arrive_is_not_there(
    reply: bytes, stays: float, message: str, tmp_path: Path
) -> None:
    with _answers(reply, stays) as url, pytest.raises(OSError, match=message):
        fetch(url, "file", tmp_path / "copy", 0.3 if stays else 5)
    assert not [*tmp_path.iterdir()]


def test_who_is_there(folder: ServedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment is not asked."""
    monkeypatch.setenv("http_proxy", f"http://{HOST}:9")
    assert is_served(folder.url, 5) is True
    assert is_served(f"{folder.url}0", 5) is False  # another node at this port
    with _answers(None) as url:
        assert is_served(url, 0.1) is None
    assert is_served(url, 5) is False  # nobody is at this port
    with _answers(b"") as url:
        assert is_served(url, 5) is None
    with _answers(b"220 another protocol\r\n") as url:
        assert is_served(url, 5) is False


def test_nothing_can_be_listed(folder: ServedFolder, tmp_path: Path) -> None:
    (folder.path / "round-1").write_bytes(b"x")
    root = folder.url.rpartition("/")[0]
    for url, name in ((root, ""), (folder.url, "")):
        fetch(url, name, tmp_path / "list", 5)
        assert (tmp_path / "list").read_bytes() == b""


def test_closed_folders_are_gone(tmp_path: Path) -> None:
    folder = ServedFolder(HOST)
    folder.close()
    assert is_served(folder.url, 5) is False
    assert not [*tmp_path.iterdir()]


def test_folders_of_killed_processes_are_removed(folder: ServedFolder, tmp_path: Path) -> None:
    (folder.path / "round-1").write_bytes(b"x")
    program = (
        "import os, runpy, signal, sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        f"folder = runpy.run_path(sys.argv[2])['ServedFolder']({HOST!r})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path), served_files.__file__]
    ended = subprocess.run(arguments, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len([*tmp_path.glob("lq-node-*")]) == 2
    other = ServedFolder(HOST)
    assert {*tmp_path.glob("lq-node-*")} == {folder.path.parent, other.path.parent}
    assert is_served(folder.url, 5)
    assert folder.files("") == {"round-1": 1}
    other.close()


def test_own_address() -> None:
    assert own_address("127.0.0.1", 29400) == "127.0.0.1"
