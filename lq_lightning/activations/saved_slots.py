"""Which saved tensors bear rounding: by the operator that saved one, and what it is in it.

An allow-list. Not in it, and so kept exactly: statistics, masks, indices, all that loss functions,
softmax, attention, ``sqrt``, ``log``, ``exp`` or comparisons save, what custom functions and
compiled code save, and every operator that is not named here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from lq_lightning._compat.saved_tensors import node_number, packed_value, saved_value
from lq_lightning.foundation.nested import tensors_in

__all__ = ["Normalized", "Sides", "find_uses"]


@dataclass(frozen=True, slots=True)
class Sides:
    """All that a piecewise linear function's backward reads of its input: on which side it is.

    Attributes:
        low: lower end of the inside.
        high: upper end.
        inside: a value that is inside.
        outside: a value that is not.
        closed: whether the ends are inside.
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
        return ~((values <= self.low) | (values >= self.high))  # so NaN is, as in ReLU's backward


@dataclass(frozen=True, slots=True)
class Normalized:
    """A norm's input, of which only the normalized values may be rounded.

    Rounded by itself, a row, group or channel whose mean is large, or that differs less than those
    beside it, would lose what the norm sees of it.

    Attributes:
        mean: is broadcast with the input; None of a root mean square.
        rstd: one over the deviation, likewise.
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
    """A tensor that an operator saves.

    Attributes:
        name: in torch's ``derivatives.yaml``.
        operand: its place among the operands that have a gradient; its producer is found there.
        sides: of a function whose derivative is a constant on each side of a bound.
        stats: of a norm: where it saved the mean, if it takes one, and one over the deviation.
        spread: of a norm: shapes a statistic so that it is broadcast with the input.
        allows: a further condition on the node.
    """

    name: str
    operand: int
    sides: Callable[[Node], Sides] | None = None
    stats: tuple[str, ...] = ()
    spread: Callable[[Tensor, Tensor], Tensor] = lambda stat, x: stat
    allows: Callable[[Node], bool] = lambda node: True


_INF = float("inf")
_HUGE = 1e4  # so that all that is between two bounds can be told in fp16


def _relu(node: Node) -> Sides:
    return Sides(0.0, _INF, 1.0, 0.0)


def _leaky_relu(node: Node) -> Sides:
    return Sides(0.0, _INF, 1.0, -1.0)


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


# The gradient is linear in these, so an error of a hundredth stays one.
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
    # Squares, and the cubes of a GELU that is written out: no other power is linear or near it.
    "PowBackward0": (_Slot("self", 0, allows=lambda n: saved_value(n, "exponent") in (2, 3)),),
}
# Derivatives are smooth functions of these inputs. Of functions that save their result (tanh,
# sigmoid) the derivative vanishes where the result is rounded to one: not in the list.
_SMOOTH = {
    "GeluBackward0": (_Slot("self", 0),),
    "SiluBackward0": (_Slot("self", 0),),
    "MishBackward0": (_Slot("self", 0),),
    "SoftplusBackward0": (_Slot("self", 0),),
    "EluBackward0": (
        _Slot("self_or_result", 0, allows=lambda node: not saved_value(node, "is_result")),
    ),
    "HardswishBackward0": (_Slot("self", 0),),
    "GluBackward0": (_Slot("self", 0),),
    "ErfBackward0": (_Slot("self", 0),),
}
_CLAMP = _Slot("self", 0, sides=_clamp, allows=_has_numbers)
# Kept as a bit per value, from which the derivative is exact.
_PIECEWISE = {
    "ReluBackward0": (_Slot("result", 0, sides=_relu),),
    "LeakyReluBackward0": (_Slot("self", 0, sides=_leaky_relu),),
    "HardtanhBackward0": (_Slot("self", 0, sides=_hardtanh, allows=_has_numbers),),
    "ClampBackward0": (_CLAMP,),  # of either overload, by version of torch
    "ClampBackward1": (_CLAMP,),
    "ClampMinBackward0": (_CLAMP,),
    "ClampMinBackward1": (_CLAMP,),
    "ClampMaxBackward0": (_CLAMP,),
    "ClampMaxBackward1": (_CLAMP,),
}


def _of_groups(stat: Tensor, x: Tensor) -> Tensor:
    stat = stat.repeat_interleave(x.shape[1] // stat.shape[1], dim=1)
    return stat.view(*stat.shape, *(1 for _ in x.shape[2:]))


def _of_channels(stat: Tensor, x: Tensor) -> Tensor:
    return stat.view(-1, *(1 for _ in x.shape[2:]))


_MEAN_AND_RSTD = ("result1", "result2")
_BATCH_NORM = _Slot("input", 0, stats=_MEAN_AND_RSTD, spread=_of_channels)
# Beside exact statistics, which have slots of their own.
_NORMS = {
    "NativeLayerNormBackward0": (_Slot("input", 0, stats=_MEAN_AND_RSTD),),
    "FusedRmsNormBackward0": (_Slot("input", 0, stats=("result1",)),),
    "NativeGroupNormBackward0": (_Slot("input", 0, stats=_MEAN_AND_RSTD, spread=_of_groups),),
    "NativeBatchNormBackward0": (_BATCH_NORM,),
    "CudnnBatchNormBackward0": (_BATCH_NORM,),
    "MiopenBatchNormBackward0": (_BATCH_NORM,),
    "BatchNormWithUpdateBackward0": (_BATCH_NORM,),
}
# Backward reads the shape alone; of a maximum's place there is an index.
_SHAPES = {
    "IndexAddBackward0": (_Slot("source", 1),),
    "MaxPool2DWithIndicesBackward0": (_Slot("self", 0),),
    "MaxPool3DWithIndicesBackward0": (_Slot("self", 0),),
    "AvgPool2DBackward0": (_Slot("self", 0),),
    "AvgPool3DBackward0": (_Slot("self", 0),),
    "AdaptiveAvgPool2DBackward0": (_Slot("self", 0),),
    "AdaptiveAvgPool3DBackward0": (_Slot("self", 0),),
}
_SLOTS = {**_PRODUCTS, **_SMOOTH, **_PIECEWISE, **_NORMS, **_SHAPES}
# What these make may hold -inf or the smallest number that there is, next to which all else of a
# group is rounded to zero.
_FILLED = ("MaskedFillBackward", "WhereBackward", "MaskedScatterBackward", "IndexFillBackward")
# These put constants in places of what has a gradient.
_JOINS = ("CatBackward", "StackBackward", "CopySlices")
# These add constants: to attention's scores masks, else numbers or tables.
_SUMS = ("AddBackward", "SubBackward")
_SCORES = ("BmmBackward", "BaddbmmBackward")
# What these make holds such values if what they take does.
_CARRIERS = (
    *(*_JOINS, *_SUMS, "MulBackward", "DivBackward"),
    *("AliasBackward", "AsStridedBackward", "CloneBackward", "ExpandBackward", "PermuteBackward"),
    *("RepeatBackward", "ReshapeAliasBackward", "SelectBackward", "SliceBackward", "SplitBackward"),
    *("SplitWithSizesBackward", "SqueezeBackward", "TBackward", "ToCopyBackward"),
    *("TransposeBackward", "UnbindBackward", "UnsafeViewBackward", "UnsqueezeBackward"),
    "ViewBackward",
)
_MAX_CARRIERS = 32  # looked at for one operand


def _may_be_filled(producer: Node, first: int) -> bool:
    """Whether what a node made may hold the values of a mask, back to the node of a number."""
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
    """Whether an operand is an activation: not a constant (mask, table, data), nor a weight."""
    producer = node.next_functions[operand][0]
    if producer is None or _may_be_filled(producer, first):
        return False
    return not isinstance(getattr(producer, "variable", None), nn.Parameter)


def _nodes(output: Any, first: int) -> Iterator[Node]:
    """The nodes that an output comes from, back to the node of a number."""
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
    if len(stats) < max(1, len(slot.stats)):  # no norm, or a batch norm that evaluates
        return None
    return Normalized(stats[0] if len(stats) > 1 else None, stats[-1])


def find_uses(output: Any, first: int) -> Iterator[tuple[Any, Use]]:
    """Find the saved tensors that bear rounding.

    Args:
        output: of a forward, with its graph.
        first: ``nodes_made()`` at its begin.

    Yields:
        What the pack hook returned for each that still has its ``tensor``, and what is enough to
        know of its values; None if all of them are read.
    """
    for node in _nodes(output, first):
        for slot in _SLOTS.get(node.name(), ()):
            packed = packed_value(node, slot.name)
            tensor = getattr(packed, "tensor", None)
            if tensor is not None and slot.allows(node) and _is_computed(node, slot.operand, first):
                yield packed, _use(node, slot, tensor)
