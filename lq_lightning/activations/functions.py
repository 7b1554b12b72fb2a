"""Norms, activation functions and linear layers that save codes, and what codes give back.

The kernels encode an input while they compute the output; backward rebuilds what it reads. A
normalization layer or an activation function attaches a source to its output, from which linear
layers behind it rebuild their input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lq_lightning._compat.float8 import scaled_mm
from lq_lightning._compat.saved_tensors import (
    base_of,
    checkpoint_region,
    version_of,
    wanted_gradients,
    with_shape,
)
from lq_lightning.kernels.activation import (
    OF_POSITIVE_PART,
    activation_backward,
    activation_dequantize,
    activation_quantize,
)
from lq_lightning.kernels.checksum import checksums
from lq_lightning.kernels.float8 import (
    activation_dequantize_float8,
    dequantize_float8,
    float8_cast,
    float8_quantize,
    norm_dequantize_float8,
)
from lq_lightning.kernels.int8 import hadamard_size_of, int8_matmul, int8_quantize
from lq_lightning.kernels.message import dequantize, parse_format, quantize
from lq_lightning.kernels.message.matrix import matrix_shape
from lq_lightning.kernels.norm import norm_backward, norm_dequantize, norm_quantize

from .policy import Matmul, SiteKind

_SOURCE = "_lq_source"
_E4M3 = torch.float8_e4m3fn
# In shorter sequences, second terms for four rows cost more than they gain.
_MIN_SEQUENCE = 32


def as_matrix(x: Tensor) -> Tensor:
    """View (or copy) a tensor as ``[T, N]`` with a contiguous last dimension."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _matmul_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Dtype of a linear layer's product: autocast's, or that of its operands."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # meta has no autocast
        return torch.get_autocast_dtype(device)
    return torch.promote_types(x.dtype, weight.dtype)


def _without_autocast(x: Tensor) -> AbstractContextManager[None]:
    device = x.device.type
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def _refuse_second_derivative(name: str) -> None:
    """Raise ``RuntimeError`` in a backward that runs with ``create_graph=True``."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"The backward of {name} was called with `create_graph=True`, but its saved "
            "activations are codes, which have no derivative. Exclude modules that need second "
            "derivatives (`ActivationPolicy(rules=[ActivationRule(module=...)])`), or call "
            "`remove()` of the handle first."
        )


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
    """Output of a normalization layer; tensors: message, rstd, weight, bias."""

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

    Tensors: the messages of the input and of the other factor (``[0, 0]`` if not gated).
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

    Attributes:
        codes: constants of the rebuild.
        tensors: messages and statistics, without gradients.
        amax: fp32 ``[1]``, the largest magnitude of the tensor; ``[0]`` if it was not asked for.
        version: version of the tensor, so that a later in-place change is noticed.
        shared: the rebuilt tensor in the backward of eager code; None in a trace.
        region: the checkpointed region that made the tensor; None outside of any.
        operands: by precision of forward products: the length of sequences in INT8, and the tensor
            as quantized operand, once a layer has made it for the others of the same forward.
        bits: site that made the tensor, and checksum of the tensor, in the site's first call.
    """

    codes: Codes
    tensors: Tensors
    amax: Tensor
    version: int = 0
    shared: Shared | None = None
    region: ref[Callable[[Tensor], Any]] | None = None
    operands: dict[str, tuple[int, tuple[Tensor, ...]]] = field(default_factory=dict)
    bits: tuple[str, int] | None = None


def attach(tensor: Tensor, source: Source) -> None:
    """Attach a source to a tensor."""
    source.version = version_of(tensor)
    setattr(tensor, _SOURCE, source)
    if torch.compiler.is_compiling():
        return
    source.shared = Shared()
    region = checkpoint_region()
    source.region = None if region is None else ref(region)
    base = base_of(tensor)
    if base is not None and has_same_rows(tensor, base):
        setattr(base, _SOURCE, source)


