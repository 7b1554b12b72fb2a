"""Sources: how the input of a linear layer is rebuilt from codes in backward.

A normalization layer or an activation function that keeps its input as a code attaches a source to
its output. A linear layer that finds one saves the source's tensors, which the producer saves
anyway, instead of its input. A source lives as long as the output that it is attached to, and holds
codes only: it does not keep that output alive.

``Observer`` sees what sites encode; ``CodeMeter`` counts codes, and on request measures their
errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from typing_extensions import override

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

from .policy import SiteKind

_ATTRIBUTE = "_lq_source"
_ALONE = "_lq_format"


Tensors = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Codes:
    """Constants of a source; with its saved tensors they give the value back.

    The number of rows is not among them: a graph that is compiled for any batch does not know it.

    Attributes:
        numel: values in a row.
        format: ``MessageFormat`` of the messages among the tensors, as a string.
    """

    numel: int
    format: str

    def rebuild(self, tensors: Tensors, rows: int, dtype: torch.dtype) -> Tensor:
        """Return the value, ``[rows, N]`` of ``dtype``."""
        raise NotImplementedError

    def rebuild_float8(self, tensors: Tensors, rows: int, scale: Tensor) -> Tensor:
        """Return the value divided by ``scale`` as E4M3, transposed and padded: ``[N, T16]``."""
        raise NotImplementedError


@dataclass(frozen=True)
class NormCodes(Codes):
    """Output of a normalization layer; tensors: message, rstd, weight, bias.

    Attributes:
        kind: arithmetic of the layer, as ``lq_lightning.kernels.norm`` names it.
        x_dtype: dtype of the layer's input.
    """

    kind: str
    x_dtype: torch.dtype

    @override
    def rebuild(self, tensors: Tensors, rows: int, dtype: torch.dtype) -> Tensor:
        y: Tensor = norm_dequantize(
            *tensors, self.numel, self.kind, self.format, dtype, self.x_dtype
        )
        return y

    @override
    def rebuild_float8(self, tensors: Tensors, rows: int, scale: Tensor) -> Tensor:
        y: Tensor = norm_dequantize_float8(*tensors, self.numel, self.kind, self.format, scale)
        return y


@dataclass(frozen=True)
class ActivationCodes(Codes):
    """Output of an activation function, times the other factor if gated.

    Tensors: the message of the input, and that of the other factor (``[0, 0]`` if not gated).
    """

    activation: str

    @override
    def rebuild(self, tensors: Tensors, rows: int, dtype: torch.dtype) -> Tensor:
        y: Tensor = activation_dequantize(
            *tensors, rows, self.numel, self.activation, self.format, dtype
        )
        return y

    @override
    def rebuild_float8(self, tensors: Tensors, rows: int, scale: Tensor) -> Tensor:
        y: Tensor = activation_dequantize_float8(
            *tensors, rows, self.numel, self.activation, self.format, scale
        )
        return y


@dataclass(frozen=True)
class MatrixCodes(Codes):
    """A tensor encoded by itself; tensors: its message."""

    @override
    def rebuild(self, tensors: Tensors, rows: int, dtype: torch.dtype) -> Tensor:
        (message,) = tensors
        if message is None:
            raise AssertionError("a matrix is rebuilt from its message")
        _, numel = matrix_shape(parse_format(self.format), rows, self.numel)
        y: Tensor = dequantize(message.unsqueeze(0), numel, self.format, 1.0, dtype)
        return y.view(rows, self.numel)

    @override
    def rebuild_float8(self, tensors: Tensors, rows: int, scale: Tensor) -> Tensor:
        y: Tensor = dequantize_float8(*tensors, rows, self.numel, self.format, scale)
        return y


class Shared:
    """A rebuilt tensor that several linear layers read one after the other in one backward.

    Held from the first reader to the last; readers are the layers that found the same source. If
    one of them takes no part in a backward, it is held until the graph is freed. Compiled graphs
    merge equal calls by themselves.
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
        """Return the tensor, which ``build`` makes once per ``key``; the last reader drops it."""
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
    """How to rebuild a tensor in backward; attached to that tensor.

    Attributes:
        codes: constants of the rebuild.
        tensors: messages and statistics, without gradients.
        amax: fp32 ``[1]``, the largest magnitude of the tensor; ``[0]`` if it was not asked for.
        version: version of the tensor, so that a later in-place change is noticed.
        shared: the rebuilt tensor in the backward of eager code; None in a trace.
        region: the checkpointed region that made the tensor; None outside of any.
        operands: by precision of forward products: the length of sequences in INT8, and the tensor
            as quantized operand, once a layer has made it for the others of the same forward.
    """

    codes: Codes
    tensors: Tensors
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

    A view shares the source of its base, if it has all rows of the base in their order, such as
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
    """Whether the running checkpointed region, if any, finds the source in its second run too.

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
    """Mark a tensor that nobody else saves, as dropout's output: a code of it saves memory."""
    setattr(tensor, _ALONE, format)


