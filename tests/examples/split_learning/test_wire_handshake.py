"""The handshake: who is let in, what is compared, and what a stranger can do to it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from lq_testing.split_learning import (
    LIMITS,
    OTHER_SECRET,
    PATIENT,
    SECRET,
    frame,
    peer_terms,
    quick,
    tcp_pair,
)
from split_learning.wire import (
    NO_AUTHENTICATION,
    Authentication,
    AuthenticationFailed,
    Limits,
    MalformedFrame,
    Refused,
    WireError,
    handshake,
)
from split_learning.wire.handshake import Terms, own_terms
from split_learning.wire.stream import open_stream

Outcome = Terms | WireError
NONCE = "ab" * 32


def outcome(do: Callable[[], Terms]) -> Outcome:
    try:
        return do()
    except WireError as error:
        return error


def shake(
    client: Authentication = SECRET,
    server: Authentication = SECRET,
    *,
    client_terms: Terms | None = None,
    server_terms: Terms | None = None,
    relay: Callable[[int, bytes], bytes] | None = None,
) -> tuple[Outcome, Outcome]:
    """Return what client and server got; ``relay`` may change the frames to the server."""
    near, far = tcp_pair()
    if relay is not None:
        near, far = _through(relay, near, far)
    until = time.monotonic() + 10
    ends = [open_stream(connected, LIMITS, PATIENT) for connected in (near, far)]
    (client_sender, client_receiver), (server_sender, server_receiver) = ends
    own = server_terms or peer_terms()

    def serve() -> Terms:
        try:
            terms = handshake.receive_terms(server_sender, server_receiver, server, until)
            handshake.compare(server_sender, own, terms, until)
            handshake.welcome(server_sender, own, until)
            return terms
        finally:
            server_sender.socket.shutdown(socket.SHUT_WR)

    def greet() -> Terms:
        try:
            wanted = client_terms or peer_terms()
            return handshake.greet(client_sender, client_receiver, client, wanted, until)
        finally:
            client_sender.socket.shutdown(socket.SHUT_WR)

    with ThreadPoolExecutor(2) as pool:
        served = pool.submit(outcome, serve)
        greeted = outcome(greet)
        result = greeted, served.result()
    for sender, receiver in ends:
        sender.socket.close()
        receiver.socket.close()
    return result


def _through(
    relay: Callable[[int, bytes], bytes], client: socket.socket, server_side: socket.socket
) -> tuple[socket.socket, socket.socket]:
    """Return ends whose frames to the server pass through ``relay``."""
    middle, server = tcp_pair()

    def pass_on() -> None:
        with server_side, middle:
            for number in range(2):
                passed = relay(number, server_side.recv(65536))
                if passed:
                    middle.sendall(passed)
                    answer = middle.recv(65536)
                    server_side.sendall(answer)
            middle.shutdown(socket.SHUT_WR)

    threading.Thread(target=outcome, args=(pass_on,), daemon=True).start()
    return client, server


# --- who is let in --------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [SECRET, NO_AUTHENTICATION], ids=["secret", "none"])
def test_equal_sides_meet(secret: Authentication) -> None:
    client_terms = own_terms({"a": 1}, LIMITS, quick(idle_s=7))
    server_terms = own_terms({"a": 1}, replace(LIMITS, body_nbytes=77), quick(idle_s=8))
    client, server = shake(secret, secret, client_terms=client_terms, server_terms=server_terms)
    assert client == server_terms
    assert server == client_terms


@pytest.mark.parametrize(
    ("client", "server", "text"),
    [
        (SECRET, OTHER_SECRET, "does not know the shared secret"),
        (NO_AUTHENTICATION, SECRET, "the server has a shared secret and the client has none"),
        (SECRET, NO_AUTHENTICATION, "the client has a shared secret and the server has none"),
    ],
)
def test_sides_without_a_common_secret_both_learn_it(
    client: Authentication, server: Authentication, text: str
) -> None:
    for result in shake(client, server):
        assert isinstance(result, AuthenticationFailed)
        assert text in str(result)


def test_a_client_does_not_trust_a_server_without_the_secret() -> None:
    """Neither one that wants none, nor one that echoes, nor one that makes tags up."""
    challenge = {"authentication": True, "nonce": NONCE}
    for answers, expected, text in (
        ([frame({"authentication": False, "nonce": NONCE}, kind=2, key=None)], 0, "has none"),
        ([frame(challenge, kind=2, key=None), frame({}, kind=4, sequence=1)], 0, "not know"),
        (
            [
                frame(challenge, kind=2, key=None),
                frame({}, kind=4, sequence=1, key=None),
                bytes(99),
            ],
            0,
            "not know",
        ),
        ([frame({"authentication": True, "nonce": "ab"}, kind=2, key=None)], 1, "nonce"),
        ([frame({"authentication": True}, kind=2, key=None)], 1, "nonce"),
        ([frame({}, kind=4, key=None)], 1, "WELCOME came in the handshake"),
    ):
        near, far = tcp_pair()
        with near, far:
            far.sendall(b"".join(answers))
            sender, receiver = open_stream(near, LIMITS, PATIENT)
            with sender.socket, pytest.raises(WireError, match=text) as raised:
                handshake.greet(sender, receiver, SECRET, peer_terms(), time.monotonic() + 10)
        assert type(raised.value) is (AuthenticationFailed, MalformedFrame)[expected]


def test_a_client_sees_its_own_nonce_come_back() -> None:
    near, far = tcp_pair()
    sender, receiver = open_stream(near, LIMITS, PATIENT)

    def echo() -> None:
        hello = far.recv(4096)
        far.sendall(hello[:5] + b"\x02" + hello[6:])

    thread = threading.Thread(target=echo)
    thread.start()
    with far, sender.socket, receiver.socket, pytest.raises(MalformedFrame, match="of its own"):
        handshake.greet(sender, receiver, SECRET, peer_terms(), time.monotonic() + 10)
    thread.join()


def test_everything_in_the_handshake_is_covered() -> None:
    """Changing one digit of a nonce, the wish for authentication, or the terms is noticed."""

    def other_nonce(number: int, sent: bytes) -> bytes:
        last = sent.rindex(b'"') - 1
        digit = b"1" if sent[last : last + 1] == b"0" else b"0"
        return sent if number else sent[:last] + digit + sent[last + 1 :]

    def no_authentication(number: int, sent: bytes) -> bytes:
        return sent if number else sent.replace(b":true,", b":null,")

    def other_terms(number: int, sent: bytes) -> bytes:
        return sent.replace(b'"a":1', b'"a":2') if number else sent

    for relay in (other_nonce, no_authentication, other_terms):
        terms = own_terms({"a": 1}, LIMITS, PATIENT)
        client, server = shake(client_terms=terms, server_terms=terms, relay=relay)
        assert isinstance(client, AuthenticationFailed), relay
        assert isinstance(server, AuthenticationFailed), relay


def test_a_recorded_handshake_opens_no_door() -> None:
    """The terms of another session have the tag of other nonces."""
    recorded: list[bytes] = []

    def record(number: int, sent: bytes) -> bytes:
        recorded.append(sent)
        return sent

    assert isinstance(shake(relay=record)[1], Terms)
    client, server = shake(relay=lambda number, sent: recorded[number])
    assert isinstance(server, AuthenticationFailed)
    assert not isinstance(client, Terms)


# --- what is compared -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "client", "shown"),
    [
        ({"a": 1}, {"a": 2}, "`a`: server 1, client 2"),
        ({"a": 1}, {"a": 1.0}, "`a`: server 1, client 1.0"),
        ({"a": 1}, {"a": True}, "`a`: server 1, client True"),
        ({"a": 1}, {}, "`a`: server 1, client not given"),
        ({}, {"a": None}, "`a`: server not given, client None"),
        ({"a": {"b": "x", "c": 1}}, {"a": {"b": "y", "c": 1}}, "`a.b`: server 'x', client 'y'"),
        ({"a": [1, 2]}, {"a": [2, 1]}, "`a`: server [1, 2], client [2, 1]"),
        ({"a": {}}, {"a": 3}, "`a`: server {}, client 3"),
        ({"a": 1, "b": 1}, {"a": 2, "b": 2}, "`a`: server 1, client 2; `b`: server 1, client 2."),
        ({"a": ""}, {"a": "\x1b[2J\n"}, r"server '', client '\x1b[2J\n'"),
    ],
)
def test_other_configurations_are_refused_with_key_and_both_values(
    server: dict[str, Any], client: dict[str, Any], shown: str
) -> None:
    results = shake(
        client_terms=own_terms(client, LIMITS, PATIENT),
        server_terms=own_terms(server, LIMITS, PATIENT),
    )
    for result in results:
        assert type(result) is Refused
        assert shown in str(result)
        assert str(result).isprintable()
    assert "Start both with the same" in str(results[0])


def test_equal_configurations_need_not_have_equal_order_or_tuples() -> None:
    one = own_terms({"a": 1, "b": {"c": (1, 2), "d": 2.5}}, LIMITS, PATIENT)
    other = own_terms({"b": {"d": 2.5, "c": [1, 2]}, "a": 1}, LIMITS, PATIENT)
    assert isinstance(shake(client_terms=one, server_terms=other)[0], Terms)


@pytest.mark.parametrize("name", ["package", "byte_order"])
def test_other_versions_are_refused(name: str) -> None:
    own = peer_terms()
    client = replace(own, **{name: "9.9"}, configuration={})
    results = shake(client_terms=client)
    for result in results:
        assert type(result) is Refused
        assert f"`{name}`: server {getattr(own, name)!r}, client '9.9'" in str(result)
    # and a configuration cannot hide it
    client = replace(client, configuration={name: getattr(own, name)})
    assert isinstance(shake(client_terms=client)[0], Refused)


def test_many_differences_are_shown_in_part() -> None:
    terms = own_terms({f"k{i:02d}": i for i in range(30)}, LIMITS, PATIENT)
    client, _ = shake(client_terms=terms)
    assert str(client).count("not given") == 10
    assert "`k09`" in str(client)
    assert "`k10`" not in str(client)
    assert "and 20 more" in str(client)


def test_long_differences_still_fit_into_a_refusal() -> None:
    """A smallest header holds 4096 bytes; each of these characters takes six in JSON."""
    small = Limits(header_nbytes=4096)
    configuration = {f"k{i}": "\u2028" * 40 for i in range(9)}
    terms = [own_terms(given, small, PATIENT) for given in (configuration, {})]
    client, server = shake(client_terms=terms[0], server_terms=terms[1])
    assert type(client) is type(server) is Refused
    assert "`k0`: server not given, client" in str(client)
    assert str(client).isascii()


def test_own_configurations_are_checked() -> None:
    with pytest.raises(ValueError, match=r"configuration\['a'\]` is <object"):
        own_terms({"a": object()}, LIMITS, PATIENT)
    with pytest.raises(ValueError, match="4096 bytes"):
        own_terms({"a": "x" * 4000}, LIMITS, PATIENT)
    with pytest.raises(ValueError, match="package"):
        own_terms({"package": "1"}, LIMITS, PATIENT)


@pytest.mark.parametrize(
    "changed",
    [
        {"idle_s": 1e-9},
        {"idle_s": float(10**9)},
        {"idle_s": True},
        {"body_nbytes": 0},
        {"header_nbytes": 10},
        {"configuration": []},
        {"package": 1},
        {"more": 1},
    ],
)
def test_terms_out_of_range_are_refused(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer's idle time decides how often it is sent to: 1e-9 would keep this side busy."""
    as_header = handshake._as_header
    monkeypatch.setattr(handshake, "_as_header", lambda terms: as_header(terms) | changed)
    client, server = shake()
    assert type(server) is MalformedFrame
    assert type(client) is Refused
    assert "malformed" in str(client)
