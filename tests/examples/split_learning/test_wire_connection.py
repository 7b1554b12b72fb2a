"""Messages between two ends of a connection: what arrives, what is refused, what times out."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from lq_testing.split_learning import (
    KEY,
    OTHER_KEY,
    connection_and_socket,
    frame,
    two_connections,
)
from split_learning.wire import (
    Limits,
    MalformedFrame,
    Message,
    PeerFailed,
    PeerLost,
    TamperedFrame,
    UnexpectedMessage,
    UnsendableMessage,
)
from split_learning.wire.authentication import Seal
from split_learning.wire.errors import printable
from split_learning.wire.stream import CHUNK_NBYTES, _in_chunks
from split_learning.wire.tensors import DTYPES

BIG = Limits(body_nbytes=64 * 1024**2)


# --- messages -------------------------------------------------------------------------------------


def test_all_dtypes_and_shapes_arrive_bit_for_bit() -> None:
    given = {
        name: torch.randint(0, 256, (3, 16), dtype=torch.uint8).view(dtype)
        for name, dtype in DTYPES.items()
        if name != "bool"
    }
    given["bool"] = torch.tensor([[True], [False]])
    given["scalar"] = torch.tensor(float("nan"))
    given["empty"] = torch.empty(0, 7, dtype=torch.bfloat16)
    given["transposed"] = torch.arange(12).reshape(3, 4).t()
    given["one row of many"] = torch.arange(12.0).expand(2, 12)[:, ::3]
    given = {name.replace(" ", "_"): tensor for name, tensor in given.items()}
    given["parameter"] = torch.nn.Parameter(torch.ones(2))
    fields = {"a": [1, 2.5, None, True, "ü\n\u2028"], "b": {"c": []}, "t": (1, 2)}
    with two_connections(limits=Limits()) as (one, other):
        one.send("batch", fields, given)
        received = other.receive("batch", "other")
    assert received.kind == "batch"
    assert received.fields == {**fields, "t": [1, 2]}
    assert received.tensors.keys() == given.keys()
    for name, tensor in given.items():
        arrived = received.tensors[name]
        assert arrived.dtype == tensor.dtype
        assert arrived.shape == tensor.shape
        assert not arrived.requires_grad
        ours, theirs = (t.detach().contiguous().reshape(-1) for t in (tensor, arrived))
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_messages_of_many_chunks_and_many_tensors_arrive() -> None:
    many = {f"t{i}": torch.full((i,), i, dtype=torch.int16) for i in range(300)}
    large = {"x": torch.arange(700_000), "y": torch.arange(3), "z": torch.arange(400_001.0)}
    with two_connections(limits=BIG) as (one, other), ThreadPoolExecutor(1) as pool:
        for given in (many, large):
            received = pool.submit(other.receive)
            one.send("batch", {}, given)
            arrived = received.result().tensors
            assert all(torch.equal(arrived[name], tensor) for name, tensor in given.items())
        assert one.traffic.sent["batch"] == other.traffic.received["batch"]
        tensor_nbytes = sum(t.nbytes for g in (many, large) for t in g.values())
        assert one.traffic.sent["batch"].tensor_nbytes == tensor_nbytes


def test_large_messages_are_tagged_while_their_beginning_is_on_its_way() -> None:
    body = [memoryview(bytes(nbytes)) for nbytes in (3, 3 * CHUNK_NBYTES, 5)]
    chunks = list(_in_chunks(b"head", body, Seal(KEY).start()))
    assert [sum(map(len, chunk)) for chunk in chunks[1:-1]] == [CHUNK_NBYTES] * 2
    assert sum(len(piece) for chunk in chunks for piece in chunk) == 4 + 8 + 3 * CHUNK_NBYTES + 64


def test_traffic_counts_what_the_socket_carries() -> None:
    with connection_and_socket() as (connection, peer):
        connection.send("batch", {"a": 1}, {"x": torch.arange(5)})
        connection.send("labels")
        peer.sendall(reply := frame(key=OTHER_KEY))
        connection.receive("batch")
        counted = connection.traffic
        assert counted.sent["batch"].messages == counted.sent["labels"].messages == 1
        assert counted.sent["batch"].tensor_nbytes == 40
        assert counted.received["batch"].nbytes == len(reply)
        connection.close()
        carried = len(b"".join(iter(lambda: peer.recv(4096), b"")))
        assert counted.sent_nbytes == carried
        assert set(counted.sent) == {"handshake", "batch", "labels", "end"}


def test_posted_messages_overlap_and_keep_their_order() -> None:
    """Both ends send more than the kernel holds before either receives."""
    x = torch.arange(2_000_000)
    with two_connections(limits=BIG) as (one, other):
        for end in (one, other):
            posted = end.post("first", {}, {"x": x})
            posted_too = end.post("second")
            assert not posted.done()
        for end in (one, other):
            assert torch.equal(end.receive("first").tensors["x"], x)
            end.receive("second")
        assert posted.result(10) is posted_too.result(10) is None


def test_what_is_sent_waits_for_what_was_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_connections() as (one, other), ThreadPoolExecutor(1) as pool:
        send, begin = one._send, threading.Event()

        def slowly(kind: str, *prepared: Any) -> None:
            if kind == "first":
                begin.wait(10)
            send(kind, *prepared)

        monkeypatch.setattr(one, "_send", slowly)
        one.post("first")
        second = pool.submit(one.send, "second")
        assert not wait([second], timeout=0.1).done
        begin.set()
        assert [other.receive().kind, other.receive().kind] == ["first", "second"]
        second.result()


@pytest.mark.parametrize(
    ("kind", "fields", "tensors", "text"),
    [
        ("Batch", {}, {}, "lower-case"),
        ("a" * 65, {}, {}, "lower-case"),
        ("end", {}, {}, "lower-case"),
        ("a", {"loss": float("nan")}, {}, r"fields\['loss'\]` is nan .* as tensors"),
        ("a", {"a": [1, {"b": torch.ones(1)}]}, {}, r"fields\['a'\]\[1\]\['b'\]` is tensor"),
        ("a", {"a": b"x"}, {}, "bytes"),
        ("a", {"a": 2**63}, {}, "64 bits"),
        ("a", {1: 2}, {}, "keys must be strings"),
        ("a", {"a": "\ud800"}, {}, "no Unicode"),
        ("a", {"a": [[[[1]]]]}, {}, "more than 5"),
        ("a", {"a": [0] * 200}, {}, "Send long lists as tensors"),
        ("a", {"a": "x" * 5000}, {}, "Send long lists as tensors"),
        ("a", {}, {"x": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        ("a", {}, {"x": torch.ones(2).to_sparse()}, "no dense tensor"),
        ("a", {}, {"x": torch.ones(2, device="meta")}, "no dense tensor"),
        ("a", {}, {"x": [1.0]}, "no dense tensor"),
        ("a", {}, {"x": torch.ones(1, 1, 1, 1)}, "3 dimensions"),
        ("a", {}, {"x y": torch.ones(1)}, "names have"),
        ("a", {}, {"x": torch.ones(2501)}, "10004 bytes; this connection takes 10000"),
        ("a", {}, {str(i): torch.ones(1) for i in range(5)}, "5 tensors; allowed: 4"),
    ],
)
def test_what_may_not_be_sent_leaves_the_connection_working(
    kind: str, fields: Any, tensors: Any, text: str
) -> None:
    with two_connections() as (one, other):
        for send in (one.send, one.post):
            with pytest.raises(UnsendableMessage, match=text):
                send(kind, fields, tensors)
        one.send("right")
        assert other.receive("right").fields == {}


def test_the_sender_keeps_to_the_receivers_limits() -> None:
    small = Limits(body_nbytes=100)
    with connection_and_socket(peer=small) as (connection, _):
        assert connection.peer.body_nbytes == 100
        with pytest.raises(UnsendableMessage, match="takes 100"):
            connection.send("a", {}, {"x": torch.ones(26)})


def test_parts_of_a_message_are_checked() -> None:
    message = Message("batch", {"step": 3, "last": True}, {"x": torch.ones(2, 3)})
    x = message.tensors["x"]
    assert message.field("step", int) == 3
    assert message.tensor("x") is message.tensor("x", shape=(2, None)) is x
    assert message.tensor("x", dtype=torch.float32, shape=[2, 3]) is x
    for name, kind in (("last", int), ("step", float), ("step", bool), ("none", int)):
        with pytest.raises(UnexpectedMessage, match=f"'{name}' of .*expected {kind.__name__}"):
            message.field(name, kind)
    for name, wanted in (
        ("y", {}),
        ("x", {"dtype": torch.float16}),
        ("x", {"shape": (3, 2)}),
        ("x", {"shape": (2,)}),
        ("x", {"shape": (2, 3, None)}),
    ):
        with pytest.raises(UnexpectedMessage, match=f"tensor '{name}'"):
            message.tensor(name, **wanted)


def test_a_message_of_another_kind_is_refused_and_its_sender_told() -> None:
    with two_connections() as (one, other):
        one.send("labels")
        with pytest.raises(UnexpectedMessage, match="'labels' where batch or end was"), other:
            other.receive("batch", "end")
        with pytest.raises(PeerFailed, match="'labels' where batch or end was"):
            one.receive()


# --- hostile peers --------------------------------------------------------------------------------


def test_tampering_ends_the_connection_for_good() -> None:
    with connection_and_socket() as (connection, peer):
        peer.sendall(frame(key=KEY) + frame(key=OTHER_KEY))  # its own frame, reflected
        for _ in range(2):
            with pytest.raises(TamperedFrame):
                connection.receive()
        with pytest.raises(TamperedFrame):
            connection.send("batch")


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 5, 6])
def test_frames_of_the_handshake_are_refused_after_it(kind: int) -> None:
    with connection_and_socket() as (connection, peer):
        peer.sendall(frame({}, kind=kind, key=None if kind == 6 else OTHER_KEY))
        with pytest.raises(MalformedFrame, match="after the handshake"):
            connection.receive()


def test_text_of_a_peer_is_shown_without_control_characters() -> None:
    with connection_and_socket() as (connection, peer):
        reason = "\x1b[2J\nroot: all is well\u202e" + "x" * 9000
        peer.sendall(frame({"reason": reason[:900]}, kind=9, key=OTHER_KEY))
        with pytest.raises(PeerFailed) as raised:
            connection.receive()
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1000
    assert printable("a\x00\n\u202eü") == "a\\x00\\n\\u202e\\xfc"


def test_nothing_follows_half_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come while a message is sent; what came after it would be read as its rest."""
    with connection_and_socket() as (connection, peer):

        def interrupted(*_: Any) -> int:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(connection._sender, "_send_all", interrupted)
            with pytest.raises(KeyboardInterrupt):
                connection.send("batch")
        with pytest.raises(PeerLost, match="cut off"):
            connection.send("batch")
        connection.close()
        assert peer.recv(4096) == b""


def test_small_messages_do_not_wait_for_others() -> None:
    with two_connections() as ends:
        for end in ends:
            own = end._sender.socket
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
