"""Means over the targets of a whole batch in steps that see one micro-batch at a time.

[Note: means over a batch]
``cross_entropy`` divides by the number of targets that it does not ignore. Micro-batches differ in
that number (padding), so the mean of their means is not the mean of the batch, and a micro-batch
without targets has 0 / 0. Let micro-batch i of M have n_i targets, and the batch n: if its mean is
multiplied by ``M n_i / n`` (0 for n_i = 0), the mean over micro-batches is the batch's, in
losses, in logged values and in gradients.

Backward passes of the first micro-batches run before the forward passes of the last ones, so n has
to be known at the first loss. Most targets are made from the batch alone, by a few functions such
as slices and comparisons. These are recorded while the first micro-batch runs, and repeated with
the tensors of the others, whose own steps then have to call the same functions. They are also
repeated with the tensors of the whole batch: if that gives another number, as where a step loops
over its samples and takes `labels[i]`, one process would not have joined these targets into one
mean, and each micro-batch keeps its own. So do functions that are not linear in a mean, such as a
perplexity. Where targets are made otherwise (from hidden states, at random, from numbers that
Python read from them), the micro-batches keep their means, and a warning gives the numbers of
targets if they differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from lq_lightning._compat.modes import StepMode
from lq_lightning._compat.saved_tensors import has_storage, outer_hooks, storage_key
from lq_lightning.foundation.nested import tensors_in

_MEANS = (functional.cross_entropy, functional.nll_loss)
_SIGNATURES = {function: inspect.signature(function) for function in _MEANS}
_PLAIN: tuple[type, ...] = (type(None), bool, int, float, str, type(...))
_PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format)
# Parts of names of functions.
_RANDOM = ["rand", "bernoulli", "multinomial", "normal", "dropout", "poisson", "uniform_"]
_RANDOM += ["exponential_", "geometric_", "cauchy_"]
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
_IN_PLACE |= {"__setitem__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}
COUNT = "a function from a (micro-)batch to its number of targets"
_CANNOT_MAKE = (RuntimeError, IndexError, TypeError, ValueError)
_CONSTANTS = {"arange", "zeros", "ones", "full", "eye"}
# Functions that keep the factor of a mean, and some that do not.
_LINEAR = {"add", "radd", "sub", "rsub", "mul", "rmul", "div", "truediv", "true_divide", "neg"}
_LINEAR |= {"mean", "sum", "detach", "clone", "reshape", "view", "squeeze"}
_LINEAR |= {"to", "float", "double", "half", "bfloat16", "cpu"}
_NONLINEAR = {"exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "square", "pow"}
_NONLINEAR |= {"rpow", "sigmoid", "tanh", "clamp", "clip", "clamp_max", "minimum", "maximum"}
_READS = {"item", "tolist", "numpy", "__array__", "__int__", "__float__", "__index__"}


class _UnknownError(Exception):
    """A tensor is not made from the batch alone."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor of the batch, by its position."""

    place: int