def source_of(tensor: Tensor) -> Source | None:
    """Return the source of a tensor; None if it has none or was changed since.

    A view shares the source of its base, if it has all rows of the base in their order, such as
    ``x.flatten(0, 1)`` or ``x[:, slice(None)]``. Not in compiled code.

    Raises:
        RuntimeError: in the first call of the site that made the tensor: its bits have changed
            though its version has not.
    """
    source: Source | None = getattr(tensor, _SOURCE, None)
    holder = tensor
    if source is None:
        if torch.compiler.is_compiling():
            return None
        base = base_of(tensor)
        source = None if base is None else getattr(base, _SOURCE, None)
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
        if _checksum(tensor.detach()) != expected:
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
    if type(tensor) is not Tensor or tensor.is_meta or not _bits_can_be_read(tensor):
        return False
    source: Source = getattr(tensor, _SOURCE)
    source.bits = name, _checksum(tensor.detach())
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

    def call(self, site: Any, output: Tensor, tensors: Mapping[str, Tensor | None]) -> None:
        """Called with what a norm, an activation function or an MLP encodes and returns."""

    def reader(self, x: Tensor, output: Tensor) -> None:
        """Called with input and output of a linear layer that has a weight gradient."""


_observers: dict[type[Observer], Observer] = {}


def observers() -> Iterable[Observer]:
    """Return the running observers; none in compiled code."""
    return () if torch.compiler.is_compiling() else _observers.values()


@dataclass(frozen=True, kw_only=True, slots=True)
class NormLayer:
    """The arithmetic of a normalization layer.

    Attributes:
        kind: ``"layer"``, ``"rms"``, ``"rms_cast"`` (rounds before the weight, as Hugging Face's
            Llama does) or ``"rms_offset"`` (multiplies with ``1 + weight``, as Gemma does).
        eps: term under the root.
        output: dtype of the output: the ``"input"``'s, or ``"promoted"`` with the weight's.
        functional: whether it calls ``torch.nn.functional``, which CUDA's autocast runs in fp32,
            with an fp32 result.
    """

    kind: str
    eps: float
    output: str
    functional: bool


class _QuantizedNorm(torch.autograd.Function):
    """AGoQ, section 4.1.1, with two deviations: exact deviations, and codes without row means.

    The paper recomputes the deviation of a row from its code. 4 bytes per row (fp32) save a pass
    over the row wherever the output is rebuilt, and the bound of the paper's case 2 with an exact
    root is below that of its case 1. A LayerNorm does not see the mean of a row; in a code it would
    take up levels.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        kind: str,
        format: str,
        dtype: torch.dtype,
        amax: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y, rstd, message, largest = norm_quantize(
            as_matrix(x), weight, bias, eps, kind, format, dtype, amax
        )
        ctx.save_for_backward(message, rstd, weight)
        ctx.mark_non_differentiable(message, rstd, largest)
        ctx.set_materialize_grads(False)
        ctx.kind, ctx.format = kind, format
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.tensors = (True, weight is not None, bias is not None)
        ctx.dtypes = tuple(None if p is None else p.dtype for p in (weight, bias))
        return y, rstd, message, largest

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        none = (None,) * 5
        if dy is None:
            return (None, None, None, *none)
        _refuse_second_derivative("a normalization layer")
        message, rstd, weight = ctx.saved_tensors
        wanted_x, wanted_weight, wanted_bias = wanted_gradients(ctx, ctx.tensors)
        dx, dweight, dbias = norm_backward(
            *(message, rstd, as_matrix(dy), weight, ctx.kind, ctx.format, ctx.x_dtype),
            wanted_weight or wanted_bias,
        )
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            dx.view(ctx.x_shape) if wanted_x else None,
            dweight.to(weight_dtype) if wanted_weight else None,
            dbias.to(bias_dtype) if wanted_bias else None,
            *none,
        )


def output_dtype(
    layer: NormLayer, dtype: torch.dtype, weight: Tensor | None, device_type: str
) -> torch.dtype:
    """Return the dtype of a layer's output for an input of ``dtype``."""
    if layer.functional and device_type == "cuda" and torch.is_autocast_enabled("cuda"):
        return torch.float32
    if layer.output == "promoted" and weight is not None:
        return torch.promote_types(dtype, weight.dtype)
    return dtype


