"""Tensors that tolerate rounding: saved ones by operator, and inputs of checkpointed regions.

Saved tensors: an allow-list by operator, and operand. Not in it, and so kept exactly: statistics,
masks, indices, everything that loss functions, softmax, attention, ``sqrt``, ``log``, ``exp`` or
comparisons save, what custom functions and compiled code save, and every operator not named here.

Regions: recomputed from a rounded input, a region has to take the same path. Where values decide on
one (experts that a router chooses, a branch on ``x.mean() > 0``), rounding gives other outputs and
gradients, or tensors of other shapes. Only regions of operators that are known to be continuous may
have a rounded input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from lq_lightning._compat.modes import OperatorMode
from lq_lightning._compat.saved_tensors import (
    has_storage,
    node_number,
    packed_value,
    saved_value,
    storage_key,
    storage_reference,
)
from lq_lightning.foundation.nested import tensors_in


@dataclass(frozen=True, slots=True)
class Sides:
    """The side that a value is on: all that a piecewise linear function's backward reads.

    ``low`` and ``high`` are the ends of the inside, which has them if ``closed``; ``inside`` and
    ``outside`` are values that are there.
    """

    low: float
    high: float
    inside: float
    outside: float
    closed: bool = False

    def contains(self, values: Tensor) -> Tensor:
        """Return which values are inside, as booleans."""
        if self.closed:
            return (values >= self.low) & (values <= self.high)
        # NaN counts as inside, as in ReLU's backward
        return ~((values <= self.low) | (values >= self.high))


@dataclass(frozen=True, slots=True)
class Normalized:
    """A norm's input, of which only the normalized values may be rounded.

    Rounded by itself, a row, group or channel with a large mean, or a small deviation compared with
    its neighbours, would lose what the norm sees of it. ``mean``, None for a root mean square, and
    ``rstd`` are broadcast with the input.
    """

    mean: Tensor | None
    rstd: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Normalize a norm's input."""
        return (x if self.mean is None else x - self.mean) * self.rstd

    def inverse(self, x: Tensor) -> Tensor:
        """Return the input from normalized values."""
        x = x / self.rstd
        return x if self.mean is None else x + self.mean


