"""Peers that stall, and how connections end."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from lq_testing.split_learning import (
    LIMITS,
    OTHER_KEY,
    PATIENT,
    connection_and_socket,
    frame,
    quick,
    two_connections,
)
from split_learning.wire import (
    Connection,
    Deadlines,
    Limits,
    PeerEnded,
    PeerFailed,
    PeerLost,
    PeerSilent,
    PeerStalled,
    UnexpectedMessage,
    WireError,
)
from split_learning.wire import pace as paces

BIG = Limits(body_nbytes=64 * 1024**2)


# --- time -----------------------------------------------------------------------------------------


class Clock:
    """Stands for the module ``time``."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_pace_cuts_pauses_and_trickles(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(paces, "time", clock)
    deadlines = Deadlines(stall_s=10, slowest_rate=1000)
    pace = paces.Pace("The other side sent", deadlines)
    assert pace.left_s(1) == 10  # a pause, however much came
    assert pace.left_s(1_000_000) == 10
    clock.now += 9
    assert pace.left_s(0) == 1
    assert pace.left_s(3000) == 4
    clock.now += 2
    with pytest.raises(PeerStalled, match="sent only 11 bytes of a message in 11.0 s"):
        pace.left_s(11)  # a byte per second
    assert pace.left_s(2000) == 1
    clock.now += 9989  # 10 MB at 1000 bytes per second
    assert pace.left_s(10_000_000) == 10
    until = paces.Pace("The other side sent", deadlines, clock.now + 3)
    assert until.left_s(10_000) == 3
    clock.now += 3
    with pytest.raises(PeerStalled):
        until.left_s(10_000)


def test_a_peer_that_says_nothing_stalls() -> None:
    with (
        connection_and_socket(quick(idle_s=0.1)) as (connection, _),
        pytest.raises(PeerSilent, match="sent nothing for 0.1 s"),
    ):
        connection.receive()


@pytest.mark.parametrize("cut", [5, 40, -40, -5], ids=["prefix", "header", "body", "tag"])
def test_a_peer_that_stops_within_a_message_stalls(cut: int) -> None:
    sent = frame(
        {"kind": "a", "fields": {}, "tensors": [["x", "int8", [8]]]}, bytes(8), key=OTHER_KEY
    )
    with connection_and_socket(quick(stall_s=0.1)) as (connection, peer):
        peer.sendall(sent[:cut])
        with pytest.raises(PeerStalled, match=f"only {len(sent[:cut])} bytes"):
            connection.receive()


def test_a_peer_that_trickles_is_cut() -> None:
    over = threading.Event()

    def trickle(peer: socket.socket) -> None:
        for byte in frame(b" " * 4000, key=OTHER_KEY):
            if over.wait(0.02):
                return
            peer.sendall(bytes([byte]))

    with connection_and_socket(quick(stall_s=0.2, slowest_rate=1e6)) as (connection, peer):
        thread = threading.Thread(target=trickle, args=(peer,))
        thread.start()
        with pytest.raises(PeerStalled, match="sent only"):
            connection.receive()
        over.set()
        thread.join()


def test_a_peer_that_takes_nothing_stalls_and_frees_who_waits() -> None:
    x = torch.zeros(32 * 1024**2, dtype=torch.uint8)
    with (
        connection_and_socket(quick(stall_s=0.2), limits=BIG, peer=BIG) as (connection, _),
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(connection.receive)
        with pytest.raises(PeerStalled, match="took only"):
            connection.send("batch", {}, {"x": x})
        with pytest.raises(PeerStalled, match="took only"):  # the cause, not the effect
            waiting.result(10)


def test_signs_of_life_keep_a_silent_connection_but_not_forever() -> None:
    with two_connections(quick(idle_s=1.0, wait_s=1.3), idle_s=0.3) as (one, other):
        with pytest.raises(PeerSilent, match="sent no message for 1.3 s"):
            one.receive()
        assert one.traffic.received["alive"].messages >= 3
        other.send("batch")


def test_waiting_shorter_is_possible() -> None:
    with (
        connection_and_socket() as (connection, _),
        pytest.raises(PeerSilent, match="sent no message for 0.1 s"),
    ):
        connection.receive(wait_s=0.1)


# --- end ------------------------------------------------------------------------------------------


def test_messages_end_with_the_connection() -> None:
    with two_connections() as (one, other), ThreadPoolExecutor(1) as pool:
        kinds = pool.submit(lambda: [message.kind for message in other.messages()])
        with one:
            one.send("first")
            one.post("second")
        assert kinds.result(10) == ["first", "second"]
        one.close()
        for call in (lambda: one.send("a"), lambda: one.post("a"), one.receive):
            with pytest.raises(PeerEnded, match="This side"):
                call()


def test_an_end_without_a_word_is_a_loss() -> None:
    with connection_and_socket() as (connection, peer):
        peer.close()
        with pytest.raises(PeerLost, match="without a word"):
            connection.receive()


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (ValueError("a path nobody should see"), PeerFailed, "ValueError$"),
        (UnexpectedMessage("odd"), PeerFailed, "odd$"),
        (PeerStalled("too slow"), PeerLost, "too slow$"),
        (KeyboardInterrupt(), PeerFailed, "KeyboardInterrupt$"),
    ],
)
def test_the_other_side_is_told_of_failures(
    error: BaseException, expected: type[WireError], text: str
) -> None:
    with two_connections() as (one, other):
        with pytest.raises(type(error)), one:
            raise error
        with pytest.raises(expected, match=text) as raised:
            other.receive()
        assert type(raised.value) is expected


def test_who_sends_learns_why_the_other_side_gave_up() -> None:
    x = torch.zeros(1_000_000, dtype=torch.uint8)

    def send_on(connection: Connection) -> None:
        for _ in range(100):
            connection.send("batch", {}, {"x": x})

    with two_connections(limits=BIG) as (one, other):
        other.fail("out of memory")
        with pytest.raises(PeerFailed, match="out of memory"):
            send_on(one)


def test_a_failure_is_told_to_a_peer_that_still_sends() -> None:
    """Closing at once would reset the connection, and what was told could be lost with it."""
    with connection_and_socket(quick(linger_s=10)) as (connection, peer), ThreadPoolExecutor() as p:
        failing = p.submit(connection.fail, "no memory")
        told = b"".join(iter(lambda: peer.recv(4096), b""))
        peer.sendall(bytes(8 * 1024**2))
        peer.close()
        failing.result(10)
    assert b"no memory" in told


def test_closing_frees_a_thread_that_receives() -> None:
    with two_connections() as (one, _), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.receive)
        one.close()
        with pytest.raises(PeerEnded, match="This side"):
            waiting.result(10)


def test_closing_does_not_wait_for_a_message_that_is_not_taken() -> None:
    x = torch.zeros(32 * 1024**2, dtype=torch.uint8)
    with connection_and_socket(limits=BIG, peer=BIG) as (connection, _):
        posted = connection.post("batch", {}, {"x": x})
        connection.fail("no time")
        with pytest.raises(WireError):
            posted.result(10)


def test_defaults_fit_a_link_of_10_megabits() -> None:
    """226 MB, the most that a batch of the paper's table 4 sends, must pass."""
    assert Deadlines().slowest_rate < 10e6 / 8 / 8  # eight clients share the link
    assert Limits().body_nbytes > 226.5e6
    assert PATIENT.idle_s < Deadlines().idle_s
    assert LIMITS.body_nbytes < Limits().body_nbytes
