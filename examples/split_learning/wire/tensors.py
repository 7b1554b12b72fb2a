"""Tensors as raw bytes: what a header says of them, checked before anything is allocated."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import MalformedFrame, TooLarge, UnsendableMessage
from .settings import Limits

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
BYTE_ORDER = sys.byteorder  # tensors travel as they lie in memory; the handshake compares this
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
NAME = re.compile(r"[\w.\-/:]{1,200}", re.ASCII)


class Description(NamedTuple):
    """A tensor that is announced, within the limits."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that follow."""
        return self.numel * self.dtype.itemsize


def describe(tensors: Mapping[str, Tensor], limits: Limits) -> list[list[Any]]:
    """Return what the header says of tensors: name, dtype and shape of each.

    Raises:
        UnsendableMessage: a name, a dtype or a size that no receiver takes.
    """
    if len(tensors) > limits.tensors:
        raise UnsendableMessage(
            f"A message of {len(tensors)} tensors; allowed: {limits.tensors}. Send them in several "
            "messages, or flattened into one tensor."
        )
    described = []
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise UnsendableMessage(
                f"A tensor called {name!r:.100}; names have 1 to 200 letters, digits or _.-/:"
            )
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
            raise UnsendableMessage(f"{name!r} is no dense tensor but {type(tensor).__name__}.")
        if tensor.dtype not in _NAMES or tensor.dim() > limits.dims:
            raise UnsendableMessage(
                f"The tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}; allowed: "
                f"{', '.join(DTYPES)}, and {limits.dims} dimensions."
            )
        described.append([name, _NAMES[tensor.dtype], list(tensor.shape)])
    nbytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
    if nbytes > limits.body_nbytes:
        raise UnsendableMessage(
            f"A message of {nbytes} bytes; this connection takes {limits.body_nbytes}. Send a "
            "smaller batch or several messages, or raise `Limits.body_nbytes` on both sides."
        )
    return described


def parse(described: Any, body_nbytes: int, limits: Limits) -> list[Description]:
    """Check what a peer says of its tensors.

    Raises:
        TooLarge: more tensors, dimensions or bytes than allowed.
        MalformedFrame: no list of name, dtype and shape, an unknown dtype, a name that comes twice,
            or tensors that do not fill the body exactly.
    """
    if not isinstance(described, list):
        raise MalformedFrame("A message without a list of its tensors.")
    if len(described) > limits.tensors:
        raise TooLarge(f"A message of {len(described)} tensors; allowed: {limits.tensors}.")
    parsed = [_parse_one(entry, limits) for entry in described]
    if len({one.name for one in parsed}) != len(parsed):
        raise MalformedFrame("A message with two tensors of one name.")
    nbytes = sum(one.nbytes for one in parsed)
    if nbytes != body_nbytes:
        raise MalformedFrame(
            f"A message whose tensors take {nbytes} bytes announces {body_nbytes} bytes."
        )
    return parsed


def _parse_one(entry: Any, limits: Limits) -> Description:
    if not isinstance(entry, list) or len(entry) != 3:
        raise MalformedFrame("A tensor that is not described by name, dtype and shape.")
    name, dtype, shape = entry
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise MalformedFrame("A tensor without a proper name.")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise MalformedFrame(
            f"The tensor {name!r} has the dtype {dtype!r:.50}; allowed: {', '.join(DTYPES)}."
        )
    if not isinstance(shape, list) or len(shape) > limits.dims:
        raise TooLarge(f"The tensor {name!r} has no shape of at most {limits.dims} dimensions.")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise MalformedFrame(f"The tensor {name!r} has sizes that are no integers of at least 0.")
    # Counting empty dimensions as one also bounds the strides of an empty tensor.
    if math.prod(max(1, size) for size in shape) * DTYPES[dtype].itemsize > limits.body_nbytes:
        raise TooLarge(
            f"The tensor {name!r} of {dtype} {shape} is larger than {limits.body_nbytes} bytes; "
            "raise `Limits.body_nbytes` on both sides if that is wanted."
        )
    return Description(name, DTYPES[dtype], tuple(shape))


def allocate(parsed: Sequence[Description]) -> dict[str, Tensor]:
    """Return uninitialised tensors on the CPU, each with memory of its own (16-byte aligned)."""
    return {one.name: torch.empty(one.shape, dtype=one.dtype) for one in parsed}


def check_values(tensors: Mapping[str, Tensor]) -> None:
    """Raise ``MalformedFrame`` where bytes are no values: booleans other than 0 and 1."""
    for name, tensor in tensors.items():
        if tensor.dtype is torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
            raise MalformedFrame(f"The boolean tensor {name!r} has values other than 0 and 1.")


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def on_cpu(tensor: Tensor) -> Tensor:
    """Return the values as a contiguous CPU tensor: itself where it is one."""
    return tensor.detach().resolve_neg().cpu().contiguous()