def quantized_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    layer: NormLayer,
    format: str,
    *,
    amax: bool,
    copies: bool,
) -> Tensor:
    """Normalize the last dimension of ``[..., N]``, keeping a code of the input for backward.

    ``amax`` finds the largest magnitude of the output, for FP8 products. With ``copies`` the source
    of the result holds copies of weight and bias, whose memory may be freed before the backward of
    a layer that reads it.
    """
    dtype = output_dtype(layer, x.dtype, weight, x.device.type)
    y, rstd, message, largest = _QuantizedNorm.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, layer.eps, layer.kind, format, dtype, amax
    )
    y = with_shape(y, x.shape)  # here, so that it may be changed in place
    for each in observers():
        each.code("norm", x, message, format, centred=layer.kind == "layer")
    codes = NormCodes(x.shape[-1], format, layer.kind, x.dtype)
    constants = [None if p is None else p.detach() for p in (weight, bias)]
    if copies:
        constants = [None if p is None else p.clone() for p in constants]
    attach(y, Source(codes, (message, rstd, *constants), largest))
    return y


class _QuantizedActivation(torch.autograd.Function):
    """AGoQ, section 8.1.1: codes of the inputs are kept, all else is recomputed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor | None, activation: str, format: str, amax: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y, message, up_message, largest = activation_quantize(
            as_matrix(x), None if up is None else as_matrix(up), activation, format, amax
        )
        ctx.save_for_backward(message, up_message)
        ctx.mark_non_differentiable(message, up_message, largest)
        ctx.set_materialize_grads(False)
        ctx.activation, ctx.format, ctx.amax = activation, format, amax
        ctx.x_shape = x.shape
        ctx.dtypes = (x.dtype, None if up is None else up.dtype)
        ctx.tensors = (True, up is not None)
        return y, message, up_message, largest

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        none = (None,) * 3
        if dy is None:
            return (None, None, *none)
        _refuse_second_derivative("an activation function")
        message, up_message = ctx.saved_tensors
        wanted_x, wanted_up = wanted_gradients(ctx, ctx.tensors)
        dx, dup, _ = activation_backward(
            message, up_message, as_matrix(dy), ctx.activation, ctx.format, False
        )
        x_dtype, up_dtype = ctx.dtypes
        return (
            dx.view(ctx.x_shape).to(x_dtype) if wanted_x else None,
            dup.view(ctx.x_shape).to(up_dtype) if wanted_up else None,
            *none,
        )


def quantized_activation(
    x: Tensor, up: Tensor | None, activation: str, format: str, *, amax: bool
) -> Tensor:
    """Return ``act(x)``, or ``act(x) * up``, with a source, keeping codes of both for backward.

    ``x`` and ``up`` are ``[..., N]``; ``amax`` finds the largest magnitude of the output, for FP8
    products.
    """
    y, message, up_message, largest = _QuantizedActivation.apply(x, up, activation, format, amax)  # type: ignore[no-untyped-call]
    y = with_shape(y, x.shape)  # here, so that it may be changed in place
    for each in observers():
        each.code("activation", x, message, format, positive=activation in OF_POSITIVE_PART)
        if up is not None:
            each.code("activation", up, up_message, format)
    codes = ActivationCodes(x.shape[-1], format, activation)
    attach(y, Source(codes, (message, up_message), largest))
    return y


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        codes: Codes,
        shared: Shared | None,
        dtype: torch.dtype,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(weight, *tensors)
        ctx.codes, ctx.shared, ctx.dtype = codes, shared, dtype
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.tensors = (True, True, bias is not None)
        bias = None if bias is None else bias.to(dtype)
        return F.linear(as_matrix(x).to(dtype), weight.to(dtype), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative("a linear layer")
        weight, *tensors = ctx.saved_tensors
        wanted_x, wanted_weight, wanted_bias = wanted_gradients(ctx, ctx.tensors)
        dtype = ctx.dtype
        dx = dweight = dbias = None
        if wanted_weight:

            def rebuild() -> Tensor:
                value: Tensor = ctx.codes.rebuild(tuple(tensors), dy.shape[0], dtype)
                return value

            x = rebuild() if ctx.shared is None else ctx.shared.get(dtype, rebuild)
            dweight = (dy.t() @ x).to(weight.dtype)
            del x
        if wanted_x:
            dx = (dy @ weight.to(dtype)).view(ctx.x_shape).to(ctx.x_dtype)
        if wanted_bias:
            dbias = dy.sum(0).to(ctx.bias_dtype)
        return (dx, dweight, dbias, None, None, None, *(None for _ in tensors))


def encode_source(x: Tensor, format: str, kind: SiteKind = "linear") -> Source:
    """Encode a tensor ``[..., N]`` without a source."""
    rows = as_matrix(x.detach())
    shape = matrix_shape(parse_format(format), *rows.shape)
    message = quantize(rows.reshape(shape), None, format, 0)
    for each in observers():
        each.code(kind, x, message, format)
    codes = MatrixCodes(rows.shape[1], format)
    return Source(codes, (message,), message.new_empty(0, dtype=torch.float32))


def _cast_weight(
    weight: Tensor, amax: Tensor | None, *, transpose: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast a weight to E4M3, ``[O, K]`` or with ``transpose`` ``[K, O]``; with scale and amax.

    Reads the weight as it lies in memory: that of ``Conv1D`` comes as a transposed view.
    """
    is_view = weight.stride(-1) != 1
    stored = weight.t() if is_view else weight
    columns = transpose is not is_view
    if amax is None:
        rows_q, columns_q, scale, amax = float8_quantize(stored, not columns, columns)
    else:
        rows_q, columns_q, scale = float8_cast(stored, amax, not columns, columns)
    return columns_q if columns else rows_q, scale, amax


