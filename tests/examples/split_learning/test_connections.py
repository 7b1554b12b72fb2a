"""Clients at a server: what differs, what breaks, what stalls, and what the network carries."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from lq_testing.split_runs import PATIENT, answering, echo, identity
from split_learning.wire import common as calls
from split_learning.wire.client import Connection, _open_channel, connect
from split_learning.wire.common import (
    Deadlines,
    Limits,
    PeerFailed,
    PeerLost,
    PeerStalled,
    Refused,
    Retry,
    ServerBusy,
    UnexpectedMessage,
    UnsendableMessage,
    WireError,
    parse_address,
    show_address,
)
from split_learning.wire.messages import PIECE_NBYTES, Message, encode
from split_learning.wire.server import Server

BIG = {"x": torch.zeros(64 * 1024**2, dtype=torch.uint8)}


def join(server: Server, **changed: Any) -> Connection:
    options: dict[str, Any] = {"configuration": {"model": "tiny"}, "deadlines": PATIENT}
    options |= {"address": server.address, "identity": identity("alice")}
    return connect(**(options | changed))


def works(connection: Connection) -> bool:
    x = torch.arange(5)
    connection.send(Message("batch", {"step": 3}, {"x": x}))
    message = connection.receive("output")
    return message.field("step", int) == 3 and torch.equal(message.tensor("x"), x)


def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    until = time.monotonic() + 10
    while text not in caplog.text:
        assert time.monotonic() < until, caplog.text
        time.sleep(0.01)


@contextlib.contextmanager
def relay(
    server: Server, frozen: threading.Event | None = None
) -> Iterator[tuple[tuple[str, int], list[bytearray], Callable[[], None]]]:
    """Give an address that leads to the server, what was carried either way, and what cuts it."""
    carried, ends = [bytearray(), bytearray()], list[socket.socket]()

    def copy(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                kept += data
                if frozen is None or not frozen.is_set():
                    target.sendall(data)
        cut()

    def accept() -> None:
        with contextlib.suppress(OSError):
            near = listening.accept()[0]
            far = socket.create_connection(server.address)
            ends.extend((near, far))
            back = threading.Thread(target=copy, args=(far, near, carried[1]))
            back.start()
            copy(near, far, carried[0])
            back.join()

    def cut() -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept)
        thread.start()
        yield listening.getsockname(), carried, cut
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        cut()
        thread.join()
        for end in ends:
            end.close()


# --- what crosses ---------------------------------------------------------------------------------


def test_bytes_are_counted_as_the_network_carries_them() -> None:
    x = torch.randint(0, 256, (3_000_000,), dtype=torch.uint8)
    secret = b"a line of text that nobody may read"
    text = torch.frombuffer(bytearray(secret), dtype=torch.uint8)
    with (
        answering() as server,
        relay(server) as (address, carried, _),
        join(server, address=address) as connection,
    ):
        for _ in range(2):
            connection.send(Message("batch", {}, {"x": x, "text": text}))
            assert torch.equal(connection.receive("output").tensor("x"), x)
        traffic = connection.traffic
    assert set(traffic.sent) == {"handshake", "batch"}
    assert traffic.sent["batch"].messages == traffic.received["output"].messages == 2
    assert traffic.sent["batch"].tensor_nbytes == 2 * (len(x) + len(text))
    for counts, really in zip((traffic.sent, traffic.received), carried, strict=True):
        counted = sum(count.nbytes for count in counts.values())
        assert 0 <= len(really) - counted < 0.006 * counted + 5000
        assert secret not in really


def test_what_was_recorded_cannot_be_played_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with answering() as server, relay(server) as (address, carried, _):
        with join(server, address=address) as connection:
            assert works(connection)
        connected = caplog.text.count("connected.")
        attacker = socket.create_connection(server.address, timeout=10)
        with attacker, contextlib.suppress(OSError):
            attacker.sendall(carried[0])
            while attacker.recv(1 << 16):
                pass
        assert caplog.text.count("connected.") == connected == 1
        with join(server) as connection:
            assert works(connection)


# --- what differs ---------------------------------------------------------------------------------


def test_other_configurations_and_versions_are_refused_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(configuration: dict[str, Any]) -> str:
        with pytest.raises(Refused) as raised:
            join(
                server,
                configuration=configuration,
                retry=Retry(attempts=3),
                sleep=lambda s: pytest.fail("tried again"),
            )
        return str(raised.value)

    with answering() as server:
        assert "`model`: server 'tiny', client 'large'. Start both" in refused({"model": "large"})
        assert "`model`: server 'tiny', client not given" in refused({})
        assert "`bits`: server not given, client 4" in refused({"model": "tiny", "bits": 4})
        assert "`model`: server 'tiny', client '\\x1b[2J'" in refused({"model": "\x1b[2J"})
        many = refused({f"option{i:03}": i for i in range(200)})
        assert "`option008`" in many
        assert "; and 191 more." in many
        monkeypatch.setattr(calls, "PROTOCOL", 3)
        assert "`protocol`: server 2, client 3" in refused({"model": "tiny"})
        monkeypatch.undo()
        monkeypatch.setattr(calls, "__version__", "0")
        assert "`package`: server '" in refused({"model": "tiny"})
        monkeypatch.undo()
        for wrong in ({"package": "1"}, {"a": "x" * 7000}):
            with pytest.raises(ValueError, match="configuration"):
                join(server, configuration=wrong)
        monkeypatch.setattr("split_learning.wire.client.METHOD", "Other")
        with pytest.raises(Refused, match="Method not found"):
            join(server)


def test_a_client_above_the_number_is_told_and_may_come_later() -> None:
    with answering(max_clients=1) as server:
        with join(server) as first:
            with pytest.raises(ServerBusy):
                join(server)
            assert works(first)
        soon = Retry(attempts=50, first_s=0.01, longest_s=0.05)
        with join(server, retry=soon) as second:
            assert works(second)
    with pytest.raises(ValueError, match="max_clients=0"):
        Server(("127.0.0.1", 0), None, lambda: echo, max_clients=0)


# --- what breaks ----------------------------------------------------------------------------------


def test_errors_end_their_client_alone(caplog: pytest.LogCaptureFixture) -> None:
    def answer(message: Message) -> Iterable[Message]:
        if message.kind == "bug":
            raise ZeroDivisionError("a secret path")
        message.field("step", int)
        return echo(message)

    with answering(answer) as server, join(server) as honest:
        for message, text in (
            (Message("bug"), "ZeroDivisionError"),
            (Message("a"), "field 'step'"),
        ):
            with join(server) as other:
                other.send(message)
                with pytest.raises(PeerFailed, match=text) as raised:
                    other.receive()
                assert "secret" not in str(raised.value)
                with pytest.raises(PeerFailed):
                    other.send(message)
        with join(server) as other:
            other.send(Message("batch", {"step": 1}))
            with pytest.raises(UnexpectedMessage, match="'output' where loss was expected"):
                other.receive("loss")
        assert works(honest)
    assert "ZeroDivisionError: a secret path" in caplog.text


def test_a_client_that_sends_is_told_at_once() -> None:
    held = threading.Event()

    def answer(message: Message) -> Iterable[Message]:
        held.wait(20)
        raise ZeroDivisionError

    with answering(answer) as server, join(server) as connection:
        connection.send(Message("batch"))
        timer = threading.Timer(0.3, held.set)
        timer.start()
        with pytest.raises(PeerFailed, match="ZeroDivisionError"):
            connection.send(Message("batch", {}, BIG))
        timer.join()


def test_raw_messages_above_the_limits_are_refused() -> None:
    alice = identity("alice")
    terms = calls.own_terms({"model": "tiny"}, Limits())

    def answer_to(metadata: Any, *pieces: bytes) -> grpc.StatusCode:
        waiting: queue.Queue[bytes] = queue.Queue()  # which never ends
        for piece in pieces:
            waiting.put(piece)
        with _open_channel(show_address(server.address), alice, PATIENT) as channel:
            requests = iter(waiting.get, b"")
            call = channel.stream_stream("/lq.SplitLearning/Connect")(requests, metadata=metadata)
            code = call.code()
            waiting.put(b"")
        return code

    with answering(limits=Limits(nbytes=PIECE_NBYTES // 2)) as server:
        exhausted, invalid = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT
        good, small = ((calls.TERMS_KEY, terms),), bytes(8)
        assert answer_to(good, bytes(PIECE_NBYTES + 1)) in (exhausted, grpc.StatusCode.CANCELLED)
        assert answer_to((), small) == invalid
        assert answer_to(((calls.TERMS_KEY, b"[" * 5000),), small) == invalid
        assert answer_to(((calls.TERMS_KEY, b'{"compared": {}, "nbytes": true}'),)) == invalid
        assert answer_to(((calls.TERMS_KEY, bytes(100_000)),)) == exhausted
        assert answer_to(good, small) == invalid
        with join(server) as honest:
            assert works(honest)
            with pytest.raises(UnsendableMessage, match="the other side takes 262144"):
                honest.send(Message("batch", {}, {"x": torch.zeros(PIECE_NBYTES)}))
            assert works(honest)


def test_a_cut_network_and_a_stopped_server_are_lost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with answering() as server:
        with relay(server) as (address, _, cut), join(server, address=address) as connection:
            assert works(connection)
            cut()
            with pytest.raises(PeerLost, match="The connection broke"):
                works(connection)
        logged(caplog, "he connection broke")
        assert "ended" not in caplog.text
        connection = join(server)
        assert works(connection)
    with connection, pytest.raises(PeerLost):
        works(connection)
    pauses: list[float] = []
    with pytest.raises(PeerLost, match="cannot be reached.*firewalls"):
        join(server, retry=Retry(attempts=5, first_s=1, longest_s=3), sleep=pauses.append)
    for pause, longest in zip(pauses, [1, 2, 3, 3], strict=True):
        assert longest / 2 <= pause <= longest
    started = contextlib.ExitStack()
    again = answering(address=server.address)  # the port is free again
    with (
        started,
        join(
            server, retry=Retry(attempts=9), sleep=lambda s: started.enter_context(again)
        ) as connection,
    ):
        assert works(connection)
    assert "Traceback" not in caplog.text


def test_a_taken_port_is_an_error() -> None:
    with answering() as server, pytest.raises(OSError, match="Failed to bind"):
        answering(address=server.address).__enter__()


# --- what stalls ----------------------------------------------------------------------------------


def test_silent_sockets_keep_no_client_out() -> None:
    with (
        answering(deadlines=replace(PATIENT, connect_s=1.0)) as server,
        contextlib.ExitStack() as ends,
    ):
        silent = [
            ends.enter_context(socket.create_connection(server.address, timeout=10))
            for _ in range(40)
        ]
        silent[0].sendall(b"\x16\x03\x01")  # the beginning of TLS
        silent[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        began = time.monotonic()
        with join(server) as connection:
            assert works(connection)
        assert time.monotonic() - began < 2
        for end in silent[:1] + silent[2:]:
            with contextlib.suppress(ConnectionError):
                assert end.recv(1) == b""  # cut after a second
        assert time.monotonic() - began < 8


def test_clients_that_stall_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    def answer(message: Message) -> Iterable[Message]:
        yield Message("output", message.fields, BIG if message.kind == "greedy" else {})

    with answering(answer, deadlines=replace(PATIENT, stall_s=0.5, wait_s=2)) as server:
        greedy, half, idle = join(server), join(server), join(server)
        greedy.send(Message("greedy"))  # and takes nothing
        with contextlib.suppress(WireError):
            half._put(b"\x40" + bytes(7), 1.0)  # its header never comes
            half._put(bytes(8), 1.0)
        logged(caplog, "it took no answer in time")
        logged(caplog, "PeerStalled: It sent nothing for 2.0 s")
        for connection in (greedy, half, idle):
            with pytest.raises((PeerLost, PeerFailed)):
                all(map(bool, iter(connection.receive, None)))
            connection.close()
        with join(server) as connection:
            connection.send(Message("batch"))
            connection.receive("output")


def test_half_a_message_is_cut_too(caplog: pytest.LogCaptureFixture) -> None:
    first, *_ = encode(Message("batch", {}, BIG), Limits().nbytes)
    with answering(deadlines=replace(PATIENT, stall_s=0.3)) as server, join(server) as connection:
        connection._outgoing.put(bytes(first))
        with pytest.raises(PeerLost):
            connection.receive()
        logged(caplog, "PeerStalled: It sent nothing for 0.3 s")


def test_servers_that_stall_do_not_hold_a_client() -> None:
    quick = Deadlines(connect_s=0.3, idle_s=20, wait_s=0.3, stall_s=0.3)
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        pytest.raises(PeerStalled, match="did not answer within"),
    ):
        connect(listening.getsockname(), identity("alice"), deadlines=quick)
    held = threading.Event()

    def answer(message: Message) -> Iterable[Message]:
        held.wait(20)
        return ()

    quick = replace(quick, connect_s=20)
    with answering(answer) as server:
        with join(server, deadlines=quick) as connection:
            connection.send(Message("batch"))
            with pytest.raises(PeerStalled, match=r"sent nothing for 0\.3 s"):
                connection.receive()
        with join(server, deadlines=quick) as connection:
            connection.send(Message("batch"))
            with pytest.raises(PeerStalled, match=r"took nothing for 0\.3 s"):
                connection.send(Message("batch", {}, BIG))
        held.set()


def test_a_silent_network_is_noticed_and_a_busy_server_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    frozen, quick = threading.Event(), replace(PATIENT, idle_s=1.8)

    def answer(message: Message) -> Iterable[Message]:
        time.sleep(2.2)  # pings are answered meanwhile
        yield Message("output", message.fields, message.tensors)

    with (
        answering(answer, deadlines=quick) as server,
        relay(server, frozen) as (address, _, _),
        join(server, address=address, deadlines=quick) as connection,
    ):
        assert works(connection)
        frozen.set()
        began = time.monotonic()
        with pytest.raises(PeerLost, match="The connection broke"):
            connection.receive()
        assert time.monotonic() - began < 10
        logged(caplog, "PeerLost: The connection broke")


# --- settings -------------------------------------------------------------------------------------


def test_pauses_are_bounded() -> None:
    retry = Retry(attempts=10**6, first_s=0.5, longest_s=30)
    assert [retry.pause_s(n, 1.0) for n in (1, 2, 3, 10, 10**6)] == [0.5, 1, 2, 30, 30]
    assert retry.pause_s(1, 0.0) == 0.25
    assert Retry(first_s=0, longest_s=0).pause_s(5, 1.0) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Retry(attempts=0),
        lambda: Retry(first_s=-1),
        lambda: Retry(first_s=9, longest_s=8),
        lambda: Limits(tensors=0),
        lambda: Deadlines(wait_s=0),
        lambda: Deadlines(idle_s=float("inf")),
    ],
)
def test_wrong_settings_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        wrong()


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


def test_a_wrong_host_is_not_tried_again() -> None:
    with pytest.raises(ValueError, match="no host"):
        connect(
            ("no.such.host.invalid", 1),
            None,
            retry=Retry(attempts=3),
            sleep=lambda s: pytest.fail("tried again"),
        )