def format_alone(tensor: Tensor) -> str | None:
    """Return the format that ``keep_alone`` gave a tensor."""
    format: str | None = getattr(tensor, _ALONE, None)
    return format


class Observer:
    """Base of observers of sites in eager code, between ``start`` and ``stop``.

    One of each class at a time. Compiled graphs contain no calls of observers.
    """

    __slots__ = ()

    def start(self) -> None:
        """Observe from now on, in place of any other observer of this class."""
        _observers[type(self)] = self

    def stop(self) -> None:
        """Stop; does nothing if another one observes."""
        if _observers.get(type(self)) is self:
            del _observers[type(self)]

    def code(
        self,
        kind: SiteKind,
        x: Tensor,
        message: Tensor,
        format: str,
        *,
        positive: bool,
        centred: bool,
    ) -> None:
        """See ``note_code``."""

    def call(self, site: Any, output: Tensor, tensors: Mapping[str, Tensor | None]) -> None:
        """See ``note_call``."""

    def reader(self, x: Tensor, output: Tensor) -> None:
        """See ``note_reader``."""


_observers: dict[type[Observer], Observer] = {}


def note_code(
    kind: SiteKind,
    x: Tensor,
    message: Tensor,
    format: str,
    *,
    positive: bool = False,
    centred: bool = False,
) -> None:
    """Report a code of ``x`` to observers.

    ``positive``: only positive values matter. ``centred``: the code is of ``x`` less the mean of
        each
    row.
    """
    if not torch.compiler.is_compiling():
        for each in _observers.values():
            each.code(kind, x, message, format, positive=positive, centred=centred)


def note_call(site: Any, output: Tensor, **tensors: Tensor | None) -> None:
    """Report to observers what a norm, an activation function or an MLP encodes and returns."""
    if not torch.compiler.is_compiling():
        for each in _observers.values():
            each.call(site, output, tensors)


def note_reader(x: Tensor, output: Tensor) -> None:
    """Report a linear layer with a weight gradient to observers."""
    if not torch.compiler.is_compiling():
        for each in _observers.values():
            each.reader(x, output)


@dataclass(slots=True)
class _Sums:
    """Sums of squared errors and squared values, fp64 on the device that computed them."""

    error: Tensor | float = 0.0
    norm: Tensor | float = 0.0


@dataclass(slots=True)
class CodeMeter(Observer):
    """Counts the codes that this process keeps.

    Attributes:
        nbytes: bytes of all codes so far.
        values: number of values that these codes represent.
        measure: whether to decode each code again and sum up its errors, too.
    """

    nbytes: int = 0
    values: int = 0
    measure: bool = False
    _sums: dict[SiteKind, _Sums] = field(default_factory=dict)

    @override
    @torch.no_grad()
    def code(
        self,
        kind: SiteKind,
        x: Tensor,
        message: Tensor,
        format: str,
        *,
        positive: bool,
        centred: bool,
    ) -> None:
        self.nbytes += message.numel()
        self.values += x.numel()
        if self.measure:
            exact = x.detach().reshape(-1, x.shape[-1]).float()
            codes = MatrixCodes(exact.shape[1], format)
            decoded = codes.rebuild((message,), exact.shape[0], torch.float32)
            if centred:
                exact = exact - exact.mean(-1, keepdim=True)
            if positive:
                exact, decoded = exact.relu(), decoded.relu()
            error = decoded - exact
            sums = self._sums.setdefault(kind, _Sums())
            sums.error = sums.error + error.square().sum(dtype=torch.float64)
            sums.norm = sums.norm + exact.square().sum(dtype=torch.float64)

    def take_errors(self, kind: SiteKind) -> tuple[float, float]:
        """Return the sums of squared errors and squared values since the last call."""
        sums = self._sums.pop(kind, _Sums())
        return float(sums.error), float(sums.norm)