Use = Sides | Normalized | None


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor that an operator saves."""

    name: str  # in torch's `derivatives.yaml`
    operand: int  # its place among the operands that have a gradient; leads to its producer
    # For a function whose derivative is constant on each side of a bound.
    sides: Callable[[Node], Sides] | None = None
    # For a norm: where it saved the mean, if it takes one, and one over the deviation; and what
    # shapes a statistic so that it is broadcast with the input.
    stats: tuple[str, ...] = ()
    spread: Callable[[Tensor, Tensor], Tensor] = lambda stat, x: stat
    allows: Callable[[Node], bool] = lambda node: True  # a further condition


_INF = float("inf")
_HUGE = 1e4  # so that fp16 resolves values between two bounds


def _hardtanh(node: Node) -> Sides:
    low, high = _bounds(node)
    return Sides(low, high, (low + high) / 2, -_INF)


def _bounds(node: Node) -> tuple[Any, Any]:
    ends = ("min_val", "max_val") if node.name().startswith("Hardtanh") else ("min", "max")
    return saved_value(node, ends[0]), saved_value(node, ends[1])


def _has_numbers(node: Node) -> bool:
    """Whether the bounds of a clamp are finite numbers, not tensors."""
    bounds = [bound for bound in _bounds(node) if bound is not None]
    return not any(isinstance(bound, Tensor) or abs(bound) >= _HUGE for bound in bounds)


def _clamp(node: Node) -> Sides:
    low, high = _bounds(node)
    if high is None:
        return Sides(low, _INF, _INF, -_INF, closed=True)
    if low is None:
        return Sides(-_INF, high, -_INF, _INF, closed=True)
    return Sides(low, high, (low + high) / 2, -_INF, closed=True)


# The gradient is linear in these: an error of 1% stays 1%.
_PRODUCTS = {
    "MmBackward0": (_Slot("self", 0), _Slot("mat2", 1)),
    "BmmBackward0": (_Slot("self", 0), _Slot("mat2", 1)),
    "AddmmBackward0": (_Slot("mat1", 1), _Slot("mat2", 2)),
    "BaddbmmBackward0": (_Slot("batch1", 1), _Slot("batch2", 2)),
    "LinearBackward0": (_Slot("input", 0),),
    "GroupedMmBackward0": (_Slot("self", 0),),
    "ConvolutionBackward0": (_Slot("input", 0),),
    "MulBackward0": (_Slot("self", 0), _Slot("other", 1)),
    "AddcmulBackward0": (_Slot("tensor1", 1), _Slot("tensor2", 2)),
    "DivBackward0": (_Slot("self", 0),),  # not the divisor, which may be near zero
    # Squares, and the cubes in a written-out GELU; other powers are too nonlinear.
    "PowBackward0": (_Slot("self", 0, allows=lambda n: saved_value(n, "exponent") in (2, 3)),),
}
# The derivative is a smooth function of these inputs. Functions that save their result (tanh,
# sigmoid) are not listed: the derivative vanishes where the result is rounded to one.
_SELF = (_Slot("self", 0),)
_SMOOTH = {
    **dict.fromkeys(("ErfBackward0", "GeluBackward0", "GluBackward0", "HardswishBackward0"), _SELF),
    **dict.fromkeys(("MishBackward0", "SiluBackward0", "SoftplusBackward0"), _SELF),
    "EluBackward0": (
        _Slot("self_or_result", 0, allows=lambda node: not saved_value(node, "is_result")),
    ),
}
_CLAMP = _Slot("self", 0, sides=_clamp, allows=_has_numbers)
# Kept as one bit per value, which gives the exact derivative.
_PIECEWISE = {
    "ReluBackward0": (_Slot("result", 0, sides=lambda node: Sides(0.0, _INF, 1.0, 0.0)),),
    "LeakyReluBackward0": (_Slot("self", 0, sides=lambda node: Sides(0.0, _INF, 1.0, -1.0)),),
    "HardtanhBackward0": (_Slot("self", 0, sides=_hardtanh, allows=_has_numbers),),
    # either overload, by version of torch
    **{f"Clamp{end}Backward{n}": (_CLAMP,) for end in ("", "Min", "Max") for n in (0, 1)},
}


def _of_groups(stat: Tensor, x: Tensor) -> Tensor:
    stat = stat.repeat_interleave(x.shape[1] // stat.shape[1], dim=1)
    return stat.view(*stat.shape, *(1 for _ in x.shape[2:]))


def _of_channels(stat: Tensor, x: Tensor) -> Tensor:
    return stat.view(-1, *(1 for _ in x.shape[2:]))


_MEAN_AND_RSTD = ("result1", "result2")
_BATCH_NORM = _Slot("input", 0, stats=_MEAN_AND_RSTD, spread=_of_channels)
# Statistics are saved in slots of their own, and kept exactly.
_NORMS = {
    "NativeLayerNormBackward0": (_Slot("input", 0, stats=_MEAN_AND_RSTD),),
    "FusedRmsNormBackward0": (_Slot("input", 0, stats=("result1",)),),
    "NativeGroupNormBackward0": (_Slot("input", 0, stats=_MEAN_AND_RSTD, spread=_of_groups),),
    "NativeBatchNormBackward0": (_BATCH_NORM,),
    "CudnnBatchNormBackward0": (_BATCH_NORM,),
    "MiopenBatchNormBackward0": (_BATCH_NORM,),
    "BatchNormWithUpdateBackward0": (_BATCH_NORM,),
}
# Backward reads only the shape; max pooling saves indices separately.
_SHAPES = {
    "IndexAddBackward0": (_Slot("source", 1),),
    **{f"MaxPool{n}DWithIndicesBackward0": _SELF for n in (2, 3)},
    **{f"{kind}Pool{n}DBackward0": _SELF for kind in ("Avg", "AdaptiveAvg") for n in (2, 3)},
}
_SLOTS = {**_PRODUCTS, **_SMOOTH, **_PIECEWISE, **_NORMS, **_SHAPES}
# Their outputs may hold -inf or the smallest representable number, beside which all other values of
# a group would be rounded to zero.
_FILLED = ("MaskedFillBackward", "WhereBackward", "MaskedScatterBackward", "IndexFillBackward")
# These may put constants beside values with a gradient.
_JOINS = ("CatBackward", "StackBackward", "CopySlices")
# These may add constants: masks to attention scores, elsewhere numbers or tables.
_SUMS = ("AddBackward", "SubBackward")
_SCORES = ("BmmBackward", "BaddbmmBackward")
# Their outputs hold such values if their inputs do.
_CARRIERS = (
    *(*_JOINS, *_SUMS, "MulBackward", "DivBackward"),
    *("AliasBackward", "AsStridedBackward", "CloneBackward", "ExpandBackward", "PermuteBackward"),
    *("RepeatBackward", "ReshapeAliasBackward", "SelectBackward", "SliceBackward", "SplitBackward"),
    *("SplitWithSizesBackward", "SqueezeBackward", "TBackward", "ToCopyBackward"),
    *("TransposeBackward", "UnbindBackward", "UnsafeViewBackward", "UnsqueezeBackward"),
    "ViewBackward",
)
_MAX_CARRIERS = 32  # nodes visited for one operand


def _may_be_filled(producer: Node, first: int) -> bool:
    """Whether the output of a node may hold a mask's fill values, back to node ``first``."""
    stack, seen = [(producer, False)], set[tuple[Node, bool]]()
    while stack and len(seen) < _MAX_CARRIERS:
        node, added = stack.pop()
        if (node, added) in seen or node_number(node) < first:
            continue
        seen.add((node, added))
        name, before = node.name().rpartition("::")[2], [n for n, _ in node.next_functions]
        joined = name.startswith(_JOINS) and None in before
        if name.startswith(_FILLED) or joined or (added and name.startswith(_SCORES)):
            return True
        if name.startswith(_CARRIERS):
            added = added or (name.startswith(_SUMS) and None in before)
            stack.extend((n, added) for n in before if n is not None)
    return False


