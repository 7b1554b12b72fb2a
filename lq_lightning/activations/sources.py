"""Sources: how tensors are rebuilt in backward from codes, which tensors have one, who watches.

A source is an attribute of the tensor that it rebuilds. Layers that read the tensor find it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor
from typing_extensions import override

from lq_lightning._compat.layouts import held_by
from lq_lightning._compat.saved_tensors import base_of, checkpoint_region, version_of
from lq_lightning.kernels.activation import activation_dequantize
from lq_lightning.kernels.checksum import checksums
from lq_lightning.kernels.float8 import (
    activation_dequantize_float8,
    dequantize_float8,
    norm_dequantize_float8,
)
from lq_lightning.kernels.message import dequantize, parse_format, quantize
from lq_lightning.kernels.message.matrix import matrix_shape
from lq_lightning.kernels.norm import norm_dequantize

from .policy import SiteKind

SOURCE = "_lq_source"
ORIGIN = "_lq_origin"  # of a DTensor: the tensor that it wraps, which had no source
ALONE = "_lq_format"  # marks dropout's output, which nobody else saves: a code of it saves memory
MARK = "_lq_calibrated_site"  # the site that made a tensor
# Dimension, number of this rank, and of all: where in a tensor the rows lie that the site has here.
PART = "_lq_part"


def as_matrix(x: Tensor) -> Tensor:
    """View (or copy) a tensor as ``[T, N]`` with a contiguous last dimension."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


Tensors = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Codes:
    """Constants of a source; with its saved tensors they give the value back.

    The number of rows is not among them: a graph that is compiled for any batch does not know it.
    """

    numel: int  # values in a row
    format: str  # `MessageFormat` of the messages among the tensors
    per_row: ClassVar[int] = 1  # leading tensors that are of rows; others are those of all rows

    def of(self, shape: torch.Size) -> Codes:
        """Return the codes of a tensor of this shape."""
        return self

    def rebuild(self, tensors: Tensors, rows: int, dtype: torch.dtype) -> Tensor:
        """Return the value, ``[rows, N]`` of ``dtype``."""
        raise NotImplementedError

    def rebuild_float8(self, tensors: Tensors, rows: int, scale: Tensor) -> Tensor:
        """Return the value divided by ``scale`` as E4M3, transposed and padded: ``[N, T16]``."""
        raise NotImplementedError


