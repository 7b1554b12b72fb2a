"""A server and its clients: none stops the others, and all ends are in good order."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import Any

import pytest
import torch
from lq_testing.split_learning import (
    LOOPBACK,
    OTHER_SECRET,
    PATIENT,
    SECRET,
    answer,
    frame,
    join,
    quick,
    serving,
    works,
)
from split_learning.wire import (
    NO_AUTHENTICATION,
    AuthenticationFailed,
    Connection,
    Limits,
    PeerEnded,
    PeerFailed,
    PeerLost,
    Refused,
    Retry,
    Server,
    ServerBusy,
    connect,
)
from split_learning.wire import server as servers


def soon(_: float) -> None:
    time.sleep(0.01)


def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Wait until a server, in another thread, has logged this."""
    until = time.monotonic() + 10
    while text not in caplog.text:
        assert time.monotonic() < until, f"{text!r} is not in {caplog.text!r}"
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def _all_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "split_learning.wire")


# --- several clients ------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [SECRET, NO_AUTHENTICATION], ids=["secret", "none"])
def test_several_clients_are_served_at_once(secret: Any) -> None:
    with serving(secret=secret) as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(join(server, secret)) for _ in range(3)]
        for step in range(3):
            assert all(works(client, step) for client in clients)
        own = sum(client.traffic.sent["batch"].nbytes for client in clients)
        stack.close()
    assert server.traffic.received["batch"].nbytes == own
    assert server.traffic.received["batch"].messages == 9
    assert server.traffic.sent["handshake"].messages == 3


def test_two_clients_work_while_others_stall(caplog: pytest.LogCaptureFixture) -> None:
    """One stranger says nothing, one client stops within a frame, one never takes its answer."""
    deadlines = quick(stall_s=1.0)
    big = Limits(body_nbytes=64 * 1024**2)
    with serving(deadlines=deadlines, limits=big) as server, contextlib.ExitStack() as stack:
        mute = stack.enter_context(socket.create_connection(server.address))
        stopped, greedy = (stack.enter_context(join(server, limits=big)) for _ in range(2))
        first, second = (stack.enter_context(join(server)) for _ in range(2))
        stopped._sender.socket.sendall(b"LQsl\x01")
        x = torch.zeros(32 * 1024**2, dtype=torch.uint8)
        posted = greedy.post("batch", {}, {"x": x})
        assert works(first)
        assert works(second)
        posted.result(10)
        logged(caplog, "sent only 5 bytes of a message")
        logged(caplog, "took only")
        assert works(first, 1)
        assert works(second, 1)
        assert "Traceback" not in caplog.text
        mute.close()


def test_a_client_above_the_number_is_told_and_may_come_later() -> None:
    with serving(max_clients=1) as server:
        with join(server) as first:
            with pytest.raises(ServerBusy, match="serves 1 clients already"):
                join(server)
            assert works(first)
        with join(server, retry=Retry(attempts=50), sleep=soon) as second:
            assert works(second)


def test_strangers_take_no_clients_room_and_only_so_many_threads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(max_clients=1, max_strangers=2) as server, contextlib.ExitStack() as stack:
        mute = [stack.enter_context(socket.create_connection(server.address)) for _ in range(2)]
        logged_out = stack.enter_context(socket.create_connection(server.address))
        logged_out.settimeout(10)
        assert logged_out.recv(1) == b""
        logged(caplog, "too many handshakes")
        mute.pop().close()
        logged(caplog, "without a word")
        with join(server, retry=Retry(attempts=50), sleep=soon) as client:
            assert works(client)
        for end in mute:
            end.close()


def test_a_stranger_that_trickles_is_cut_after_the_handshakes_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hello = frame({"authentication": True, "nonce": "ab" * 32}, kind=1, key=None)
    with serving(deadlines=quick(handshake_s=1.0)) as server:
        with socket.create_connection(server.address) as slow:
            with contextlib.suppress(OSError):
                for byte in hello:
                    slow.sendall(bytes([byte]))
                    time.sleep(0.02)
            logged(caplog, "PeerStalled")
        with join(server) as client:
            assert works(client)


# --- errors ---------------------------------------------------------------------------------------


