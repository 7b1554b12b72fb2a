"""Messages: a kind, plain fields and tensors, sent as one safetensors file in bounded pieces.

The file's own header says how many bytes follow, so there is no other framing: a piece is a gRPC
message of at most ``PIECE_NBYTES``, and the first holds the whole header. Kind and fields (JSON)
are its metadata. A header is checked before anything is allocated or decoded; nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from .common import (
    PIECE_NBYTES,
    Limits,
    MalformedMessage,
    TooLarge,
    UnexpectedMessage,
    UnsendableMessage,
    load_json,
)

_HEADER_NBYTES = 256 * 1024
_LENGTH = struct.Struct("<Q")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_T = TypeVar("_T")


@dataclass(slots=True)
class Count:
    """Messages of one kind in one direction.

    ``nbytes`` are their bytes in gRPC, to which HTTP/2 and TLS add about 0.3%.
    """

    messages: int = 0
    nbytes: int = 0
    tensor_nbytes: int = 0

    def add(self, nbytes: int, tensor_nbytes: int = 0, messages: int = 1) -> None:
        """Count more messages."""
        self.messages += messages
        self.nbytes += nbytes
        self.tensor_nbytes += tensor_nbytes


class Traffic:
    """Counts by kind of message; ``handshake`` is the comparison of configurations."""

    def __init__(self) -> None:
        self.sent: defaultdict[str, Count] = defaultdict(Count)
        self.received: defaultdict[str, Count] = defaultdict(Count)

    def merge(self, other: Traffic) -> None:
        """Add all that another has counted."""
        for own, others in ((self.sent, other.sent), (self.received, other.received)):
            for kind, count in others.items():
                own[kind].add(count.nbytes, count.tensor_nbytes, count.messages)


@dataclass(frozen=True, slots=True)
class Message:
    """A message. Its sender may be mistaken: take the parts of a received one with checks.

    Attributes:
        kind: Purpose.
        fields: Plain data, as JSON has it.
        tensors: Dense tensors; on the CPU once received.
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def tensor(
        self,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        shape: Sequence[int | None] | None = None,
    ) -> Tensor:
        """Return a tensor of this dtype and shape, in which None stands for any size."""
        found = self.tensors.get(name)
        if found is None:
            raise UnexpectedMessage(
                f"The message {self.kind!r} has no tensor {name!r}, but {sorted(self.tensors)}."
            )
        fits = shape is None or (
            len(shape) == found.dim()
            and all(want in (None, size) for want, size in zip(shape, found.shape, strict=True))
        )
        if not fits or dtype not in (None, found.dtype):
            raise UnexpectedMessage(
                f"The tensor {name!r} of the message {self.kind!r} is {found.dtype} "
                f"{list(found.shape)}; expected {dtype or 'any dtype'} "
                f"{'of any shape' if shape is None else list(shape)}."
            )
        return found

    def field(self, name: str, kind: type[_T]) -> _T:
        """Return a field of exactly this type; an int is no bool and no float."""
        value = self.fields.get(name)
        if type(value) is not kind:
            raise UnexpectedMessage(
                f"The field {name!r} of the message {self.kind!r} is {value!r:.100}; expected "
                f"{kind.__name__}."
            )
        return value

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def encode(message: Message, nbytes: int) -> list[memoryview]:
    """Return the pieces of a message to a side that takes ``nbytes``."""
    for name, tensor in message.tensors.items():
        if tensor.dtype not in _DTYPES.values() or tensor.layout is not torch.strided:
            raise UnsendableMessage(
                f"The tensor {name!r} is {tensor.dtype}, {tensor.layout}; allowed: dense tensors "
                f"of {', '.join(str(dtype) for dtype in _DTYPES.values())}."
            )
    if message.tensor_nbytes > nbytes:
        raise UnsendableMessage(
            f"A message of {message.tensor_nbytes} bytes; the other side takes {nbytes}. Send a "
            "smaller batch or several messages, or raise `Limits.nbytes` on both sides."
        )
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in message.tensors.items():
        value = tensor.detach().resolve_neg().cpu().contiguous()
        # safetensors saves no two tensors that share memory.
        place = value.untyped_storage().data_ptr()
        tensors[name] = value.clone() if place in seen else value
        seen.add(place)
    try:
        fields = json.dumps(message.fields, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UnsendableMessage(
            f"The fields of {message.kind!r} are no plain JSON: {error}. Send numbers that JSON "
            "lacks as tensors."
        ) from error
    metadata = {"kind": message.kind, "fields": fields}
    encoded = memoryview(safetensors.torch.save(tensors, metadata))
    (header_nbytes,) = _LENGTH.unpack_from(encoded)
    if header_nbytes > _HEADER_NBYTES or len(encoded) > nbytes:
        raise UnsendableMessage(
            f"A message of {len(encoded)} bytes with a header of {header_nbytes}; the other side "
            f"takes {nbytes} and {_HEADER_NBYTES}. Send long fields as tensors."
        )
    return [encoded[i : i + PIECE_NBYTES] for i in range(0, len(encoded), PIECE_NBYTES)]


def stream_nbytes(nbytes: int, pieces: int) -> int:
    """Return the bytes of a message in gRPC, which puts 5 bytes in front of every piece."""
    return nbytes + 5 * pieces


def read_message(
    next_piece: Callable[[bool], bytes | None], limits: Limits, traffic: Traffic
) -> Message | None:
    """Return the next message, or None where the other side has ended the stream.

    Args:
        next_piece: Returns the next piece, or nothing at the end; is told if it is the first one.
        limits: Limits on the message.
        traffic: Counts it.
    """
    piece = next_piece(True)
    if not piece:
        return None
    kind, fields, total = _check_header(piece, limits)
    pieces, left = list[bytes](), total
    while True:
        # Many small pieces would take far more memory than their bytes.
        if len(piece) != min(left, PIECE_NBYTES):
            raise MalformedMessage(
                f"A message of {total} bytes, according to its header, came in a piece of "
                f"{len(piece)} where {min(left, PIECE_NBYTES)} are next."
            )
        pieces.append(piece)
        left -= len(piece)
        if not left:
            break
        piece = next_piece(False) or b""
    count = len(pieces)
    encoded = b"".join(pieces)
    pieces.clear()
    try:
        tensors = safetensors.torch.load(encoded)
    except (safetensors.SafetensorError, ValueError, RuntimeError) as error:
        raise MalformedMessage(f"A message is no safetensors file: {error}.") from error
    for name, tensor in tensors.items():
        if tensor.dtype is torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
            raise MalformedMessage(f"The boolean tensor {name!r} has values other than 0 and 1.")
    message = Message(kind, fields, tensors)
    traffic.received[kind].add(stream_nbytes(total, count), message.tensor_nbytes)
    return message


def _check_header(piece: bytes, limits: Limits) -> tuple[str, dict[str, Any], int]:
    """Return kind, fields and size of a message whose first piece has come."""
    if len(piece) < _LENGTH.size:
        raise MalformedMessage("A message of less than 8 bytes.")
    (header_nbytes,) = _LENGTH.unpack_from(piece)
    if header_nbytes > _HEADER_NBYTES or _LENGTH.size + header_nbytes > len(piece):
        raise TooLarge(f"A message with a header of {header_nbytes} bytes.")
    header = load_json(piece[_LENGTH.size : _LENGTH.size + header_nbytes])
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or set(metadata) != {"kind", "fields"}:
        raise MalformedMessage("A message without kind and fields.")
    kind, fields = metadata["kind"], metadata["fields"]
    if not isinstance(kind, str) or not isinstance(fields, str):
        raise MalformedMessage("A message whose kind or fields are no text.")
    if len(header) > limits.tensors:
        raise TooLarge(f"A message of {len(header)} tensors; allowed: {limits.tensors}.")
    total = _LENGTH.size + header_nbytes
    for name, entry in header.items():
        total += _check_tensor(name, entry, limits)
    if total > limits.nbytes:
        raise TooLarge(
            f"A message of {total} bytes; allowed: {limits.nbytes}. Raise `Limits.nbytes` on both "
            "sides if that is wanted."
        )
    return kind, load_json(fields), total


def _check_tensor(name: str, entry: Any, limits: Limits) -> int:
    """Return the bytes of a tensor that a header announces."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise MalformedMessage(
            f"The tensor {name!r:.100} has the dtype {dtype!r:.50}; allowed: {', '.join(_DTYPES)}."
        )
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise MalformedMessage(f"The tensor {name!r:.100} has no shape.")
    # Counting empty dimensions as one also bounds the strides of an empty tensor.
    nbytes = math.prod(max(1, size) for size in shape) * _DTYPES[dtype].itemsize
    if len(shape) > limits.dims or nbytes > limits.nbytes:
        raise TooLarge(
            f"The tensor {name!r:.100} of {dtype} {str(shape):.100}; allowed: {limits.dims} "
            f"dimensions and {limits.nbytes} bytes."
        )
    return nbytes if all(shape) else 0
