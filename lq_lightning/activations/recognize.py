"""Recognize norms, activation functions and MLPs: what a module computes is proved.

Names of classes and attributes only say what to try. The module's own code runs on stand-ins
(``trace``), for inputs of all dtypes and numbers of dimensions that a site takes, in training and
in evaluation, and the formula that it computes has to be that of a site in each. Any other module
is left alone.
"""

from __future__ import annotations

import itertools
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .algebra import ACTIVATIONS as FORMULAS
from .algebra import Formula, atom, mean, number, root
from .functions import NormLayer
from .sites import DIMS, HOOKS, FunctionSite, Proof, Reads, is_function_without_state, sites_of
from .trace import NotKnown, Probe, Trace, random_values, reads_same, untouched_generators

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
# Differences, relative to a row's largest value, that count as equal; a second line of defence.
_TOLERANCE = 1e-5
_GRADIENT_TOLERANCE = 1e-3
_ROUGH_TOLERANCE = 0.02  # for bf16, on average; one rounding is 0.004 at most

MLP = tuple[str, str, "str | None", str]
_NORM_NAME = re.compile(r"norm", re.IGNORECASE)
_ACTIVATION_NAME = re.compile(r"gelu|silu|swish|relu", re.IGNORECASE)
_FUNCTION_NAME = re.compile(r"act", re.IGNORECASE)
_FUNCTION_TYPES = (types.FunctionType, types.BuiltinFunctionType)
# Names of gate, up and down projection; gate and up share a name if one layer makes both.
_GATED_NAMES = (
    ("gate_proj", "up_proj", "down_proj"),  # Llama, Mistral, Qwen, Gemma and most others
    ("gate_up_proj", "gate_up_proj", "down_proj"),  # Phi-3, GLM
    ("fc_1", "fc_2", "proj"),  # litgpt
    ("w1", "w3", "w2"),  # Meta's own Llama, torchtitan
    ("fc1_g", "fc1_x", "fc2"),  # timm
)


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
    """Return the formula of a run, which must equal the first run's."""
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
    """Return the normalization that the code of a layer computes; else raise ``NotKnown``.

    ``values`` are weight and bias of the stand-in, ``[size]`` fp32 or None.
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
    small = (random_values(3, size) * eps**0.5).requires_grad_()  # so that `eps` matters
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
    """Return the name of the activation function that code computes; else raise ``NotKnown``."""
    first, name = None, ""
    for dtype, dims, training, autocast in _variants():
        trace = Trace(dtype, knows_width=False, autocast=autocast)
        x = _input(dtype, dims, 16 + 8 * dims)
        y, formula = run(trace, x, training=training)
        if y.dtype != dtype:
            raise NotKnown("changes the dtype")
        _same(formula, first)
        if first is None:
            names = [n for n, f in FORMULAS.items() if formula == f(atom("input"))]
            if not names:
                raise NotKnown("no function that is known")
            first, name = formula, names[0]
    x = _input(torch.float32, 2, 48)
    y, _ = run(Trace(x.dtype, knows_width=False), x, training=True)
    if not _agree(y, ACTIVATIONS[name](x), [x]):
        raise NotKnown("other values than those of its formula")
    return name


def match_transposed(probe: Probe) -> bool:
    """Return True if code computes ``x @ weight + bias``; else raise ``NotKnown``."""
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
    """Input of an MLP's last projection, its name, and the names of the projections before.

    Those take the MLP's input itself, and the last one's output is the MLP's: a site that calls
    them applies nothing else to the tensors, even if it has no effect here.
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
    """Return function, gate, up and down projection of an MLP's code; else raise ``NotKnown``."""
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


@dataclass(frozen=True, slots=True)
class Match:
    """A recognized module: a ``NormLayer`` and a size, the name of an activation function, or an
    ``MLP``; and the proof.
    """

    found: Any
    proof: Proof


