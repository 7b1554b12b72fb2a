"""A store that many processes share, over connections that may hang, or be cut."""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lq_lightning.data_parallel.config import split_address

_OPERATION = 10.0  # seconds after which an operation is tried again
_PREFIX = "lq_lightning/nodes"
_AGAIN = 0.1  # seconds before that


class PatientStore:
    """A client of the store that connects again where its connection is lost.

    All operations may be repeated without harm: entries are written once, and lists may have an
    entry twice.

    Args:
        address: ``"host:port"`` of the store.
        patience: Seconds after which an operation that keeps failing raises; may be set.

    Raises:
        RuntimeError: In every operation, if the store does not answer.
    """

    def __init__(self, address: str, patience: float) -> None:
        self._address, self.patience = address, patience
        self._store: Store | None = None

    def connect(self) -> Store:
        """Return a connection of its own, for a process group or another thread."""
        host, port = split_address(self._address)
        with socket.create_connection((host, port), _OPERATION / 2):
            pass  # the store would print a page for each of its own attempts
        addresses = {found[4][0] for found in socket.getaddrinfo(host, port)}
        make = dist.TCPStore  # type: ignore[attr-defined]
        # one connection in some forty hangs, at the same place on an idle machine: try again soon
        for seconds in (_OPERATION / 10, _OPERATION / 5, _OPERATION / 2):
            made, wait = None, timedelta(seconds=seconds)
            with suppress(dist.DistNetworkError), _cutting_unbounded(addresses, port, seconds):
                made = make(host, port, is_master=False, timeout=wait)
            if made is not None:
                _bound_reads(addresses, port)
                made.set_timeout(timedelta(seconds=_OPERATION / 2))
                return PrefixStore(_PREFIX, made)
        raise TimeoutError(f"no connection in {0.8 * _OPERATION:g} s")

    def _call(self, operation: Callable[[Any], Any]) -> Any:
        began = time.monotonic()
        while True:
            try:
                return operation(self._connected())
            except (RuntimeError, OSError) as error:
                self._store = None
                if time.monotonic() > began + self.patience:  # which may be set meanwhile
                    raise RuntimeError(
                        f"the meeting point {self._address} has not answered for "
                        f"{self.patience:g} s: {str(error).splitlines()[0]}. Start "
                        "`lq-lightning meet` there, or check the network and `meet_at`."
                    ) from error
                time.sleep(_AGAIN)

    def _connected(self) -> Store:
        if self._store is None:
            self._store = self.connect()
        return self._store

    def read(self, key: str) -> str | None:
        """The value of a key, if there is one."""

        def get(store: Any) -> str | None:
            return store.get(key).decode() if store.check([key]) else None

        found: str | None = self._call(get)
        return found

    def has(self, key: str) -> bool:
        """Whether there is a value."""
        return bool(self._call(lambda store: store.check([key])))

    def write(self, key: str, value: str) -> None:
        """Write a value over another, if there is one."""
        self._call(lambda store: store.set(key, value))

    def propose(self, key: str, value: str, instead_of: str = "") -> str:
        """Write a value if there is none, or ``instead_of``; return what is there then."""
        return bytes(self._call(lambda store: store.compare_set(key, instead_of, value))).decode()

    def add_to(self, key: str, entry: str) -> None:
        """Add an entry to a list."""
        self._call(lambda store: store.append(key, f"{entry},"))

    def list(self, key: str) -> set[str]:
        """The entries of a list."""
        return {entry for entry in (self.read(key) or "").split(",") if entry}

    def remove(self, key: str) -> None:
        """Remove a value, if there is one."""
        self._call(lambda store: store.delete_key(key))


def _connections(addresses: Collection[object], port: int) -> Iterator[socket.socket]:
    """Connections of this process to the store, for which torch has no name."""
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # it is closed meanwhile, or is not connected
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as found:
                host, at = found.getpeername()[:2]
                if at == port and host.removeprefix("::ffff:") in addresses:
                    yield found


def _bound_reads(addresses: Collection[object], port: int) -> None:
    """Let reads end in time: a cut connection would keep its thread, which aborts at the exit."""
    limit = struct.pack("ll", *divmod(int(_OPERATION * 1e6), 1_000_000))
    for found in _connections(addresses, port):
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


@contextmanager
def _cutting_unbounded(addresses: Collection[object], port: int, seconds: float) -> Iterator[None]:
    """Again and again end connections that take too long to make: torch waits for ever."""
    made = threading.Event()

    def watch() -> None:
        while not made.wait(seconds):
            for found in _connections(addresses, port):
                if not any(found.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)):
                    found.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        made.set()
        thread.join()


def keep_meeting_point(port: int) -> Any:
    """Keep the store in which nodes meet, for as long as the result is referred to.

    Raises:
        RuntimeError: The port is in use.
    """
    make = dist.TCPStore  # type: ignore[attr-defined]
    return make("0.0.0.0", port, is_master=True, wait_for_workers=False)
