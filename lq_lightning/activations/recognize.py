"""What a module computes, proved operator by operator: norms, activation functions, gated MLPs.

Names of classes and attributes only say what to try. The module's own code runs on stand-ins
(``trace``), for inputs of all dtypes and numbers of dimensions that a site takes, in training and
in evaluation, and the formula that it computes has to be that of a site in each. Any other module
is left alone.
"""

from __future__ import annotations

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
from torch import Tensor, nn

from .functions import NormLayer
from .patterns import match_activation, match_mlp, match_norm, match_transposed
from .probe import Probe
from .proof import Proof, Reads, is_function_without_state, reads_same
from .sites import FunctionSite, sites_of
from .trace import NotKnown, Trace, random_values, untouched_generators

__all__ = ["Match", "Recognizer", "own_forward", "recognize_norm"]

_NORM_NAME = re.compile(r"norm", re.IGNORECASE)
_ACTIVATION_NAME = re.compile(r"gelu|silu|swish|relu", re.IGNORECASE)
_FUNCTION_NAME = re.compile(r"act", re.IGNORECASE)
_FUNCTION_TYPES = (types.FunctionType, types.BuiltinFunctionType)
# Attributes of gate, up and down projection; one name for both of the first if it makes both.
_GATED_NAMES = (
    ("gate_proj", "up_proj", "down_proj"),  # Llama, Mistral, Qwen, Gemma and most others
    ("gate_up_proj", "gate_up_proj", "down_proj"),  # Phi-3, GLM
    ("fc_1", "fc_2", "proj"),  # litgpt
    ("w1", "w3", "w2"),  # Meta's own Llama, torchtitan
    ("fc1_g", "fc1_x", "fc2"),  # timm
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True)
class Match:
    """What a module was recognized as.

    Attributes:
        found: a ``NormLayer`` and a size, the name of an activation function, or an ``MLP``.
        proof: the attributes that must not change.
    """

    found: Any
    proof: Proof


def own_forward(module: nn.Module) -> Any:
    """Return the forward that an instance had before it got a site; None if that of its class.

    Liger's, whose kernels run on GPUs only and cannot be tried out, count as that of the class.
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
    return not any(vars(module)[name] for name in _HOOKS) and "forward" not in vars(module)


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
    """Recognizes modules, and runs the code of a class once for all that read the same values."""

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

        Args:
            module: Anything. A class whose name contains "norm" is tried out.
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

        Args:
            module: Anything. A class whose name contains GELU, SiLU, Swish or ReLU is tried out.
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
        """The match, if modules inside that a site does not run have no hooks."""
        if found is None:
            return None
        proof = Proof.of(module, reads, projections)
        inside = [kept.module for kept in proof.kept if kept.replaced]
        return Match(found, proof) if all(map(_is_unhooked, inside)) else None

    def function(self, module: nn.Module) -> tuple[str, str] | None:
        """Return attribute and name of an activation function that a module has, and is no module.

        Args:
            module: Anything. Attributes whose names contain "activation" or "act" are tried out,
                such as ``activation`` of ``nn.TransformerEncoderLayer``.
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
        """Return the function and the names of the projections of an MLP, gated or plain.

        Args:
            module: Anything. One with children of certain names, or with two or three linear
                layers, is tried out.

        Returns:
            ``(activation, gate, up, down)`` as ``MLPSite`` has them; None if the module computes
            something else, dropout included, or if its activation function is a module of its own
            that suffices.
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
    """Width of a projection's output if it says so."""
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
            return match_activation(partial(_run, function))
    except NotKnown:
        return ""


def _run(
    function: Callable[[Tensor], Any], trace: Trace, x: Tensor, *, training: bool
) -> tuple[Tensor, Any]:
    del training  # a function has no mode
    return trace.run(function, x)


def recognize_norm(module: nn.Module) -> NormLayer | None:
    """Return what a normalization layer over the last dimension computes; None if it is none."""
    match = Recognizer().norm(module)
    return None if match is None else match.found[0]