@dataclass(frozen=True, slots=True)
class _Made:
    """The result of a function of such tensors and constants."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    in_place: bool


@dataclass(frozen=True, slots=True)
class _Call:
    """A mean over targets in a step, up to the values of the batch."""

    target: Any  # recipe of its targets
    ignored: int
    weighted: bool


class BatchMeans:
    """Corrects means over targets to means over the batch; see [Note: means over a batch].

    ``arguments`` of the step are given by micro-batch.
    """

    def __init__(self, arguments: Sequence[tuple[Any, ...]]) -> None:
        self._leaves = [list(tensors_in(own)) for own in arguments]
        # each with the number of all targets, and whether the whole batch gives it, as tensors
        self._calls: list[tuple[_Call | None, tuple[Tensor, Tensor] | None]] = []
        self._found: dict[int, list[Tensor]] = {}

    def watching(self, index: int) -> StepMode:
        """Around the step of a micro-batch, on the last stage."""
        return _Watch(self, self._leaves[index])

    def factor(
        self, number: int, call: _Call | None, found: Tensor, count: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Return the factor that corrects a mean, and whether to apply it; None if unknown.

        Args:
            number: Index of the call in the step.
            call: The call; None if it is not known how its targets are made.
            found: Number of targets.
            count: Function that counts the targets of another micro-batch.

        Raises:
            RuntimeError: Micro-batches before this one made their targets otherwise.
        """
        if number >= len(self._calls):
            self._calls.append((call, None if call is None else self._total(call.target, count)))
        first, known = self._calls[min(number, len(self._calls) - 1)]
        self._found.setdefault(number, []).append(found)
        if known is None:
            return None
        if call != first:
            raise RuntimeError(
                "a step makes the targets of its losses otherwise in one micro-batch than in "
                "another, so that they cannot be counted before all have run: give the strategy "
                f"`count_targets`, {COUNT}."
            )
        total, joined = known
        return found * len(self._leaves) / total, joined

    def _total(
        self, target: Any, count: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        try:
            made = [_make(target, leaves, {}) for leaves in self._leaves]
            total = torch.stack([count(tensor) for tensor in made]).sum(0)
        except _CANNOT_MAKE:
            return None  # shapes or numbers are others in another micro-batch
        try:
            whole = count(_make(target, _Joined(self._leaves), {}))
        except _CANNOT_MAKE:
            whole = total  # the step names the size of a micro-batch, all of which it uses
        # sums of weights of classes are rounded
        return total, torch.isclose(whole.double(), total.double(), rtol=1e-5, atol=0.0)

    def left_out(self) -> list[int] | None:
        """Return targets by micro-batch where they differ and means are not corrected.

        Without any such call, labels of the batch other than -100 count. Waits for the device.
        """
        every = []
        for number, numbers in self._found.items():
            known = self._calls[number][1]
            corrected = known is not None and bool(known[1])
            if len(numbers) == len(self._leaves) and not corrected:
                every.append(numbers)
        if not self._calls:
            places = [p for p, t in enumerate(self._leaves[0]) if t.dim() and t.dtype == torch.long]
            every += [[(own[place] != -100).sum() for own in self._leaves] for place in places]
        for numbers in every:
            counts = torch.stack(numbers).tolist()
            if len(set(counts)) > 1:
                return [round(count) for count in counts]
        return None


class _Joined:
    """The tensors of a batch by position, joined from its micro-batches where they are used."""

    def __init__(self, leaves: Sequence[Sequence[Tensor]]) -> None:
        self._leaves = leaves

    def __getitem__(self, place: int) -> Tensor:
        parts = [own[place] for own in self._leaves]
        return torch.cat(parts) if parts[0].dim() else parts[0]


class _Watch(StepMode):
    """Records how a step computes its targets from the batch, and corrects its means."""

    def __init__(self, means: BatchMeans, leaves: Sequence[Tensor]) -> None:
        super().__init__()
        self._means = means
        self._nodes: Any = WeakIdKeyDictionary()
        for place, tensor in enumerate(leaves):
            self._nodes[tensor] = _Leaf(place)
        # Uncorrected values of corrected means and of linear terms with them.
        self._plain: Any = WeakIdKeyDictionary()
        self._read = False  # whether Python took numbers from the batch, which may be anywhere
        self._number = 0
        self._around = (outer_hooks(), torch.is_grad_enabled())

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function and record its result."""
        named = dict(kwargs or {})
        if torch.compiler.is_compiling():
            return function(*args, **named)
        name = getattr(function, "__name__", "")
        if self._plain and name.strip("_") in _NONLINEAR:
            args = self._without_factors(args)  # a perplexity comes from a micro-batch's own mean
        result = function(*args, **named)
        if function in _MEANS:
            return self._corrected(function, args, named, result)
        if self._plain and name.strip("_") in _LINEAR:
            self._note_plain(function, args, named, result)
        if name in _READS:
            self._read |= any(tensor in self._nodes for tensor in tensors_in(args))
        elif name in _IN_PLACE or "out" in named or (name.endswith("_") and name[-2:] != "__"):
            self._note_change(function, args, named)
        elif isinstance(result, Tensor) and result not in self._nodes:
            made = self._made(function, args, named)
            if made is not None:
                self._nodes[result] = made
        return result

    def _note_plain(self, function: Any, args: Any, named: Any, result: Any) -> None:
        changes = function.__name__[-1] == "_" and function.__name__[:2] != "__"
        if changes or not isinstance(result, Tensor) or result.numel() != 1:
            return
        plain = self._without_factors(args)
        if plain is not args and result not in self._plain:
            self._plain[result] = function(*plain, **named)

    def _without_factors(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not any(isinstance(value, Tensor) and value in self._plain for value in args):
            return args
        return tuple(self._plain.get(v, v) if isinstance(v, Tensor) else v for v in args)

    def _made(self, function: Any, args: Any, named: Any, in_place: bool = False) -> _Made | None:
        name = getattr(function, "__name__", "")
        if any(part in name for part in _RANDOM):
            return None
        if name not in _CONSTANTS and not any(t in self._nodes for t in tensors_in((args, named))):
            return None
        try:
            own = {key: self._encode(value) for key, value in named.items()}
            return _Made(function, self._encode(args), own, in_place)
        except _UnknownError:
            return None

    def _note_change(self, function: Any, args: Any, named: Any) -> None:
        changed = named.get("out", args[0] if args else None)
        if not isinstance(changed, Tensor) or not has_storage(changed):
            return
        self._plain.pop(changed, None)
        same = [t for t in self._nodes if storage_key(t) == storage_key(changed)]
        made = None
        if len(same) == 1 and isinstance(self._nodes.get(changed), _Made) and "out" not in named:
            made = self._made(function, args, named, in_place=True)
        for tensor in same:  # views among them would not know of the change
            del self._nodes[tensor]
        if made is not None:
            self._nodes[changed] = made

    def _encode(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            node = self._nodes.get(value)
            if node is None:
                raise _UnknownError
            return node
        if isinstance(value, (tuple, list)):
            items = [self._encode(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, slice):
            return slice(*map(self._encode, (value.start, value.stop, value.step)))
        if not isinstance(value, _PLAIN):
            raise _UnknownError
        return value

    def _corrected(self, function: Any, args: Any, named: Any, result: Any) -> Any:
        bound = _SIGNATURES[function].bind(*args, **named)
        bound.apply_defaults()
        own = bound.arguments
        target, weight, ignored = own["target"], own["weight"], own["ignore_index"]
        legacy = own["size_average"] is not None or own["reduce"] is not None
        if legacy or own["reduction"] != "mean" or target.is_floating_point():
            return result
        count = partial(_count, ignored=ignored, weight=weight)
        node = self._nodes.get(target)
        # activation checkpointing computes it again in backward, where nothing can be corrected
        inside = self._around != (outer_hooks(), torch.is_grad_enabled())
        unknown = node is None or inside or self._read
        call = None if unknown else _Call(node, ignored, weight is not None)
        found = count(target)
        factor = self._means.factor(self._number, call, found, count)
        self._number += 1
        if factor is None:
            return result
        share, joined = factor
        corrected = torch.where(found > 0, result, 0) * share.to(result.dtype)
        corrected = torch.where(joined, corrected, result)
        self._plain[corrected] = result
        return corrected


@torch.no_grad()
def _count(target: Tensor, ignored: int, weight: Tensor | None) -> Tensor:
    counts = target != ignored
    return counts.sum() if weight is None else (weight[target.where(counts, 0)] * counts).sum()


@torch.no_grad()
def _make(node: Any, leaves: Sequence[Tensor] | _Joined, known: dict[int, Any]) -> Any:
    """Repeat the recipe ``node`` with other leaves; ``known`` caches results by the node's id."""
    if isinstance(node, _Leaf):
        return leaves[node.place]
    if isinstance(node, slice):
        return slice(*(_make(part, leaves, known) for part in (node.start, node.stop, node.step)))
    if isinstance(node, (tuple, list)):
        return type(node)(_make(item, leaves, known) for item in node)
    if not isinstance(node, _Made):
        return node
    if id(node) not in known:
        args = _make(node.args, leaves, known)
        named = {key: _make(value, leaves, known) for key, value in node.kwargs.items()}
        if node.in_place:
            args = (args[0].clone(), *args[1:])
        result = node.function(*args, **named)
        known[id(node)] = args[0] if node.in_place else result
    return known[id(node)]
