"""A message of the program: a kind, plain fields and tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import MalformedFrame, UnexpectedMessage

_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")
_TAKEN = frozenset(("handshake", "alive", "end"))  # what is counted under these is no message
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Message:
    """What ``Connection.receive`` returns. Its sender may be mistaken: take its parts with checks.

    Attributes:
        kind: one of those that were waited for.
        fields: plain data.
        tensors: on the CPU, contiguous, each with memory of its own.
    """

    kind: str
    fields: dict[str, Any]
    tensors: dict[str, Tensor]

    def tensor(
        self,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        shape: Sequence[int | None] | None = None,
    ) -> Tensor:
        """Return a tensor.

        Args:
            name: what it was sent as.
            dtype: that it must have.
            shape: that it must have; None stands for any size.

        Raises:
            UnexpectedMessage: there is none of this name, or it is another one.
        """
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
        """Return a field of exactly this type; an int is no bool and no float.

        Raises:
            UnexpectedMessage: there is none of this name, or it is of another type.
        """
        value = self.fields.get(name)
        if type(value) is not kind:
            raise UnexpectedMessage(
                f"The field {name!r} of the message {self.kind!r} is {value!r:.100}; expected "
                f"{kind.__name__}."
            )
        return value


def is_kind(value: object) -> bool:
    """Whether this can be the kind of a message."""
    return isinstance(value, str) and bool(_KIND.fullmatch(value)) and value not in _TAKEN


def parse(header: dict[str, Any], tensors: dict[str, Tensor]) -> Message:
    """Return the message of a frame.

    Raises:
        MalformedFrame: a header without kind or fields, or with something else.
    """
    kind, fields = header.get("kind"), header.get("fields")
    if header.keys() != {"kind", "fields", "tensors"}:
        raise MalformedFrame("A message's header has other parts than kind, fields and tensors.")
    if not is_kind(kind) or not isinstance(fields, dict):
        raise MalformedFrame("A message without a proper kind, or without fields.")
    return Message(str(kind), fields, tensors)
