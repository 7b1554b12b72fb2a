"""What a message brings over, and what is refused before anything is allocated for it."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import pytest
import torch
from split_learning.wire.common import (
    Limits,
    MalformedMessage,
    TooLarge,
    UnexpectedMessage,
    UnsendableMessage,
    WireError,
    printable,
)
from split_learning.wire.messages import (
    _DTYPES,
    PIECE_NBYTES,
    Message,
    Traffic,
    encode,
    read_message,
)

LIMITS = Limits(nbytes=100_000, tensors=4, dims=3)


def read(pieces: list[Any], limits: Limits = LIMITS) -> Message | None:
    waiting = [bytes(piece) for piece in pieces]
    return read_message(lambda first: waiting.pop(0) if waiting else None, limits, Traffic())


def header(tensors: Any = None, body: bytes = b"", **metadata: Any) -> bytes:
    """Return a message, by default a right one, written without the code under test."""
    told = {"__metadata__": {"kind": "batch", "fields": "{}"} | metadata} | (tensors or {})
    encoded = told if isinstance(told, bytes) else json.dumps(told).encode()
    return struct.pack("<Q", len(encoded)) + encoded + body


def test_all_dtypes_and_shapes_arrive_bit_for_bit() -> None:
    given = {
        name: torch.randint(0, 256, (3, 16), dtype=torch.uint8).view(dtype)
        for name, dtype in _DTYPES.items()
        if dtype is not torch.bool
    }
    given["bool"] = torch.tensor([[True], [False]])
    given["scalar"] = torch.tensor(float("nan"))
    given["empty"] = torch.empty(0, 7, dtype=torch.bfloat16)
    given["transposed"] = torch.arange(12).reshape(3, 4).t()
    given["row of many"] = torch.arange(12.0).expand(2, 12)[:, ::3]
    given["parameter"] = torch.nn.Parameter(torch.ones(2))
    given["again"] = given["parameter"].detach()  # shares its memory
    given["large"] = torch.arange(700_000)
    fields = {"a": [1, 2.5, None, True, "ü\n\u2028"], "b": {"c": []}}
    pieces = encode(Message("batch", fields, given), Limits().nbytes)
    assert len(pieces) == -(-sum(map(len, pieces)) // PIECE_NBYTES) > 10
    arrived = read(pieces, Limits())
    assert arrived is not None
    assert (arrived.kind, arrived.fields) == ("batch", fields)
    assert arrived.tensors.keys() == given.keys()
    for name, tensor in given.items():
        other = arrived.tensors[name]
        assert (other.dtype, other.shape, other.requires_grad) == (tensor.dtype, tensor.shape, 0)
        ours, theirs = (t.detach().contiguous().reshape(-1) for t in (tensor, other))
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert read([]) is None


def described(dtype: Any = "F32", shape: Any = (1,), nbytes: int = 4) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}


@pytest.mark.parametrize(
    ("sent", "expected", "text"),
    [
        ([b"GET / "], MalformedMessage, "less than 8"),
        ([struct.pack("<Q", 1 << 40) + b"{}"], TooLarge, "header of 1099511627776"),
        ([struct.pack("<Q", 300_000) + bytes(300_000)], TooLarge, "header of 300000"),
        ([struct.pack("<Q", 2) + b"[]"], MalformedMessage, "a list, not an object"),
        ([struct.pack("<Q", 3) + b"\x80\x04."], MalformedMessage, "no plain JSON"),
        ([struct.pack("<Q", 2) + b"{}"], MalformedMessage, "without kind and fields"),
        ([struct.pack("<Q", 200_000) + b"[" * 200_000], MalformedMessage, "no plain JSON"),
        ([header(kind=7)], MalformedMessage, "no text"),
        ([header(more="x")], MalformedMessage, "without kind and fields"),
        ([header(fields='{"a": NaN}')], MalformedMessage, "NaN is no JSON"),
        ([header(fields='{"a": "\\ud800"}')], MalformedMessage, "no plain JSON"),
        ([header(described("C64"))], MalformedMessage, "has the dtype 'C64'"),
        ([header(described(["F32"]))], MalformedMessage, "has the dtype"),
        ([header({"x": 5})], MalformedMessage, "has the dtype None"),
        ([header(described(shape=7))], MalformedMessage, "has no shape"),
        ([header(described(shape=[True]))], MalformedMessage, "has no shape"),
        ([header(described(shape=[-1]))], MalformedMessage, "has no shape"),
        ([header(described(shape=[1] * 4))], TooLarge, "allowed: 3 dimensions"),
        ([header(described(shape=[1 << 60]))], TooLarge, "allowed: 3 dimensions and 100000 bytes"),
        ([header(described(shape=[0, 1 << 60]))], TooLarge, "100000 bytes"),
        ([header({c: described()["x"] for c in "abcde"})], TooLarge, "of 5 tensors; allowed: 4"),
        (
            [header({c: described(shape=[9000])["x"] for c in "abcd"})],
            TooLarge,
            "144[0-9]* bytes; allowed: 100000",
        ),
        ([header(described(), bytes(3))], MalformedMessage, "a piece of"),
        ([header(described(shape=[9000]), bytes(9)), bytes(9)], MalformedMessage, "a piece of"),
        ([header(described(), bytes(5))], MalformedMessage, "a piece of"),
        ([header(described(nbytes=8), bytes(4))], MalformedMessage, "no safetensors file"),
        ([header(described("BOOL", [1], 1), b"\2")], MalformedMessage, "other than 0 and 1"),
    ],
)
def test_malformed_and_large_messages_are_refused(
    sent: list[bytes], expected: type[WireError], text: str
) -> None:
    with pytest.raises(expected, match=text) as raised:
        read(sent)
    assert type(raised.value) is expected
    assert len(str(raised.value)) < 500


def test_random_changes_raise_nothing_but_our_errors() -> None:
    rng = random.Random(17)
    good = b"".join(encode(Message("a", {"b": 1}, {"x": torch.arange(4)}), 1000))
    for _ in range(500):
        sent = bytearray(good)
        for _ in range(rng.choice([1, 1, 4])):
            sent[rng.randrange(len(sent))] = rng.randrange(256)
        cut = rng.randrange(1, len(sent))
        try:
            read([sent[:cut], sent[cut:]] if rng.random() < 0.5 else [sent])
        except WireError:
            continue


@pytest.mark.parametrize(
    ("fields", "tensors", "text"),
    [
        ({"loss": float("nan")}, {}, "no plain JSON.*as tensors"),
        ({"a": torch.ones(1)}, {}, "no plain JSON"),
        ({"a": "x" * 300_000}, {}, "Send long fields as tensors"),
        ({}, {"x": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        ({}, {"x": torch.ones(2).to_sparse()}, "sparse"),
        ({}, {"x": torch.ones(250_001)}, "1000004 bytes; the other side takes 1000000"),
        ({}, {"x": torch.ones(249_999)}, "a header of"),
    ],
)
def test_what_no_receiver_takes_is_not_sent(fields: Any, tensors: Any, text: str) -> None:
    with pytest.raises(UnsendableMessage, match=text):
        encode(Message("a", fields, tensors), 1_000_000)


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


def test_text_of_a_peer_is_shown_without_control_characters() -> None:
    assert printable("a\x00\n\u202eü") == "a\\x00\\n\\u202e\\xfc"
    assert len(printable("x" * 9000)) == 603
