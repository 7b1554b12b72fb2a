"""The client's end: reach a server, send messages and receive its answers."""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc

from .common import (
    METHOD,
    SERVICE,
    TERMS_KEY,
    TRANSIENT,
    Address,
    AddressError,
    AuthenticationFailed,
    Deadlines,
    Limits,
    MalformedMessage,
    PeerFailed,
    PeerLost,
    PeerStalled,
    Refused,
    Retry,
    ServerBusy,
    UnexpectedMessage,
    WireError,
    deadline,
    own_terms,
    printable,
    read_terms,
    show_address,
)
from .identity import SERVER_NAME, Identity
from .messages import Message, Traffic, encode, read_message, stream_nbytes

logger = logging.getLogger(__name__)
_GOODBYE_S = 2.0
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)
_ERRORS: dict[grpc.StatusCode, type[WireError]] = {
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationFailed,
    grpc.StatusCode.FAILED_PRECONDITION: Refused,
    grpc.StatusCode.UNIMPLEMENTED: Refused,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ServerBusy,
}


def connect(
    address: Address,
    identity: Identity | None,
    configuration: Mapping[str, Any] | None = None,
    *,
    limits: Limits | None = None,
    deadlines: Deadlines | None = None,
    retry: Retry | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> Connection:
    """Connect to a server, each side with its certificate.

    Args:
        address: Host and port.
        identity: Identity of this client; ``NO_AUTHENTICATION`` if the server runs without.
        configuration: Plain data that must be equal to the server's.
        limits: Limits on received messages.
        deadlines: Deadlines for all that the server does.
        retry: Attempts while the server cannot be reached or is busy; None tries once.
        sleep: Waits between attempts.

    Raises:
        AddressError: there is no such host.
        AuthenticationFailed: one side does not accept the other's certificate.
        Refused: the server's reason, with what differs.
        PeerLost: the server cannot be reached.
    """
    limits, deadlines = limits or Limits(), deadlines or Deadlines()
    terms = own_terms(configuration or {}, limits)
    retry = retry or Retry(attempts=1)
    for failures in range(1, retry.attempts + 1):
        try:
            _look_up(address)
            return Connection(address, identity, terms, limits, deadlines)
        except TRANSIENT as error:
            if failures == retry.attempts:
                raise
            pause_s = retry.pause_s(failures, random.random())
            logger.warning(
                "%s Attempt %d of %d in %.1f s.", error, failures + 1, retry.attempts, pause_s
            )
            sleep(pause_s)
    raise AssertionError("an attempt returns or raises")


def _look_up(address: Address) -> None:
    """Tell a wrong name, which stays wrong, from a network that is away."""
    try:
        socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            raise PeerLost(f"The name {address[0]!r} cannot be looked up: {error}.") from error
        raise AddressError(f"There is no host {address[0]!r}: {error}. Check the name.") from error


class Connection:
    """Messages to and from a server, for one thread. ``connect`` makes it.

    After any ``WireError`` nothing can be sent or received any more.
    """

    def __init__(
        self,
        address: Address,
        identity: Identity | None,
        terms: bytes,
        limits: Limits,
        deadlines: Deadlines,
    ) -> None:
        self.traffic = Traffic()
        self._address = show_address(address)
        self._limits = limits
        self._deadlines = deadlines
        self._connected = False
        # One piece waits while gRPC sends the one before: memory is bounded, and `send` is held
        # while the network is slower than this program.
        self._outgoing: queue.Queue[bytes | None] = queue.Queue(maxsize=1)
        self._channel = _open_channel(self._address, identity, deadlines)
        stream = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self._call = stream(self._pieces(), metadata=((TERMS_KEY, terms),))
        if not self._call.add_callback(self._on_end):
            self._on_end()  # it has ended already
        try:
            with deadline(self._call.cancel, deadlines.connect_s) as passed:
                metadata = self._call.initial_metadata()
            if all(key != TERMS_KEY for key, _ in metadata):
                raise self._error(passed, f"did not answer within {deadlines.connect_s:.0f} s")
            told, _, self._peer_nbytes = read_terms(metadata)
        except BaseException:
            self._channel.close()
            raise
        self._connected = True
        self.traffic.sent["handshake"].add(len(terms))
        self.traffic.received["handshake"].add(len(told))

    def send(self, message: Message) -> None:
        """Send a message; returns when all but its end is on its way.

        Raises:
            UnsendableMessage: the server does not take it; nothing was sent.
            WireError: the connection is broken.
        """
        pieces = encode(message, self._peer_nbytes)
        try:
            for piece in pieces:
                self._put(bytes(piece), self._deadlines.stall_s)
        except BaseException:  # Ctrl-C too: nothing may follow half a message
            self._call.cancel()
            raise
        nbytes = stream_nbytes(sum(map(len, pieces)), len(pieces))
        self.traffic.sent[message.kind].add(nbytes, message.tensor_nbytes)

    def receive(self, *kinds: str) -> Message:
        """Wait for the next message, which must be of one of these kinds, if any are given.

        Raises:
            UnexpectedMessage: it is of another kind.
            PeerFailed: the server met an error; the text says which.
            WireError: all other errors.
        """
        try:
            received = read_message(self._next_piece, self._limits, self.traffic)
            if received is None:
                raise PeerLost("The server ended the connection.")
            if kinds and received.kind not in kinds:
                raise UnexpectedMessage(
                    f"The server sent {received.kind!r} where {' or '.join(kinds)} was expected."
                )
            return received
        except (MalformedMessage, UnexpectedMessage):
            self._call.cancel()
            raise

    def close(self) -> None:
        """End the connection in good order; calling it again does nothing."""
        if self._call.is_active():
            with contextlib.suppress(WireError):
                self._put(b"", _GOODBYE_S)
            with deadline(self._call.cancel, _GOODBYE_S), contextlib.suppress(grpc.RpcError):
                next(self._call, None)
        self._channel.close()

    def __enter__(self) -> Connection:
        """Return the connection."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the connection."""
        self.close()

    def _pieces(self) -> Iterator[bytes]:
        """Yield what gRPC sends, on its thread; an empty piece tells the end from a broken line."""
        while (piece := self._outgoing.get()) is not None:
            yield piece
            if not piece:
                return

    def _put(self, piece: bytes, seconds: float) -> None:
        """Hand over a piece, unless the call ends first."""
        until = time.monotonic() + seconds
        while self._call.is_active():
            with contextlib.suppress(queue.Full):
                self._outgoing.put(piece, timeout=min(0.1, seconds))
                return
            if time.monotonic() > until:
                raise self._stalled(f"took nothing for {seconds:.1f} s")
        raise self._error()

    def _next_piece(self, first: bool) -> bytes | None:
        seconds = self._deadlines.wait_s if first else self._deadlines.stall_s
        with deadline(self._call.cancel, seconds) as passed:
            try:
                piece: bytes | None = next(self._call, None)
            except grpc.RpcError as error:
                raise self._error(passed, f"sent nothing for {seconds:.1f} s") from error
        return piece

    def _on_end(self) -> None:
        """Wake gRPC's thread if it waits for a piece."""
        with contextlib.suppress(queue.Full):
            self._outgoing.put_nowait(None)

    def _stalled(self, late: str) -> PeerStalled:
        return PeerStalled(
            f"The server {self._address} {late}. Look what keeps it busy, and check the network; "
            "`Deadlines` allows more time."
        )

    def _error(self, passed: threading.Event | None = None, late: str = "") -> WireError:
        """Return what ended the call."""
        if passed is not None and passed.is_set():
            return self._stalled(late)
        code, details = self._call.code(), printable(self._call.details())
        if code in _ERRORS:
            return _ERRORS[code](f"The server refused: {details}")
        if code not in _BROKEN:
            return PeerFailed(f"The server ended the connection: {details}")
        if self._connected:
            return PeerLost(f"The connection broke: {details}.")
        if "SSL_ERROR_SSL" in details:
            return AuthenticationFailed(
                f"{self._address} is not the server of this client's authority: {details}. Check "
                "the address, and that both certificates are of one authority."
            )
        return PeerLost(
            f"The server {self._address} cannot be reached: {details}. Check that it runs, its "
            "address and port, firewalls, and that both certificates are of one authority."
        )


def _open_channel(address: str, identity: Identity | None, deadlines: Deadlines) -> grpc.Channel:
    options: list[tuple[str, Any]] = [
        *deadlines.channel_options(),
        # Nothing is shared with an earlier attempt, whose pause would hold this one up.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
    ]
    if identity is None:
        return grpc.insecure_channel(address, options)
    options.append(("grpc.ssl_target_name_override", SERVER_NAME))
    return grpc.secure_channel(address, identity.channel_credentials(), options)