def _sequence_length(x: Tensor) -> int:
    """Length of the sequences, whose first rows INT8 represents twice; 0 if short.

    ``[..., S, K]``; a matrix is one sequence. Where the second dimension is not time,
    other rows get second terms.
    """
    length = x.shape[-2] if x.dim() > 1 else 0
    return length if length >= _MIN_SEQUENCE else 0


def _forward_product(
    operand: tuple[Tensor, ...], weight: Tensor, dtype: torch.dtype, matmul: Matmul, length: int
) -> tuple[Tensor, Tensor]:
    """Product with a weight ``[O, K]``, of ``dtype``, and the largest magnitude of the weight."""
    if matmul == "int8_forward":
        size = hadamard_size_of(weight.shape[1])
        stored = (
            weight if weight.stride(-1) == 1 else weight.contiguous()
        )  # Conv1D's is a transposed view
        weight_q, weight_scale, _, amax = int8_quantize(stored, size, True, 0)
        _, *terms = operand
        return int8_matmul(*terms[:2], weight_q, weight_scale, terms[2], length, dtype), amax
    scale, rows = operand
    weight_rows, weight_scale, amax = _cast_weight(weight, None, transpose=False)
    y = scaled_mm(rows, weight_rows, scale, weight_scale, dtype, fast_accumulation=True)
    return y, amax