def _is_computed(node: Node, operand: int, first: int) -> bool:
    """Whether an operand is an activation: neither a constant (mask, table, data) nor a weight."""
    producer = node.next_functions[operand][0]
    if producer is None or _may_be_filled(producer, first):
        return False
    return not isinstance(getattr(producer, "variable", None), nn.Parameter)


def _nodes(output: Any, first: int) -> Iterator[Node]:
    """The nodes that an output comes from, back to node number ``first``."""
    stack = [t.grad_fn for t in tensors_in(output) if t.grad_fn is not None]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in seen or node_number(node) < first:
            continue
        seen.add(node)
        yield node
        stack.extend(after for after, _ in node.next_functions if after is not None)


def _use(node: Node, slot: _Slot, x: Tensor) -> Use:
    if slot.sides is not None:
        return slot.sides(node)
    found = [getattr(packed_value(node, name), "tensor", None) for name in slot.stats]
    stats = [slot.spread(s, x) for s in found if s is not None and s.numel()]
    if len(stats) < max(1, len(slot.stats)):  # not a norm, or a batch norm in evaluation
        return None
    return Normalized(stats[0] if len(stats) > 1 else None, stats[-1])


def find_uses(output: Any, first: int) -> Iterator[tuple[Any, Use]]:
    """Find the saved tensors that bear rounding in a graph, from node number ``first`` on.

    Yields the pack hook's result for each that still has its ``tensor``, and what backward reads of
    its values; None for all of them.
    """
    for node in _nodes(output, first):
        for slot in _SLOTS.get(node.name(), ()):
            packed = packed_value(node, slot.name)
            tensor = getattr(packed, "tensor", None)
            if tensor is not None and slot.allows(node) and _is_computed(node, slot.operand, first):
                yield packed, _use(node, slot, tensor)


