"""What strangers can do to the handshake of a server, and false servers to that of a client."""

from __future__ import annotations

import random
import socket
import time

import pytest
from lq_testing.split_learning import (
    LIMITS,
    PATIENT,
    SECRET,
    frame,
    peer_terms,
    quick,
    tcp_pair,
)
from split_learning.wire import (
    NO_AUTHENTICATION,
    AuthenticationFailed,
    Deadlines,
    Limits,
    MalformedFrame,
    PeerLost,
    PeerStalled,
    Refused,
    TooLarge,
    VersionDiffers,
    WireError,
    connect,
    handshake,
)
from split_learning.wire.frames import PREFIX_NBYTES
from split_learning.wire.stream import open_stream

NONCE = "ab" * 32


def stranger(sent: bytes) -> tuple[WireError, bytes]:
    """Return what the server raises for a stranger's bytes, and what it answers."""
    near, far = tcp_pair()
    sender, receiver = open_stream(far, Limits(), PATIENT)
    with near, sender.socket, receiver.socket:
        near.sendall(sent)
        near.shutdown(socket.SHUT_WR)
        with pytest.raises(WireError) as raised:
            handshake.receive_terms(sender, receiver, SECRET, time.monotonic() + 10)
        sender.socket.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: near.recv(4096), b""))
    return raised.value, answer


HELLO = {"authentication": True, "nonce": NONCE}


@pytest.mark.parametrize(
    ("sent", "expected", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", MalformedFrame, "malformed"),
        (frame(HELLO, kind=1, key=None, version=2), VersionDiffers, "version"),
        (frame(HELLO, kind=7, key=None), MalformedFrame, "malformed"),
        (frame({}, kind=6, key=None), MalformedFrame, "malformed"),
        (frame({}, kind=5, key=None), MalformedFrame, "malformed"),
        (frame({**HELLO, "nonce": 7}, kind=1, key=None), MalformedFrame, "malformed"),
        (frame(HELLO, kind=1, key=None, header_nbytes=4097), TooLarge, "malformed"),
        (frame({**HELLO, "a": [0] * 200}, kind=1, key=None), TooLarge, "malformed"),
        (frame(b"\x80\x04.", kind=1, key=None), MalformedFrame, "malformed"),
        (b"", PeerLost, ""),
    ],
)
def test_strangers_are_rejected(sent: bytes, expected: type[WireError], code: str) -> None:
    error, answered = stranger(sent)
    assert type(error) is expected
    assert (f'"code":"{code}"'.encode() in answered) if code else not answered
    assert len(answered) < 400


def test_random_strangers_raise_nothing_but_our_errors() -> None:
    """Without authentication, so that what is behind the tags is reached too."""
    rng = random.Random(17)
    terms = {
        "configuration": {"a": {"b": [1]}},
        "package": "1",
        "byte_order": "little",
        "body_nbytes": 9,
        "header_nbytes": 4096,
        "idle_s": 1.0,
    }
    errors = set()
    for _ in range(250):
        told = {name: value for name, value in terms.items() if rng.random() < 0.98}
        if rng.random() < 0.5:
            told[rng.choice(list(terms))] = rng.choice(
                [None, "", 0, -1, 2**62, 1e300, [], {"": {}}]
            )
        hello = frame({"authentication": False, "nonce": NONCE}, kind=1, key=None)
        sent = bytearray(hello + frame(told, kind=3, key=None, sequence=1))
        for _ in range(rng.choice([0, 0, 1, 4])):
            sent[rng.randrange(len(sent))] = rng.randrange(256)
        near, far = tcp_pair()
        sender, receiver = open_stream(far, LIMITS, PATIENT)
        with near, sender.socket, receiver.socket:
            near.sendall(sent)
            near.shutdown(socket.SHUT_WR)
            until = time.monotonic() + 10
            try:
                client = handshake.receive_terms(sender, receiver, NO_AUTHENTICATION, until)
                handshake.compare(sender, peer_terms(), client, until)
            except WireError as error:
                errors.add(type(error))
    assert {MalformedFrame, Refused, AuthenticationFailed} <= errors


def test_an_unauthenticated_refusal_is_called_one_and_made_printable() -> None:
    near, far = tcp_pair()
    with near, far:
        reason = {"code": "busy", "reason": "\x1b[31mrun this\n"}
        far.sendall(frame(reason, kind=6, key=None))
        sender, receiver = open_stream(near, LIMITS, PATIENT)
        with sender.socket, pytest.raises(Refused, match="anybody could give") as raised:
            handshake.greet(sender, receiver, SECRET, peer_terms(), time.monotonic() + 10)
    assert str(raised.value).isprintable()


def test_a_server_of_another_version_is_named_with_both() -> None:
    near, far = tcp_pair()
    with near, far:
        far.sendall(frame({}, kind=6, key=None, version=3))
        sender, receiver = open_stream(near, LIMITS, PATIENT)
        with sender.socket, pytest.raises(VersionDiffers, match="1 here, 3 on the other side"):
            handshake.greet(sender, receiver, SECRET, peer_terms(), time.monotonic() + 10)


def test_a_server_that_only_accepts_does_not_hold_a_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        before = time.monotonic()
        with pytest.raises(PeerStalled):
            connect(listening.getsockname(), SECRET, deadlines=quick(handshake_s=0.2))
        assert time.monotonic() - before < 5


def test_frames_before_the_handshake_are_no_larger_than_a_hello() -> None:
    assert handshake._HELLO_LIMITS.header_nbytes <= 4096
    assert handshake._HELLO_LIMITS.body_nbytes == 1
    assert Deadlines().handshake_s <= 10
    assert PREFIX_NBYTES == 28