class _Float8Linear(torch.autograd.Function):
    """COAT, part 2: one scale per tensor for all operands.

    Deviations: gradients are E4M3 like all else, because E5M2 rounds twice as coarsely and its
    longer range gained nothing, neither in models with outliers nor early in training. The largest
    magnitude is found by the kernel that makes a tensor instead of by a second reduction over
    maxima of groups (Group Scaling); the transposed operand of the weight gradient is rebuilt from
    the code of its source instead of being saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        codes: Codes | None,
        shared: Shared | None,
        dtype: torch.dtype,
        matmul: Matmul,
        count: int,
        *tensors: Any,
    ) -> Tensor:
        operand, saved = tensors[:count], tensors[count:]
        scale = operand[0]
        y, amax = _forward_product(operand, weight, dtype, matmul, _sequence_length(x))
        if bias is not None:
            y = y + bias.to(dtype)
        # without a source the input itself is saved; attention saves its output projection's anyway
        kept = (x,) if codes is None else saved
        if not weight.requires_grad:
            kept = ()
        ctx.save_for_backward(weight, amax, scale, *kept)
        ctx.codes, ctx.shared = codes, shared
        ctx.x_shape, ctx.x_dtype, ctx.dtype = x.shape, x.dtype, dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.tensors = (True, True, bias is not None)
        ctx.more = 5 + len(tensors)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative("a linear layer")
        weight, amax, scale, *kept = ctx.saved_tensors
        wanted_x, wanted_weight, wanted_bias = wanted_gradients(ctx, ctx.tensors)
        dy = as_matrix(dy)
        dx = dweight = dbias = None
        dy_rows, dy_columns, dy_scale, _ = float8_quantize(dy, wanted_x, wanted_weight)
        if wanted_weight:

            def rebuild() -> Tensor:
                if ctx.codes is None:
                    x = as_matrix(kept[0])
                    columns: Tensor = float8_cast(x, scale * 448.0, False, True)[1]
                else:
                    columns = ctx.codes.rebuild_float8(tuple(kept), dy.shape[0], scale)
                return columns

            columns = rebuild() if ctx.shared is None else ctx.shared.get(_E4M3, rebuild)
            dweight = scaled_mm(
                dy_columns, columns, dy_scale, scale, ctx.dtype, fast_accumulation=False
            )
            dweight = dweight.to(weight.dtype)
            del columns
        if wanted_x:
            weight_columns, weight_scale, _ = _cast_weight(weight, amax, transpose=True)
            dx = scaled_mm(
                dy_rows, weight_columns, dy_scale, weight_scale, ctx.dtype, fast_accumulation=False
            )
            dx = dx.view(ctx.x_shape).to(ctx.x_dtype)
        if wanted_bias:
            dbias = dy.sum(0).to(ctx.bias_dtype)
        return (dx, dweight, dbias, *(None,) * ctx.more)


def _operand_of(x: Tensor, source: Source | None, matmul: Matmul) -> tuple[Tensor, ...]:
    """Quantize the input for the forward product, once for all layers that read it.

    The E4M3 scale comes first, then the rows in E4M3, or three results of ``int8_quantize``.
    """
    # A view shares the source but may have other sequence lengths. They are compared instead of
    # being keys, because a trace would specialize on keys.
    length = _sequence_length(x) if matmul == "int8_forward" else 0
    if source is not None and matmul in source.operands:
        made_for, kept = source.operands[matmul]
        if made_for == length:
            return kept
    matrix = as_matrix(x.detach())
    amax = None if source is None or source.amax.numel() == 0 else source.amax
    operand: tuple[Tensor, ...]
    if matmul == "int8_forward":
        size = hadamard_size_of(matrix.shape[1])
        *terms, largest = int8_quantize(matrix, size, amax is None, length)
        amax = largest if amax is None else amax
        operand = (float8_cast(matrix, amax, False, False)[2], *terms)
    elif amax is not None:
        rows, _, scale = float8_cast(matrix, amax, True, False)
        operand = (scale, rows)
    else:
        rows, _, scale, _ = float8_quantize(matrix, True, False)
        operand = (scale, rows)
    if source is not None:
        source.operands[matmul] = (length, operand)
    return operand


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, source: Source | None, matmul: Matmul
) -> Tensor:
    """Apply a linear layer that saves the tensors of its input's source instead of the input.

    Args:
        x: ``[..., K]`` fp32, bf16 or fp16.
        weight: ``[O, K]``; cast in every pass, never stored as FP8.
        bias: ``[O]`` or None.
        source: source of ``x``; without one, FP8 products save the input itself.
        matmul: ``"native"`` needs a source and a weight that requires a gradient.

    Returns:
        ``[..., O]`` in autocast's dtype, or in the dtype of the operands.
    """
    dtype = _matmul_dtype(x, weight)
    codes, shared = (None, None) if source is None else (source.codes, source.shared)
    tensors = () if source is None else source.tensors
    if shared is not None:
        shared.consumers += 1
    y: Tensor
    with _without_autocast(x):
        if matmul == "native":
            y = _QuantizedLinear.apply(x, weight, bias, codes, shared, dtype, *tensors)  # type: ignore[no-untyped-call]
        else:
            operand = _operand_of(x, source, matmul)
            y = _Float8Linear.apply(  # type: ignore[no-untyped-call]
                x, weight, bias, codes, shared, dtype, matmul, len(operand), *operand, *tensors
            )
    return with_shape(y, (*x.shape[:-1], weight.shape[0]))  # here: it may be changed in place
