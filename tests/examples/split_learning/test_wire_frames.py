"""Frames from hostile peers: each is refused by name, and nothing large is allocated for it."""

from __future__ import annotations

import random
import struct
import tracemalloc
from typing import Any

import pytest
import torch
from lq_testing.split_learning import KEY, LIMITS, OTHER_KEY, frame, receiver_of
from split_learning.wire import (
    MalformedFrame,
    Message,
    PeerLost,
    ReplayedFrame,
    TamperedFrame,
    TooLarge,
    VersionDiffers,
    WireError,
)
from split_learning.wire import message as messages
from split_learning.wire.frames import PREFIX_NBYTES
from split_learning.wire.stream import Receiver


def read(receiver: Receiver) -> Message:
    received = receiver.receive(within_s=10)
    return messages.parse(received.header, received.tensors)


def header(fields: Any = None, tensors: Any = None, kind: Any = "batch") -> dict[str, Any]:
    return {"kind": kind, "fields": fields or {}, "tensors": tensors or []}


def tensor(shape: Any, dtype: Any = "float32", name: Any = "x") -> list[Any]:
    return [name, dtype, shape]


def fields(written: bytes) -> bytes:
    """Return a frame that is right but for what its fields hold."""
    return frame(b'{"kind":"a","fields":{' + written + b'},"tensors":[]}')


RIGHT = frame(header({"step": 3}, [tensor([2, 3], "int16"), tensor([], "bool", "y")]), bytes(13))


def test_a_frame_made_by_hand_is_read() -> None:
    values = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    body = values.numpy().tobytes() + b"\x01"
    described = [tensor([2, 3], "int16"), tensor([], "bool", "y"), tensor([0, 3], name="z")]
    with receiver_of(frame(header({"step": 3}, described), body)) as receiver:
        received = read(receiver)
    assert received.kind == "batch"
    assert received.fields == {"step": 3}
    assert torch.equal(received.tensors["x"], values)
    assert torch.equal(received.tensors["y"], torch.tensor(True))
    assert received.tensors["z"].shape == (0, 3)
    assert all(t.data_ptr() % 16 == 0 for t in received.tensors.values())


