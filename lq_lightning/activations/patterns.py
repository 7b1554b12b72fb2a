"""Formulas of what sites compute, and whether code on stand-ins computes one of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .algebra import ACTIVATIONS as FORMULAS
from .algebra import Formula, atom, mean, number, root
from .functions import NormLayer
from .probe import Probe
from .sites import DIMS
from .trace import NotKnown, Trace, random_values

__all__ = ["MLP", "match_activation", "match_mlp", "match_norm", "match_transposed"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
_TORCH_NORMS = (F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Fractions of the range of a row's values that count as equal; only a second line of defence.
_TOLERANCE = 1e-5
_GRADIENT_TOLERANCE = 1e-3
_ROUGH_TOLERANCE = 0.02  # of bf16, on average; a value is rounded by 0.004 at most

MLP = tuple[str, str, "str | None", str]


def _variants() -> Iterator[tuple[torch.dtype, int, bool, bool]]:
    """Dtype, number of dimensions, training or not, autocast or not."""
    yield from itertools.product(_DTYPES, DIMS, (True, False), (False,))
    yield torch.float32, 3, True, True


def _input(dtype: torch.dtype, dims: int, width: int) -> Tensor:
    rows = ((3,), (2, 3), (2, 1, 3), (1, 2, 1, 3))[dims - 2]
    x = random_values(*rows, width) + 0.5
    if dims == 2 and dtype == torch.float32:
        x = x * torch.logspace(-3.0, 3.0, 3, device="cpu", dtype=torch.float32)[:, None]
    return x.to(dtype).requires_grad_()


def _close(y: Tensor, expected: Tensor, tolerance: float = _TOLERANCE) -> bool:
    if y.shape != expected.shape:
        return False
    y, expected = y.detach().double(), expected.detach().double()
    largest = expected.abs().amax(-1, keepdim=True)
    return bool(((y - expected).abs() <= tolerance * largest).all())


def _agree(y: Tensor, expected: Tensor, leaves: list[Tensor]) -> bool:
    """Whether two results of the same leaves and their gradients are equal."""
    if not _close(y, expected):
        return False
    dy = random_values(*y.shape).to(y.dtype)
    found, right = (torch.autograd.grad(z, leaves, dy, allow_unused=True) for z in (y, expected))
    return all(
        g is not None and e is not None and _close(g, e, _GRADIENT_TOLERANCE)
        for g, e in zip(found, right, strict=True)
    )


def _same(formula: Formula, first: Formula | None) -> Formula:
    """Return the formula of a run, which must equal that of the first run."""
    if first is not None and formula != first:
        raise NotKnown("computes something else for other inputs")
    return formula


def _norm_formula(formula: Formula, values: dict[str, Any]) -> tuple[str, float]:
    """Kind and ``eps`` of a norm; "rms" stands for "rms_cast", too."""
    x, one = atom("input"), number(1.0)
    weight, bias = (
        None if values.get(name) is None else atom("parameter", name) for name in ("weight", "bias")
    )
    centered = x + mean(x).scaled(-1.0)
    for each in formula.atoms():
        if each.name != "root" or not isinstance(each.argument, Formula):
            continue
        eps = each.argument.constant
        for kind in ("layer", "rms", "rms_offset"):
            value = centered if kind == "layer" else x
            y = value * root(mean(value * value) + number(eps)).inverse()
            if weight is not None:
                y = y * (one + weight if kind == "rms_offset" else weight)
            if eps > 0.0 and formula == (y if bias is None else y + bias):
                return kind, eps
    raise NotKnown("no norm")


def _norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float
) -> Tensor:
    wide = x.float()
    if kind == "layer":
        y = F.layer_norm(wide, wide.shape[-1:], eps=eps)
    else:
        y = F.rms_norm(wide, wide.shape[-1:], eps=eps)
    if kind == "rms_cast":
        y = y.to(x.dtype)
    if weight is not None:
        y = y.float() * (1.0 + weight if kind == "rms_offset" else weight)
    return (y if bias is None else y + bias).to(x.dtype)


def match_norm(probe: Probe, size: int, values: dict[str, Any]) -> NormLayer:
    """Return the normalization that the code of a layer computes.

    Args:
        probe: Whose parameters are ``values``.
        size: Of a row.
        values: Weight and bias, ``[size]`` fp32 or None.

    Raises:
        NotKnown: It is none.
    """
    given = {name: p for name, p in values.items() if p is not None}

    def run(
        x: Tensor, training: bool = True, autocast: bool = False, own: torch.dtype = torch.float32
    ) -> tuple[Tensor, Formula, bool]:
        trace = Trace(x.dtype, norms=_TORCH_NORMS, autocast=autocast)
        same = own == torch.float32
        used = {n: p if same else nn.Parameter(p.detach().to(own)) for n, p in given.items()}
        probe.parameters.update(used)
        for name, parameter in used.items():
            trace.add(parameter, atom("parameter", name))
        return *probe.run(trace, x, training=training), trace.functional

    formula, kind, eps = None, "", 0.0
    for dtype, dims, training, autocast in _variants():
        for own in {torch.float32, dtype} if given else {torch.float32}:
            x = _input(dtype, dims, size)
            found = _same(run(x, training, autocast, own)[1], formula)
            if formula is None:
                formula, (kind, eps) = found, _norm_formula(found, values)
    weight, bias = values.get("weight"), values.get("bias")
    x = _input(torch.float32, 2, size)
    small = (random_values(3, size) * eps**0.5).requires_grad_()  # of which `eps` is a large part
    for value in (x, small):
        expected = _norm_reference(value, weight, bias, kind, eps)
        if not _agree(run(value)[0], expected, [value, *given.values()]):
            raise NotKnown("other values than those of its formula")
    rough = small.detach().bfloat16().requires_grad_()
    y, _, functional = run(rough)
    output = "input" if y.dtype == rough.dtype or weight is None else "promoted"

    def distance(kind: str) -> float:
        expected = _norm_reference(rough, weight, bias, kind, eps)
        return float((y.to(expected.dtype).float() - expected.float()).abs().sum())

    kind = min(("rms", "rms_cast") if kind == "rms" else (kind,), key=distance)
    if not distance(kind) <= _ROUGH_TOLERANCE * float(y.float().abs().sum()):
        raise NotKnown("other values in bf16")
    return NormLayer(kind=kind, eps=eps, output=output, functional=functional)


def match_activation(run: Callable[..., tuple[Tensor, Formula]]) -> str:
    """Return the name of the activation function that code computes.

    Args:
        run: Takes a trace, an input, and ``training``.

    Raises:
        NotKnown: It is none that sites know.
    """
    first, name = None, ""
    for dtype, dims, training, autocast in _variants():
        trace = Trace(dtype, knows_width=False, autocast=autocast)
        x = _input(dtype, dims, 16 + 8 * dims)
        y, formula = run(trace, x, training=training)
        if y.dtype != dtype:
            raise NotKnown("changes the dtype")
        _same(formula, first)
        if first is None:
            first, name = formula, _activation_of(formula)
    x = _input(torch.float32, 2, 48)
    y, _ = run(Trace(x.dtype, knows_width=False), x, training=True)
    if not _agree(y, ACTIVATIONS[name](x), [x]):
        raise NotKnown("other values than those of its formula")
    return name


def _activation_of(formula: Formula) -> str:
    for name, function in FORMULAS.items():
        if formula == function(atom("input")):
            return name
    raise NotKnown("no function that is known")


def match_transposed(probe: Probe) -> bool:
    """Return whether code computes ``x @ weight + bias``.

    Raises:
        NotKnown: It does not.
    """
    parameters = probe.parameters
    y = atom("product", (atom("input"), atom("parameter", "weight")))
    if parameters["bias"] is not None:
        y = y + atom("parameter", "bias")
    for dtype, dims, training, autocast in _variants():
        trace = Trace(dtype)
        for name, parameter in list(parameters.items()):
            if parameter is not None:
                parameters[name] = nn.Parameter(parameter.detach().to(dtype))
                trace.add(parameters[name], atom("parameter", name))
        x = _input(dtype, dims, parameters["weight"].shape[0])
        if not autocast and probe.run(trace, x, training=training)[1] != y:
            raise NotKnown("no product with its weight")
    return True


def _roles(formula: Formula, trace: Trace, x: Tensor, y: Tensor) -> tuple[Formula, str, list[str]]:
    """What the last projection of an MLP takes, its name, and those of the projections before.

    They take the very input, and what the last one makes is the output: a site that calls them
    applies nothing else to the tensors, be it without effect here.
    """
    for name, (_, _, made) in trace.calls.items():
        last = next(iter(formula.atoms()), None)
        if made is not y or last is None or formula != atom("call", last.argument):
            continue
        inner = last.argument[1]  # type: ignore[index]
        before = [other for other in trace.calls if other != name]
        if all(trace.calls[other][0] is x for other in before):
            return inner, name, before
    raise NotKnown("changes what projections take or make")


def _factors(before: list[str], widths: dict[str, int]) -> Iterator[tuple[str, str | None, Any]]:
    """Yield possible gate and up projections, with the formulas of their outputs."""
    of = {name: atom("call", (name, atom("input"))) for name in before}
    if len(before) == 2:
        for gate, up in itertools.permutations(before):
            yield gate, up, (of[gate], of[up])
    elif len(before) == 1:
        (gate,) = before
        width = widths[gate]
        parts = [atom("part", (a, b, of[gate])) for a, b in ((0, width // 2), (width // 2, width))]
        if width % 2 == 0:
            yield gate, gate, tuple(parts)
        yield gate, None, (of[gate], number(1.0))


def match_mlp(probe: Probe, size: int) -> MLP:
    """Return activation function, gate, up and down projection of the code of an MLP.

    Args:
        probe: Whose projections are stand-ins.
        size: Of a row of its input.

    Raises:
        NotKnown: It is none.
    """
    found = set()
    for dtype, dims, training, autocast in _variants():
        trace, x = Trace(dtype, autocast=autocast), _input(dtype, dims, size)
        y, formula = probe.run(trace, x, training=training)
        inner, last, before = _roles(formula, trace, x, y)
        found.add(_mlp_of(inner, last, before, trace))
        if trace.calls[last][0].dtype != dtype:
            raise NotKnown("changes the dtype")
    if len(found) != 1:
        raise NotKnown("computes something else for other inputs")
    mlp = found.pop()
    name, gate, up, down = mlp
    x = _input(torch.float32, 2, size)
    trace = Trace(x.dtype)
    probe.run(trace, x, training=True)
    leaves = [trace.calls[each][1] for each in {gate, up or gate}]
    first = trace.calls[gate][1]
    one = torch.ones_like(first)
    factors = (first, one) if up is None else (first, trace.calls[up][1])
    factors = factors if gate != up else first.chunk(2, dim=-1)  # type: ignore[assignment]
    if not _agree(trace.calls[down][0], ACTIVATIONS[name](factors[0]) * factors[1], leaves):
        raise NotKnown("other values than those of its formula")
    return mlp


def _mlp_of(inner: Formula, down: str, before: list[str], trace: Trace) -> MLP:
    widths = {name: trace.calls[name][1].shape[-1] for name in before}
    for gate, up, (first, second) in _factors(before, widths):
        for name, function in FORMULAS.items():
            if inner == function(first) * second:
                return name, gate, up, down
    raise NotKnown("no gated MLP")
