"""Sources: how a tensor that a linear layer takes can be rebuilt from codes in backward.

A normalization layer or an activation function that keeps its input as a code attaches a source to
its output. A linear layer that finds one saves the source's tensors, which the producer saves
anyway, instead of its input. A source lives as long as the output that it is attached to, and holds
codes only: it does not keep that output alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from lq_lightning._compat.saved_tensors import base_of, checkpoint_region, version_of
from lq_lightning.kernels.activation import activation_dequantize
from lq_lightning.kernels.float8 import (
    activation_dequantize_float8,
    dequantize_float8,
    norm_dequantize_float8,
)
from lq_lightning.kernels.message import dequantize, parse_format
from lq_lightning.kernels.message.matrix import matrix_shape
from lq_lightning.kernels.norm import norm_dequantize

__all__ = [
    "ActivationCodes",
    "Codes",
    "MatrixCodes",
    "NormCodes",
    "Shared",
    "Source",
    "attach",
    "format_alone",
    "has_same_rows",
    "keep_alone",
    "source_of",
]

_ATTRIBUTE = "_lq_source"
_ALONE = "_lq_format"


class Codes(Protocol):
    """Constants of a source: with the tensors it saves they give the value back.

    The number of rows is none of them: a graph that is compiled for any batch does not know it.
    """

    @property
    def format(self) -> str:
        """Of the messages among the tensors."""

    def rebuild(self, tensors: tuple[Tensor | None, ...], rows: int, dtype: torch.dtype) -> Tensor:
        """Return the value, ``[rows, N]`` of ``dtype``."""

    def rebuild_float8(
        self, tensors: tuple[Tensor | None, ...], rows: int, scale: Tensor
    ) -> Tensor:
        """Return the value divided by ``scale`` as E4M3, transposed and padded: ``[N, T16]``."""


@dataclass(frozen=True)
class NormCodes:
    """Of a normalization layer's output; tensors: message, rstd, weight, bias.

    Attributes:
        numel: values in a row.
        kind: arithmetic of the layer, as ``lq_lightning.kernels.norm`` names it.
        format: of the message.
        x_dtype: dtype of the layer's input.
    """

    numel: int
    kind: str
    format: str
    x_dtype: torch.dtype

    def rebuild(self, tensors: tuple[Tensor | None, ...], rows: int, dtype: torch.dtype) -> Tensor:
        """See ``Codes``."""
        message, rstd, weight, bias = tensors
        y: Tensor = norm_dequantize(
            message, rstd, weight, bias, self.numel, self.kind, self.format, dtype, self.x_dtype
        )
        return y

    def rebuild_float8(
        self, tensors: tuple[Tensor | None, ...], rows: int, scale: Tensor
    ) -> Tensor:
        """See ``Codes``."""
        message, rstd, weight, bias = tensors
        y: Tensor = norm_dequantize_float8(
            message, rstd, weight, bias, self.numel, self.kind, self.format, scale
        )
        return y


@dataclass(frozen=True)
class ActivationCodes:
    """Of an activation function's output, times the other factor if gated.

    Tensors: the message of the input, and that of the other factor (``[0, 0]`` if not gated).
    """

    numel: int
    activation: str
    format: str

    def rebuild(self, tensors: tuple[Tensor | None, ...], rows: int, dtype: torch.dtype) -> Tensor:
        """See ``Codes``."""
        message, up = tensors
        y: Tensor = activation_dequantize(
            message, up, rows, self.numel, self.activation, self.format, dtype
        )
        return y

    def rebuild_float8(
        self, tensors: tuple[Tensor | None, ...], rows: int, scale: Tensor
    ) -> Tensor:
        """See ``Codes``."""
        message, up = tensors
        y: Tensor = activation_dequantize_float8(
            message, up, rows, self.numel, self.activation, self.format, scale
        )
        return y


@dataclass(frozen=True)
class MatrixCodes:
    """Of a tensor by itself; tensors: its message."""

    numel: int
    format: str

    def rebuild(self, tensors: tuple[Tensor | None, ...], rows: int, dtype: torch.dtype) -> Tensor:
        """See ``Codes``."""
        (message,) = tensors
        if message is None:
            raise AssertionError("a matrix is rebuilt from its message")
        _, numel = matrix_shape(parse_format(self.format), rows, self.numel)
        y: Tensor = dequantize(message.unsqueeze(0), numel, self.format, 1.0, dtype)
        return y.view(rows, self.numel)

    def rebuild_float8(
        self, tensors: tuple[Tensor | None, ...], rows: int, scale: Tensor
    ) -> Tensor:
        """See ``Codes``."""
        (message,) = tensors
        y: Tensor = dequantize_float8(message, rows, self.numel, self.format, scale)
        return y


class Shared:
    """A rebuilt tensor that several linear layers read one after the other in one backward.

    Held from the first of them to the last, which are the layers that found the same source. If one
    of them takes no part in a backward, it is held until the graph is freed. Compiled graphs merge
    equal calls by themselves.
    """

    __slots__ = ("_consumers", "_key", "_remaining", "_value")

    def __init__(self) -> None:
        self._consumers = 0
        self._remaining = 0
        self._key: Any = None
        self._value: Tensor | None = None

    def join(self) -> None:
        """Count a layer that will read the tensor."""
        self._consumers += 1

    def get(self, key: Any, build: Callable[[], Tensor]) -> Tensor:
        """Return the tensor, and drop it if this was the last reader of this backward.

        Args:
            key: what ``build`` depends on, but for the codes.
            build: makes the tensor.
        """
        if self._value is None or self._key != key:
            value = build()
            if self._consumers < 2 or self._value is not None:
                return value
            self._key, self._value, self._remaining = key, value, self._consumers
        else:
            value = self._value
        self._remaining -= 1
        if self._remaining == 0:
            self._value = None
        return value


@dataclass
class Source:
    """What is attached to a tensor.

    Attributes:
        codes: how to rebuild it.
        tensors: what from; they have no gradients.
        amax: fp32 ``[1]``, the largest magnitude of the tensor; ``[0]`` if it was not asked for.
        version: of the tensor, so that a later change in place is noticed.
        shared: for the backward of eager code; None in a trace.
        region: the checkpointed region that it was made in, None outside of any.
        operands: by the precision of forward products, the length of sequences in INT8 and the
            tensor as they take it, once a layer has made it for others of the same forward.
    """

    codes: Codes
    tensors: tuple[Tensor | None, ...]
    amax: Tensor
    version: int = 0
    shared: Shared | None = None
    region: ref[Callable[[Tensor], Any]] | None = None
    operands: dict[str, tuple[int, tuple[Tensor, ...]]] = field(default_factory=dict)


def attach(tensor: Tensor, source: Source) -> None:
    """Attach a source to a tensor."""
    source.version = version_of(tensor)
    setattr(tensor, _ATTRIBUTE, source)
    if torch.compiler.is_compiling():
        return
    source.shared = Shared()
    region = checkpoint_region()
    source.region = None if region is None else ref(region)
    base = base_of(tensor)
    if base is not None and base.numel() == tensor.numel():
        setattr(base, _ATTRIBUTE, source)


def source_of(tensor: Tensor) -> Source | None:
    """Return the source of a tensor; None if it has none or was changed since.

    A view has that of its base, if its rows are all rows of that in their order: such as
    ``x.flatten(0, 1)`` or ``x[:, slice(None)]``. Not in compiled code.
    """
    source: Source | None = getattr(tensor, _ATTRIBUTE, None)
    if source is None:
        if torch.compiler.is_compiling():
            return None
        base = base_of(tensor)
        source = None if base is None else getattr(base, _ATTRIBUTE, None)
        if base is None or source is None or not has_same_rows(tensor, base):
            return None
    if version_of(tensor) != source.version or not _is_seen_twice(source):
        return None
    return source


def _is_seen_twice(source: Source) -> bool:
    """Whether a checkpointed region, if one runs, finds the source in its second run too.

    The arguments of the region come back without what is attached to them, and both runs have to
    save alike.
    """
    if torch.compiler.is_compiling():
        return True
    region = checkpoint_region()
    return region is None or (source.region is not None and source.region() is region)


def has_same_rows(view: Tensor, base: Tensor) -> bool:
    """Return whether a view has all rows of its base, in their order."""
    whole = view.numel() == base.numel() and view.shape[-1:] == base.shape[-1:]
    return whole and view.is_contiguous() and base.is_contiguous() and view.dtype == base.dtype


def keep_alone(tensor: Tensor, format: str) -> None:
    """Mark a tensor that nobody else keeps, so that a code of it saves memory.

    Args:
        tensor: such as the output of dropout, which keeps its mask.
        format: of the code, a ``MessageFormat`` as a string.
    """
    setattr(tensor, _ALONE, format)


def format_alone(tensor: Tensor) -> str | None:
    """Return the format that ``keep_alone`` gave a tensor."""
    format: str | None = getattr(tensor, _ALONE, None)
    return format