@dataclass(frozen=True)
class NormCodes(Codes):
    """Output of a normalization layer; tensors: message, rstd, weight, bias."""

    kind: str
    x_dtype: torch.dtype
    per_row = 2

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

    Tensors: the messages of the input and of the other factor (``[0, 0]`` if not gated).
    """

    activation: str
    per_row = 2

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
        message: Any = tensors[0]
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

    __slots__ = ("_key", "_remaining", "_value", "consumers", "was_read")

    def __init__(self) -> None:
        self.consumers = 0
        self.was_read = False  # by a backward
        self._remaining = 0
        self._key: Any = None
        self._value: Tensor | None = None

    def get(self, key: Any, build: Callable[[], Tensor]) -> Tensor:
        """Return the tensor, which ``build`` makes once per ``key``; the last reader drops it."""
        self.was_read = True
        if self._value is None or self._key != key:
            value = build()
            if self.consumers < 2 or self._value is not None:
                return value
            self._key, self._value, self._remaining = key, value, self.consumers
        else:
            value = self._value
        self._remaining -= 1
        if self._remaining == 0:
            self._value = None
        return value


@dataclass
class Source:
    """How to rebuild a tensor in backward; attached to that tensor.

    A linear layer that finds one saves the source's tensors, which the producer saves anyway,
    instead of its input. A source lives as long as the output that it is attached to, and holds
    codes only: it does not keep that output alive.
    """

    codes: Codes
    tensors: Tensors  # messages and statistics, without gradients
    amax: Tensor  # fp32 [1], the largest magnitude of the tensor; [0] if it was not asked for
    version: int = 0  # of the tensor, so that a later in-place change is noticed
    shared: Shared | None = None  # the rebuilt tensor in eager backward; None in a trace
    # The checkpointed region that made the tensor; None outside of any.
    region: ref[Callable[[Tensor], Any]] | None = None
    # By precision of forward products: the length of sequences in INT8, and the tensor as quantized
    # operand, once a layer has made it for the others of the same forward.
    operands: dict[str, tuple[int, tuple[Tensor, ...]]] = field(default_factory=dict)
    bits: tuple[str, int] | None = None  # in the first call of the site: its name, and a checksum
    gathered: Source | None = None  # of the whole tensor, if some layer reads that of this shard


def attach(tensor: Tensor, source: Source) -> None:
    """Attach a source to a tensor."""
    source.version = version_of(tensor)
    setattr(tensor, SOURCE, source)
    if torch.compiler.is_compiling():
        return
    source.shared = Shared()
    region = checkpoint_region()
    source.region = None if region is None else ref(region)
    base = base_of(tensor)
    if base is not None and has_same_rows(tensor, base):
        setattr(base, SOURCE, source)
    relay(getattr(tensor, ORIGIN, None), source)


def relay(tensor: Tensor | None, source: Source) -> None:
    """Attach a source that another tensor of the same values has; readers of both share it."""
    if tensor is None:
        return
    bits = source.bits
    if bits is not None and _bits_can_be_read(tensor):
        bits = bits[0], _checksum(held_by(tensor).detach())
    shared, region, operands = source.shared, source.region, source.operands
    version = version_of(tensor)
    made = Source(
        source.codes, source.tensors, source.amax, version, shared, region, operands, bits
    )
    setattr(tensor, SOURCE, made)


def source_of(tensor: Tensor) -> Source | None:
    """Return the source of a tensor; None if it has none or was changed since.

    A view shares the source of its base, if it has all rows of the base in their order, such as
    ``x.flatten(0, 1)`` or ``x[:, slice(None)]``. Not in compiled code.

    Raises:
        RuntimeError: in the first call of the site that made the tensor: its bits have changed
            though its version has not.
    """
    source: Source | None = getattr(tensor, SOURCE, None)
    holder = tensor
    if source is None:
        if torch.compiler.is_compiling():
            return None
        base = base_of(tensor)
        source = None if base is None else getattr(base, SOURCE, None)
        if base is None or source is None or not has_same_rows(tensor, base):
            return None
        holder = base
    if version_of(tensor) != source.version or not _is_seen_twice(source):
        return None
    # Batches, received buffers and FSDP2's parameters are filled anew after a backward, unseen.
    if source.shared is not None and source.shared.was_read and holder.grad_fn is None:
        return None
    if source.bits is not None and _bits_can_be_read(tensor):
        name, expected = source.bits
        if _checksum(held_by(tensor).detach()) != expected:
            raise RuntimeError(
                f"A tensor that is rebuilt from the code of `{name}` was changed in a way that "
                "autograd does not see (`.data`, NumPy, a kernel of another library): layers would "
                "compute with the values before the change. Change it with an operation of torch "
                "(`h = h * 2` or `h.mul_(2)`), or exclude the module: "
                f"`ActivationPolicy(rules=[ActivationRule(module={name!r})])`."
            )
    return source


def remember_bits(tensor: Tensor, name: str) -> bool:
    """Let ``source_of`` compare a tensor's bits, which site ``name`` made; False if it cannot."""
    held = held_by(tensor)
    if type(held) is not Tensor or held.is_meta or not _bits_can_be_read(held):
        return False
    source: Source = getattr(tensor, SOURCE)
    source.bits = name, _checksum(held.detach())
    return True


def _bits_can_be_read(tensor: Tensor) -> bool:
    """Whether a number can be read from a tensor now: not in a trace, nor in a CUDA graph."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


# One operator, so that neither dispatch modes nor checkpoints see what it is made of.
@torch.library.custom_op(
    "lq_lightning::activation_checksum", mutates_args=(), schema="(Tensor x) -> SymInt"
)
def _checksum(x: Tensor) -> int:
    return int(checksums([x.contiguous()])[0])


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
        positive: bool = False,
        centred: bool = False,
    ) -> None:
        """Called with a code of ``x``; ``positive``: only positive values matter; ``centred``: the
        code is of ``x`` less the mean of each row.
        """

    def call(
        self, site: Any, output: Tensor, tensors: Mapping[str, Tensor | None], ranks: int
    ) -> None:
        """Called with what a norm, an activation function or an MLP encodes and returns of rows
        that lie on so many ranks.
        """

    def reader(self, x: Tensor, output: Tensor, shards: int = 1) -> None:
        """Called with input and output of a linear layer that has a weight gradient; ``output`` is
        local, its weight one of so many shards.
        """


Part = tuple[int, int, int]


def part_of(x: Tensor) -> Part:
    """Where in a tensor the rows lie that the site that made it has on this rank."""
    part: Part = getattr(x, PART, (0, 0, 1))
    return part


def own_rows_of(gradient: Tensor, part: Part) -> Tensor:
    """The rows of a gradient that lie in a part."""
    dim, rank, size = part
    each = gradient.shape[dim] // size
    return gradient.narrow(dim, rank * each, each)


_observers: dict[type[Observer], Observer] = {}


def observers() -> Iterable[Observer]:
    """Return the running observers; none in compiled code."""
    return () if torch.compiler.is_compiling() else _observers.values()


def encode_source(x: Tensor, format: str, kind: SiteKind = "linear") -> Source:
    """Encode a tensor ``[..., N]`` without a source."""
    rows = as_matrix(x.detach())
    shape = matrix_shape(parse_format(format), *rows.shape)
    message = quantize(rows.reshape(shape), None, format, 0)
    for each in observers():
        each.code(kind, x, message, format)
    codes = MatrixCodes(rows.shape[1], format)
    return Source(codes, (message,), message.new_empty(0, dtype=torch.float32))