def own_forward(module: nn.Module) -> Any:
    """Return the forward that an instance had before it got a site; None if that of its class.

    Liger's modules, whose kernels run on GPUs only and cannot be tried out, count by their class.
    """
    own = vars(module).get("forward")
    for site in sites_of(module):
        own = own if isinstance(site, FunctionSite) else site.previous
    if own is None or getattr(own, "__self__", None) is not module:
        return own
    function: Any = getattr(own, "__func__", None)
    name = getattr(function, "__module__", None) or ""
    same = function is type(module).forward or name.startswith("liger_kernel.")
    return None if same else own


def _is_bare(module: nn.Module) -> bool:
    """Whether a module's output depends on the code of its class alone."""
    own = vars(module)
    return (
        own_forward(module) is None
        and not any(value is not None for value in own["_buffers"].values())
        and "parametrizations" not in own["_modules"]
    )


def _is_unhooked(module: nn.Module) -> bool:
    return not any(vars(module)[name] for name in HOOKS) and "forward" not in vars(module)


@contextmanager
def _apart() -> Iterator[None]:
    """Run the code of others eagerly, without warnings, whatever mode the process is in."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for context in (
            untouched_generators(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.device("cpu"),
        ):
            stack.enter_context(context)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


class Recognizer:
    """Recognizes modules; runs the code of a class once for all that read the same values."""

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[Reads, Any]]] = {}
        self._functions: dict[Callable[..., Any], str] = {}

    def _match(
        self, key: Any, module: nn.Module, probe: Callable[[], Probe], try_out: Callable[..., Any]
    ) -> tuple[Any, Reads]:
        known = self._known.setdefault((*key, type(module)), [])
        for reads, found in known:
            if reads_same(module, reads):
                return found, reads
        reads, found = {}, None
        try:
            with _apart():
                made = probe()
                reads = made.reads
                found = try_out(made)
        except NotKnown:
            pass
        known.append((reads, found))
        return found, reads

    def norm(self, module: nn.Module) -> Match | None:
        """Return the ``NormLayer`` that a module is, and the size of its rows; None if it is none.

        A class whose name contains "norm" is tried out.
        """
        if not _NORM_NAME.search(type(module).__name__) or not _is_bare(module):
            return None
        shapes = _norm_shapes(module)
        if next(module.children(), None) is not None or shapes is None:
            return None
        size, names = shapes
        values = {
            name: nn.Parameter(random_values(size + i).narrow(0, 0, size).clone())
            if given
            else None
            for i, (name, given) in enumerate(names)
        }
        probe = partial(Probe, module, dict(values))
        key = ("norm", size, names)
        found, reads = self._match(key, module, probe, lambda made: match_norm(made, size, values))
        return None if found is None else Match((found, size), Proof.of(module, reads))

    def activation(self, module: nn.Module) -> Match | None:
        """Return the name of the function that a module without parameters computes.

        A class whose name contains GELU, SiLU, Swish or ReLU is tried out.
        """
        if not _ACTIVATION_NAME.search(type(module).__name__) or not _is_bare(module):
            return None
        if next(module.parameters(), None) is not None:
            return None
        found, reads = self._match(
            ("activation",), module, partial(Probe, module), lambda p: match_activation(p.run)
        )
        return self._of_parts(module, found, reads)

    def _of_parts(
        self, module: nn.Module, found: Any, reads: Reads, projections: Any = ()
    ) -> Match | None:
        """The match, if submodules that a site does not run have no hooks."""
        if found is None:
            return None
        proof = Proof.of(module, reads, projections)
        inside = [kept.module for kept in proof.kept if kept.replaced]
        return Match(found, proof) if all(map(_is_unhooked, inside)) else None

    def function(self, module: nn.Module) -> tuple[str, str] | None:
        """Return attribute and name of an activation function that is no module, such as
        ``activation`` of ``nn.TransformerEncoderLayer``: attributes whose names contain "act" are
        tried out.
        """
        for attribute, function in vars(module).items():
            if _FUNCTION_NAME.search(attribute) and isinstance(function, _FUNCTION_TYPES):
                if function not in self._functions:
                    self._functions[function] = _function_name(function)
                if name := self._functions[function]:
                    return attribute, name
        return None

    def linear(self, module: nn.Module) -> bool:
        """Return whether a module computes ``nn.Linear``, with its weight transposed or not."""
        own = vars(module)
        if not _is_bare(module) or own["_parameters"].get("weight") is None:
            return False
        forward = type(module).forward
        if forward is nn.Linear.forward:
            return "bias" in own["_parameters"]
        if type(module).__name__ != "Conv1D" or not hasattr(module, "nf"):
            return False
        of = getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")
        if of == ("transformers.pytorch_utils", "Conv1D.forward"):
            return True
        shapes = tuple((n, None if p is None else p.shape) for n, p in own["_parameters"].items())
        if {name for name, _ in shapes} != {"weight", "bias"}:
            return False

        def probe() -> Probe:
            made = {n: None if s is None else nn.Parameter(random_values(*s)) for n, s in shapes}
            return Probe(module, made)

        found, _ = self._match(("linear", shapes), module, probe, match_transposed)
        return bool(found)

    def _projections(self, module: nn.Module) -> dict[str, int | None]:
        """Children that a gated MLP would project with, and the widths of their outputs."""
        children = vars(module)["_modules"]
        for names in _GATED_NAMES:
            if all(children.get(name) is not None for name in names):
                return _widths(children, *names)
        linear = [name for name, child in module.named_children() if self._projects(child)]
        return {n: _width(children[n]) or 32 for n in linear} if len(linear) in (2, 3) else {}

    def _projects(self, module: nn.Module) -> bool:
        """Whether a module looks like a projection, also one with adapters (LoRA)."""
        return isinstance(getattr(module, "in_features", None), int) or self.linear(module)

    def mlp(self, module: nn.Module) -> Match | None:
        """Return activation, gate, up and down of an MLP, as ``MLPSite`` has them.

        A module with children of certain names, or with two or three linear layers, is tried out.
        None if it computes something else, dropout included, or if a site for its activation module
        suffices.
        """
        widths = self._projections(module)
        own = vars(module)["_parameters"].values()
        if not widths or not _is_bare(module) or any(p is not None for p in own):
            return None
        first = vars(module)["_modules"][next(iter(widths))]
        size = getattr(first, "in_features", None)
        if not isinstance(size, int):
            weight = getattr(first, "weight", None)
            size = weight.shape[0] if isinstance(weight, Tensor) and weight.dim() == 2 else 16
        probe = partial(Probe, module, widths=widths)
        key = ("mlp", size, tuple(widths.items()))
        found, reads = self._match(key, module, probe, lambda made: match_mlp(made, size))
        match = self._of_parts(module, found, reads, widths)
        if match is None or found[2] is not None:
            return match
        return None if any(map(self.activation, module.children())) else match


def _norm_shapes(module: nn.Module) -> tuple[int, tuple[tuple[str, bool], ...]] | None:
    """Length of a norm's rows, and which of weight and bias it has."""
    own = vars(module)["_parameters"]
    values = {name: p for name, p in own.items() if p is not None}
    if set(own) - {"weight", "bias"} or any(p.dim() != 1 for p in values.values()):
        return None
    shape = getattr(module, "normalized_shape", None)
    sizes = {p.shape[0] for p in values.values()}
    if isinstance(shape, (tuple, list)) and len(shape) == 1:
        sizes.add(shape[0])
    if len(sizes) != 1 or sizes == {1}:
        return None
    return sizes.pop(), tuple((name, name in values) for name in own)


def _width(projection: nn.Module) -> int | None:
    width = getattr(projection, "out_features", getattr(projection, "nf", None))
    return width if isinstance(width, int) else None


def _widths(children: dict[str, Any], gate: str, up: str, down: str) -> dict[str, int | None]:
    """Output widths; widths that a projection does not state are inferred from the others."""
    inner = getattr(children[down], "in_features", None)
    inner = inner if isinstance(inner, int) else 32
    fitting = 2 * inner if gate == up else _width(children[gate]) or _width(children[up]) or inner
    return {
        gate: _width(children[gate]) or fitting,
        up: _width(children[up]) or fitting,
        down: _width(children[down]),
    }


def _function_name(function: Callable[..., Any]) -> str:
    if not is_function_without_state(function):
        return ""
    try:
        with _apart():
            return match_activation(lambda trace, x, **mode: trace.run(function, x))
    except NotKnown:
        return ""