DEEP = b'{"kind":"batch","tensors":[],"fields":' + b'{"a":' * 900 + b"1" + b"}" * 901
AT_LIMIT = b'{"kind":"batch","tensors":[],"fields":' + b'{"a":' * 3 + b"[]" + b"}" * 4
HOSTILE: dict[str, tuple[type[WireError], bytes]] = {
    # prefix
    "http": (MalformedFrame, b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n"),
    "version": (VersionDiffers, frame(version=2)),
    "type zero": (MalformedFrame, frame(kind=0)),
    "type unknown": (MalformedFrame, frame(kind=11)),
    "reserved bits": (MalformedFrame, frame(zero=1)),
    "rejection": (MalformedFrame, frame({}, kind=6, key=None)),
    "sequence ahead": (ReplayedFrame, frame(sequence=1)),
    "sequence far": (ReplayedFrame, frame(sequence=2**64 - 1)),
    "header too large": (TooLarge, frame(header_nbytes=LIMITS.header_nbytes + 1)),
    "header of 4 GB": (TooLarge, frame(header_nbytes=2**32 - 1)),
    "body too large": (TooLarge, frame(body_nbytes=LIMITS.body_nbytes + 1)),
    "body of 2^64": (TooLarge, frame(body_nbytes=2**64 - 1)),
    "sign of life with a body": (TooLarge, frame({}, b"x", kind=8)),
    # tags
    "no tag": (TamperedFrame, frame(key=None) + bytes(32)),
    "other key": (TamperedFrame, frame(key=OTHER_KEY)),
    "header changed": (TamperedFrame, RIGHT[:40] + b"~" + RIGHT[41:]),
    "body changed": (TamperedFrame, RIGHT[:-33] + b"\x01" + RIGHT[-32:]),
    "last tag changed": (TamperedFrame, RIGHT[:-1] + bytes([RIGHT[-1] ^ 1])),
    "size changed": (TamperedFrame, RIGHT[:20] + struct.pack("<Q", 14) + RIGHT[28:]),
    # truncation
    "nothing": (PeerLost, b""),
    "end in the prefix": (PeerLost, RIGHT[: PREFIX_NBYTES - 1]),
    "end in the header": (PeerLost, RIGHT[: PREFIX_NBYTES + 5]),
    "end before the body": (PeerLost, RIGHT[:-45]),
    "end in the body": (PeerLost, RIGHT[:-35]),
    "end in the last tag": (PeerLost, RIGHT[:-1]),
    # JSON
    "empty header": (MalformedFrame, frame(b"")),
    "no JSON": (MalformedFrame, frame(b"{'kind': 1}")),
    "pickle": (MalformedFrame, frame(b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00.")),
    "two values": (MalformedFrame, frame(b"{}{}")),
    "trailing bytes": (MalformedFrame, frame(b'{"kind":"a","fields":{},"tensors":[]}\x00')),
    "a list": (MalformedFrame, frame([1])),
    "no UTF-8": (MalformedFrame, fields(b'"a":"\xff"')),
    "half a character": (MalformedFrame, fields(b'"a":"\\ud800"')),
    "half a key": (MalformedFrame, fields(b'"\\ud800":[1]')),
    "key twice": (MalformedFrame, fields(b'"a":1,"a":1')),
    "key twice above": (MalformedFrame, frame(b'{"kind":"a","kind":"b","fields":{},"tensors":[]}')),
    "NaN": (MalformedFrame, fields(b'"a":NaN')),
    "Infinity": (MalformedFrame, fields(b'"a":-Infinity')),
    "1e999": (MalformedFrame, fields(b'"a":1e999')),
    "2^63": (MalformedFrame, frame(header({"a": 2**63}))),
    "4000 digits": (MalformedFrame, fields(b'"a":' + b"9" * 4000)),
    "900 deep": (TooLarge, frame(DEEP)),
    "one too deep": (TooLarge, frame(header({"a": {"a": {"a": [[]]}}}))),
    "many items": (TooLarge, frame(header({"a": [[]] * 150}))),
    "many numbers": (TooLarge, frame(header({"a": [0] * 210}))),
    # parts of a message
    "no tensors": (MalformedFrame, frame({"kind": "a", "fields": {}})),
    "no kind": (MalformedFrame, frame({"fields": {}, "tensors": []})),
    "one more part": (MalformedFrame, frame({**header(), "more": 1})),
    "kind no text": (MalformedFrame, frame(header(kind=7))),
    "kind with a newline": (MalformedFrame, frame(header(kind="a\nb"))),
    "kind of counts": (MalformedFrame, frame(header(kind="alive"))),
    "kind too long": (MalformedFrame, frame(header(kind="a" * 65))),
    "fields a list": (MalformedFrame, frame({"kind": "a", "fields": [], "tensors": []})),
    # tensors
    "tensors a dictionary": (MalformedFrame, frame({"kind": "a", "fields": {}, "tensors": {}})),
    "tensor a name": (MalformedFrame, frame(header(tensors=["xyz"]))),
    "tensor without shape": (MalformedFrame, frame(header(tensors=[["x", "int8"]]))),
    "name a number": (MalformedFrame, frame(header(tensors=[tensor([0], name=1)]))),
    "name empty": (MalformedFrame, frame(header(tensors=[tensor([0], name="")]))),
    "name with escape": (MalformedFrame, frame(header(tensors=[tensor([0], name="\x1b[2J")]))),
    "name twice": (MalformedFrame, frame(header(tensors=[tensor([0]), tensor([0])]))),
    "dtype object": (MalformedFrame, frame(header(tensors=[tensor([1], "object")]), bytes(8))),
    "dtype of torch": (MalformedFrame, frame(header(tensors=[tensor([0], "torch.int8")]))),
    "dtype complex": (MalformedFrame, frame(header(tensors=[tensor([1], "complex64")]), bytes(8))),
    "dtype a list": (MalformedFrame, frame(header(tensors=[tensor([0], ["int8"])]))),
    "shape a number": (TooLarge, frame(header(tensors=[tensor(1)]), bytes(4))),
    "size negative": (MalformedFrame, frame(header(tensors=[tensor([-1, -1])]), bytes(4))),
    "size a float": (MalformedFrame, frame(header(tensors=[tensor([1.0])]), bytes(4))),
    "size a boolean": (MalformedFrame, frame(header(tensors=[tensor([True])]), bytes(4))),
    "size huge": (TooLarge, frame(header(tensors=[tensor([2**62])]), bytes(4))),
    "product of 2^64": (TooLarge, frame(header(tensors=[tensor([2**32, 2**32])]), bytes(4))),
    "huge and empty": (TooLarge, frame(header(tensors=[tensor([2**62, 0, 2**62])]))),
    "four dimensions": (TooLarge, frame(header(tensors=[tensor([1, 1, 1, 1])]), bytes(4))),
    "five tensors": (TooLarge, frame(header(tensors=[tensor([0], name=n) for n in "abcde"]))),
    "body too short": (MalformedFrame, frame(header(tensors=[tensor([2])]), bytes(7))),
    "body too long": (MalformedFrame, frame(header(tensors=[tensor([2])]), bytes(9))),
    "body without tensors": (MalformedFrame, frame(header(), bytes(1))),
    "tensors without body": (MalformedFrame, frame(header(tensors=[tensor([2])]))),
    "boolean of 2": (MalformedFrame, frame(header(tensors=[tensor([2], "bool")]), b"\x01\x02")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_frames_are_refused_by_name(name: str) -> None:
    expected, sent = HOSTILE[name]
    with receiver_of(sent) as receiver, pytest.raises(WireError) as raised:
        read(receiver)
    assert type(raised.value) is expected, raised.value


def test_what_is_at_the_limits_passes() -> None:
    shapes = [tensor([2500, 1, 1]), *(tensor([0], name=name) for name in "abc")]
    for sent in (
        frame(AT_LIMIT),
        frame(header(tensors=shapes), bytes(10_000)),
        frame(header({"a": [0] * 90, "b": -(2**63), "c": 2**63 - 1})),
        frame(header(kind="a" * 64)),
        frame(b'{"kind":"a","fields":{"a":"[[[[[[[[\\"[["},"tensors":[]}'),
    ):
        with receiver_of(sent) as receiver:
            assert read(receiver).kind


def test_replayed_and_reordered_frames_are_refused() -> None:
    first, second = (frame(sequence=number) for number in (0, 1))
    with receiver_of(first + second + first) as receiver:
        read(receiver)
        read(receiver)
        with pytest.raises(ReplayedFrame, match="Frame 0 came where frame 2 is next"):
            read(receiver)
    with receiver_of(first + first) as receiver:
        read(receiver)
        with pytest.raises(ReplayedFrame):
            read(receiver)


def test_an_unfinished_string_takes_no_quadratic_time() -> None:
    from split_learning.wire import plain
    from split_learning.wire.settings import Limits

    with pytest.raises(MalformedFrame):
        plain.load(b'"' + b'\\"' * 2**19, Limits())


def test_a_large_announcement_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes come before allocation: also where the tensors that are announced never come."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: pytest.fail("allocated"))
    for name in ("size huge", "product of 2^64", "huge and empty", "body too long", "other key"):
        with receiver_of(HOSTILE[name][1]) as receiver, pytest.raises(WireError):
            read(receiver)
    monkeypatch.setattr(torch, "empty", empty)
    tracemalloc.start()
    try:
        for name in ("header of 4 GB", "body of 2^64", "900 deep", "many items"):
            with receiver_of(HOSTILE[name][1]) as receiver, pytest.raises(WireError):
                read(receiver)
        assert tracemalloc.get_traced_memory()[1] < 400_000
    finally:
        tracemalloc.stop()


def _mutated(rng: random.Random, key: bytes | None) -> bytes:
    """Return a frame with something wrong: most with right tags, as of a peer with the secret."""
    shape = [rng.choice([0, 1, 2, 7, -1, 2**31, 2**63, 1.5, None]) for _ in range(rng.randrange(4))]
    dtype = rng.choice(["float32", "int8", "bool", "bfloat16", "object", 3])
    encoded = frame(header({"a": [1, {"b": "c"}]}, [tensor(shape, dtype)]), key=None)[
        PREFIX_NBYTES:
    ]
    encoded = bytearray(encoded)
    for _ in range(rng.choice([0, 0, 0, 1, 2, 5])):
        encoded[rng.randrange(len(encoded))] = rng.choice(b'"[]{},:0-9eN\\\x00\xff')
    sizes = {}
    if rng.random() < 0.2:
        sizes["header_nbytes"] = rng.choice([0, 1, len(encoded) - 1, 2**31])
    if rng.random() < 0.2:
        sizes["body_nbytes"] = rng.choice([0, 1, 9999, 2**40])
    body = rng.randbytes(rng.choice([0, 1, 2, 4, 8, 14, 28]))
    made = bytearray(frame(bytes(encoded), body, key=key, **sizes))
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        made[rng.randrange(len(made))] = rng.randrange(256)
    if rng.random() < 0.1:
        del made[rng.randrange(len(made)) :]
    return bytes(made)


@pytest.mark.parametrize("key", [None, KEY], ids=["without tags", "with tags"])
def test_random_frames_raise_nothing_but_our_errors(
    key: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(16)
    allocated = []
    empty = torch.empty

    def recorded(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = empty(shape, dtype=dtype)
        allocated.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", recorded)
    read_well, errors = 0, set()
    for _ in range(400):
        allocated.clear()
        with receiver_of(_mutated(rng, key), key) as receiver:
            try:
                read(receiver)
                read_well += 1
            except WireError as error:
                errors.add(type(error))
        assert sum(allocated) <= LIMITS.body_nbytes
    assert read_well  # or nothing behind the first checks was reached
    assert {MalformedFrame, TooLarge, PeerLost} <= errors