# ATen operators, without the underscore of in-place ones. A mask or index that they take does not
# depend on the region's input, or else the operator that made it is not listed here.
_VIEWS = """
    alias as_strided _conj detach diagonal expand imag lift_fresh movedim narrow permute real
    _reshape_alias resolve_conj resolve_neg reshape select slice split split_with_sizes squeeze t
    transpose unbind unflatten unfold _unsafe_view unsqueeze view view_as_complex view_as_real
"""
_MOVES = """
    cat clone constant_pad_nd contiguous copy _to_copy embedding fill flip gather index index_add
    index_copy index_put _index_put_impl index_select masked_fill pixel_shuffle pixel_unshuffle
    reflection_pad1d reflection_pad2d repeat repeat_interleave replication_pad2d roll scatter
    scatter_add select_scatter slice_scatter stack tril triu where zero
"""
_FUNCTIONS = """
    abs add addcdiv addcmul celu clamp clamp_max clamp_min cos div elu erf exp expm1 gelu glu
    hardsigmoid hardswish hardtanh leaky_relu lerp log log1p log2 logaddexp log_sigmoid_forward
    maximum minimum mish mul neg pow _prelu_kernel reciprocal relu rsqrt rsub sigmoid silu sin
    softplus sqrt sub tanh
"""
_REDUCTIONS = """
    _adaptive_avg_pool2d amax amin avg_pool2d _batch_norm_with_update cudnn_batch_norm cumsum
    _fused_rms_norm linalg_vector_norm _log_softmax logcumsumexp logsumexp max_pool2d_with_indices
    mean native_batch_norm _native_batch_norm_legit native_dropout native_group_norm
    native_layer_norm norm prod _safe_softmax _softmax std sum upsample_bilinear2d
    upsample_nearest2d var var_mean
"""
_MATRIX_PRODUCTS = """
    addbmm addmm addmv baddbmm bmm convolution dot _grouped_mm linear mm mv _scaled_mm
    _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_fused_attention_overrideable
"""
# These overwrite all values with random ones.
_RANDOM = "exponential normal uniform"
_CONTINUOUS = frozenset(
    " ".join((_VIEWS, _MOVES, _FUNCTIONS, _REDUCTIONS, _MATRIX_PRODUCTS, _RANDOM)).split()
)
# Operators of other libraries: our codes, which are only saved, and collectives.
_LIBRARIES = ("lq_lightning::", "_c10d_functional::", "c10d::", "c10d_functional::", "fsdp::")
# These read only a tensor's shape.
_LIKES = "full_like new_full new_ones new_zeros ones_like rand_like randn_like zeros_like"
_LIKE = frozenset(_LIKES.split())
_EMPTY = ("empty", "new_empty")  # prefixes of names
_TO_PYTHON = {  # read values without an operator
    Tensor.tolist: "tolist",
    Tensor.numpy: "numpy",
    Tensor.__array__: "__array__",
    Tensor.__dlpack__: "__dlpack__",
}


class _Operators(OperatorMode):
    """Tracks which values depend on tensors, operator by operator.

    Uninitialized memory is followed, too, and memory whose address is asked for: a library may fill
    it without an operator.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor], note: Callable[[str], None]) -> None:
        super().__init__()
        # storages; references keep their addresses from being reused
        self._followed: dict[int, Any] = {}
        self._note = note
        for tensor in tensors:
            self.follow(tensor)

    def follow(self, tensor: Tensor) -> None:
        if has_storage(tensor):
            self._followed[storage_key(tensor)] = storage_reference(tensor)

    def _is_followed(self, tensor: Tensor) -> bool:
        return not has_storage(tensor) or storage_key(tensor) in self._followed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name, _, overload = str(func.name()).partition(".")
        short = name.removeprefix("aten::").removesuffix("_")
        if short.startswith(_EMPTY):
            self.follow(result)
            return result
        if short in _LIKE or not any(map(self._is_followed, tensors_in((args, kwargs)))):
            return result
        if not _is_continuous(name, short, overload, args, kwargs):
            self._note(name)
        written = args[:1] if name.endswith("_") else ()
        for tensor in tensors_in((result, written, kwargs.get("out"))):
            self.follow(tensor)
        return result


def _is_continuous(
    name: str, short: str, overload: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    if name.startswith(_LIBRARIES):
        return True
    if short == "_to_copy":
        return not _rounds(args[0].dtype, kwargs.get("dtype"))
    if short == "copy":
        return not _rounds(args[1].dtype, args[0].dtype)
    if short == "bernoulli":
        return overload in ("float", "p")  # otherwise the tensor's values are probabilities
    return short in _CONTINUOUS and "mode" not in overload  # division with a mode rounds


def _rounds(before: torch.dtype, after: torch.dtype | None) -> bool:
    """Whether a cast rounds to integers or booleans."""
    exact = after is None or after.is_floating_point or after.is_complex
    return before.is_floating_point and not exact


class _ToPython(TorchFunctionMode):
    """Sees functions that read a tensor's values without an operator."""

    def __init__(self, operators: _Operators, note: Callable[[str], None]) -> None:
        super().__init__()
        self._operators, self._note = operators, note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _TO_PYTHON:
            self._note(_TO_PYTHON[func])
        elif func is Tensor.data_ptr:
            self._operators.follow(args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def watch_region(tensors: Iterable[Tensor]) -> Iterator[list[str]]:
    """Watch the operators of a region inside of a ``with`` block; ``tensors`` are all of its input.

    Yields a list that receives the names of operators on values that depend on these tensors, if an
    operator is not known to be continuous. Takes several times as long as the forward on the host:
    done for the first calls only.
    """
    found: list[str] = []
    operators = _Operators(tensors, found.append)
    with _ToPython(operators, found.append), operators:
        yield found
