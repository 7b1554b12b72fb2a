"""The server's side: a thread per client, and nothing that one client does stops the others."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from . import handshake
from .addresses import Address, is_loopback, listen, show_address
from .authentication import Authentication, Secret
from .client import check_secret
from .connection import Connection
from .errors import PeerEnded, ServerBusy, WireError
from .settings import Deadlines, Limits
from .stream import linger, open_stream, shut
from .traffic import Traffic

logger = logging.getLogger(__name__)
Handler = Callable[[Connection], None]
_PAUSE_S = 0.5  # after the system gave no socket or thread
_TUNNEL = (
    "Messages are not encrypted: whoever is on the way can read them. Where that matters, listen "
    "on 127.0.0.1 and let clients come through a tunnel (ssh -L, WireGuard, a VPN)."
)


class Server:
    """Listens, shakes hands and calls a handler for every client, in a thread of its own.

    The handler receives and sends until it returns, or until the connection raises a
    ``WireError``; either ends this client alone. It is called from several threads at once.

    Args:
        address: host and port to listen on; port 0 takes a free one.
        secret: what clients have too, or ``NO_AUTHENTICATION``.
        handler: serves one client.
        configuration: plain data that must be equal to every client's.
        limits: of what is received.
        deadlines: of all that clients do.
        max_clients: served at the same time; others are told that the server is busy.
        max_strangers: handshakes at the same time; connections beyond are closed at once.

    Attributes:
        address: host and port that it listens on.
        traffic: of all clients that have gone.

    Raises:
        SecretError: neither a secret nor ``NO_AUTHENTICATION``.
        OSError: the address cannot be listened on.
    """

    def __init__(
        self,
        address: Address,
        secret: Authentication,
        handler: Handler,
        configuration: Mapping[str, Any] | None = None,
        *,
        limits: Limits | None = None,
        deadlines: Deadlines | None = None,
        max_clients: int = 8,
        max_strangers: int = 32,
    ) -> None:
        check_secret(secret)
        if max_clients < 1 or max_strangers < 1:
            raise ValueError(
                f"`max_clients={max_clients}` and `max_strangers={max_strangers}` must be at least "
                "1."
            )
        self._secret = secret
        self._handler = handler
        self._limits = limits or Limits()
        self._deadlines = deadlines or Deadlines()
        self._terms = handshake.own_terms(configuration or {}, self._limits, self._deadlines)
        self._max_clients = max_clients
        self._rooms = threading.BoundedSemaphore(max_clients)
        self._doors = threading.BoundedSemaphore(max_strangers)
        self._lock = threading.Lock()  # of what follows
        self._open: dict[threading.Thread, socket.socket | Connection] = {}
        self._stopping = False
        self.traffic = Traffic()
        self._serving = threading.Lock()
        self._listening = listen(address)
        self._listening.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self.address: Address = self._listening.getsockname()[:2]
        self._warn()

    def _warn(self) -> None:
        public = not is_loopback(self.address[0])
        if not isinstance(self._secret, Secret):
            logger.warning(
                "No authentication: every program that reaches %s is served. Use a shared secret.",
                show_address(self.address),
            )
        if public:
            logger.warning("%s is open to other machines. %s", show_address(self.address), _TUNNEL)

    # --- running ----------------------------------------------------------------------------------

    def serve_forever(self) -> None:
        """Serve clients until another thread calls ``stop``, or Ctrl-C raises; then call it too.

        A signal handler must not call ``stop``: let it raise ``SystemExit``.
        """
        with self._serving, selectors.DefaultSelector() as selector:
            if self._stopping:
                return
            selector.register(self._listening, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._stopping:
                selector.select()
                if not self._stopping:
                    self._accept()

    def start(self) -> None:
        """Serve clients in a thread, until ``stop`` is called."""
        threading.Thread(target=self.serve_forever, name="server", daemon=True).start()

    def stop(self) -> None:
        """End all connections in good order and listen no more; calling it again does nothing."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        self._wake.send(b"x")
        with self._serving:  # a selector whose sockets are closed would wait forever
            for end in (self._listening, self._wake, self._woken):
                end.close()
        with self._lock:
            still = dict(self._open)
        still.pop(threading.current_thread(), None)
        for known in still.values():
            if isinstance(known, Connection):
                threading.Thread(target=known.close, daemon=True).start()
            else:  # in its handshake
                shut(known)
        until = time.monotonic() + 3 * self._deadlines.linger_s
        for thread in still:
            thread.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> Server:
        """Serve clients in a thread."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End all connections."""
        self.stop()

    # --- clients ----------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connected, address = self._listening.accept()
        except (BlockingIOError, ConnectionError):  # it was gone before it was taken
            return
        except OSError as error:  # such as no more files: those who are served go on
            logger.error("No connection can be taken: %s.", error)
            time.sleep(_PAUSE_S)
            return
        shown = show_address(address[:2])
        if not self._doors.acquire(blocking=False):
            logger.warning("%s: closed, as too many handshakes are under way.", shown)
            connected.close()
            return
        thread = threading.Thread(
            target=self._welcome, args=(connected, shown), name=f"client {shown}", daemon=True
        )
        with self._lock:
            self._open[thread] = connected
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            logger.error("%s: no thread can be started: %s.", shown, error)
            self._forget(thread)
            self._doors.release()
            connected.close()

    def _forget(self, thread: threading.Thread) -> None:
        with self._lock:
            self._open.pop(thread, None)

    def _welcome(self, connected: socket.socket, shown: str) -> None:
        """Shake hands with a client and serve it: all that its thread does."""
        try:
            try:
                connection = self._shake_hands(connected, shown)
            finally:
                self._doors.release()
            try:
                self._serve(connection)
            finally:
                self._rooms.release()
                self.traffic.merge(connection.traffic)
        except PeerEnded:
            logger.info("%s: ended.", shown)
        except WireError as error:
            logger.warning("%s: %s: %s", shown, type(error).__name__, error)
        except Exception:
            logger.exception("%s: served no longer, as this server met an error.", shown)
        finally:
            self._forget(threading.current_thread())

    def _shake_hands(self, connected: socket.socket, shown: str) -> Connection:
        """Return the connection of a client, which then has one of the rooms."""
        sender, receiver = open_stream(connected, self._limits, self._deadlines)
        try:
            until = time.monotonic() + self._deadlines.handshake_s
            client = handshake.receive_terms(sender, receiver, self._secret, until)
            handshake.compare(sender, self._terms, client, until)
            if not self._rooms.acquire(blocking=False):
                reason = f"it serves {self._max_clients} clients already. Try again later."
                handshake.refuse(sender, "busy", reason, until)
                raise ServerBusy(f"Refused: {reason}")
            try:
                handshake.welcome(sender, self._terms, until)
                return Connection(
                    sender, receiver, address=shown, peer=client, deadlines=self._deadlines
                )
            except BaseException:
                self._rooms.release()
                raise
        except BaseException:
            linger(receiver.socket, self._deadlines.linger_s)
            sender.socket.close()
            receiver.socket.close()
            raise

    def _serve(self, connection: Connection) -> None:
        with self._lock:
            self._open[threading.current_thread()] = connection
            stopping = self._stopping
        logger.info("%s: connected.", connection.address)
        with connection:
            if not stopping:
                self._handler(connection)
        logger.info(
            "%s: ended; %d bytes received, %d sent.",
            connection.address,
            connection.traffic.received_nbytes,
            connection.traffic.sent_nbytes,
        )