def test_a_server_goes_on_after_every_error(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server:
        with pytest.raises(AuthenticationFailed):
            join(server, OTHER_SECRET)
        logged(caplog, "AuthenticationFailed: The client does not know")
        with pytest.raises(Refused, match="`model`: server 'tiny', client 'large'"):
            connect(server.address, SECRET, {"model": "large"}, deadlines=PATIENT)
        logged(caplog, "Refused: Client and server differ: `model`")
        with socket.create_connection(server.address) as web:
            web.sendall(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n")
        logged(caplog, "speaks another protocol")
        with join(server) as wrong:
            wrong.send("labels")
            with pytest.raises(PeerFailed, match="'labels' where batch was expected"):
                wrong.receive()
        logged(caplog, "UnexpectedMessage")
        lost = join(server)
        lost._sender.socket.sendall(b"LQsl")
        lost._cut(PeerLost("for the test"))
        logged(caplog, "PeerLost: The other side closed the connection after 4 bytes")
        lost.close()
        assert "Traceback" not in caplog.text
        with join(server) as client:
            assert works(client)


def test_a_refusal_is_told_to_a_client_that_still_sends() -> None:
    with serving(deadlines=quick(linger_s=10)) as server:
        with socket.create_connection(server.address, timeout=5) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n")
            told = b"".join(iter(lambda: client.recv(4096), b""))
            client.sendall(bytes(8 * 1024**2))
        assert b"malformed" in told


def test_an_error_of_the_handler_is_logged_whole_and_told_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(connection: Connection) -> None:
        connection.receive("batch")
        raise ZeroDivisionError("a secret path")

    with serving(fails) as server, join(server) as client:
        client.send("batch")
        with pytest.raises(PeerFailed) as raised:
            client.receive()
    assert "ZeroDivisionError" in str(raised.value)
    assert "secret" not in str(raised.value)
    assert "ZeroDivisionError: a secret path" in caplog.text


def test_a_client_that_breaks_its_room_gives_it_back() -> None:
    def fails(connection: Connection) -> None:
        connection.receive("batch").field("step", int)

    with serving(fails, max_clients=1) as server:
        for _ in range(3):
            with join(server, retry=Retry(attempts=50), sleep=soon) as client:
                client.send("batch")
                with pytest.raises(PeerFailed):
                    client.receive()


def test_options_are_checked() -> None:
    for name in ("max_clients", "max_strangers"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            Server(LOOPBACK, SECRET, answer, **{name: 0})
    with pytest.raises(OSError, match="assign requested address|not available"):
        Server(("203.0.113.1", 0), SECRET, answer)


# --- end ------------------------------------------------------------------------------------------


def test_stopping_ends_clients_in_good_order_and_frees_the_port() -> None:
    entered = threading.Event()

    def handler(connection: Connection) -> None:
        entered.set()
        answer(connection)

    with serving(handler) as server:
        client = join(server)
        mute = socket.create_connection(server.address, timeout=5)
        assert entered.wait(10)
        until = time.monotonic() + 10
        while len(server._open) < 2:
            assert time.monotonic() < until
            time.sleep(0.005)
    with mute:
        assert mute.recv(1) == b""
    with client, pytest.raises(PeerEnded, match="other side"):
        client.receive()
    with pytest.raises(PeerLost, match="cannot be reached"):
        join(server)
    server.stop()
    Server(server.address, SECRET, answer).stop()


def test_stopping_frees_a_handler_that_sends() -> None:
    x = {"x": torch.zeros(32 * 1024**2, dtype=torch.uint8)}
    entered = threading.Event()
    big = Limits(body_nbytes=64 * 1024**2)

    def handler(connection: Connection) -> None:
        entered.set()
        connection.send("output", {}, x)

    with serving(handler, limits=big) as server:
        client = join(server, limits=big)
        assert entered.wait(10)
    client.fail("end of the test")


def test_a_server_stops_before_it_has_begun() -> None:
    server = Server(LOOPBACK, SECRET, answer)
    server.stop()
    server.serve_forever()


def test_serve_forever_ends_with_stop() -> None:
    server = Server(LOOPBACK, SECRET, answer, {"model": "tiny"}, deadlines=PATIENT)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with join(server) as client:
        assert works(client)
    server.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_a_lack_of_files_is_survived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(servers, "_PAUSE_S", 0.01)
    with serving() as server:
        real, fails = server._listening, [OSError(24, "Too many open files"), BlockingIOError()]

        class Listening:
            def accept(self) -> Any:
                if fails:
                    raise fails.pop(0)
                return real.accept()

            def fileno(self) -> int:
                return real.fileno()

            def close(self) -> None:
                real.close()

        server._listening = Listening()  # type: ignore[assignment]
        with join(server) as client:
            assert works(client)
        assert "Too many open files" in caplog.text
