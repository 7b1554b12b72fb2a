"""Two ends of a connection in one process, and frames made by hand for one of them."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import torch
from split_learning.wire import Connection, Deadlines, Limits, Secret, Server, connect
from split_learning.wire.authentication import Seal
from split_learning.wire.handshake import Terms, own_terms
from split_learning.wire.stream import Receiver, open_stream

SECRET = Secret(b"correct horse battery staple, and then some")
OTHER_SECRET = Secret(b"correct horse battery staple, and then none")
KEY = b"k" * 32
OTHER_KEY = b"j" * 32
LIMITS = Limits(header_nbytes=4096, body_nbytes=10_000, tensors=4, dims=3, depth=5, items=100)
# Long enough for a busy machine, except where a test waits for one of them to pass.
PATIENT = Deadlines(idle_s=20, stall_s=20, wait_s=20, handshake_s=20, linger_s=0.05)


def quick(**changed: float) -> Deadlines:
    """Return deadlines with some that pass soon."""
    values = {name: getattr(PATIENT, name) for name in PATIENT.__slots__}
    return Deadlines(**(values | changed))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
    one.settimeout(10)
    return one, other


def tag(key: bytes | None, covered: bytes) -> bytes:
    """Return the tag as the protocol defines it."""
    return b"" if key is None else hmac.new(key, covered, "sha256").digest()


def frame(
    header: Any = None,
    body: bytes = b"",
    *,
    key: bytes | None = KEY,
    sequence: int = 0,
    kind: int = 7,
    magic: bytes = b"LQsl",
    version: int = 1,
    zero: int = 0,
    header_nbytes: int | None = None,
    body_nbytes: int | None = None,
) -> bytes:
    """Return a frame, by default a right one, in bytes written without the code under test."""
    if header is None:
        header = {"kind": "batch", "fields": {}, "tensors": []}
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = struct.pack(
        "<4sBBHQIQ",
        magic,
        version,
        kind,
        zero,
        sequence,
        len(encoded) if header_nbytes is None else header_nbytes,
        len(body) if body_nbytes is None else body_nbytes,
    )
    raw = prefix + encoded
    return raw + tag(key, raw) + (body + tag(key, raw + body) if body else b"")


@contextlib.contextmanager
def receiver_of(sent: bytes, key: bytes | None = KEY) -> Iterator[Receiver]:
    """Give the receiver of bytes from a peer that then ends the connection."""
    peer, connected = tcp_pair()
    with peer:
        sender, receiver = open_stream(connected, LIMITS, PATIENT)
        receiver.seal = Seal(key)
        with sender.socket, receiver.socket:
            peer.sendall(sent)
            peer.shutdown(socket.SHUT_WR)
            yield receiver


def peer_terms(limits: Limits = LIMITS, idle_s: float = 20.0) -> Terms:
    """Return what the other side said of itself."""
    return own_terms({}, limits, quick(idle_s=idle_s))


@contextlib.contextmanager
def connection_and_socket(
    deadlines: Deadlines = PATIENT, *, limits: Limits = LIMITS, peer: Limits = LIMITS
) -> Iterator[tuple[Connection, socket.socket]]:
    """Give a connection after its handshake, and the socket of its peer.

    The connection sends under ``KEY`` and receives under ``OTHER_KEY``.
    """
    far, connected = tcp_pair()
    sender, receiver = open_stream(connected, limits, deadlines)
    sender.seal, receiver.seal = Seal(KEY), Seal(OTHER_KEY)
    connection = Connection(
        sender, receiver, address="peer", peer=peer_terms(peer), deadlines=deadlines
    )
    try:
        with far:
            yield connection, far
    finally:
        connection.fail("end of the test")


@contextlib.contextmanager
def two_connections(
    deadlines: Deadlines = PATIENT, *, limits: Limits = LIMITS, idle_s: float = 20.0
) -> Iterator[tuple[Connection, Connection]]:
    """Give both ends of a connection after the handshake."""
    ends = []
    keys = [KEY, OTHER_KEY]
    for connected in tcp_pair():
        sender, receiver = open_stream(connected, limits, deadlines)
        sender.seal, receiver.seal = Seal(keys[0]), Seal(keys[1])
        keys.reverse()
        peer = peer_terms(limits, idle_s)
        ends.append(Connection(sender, receiver, address="peer", peer=peer, deadlines=deadlines))
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.fail("end of the test")


LOOPBACK = ("127.0.0.1", 0)


def answer(connection: Connection) -> None:
    """Handle a client by sending back what it sends."""
    for message in connection.messages("batch"):
        connection.send("output", message.fields, message.tensors)


@contextlib.contextmanager
def serving(handler: Any = answer, secret: Any = SECRET, **options: Any) -> Iterator[Server]:
    """Give a server that runs."""
    options = {"deadlines": PATIENT, **options}
    with Server(LOOPBACK, secret, handler, {"model": "tiny"}, **options) as server:
        yield server


def join(server: Server, secret: Any = SECRET, **options: Any) -> Connection:
    """Return a client of it."""
    options = {"deadlines": PATIENT, **options}
    return connect(server.address, secret, {"model": "tiny"}, **options)


def works(connection: Connection, step: int = 0) -> bool:
    """Whether a message comes back."""
    connection.send("batch", {"step": step}, {"x": torch.arange(5)})
    message = connection.receive("output")
    return message.field("step", int) == step and torch.equal(
        message.tensor("x", dtype=torch.int64, shape=(5,)), torch.arange(5)
    )
