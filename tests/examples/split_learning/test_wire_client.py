"""Clients that connect again, and addresses."""

from __future__ import annotations

import socket

import pytest
from lq_testing.split_learning import (
    LOOPBACK,
    OTHER_SECRET,
    PATIENT,
    SECRET,
    answer,
    join,
    serving,
    works,
)
from split_learning.wire import (
    PeerEnded,
    PeerLost,
    Retry,
    Server,
    WireError,
    connect,
    parse_address,
    show_address,
)


def test_connecting_again_waits_longer_each_time_and_gives_up() -> None:
    pauses: list[float] = []
    with socket.create_server(LOOPBACK) as taken:
        address = taken.getsockname()
    retry = Retry(attempts=5, first_s=1, longest_s=3)
    with pytest.raises(PeerLost, match="cannot be reached.*firewalls"):
        connect(address, SECRET, retry=retry, sleep=pauses.append)
    assert len(pauses) == 4
    for pause, longest in zip(pauses, [1, 2, 3, 3], strict=True):
        assert longest / 2 <= pause <= longest


def test_pauses_are_bounded() -> None:
    retry = Retry(attempts=10**6, first_s=0.5, factor=2, longest_s=30)
    assert [retry.pause_s(n, 1.0) for n in (1, 2, 3, 10, 10**6)] == [0.5, 1, 2, 30, 30]
    assert retry.pause_s(1, 0.0) == 0.25
    assert Retry(first_s=0, longest_s=0).pause_s(5, 1.0) == 0


@pytest.mark.parametrize(
    "wrong", [{"attempts": 0}, {"first_s": -1}, {"first_s": 9, "longest_s": 8}, {"factor": 0.5}]
)
def test_wrong_retries_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Retry(**wrong)


def test_refusals_are_not_tried_again() -> None:
    with serving() as server:
        for secret, configuration in ((OTHER_SECRET, {"model": "tiny"}), (SECRET, {})):
            with pytest.raises(WireError):
                connect(
                    server.address,
                    secret,
                    configuration,
                    deadlines=PATIENT,
                    retry=Retry(attempts=3),
                    sleep=lambda s: pytest.fail("tried again"),
                )
    with pytest.raises(ValueError, match="no host"):
        connect(("no.such.host.invalid", 1), SECRET, sleep=lambda s: pytest.fail("tried again"))


def test_a_client_connects_again_to_a_server_that_was_started_anew() -> None:
    with serving() as server:
        client = join(server)
        assert works(client)
    with client, pytest.raises(PeerEnded):
        works(client)
    started: list[Server] = []

    def start_server(_: float) -> None:
        again = Server(server.address, SECRET, answer, {"model": "tiny"}, deadlines=PATIENT)
        started.append(again)
        again.start()

    with join(server, retry=Retry(attempts=2), sleep=start_server) as client:
        assert works(client)
    started[0].stop()


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("server.example:5600", ("server.example", 5600)),
        ("[2001:db8::7]:1", ("2001:db8::7", 1)),
    ],
)
def test_addresses_are_read_and_shown(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
    assert show_address(address) == text


@pytest.mark.parametrize("text", ["", "a", ":1", "a:", "a:b", "a:-1", "a:65536", "::1:5", "a:٣"])
def test_other_texts_are_no_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_address(text)
