"""What a module computes, found by running it: norms, activation functions, gated MLPs.

Names of classes and attributes only say what to try. A module is taken for what it looks like if a
copy with random weights, on the CPU, computes just that; a variant with one more operation is left
alone instead of being computed wrongly.
"""

from __future__ import annotations

import copy
import itertools
import re
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .norm import NormLayer
from .sites import FunctionSite, sites_of

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "is_linear",
    "recognize_activation",
    "recognize_function",
    "recognize_mlp",
    "recognize_norm",
]

_EPS_NAMES = ("variance_epsilon", "eps", "norm_eps", "layer_norm_eps")
_NORM_NAME = re.compile(r"norm", re.IGNORECASE)
_ACTIVATION_NAME = re.compile(r"gelu|silu|swish|relu", re.IGNORECASE)
_FUNCTION_NAME = re.compile(r"act", re.IGNORECASE)
_FUNCTION_TYPES = (types.FunctionType, types.BuiltinFunctionType)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
_TORCH_NORMS = (F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm)
# Attributes of gate, up and down projection; one name for both of the first if it makes both.
_GATED_NAMES = (
    ("gate_proj", "up_proj", "down_proj"),  # Llama, Mistral, Qwen, Gemma and most others
    ("gate_up_proj", "gate_up_proj", "down_proj"),  # Phi-3, GLM
    ("fc_1", "fc_2", "proj"),  # litgpt
    ("w1", "w3", "w2"),  # Meta's own Llama, torchtitan
    ("fc1_g", "fc1_x", "fc2"),  # timm
)
# Fractions of the range of the values that count as equal; a different function differs by more.
_TOLERANCE = 1e-5
_ROUGH_TOLERANCE = 0.02  # of bf16, on average; a value is rounded by 0.004 at most

MLP = tuple[str, str, "str | None", str]


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)


def _run(
    module: nn.Module,
    x: Tensor,
    parameters: dict[str, Any] | None = None,
    children: Mapping[str, nn.Module] | None = None,
) -> Tensor | None:
    """Output of a module with other parameters or children; None if it takes or gives no tensor.

    As in training, whatever mode the module is in now: dropout that rests shall not be overlooked.
    """
    probe = _training_copy(module)
    probe.__dict__.pop("forward", None)
    probe.__dict__["_parameters"] = parameters or {}
    probe.__dict__["_modules"].update(children or {})
    own = _own_forward(module)
    if own is None:
        return _call(lambda value: type(module).forward(probe, value), x)
    if getattr(own, "__self__", None) is not module:
        return None  # around the real parameters; what it adds is not to be lost
    return _call(lambda value: own.__func__(probe, value), x)


def _own_forward(module: nn.Module) -> Any:
    """The forward that an instance had before it got a site; None if it is that of its class.

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


def _training_copy(module: nn.Module) -> nn.Module:
    """A copy in training mode, with copies of its submodules, that shares their tensors."""
    probe = copy.copy(module)
    probe.__dict__ = {**module.__dict__, "training": True}
    probe.__dict__["_modules"] = {
        name: None if part is None else _training_copy(part)
        for name, part in vars(module)["_modules"].items()
    }
    return probe


def _call(function: Callable[[Tensor], Any], x: Tensor) -> Tensor | None:
    try:
        with torch.no_grad(), torch.device("cpu"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of mixed dtypes, which are part of the question
            y = function(x)
    except Exception:  # whatever code of others does with an input of ours: not what it looks like
        return None
    return y if isinstance(y, Tensor) and y.shape[:-1] == x.shape[:-1] else None


def _equal(y: Tensor, expected: Tensor) -> bool:
    if y.shape != expected.shape:
        return False
    return bool((y - expected).abs().max() <= _TOLERANCE * expected.abs().max())


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


def _eps_of(module: nn.Module) -> float | None:
    for name in _EPS_NAMES:
        value = getattr(module, name, None)
        if isinstance(value, (float, int)):
            return float(value)
        if value is None and hasattr(module, name):  # torch's default, whatever the input's dtype
            return torch.finfo(torch.float32).eps
    return None


def _norm_parameters(module: nn.Module) -> tuple[int, dict[str, Any]] | None:
    """Length of a norm's rows, and random values for its weight and bias."""
    values = {name: p for name, p in vars(module)["_parameters"].items() if p is not None}
    if set(values) - {"weight", "bias"} or any(p.dim() != 1 for p in values.values()):
        return None
    shape = getattr(module, "normalized_shape", None)
    sizes = {p.shape[0] for p in values.values()}
    if shape is not None and len(shape) == 1:
        sizes.add(shape[0])
    if len(sizes) != 1:
        return None
    size = sizes.pop()
    made = {
        name: None if p is None else _random(size + index).narrow(0, 0, size)
        for index, (name, p) in enumerate(vars(module)["_parameters"].items())
    }
    return size, made


class _FunctionalNorms(TorchFunctionMode):
    """Notice calls of torch's own norms."""

    seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen |= func in _TORCH_NORMS
        return func(*args, **(kwargs or {}))


def recognize_norm(module: nn.Module) -> NormLayer | None:
    """Return what a normalization layer over the last dimension computes; None if it is none.

    Args:
        module: Anything. A class whose name contains "norm" is tried out.
    """
    if not _NORM_NAME.search(type(module).__name__) or next(module.children(), None) is not None:
        return None
    eps, found = _eps_of(module), _norm_parameters(module)
    if eps is None or found is None:
        return None
    size, values = found
    weight, bias = values.get("weight"), values.get("bias")
    x = _random(3, size) * 2 + 0.5
    kinds = ["layer", "rms", "rms_cast", "rms_offset"]
    for value in (x, x * eps**0.5):  # of the second `eps` is a large part
        y = _run(module, value, values)
        kinds = [
            kind
            for kind in kinds
            if y is not None and _equal(y, _norm_reference(value, weight, bias, kind, eps))
        ]
    if not kinds:
        return None
    rough = (x * eps**0.5).bfloat16()
    with _FunctionalNorms() as calls:
        y = _run(module, rough, values)
    if y is None:
        return None
    output = "input" if y.dtype == rough.dtype or weight is None else "promoted"

    def distance(kind: str) -> float:
        expected = _norm_reference(rough, weight, bias, kind, eps)
        return float((y.to(expected.dtype).float() - expected.float()).abs().sum())

    kind = min(kinds, key=distance)
    if not distance(kind) <= _ROUGH_TOLERANCE * float(y.float().abs().sum()):
        return None  # such as an `eps` that depends on the dtype
    return NormLayer(kind=kind, eps=eps, output=output, functional=calls.seen)


def _activation_of(y: Tensor, expected: Callable[[Callable[[Tensor], Tensor]], Tensor]) -> str:
    for name, function in ACTIVATIONS.items():
        if _equal(y, expected(function)):
            return name
    return ""


def recognize_activation(module: nn.Module) -> str | None:
    """Return the name of the function that a module without parameters computes, None if unknown.

    Args:
        module: Anything. A class whose name contains GELU, SiLU, Swish or ReLU is tried out, if it
            does not work in place: its input, which others may keep, is to be changed.
    """
    if (
        not _ACTIVATION_NAME.search(type(module).__name__)
        or next(module.parameters(), None) is not None
        or getattr(module, "inplace", False)
    ):
        return None
    x = torch.linspace(-6.0, 6.0, 48, device="cpu", dtype=torch.float32).view(3, 16)
    y = _run(module, x.clone())
    return None if y is None else _activation_of(y, lambda function: function(x)) or None


def recognize_function(module: nn.Module) -> tuple[str, str] | None:
    """Return attribute and name of an activation function that a module has, and is no module.

    Args:
        module: Anything. Attributes whose names contain "activation" or "act" are tried out, such
            as ``activation`` of ``nn.TransformerEncoderLayer``.
    """
    for attribute, function in vars(module).items():
        if _FUNCTION_NAME.search(attribute) and isinstance(function, _FUNCTION_TYPES):
            x = torch.linspace(-6.0, 6.0, 48, device="cpu", dtype=torch.float32).view(3, 16)
            y = _call(function, x.clone())
            name = "" if y is None else _activation_of(y, lambda act, x=x: act(x))  # type: ignore[misc]
            if name:
                return attribute, name
    return None


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes what ``nn.Linear`` does, also with a transposed weight."""
    if _own_forward(module) is not None:
        return False
    if type(module).forward is nn.Linear.forward:
        return True
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _projects(module: nn.Module) -> bool:
    """Whether a module looks like a projection, also one with adapters (LoRA)."""
    return is_linear(module) or isinstance(getattr(module, "in_features", None), int)


def _gated_children(module: nn.Module) -> Iterator[tuple[str, str | None, str]]:
    names = vars(module)["_modules"].keys()
    for gate, up, down in _GATED_NAMES:
        if {gate, up, down} <= names:
            yield gate, up, down
    linear = [name for name, child in module.named_children() if _projects(child)]
    if len(linear) == 3:  # hand-written: any names, in any order
        yield from itertools.permutations(linear)
    functional = not any(recognize_activation(child) for child in module.children())
    if len(linear) == 2:
        yield linear[0], linear[0], linear[1]
        if functional:
            yield linear[0], None, linear[1]


def _drops(module: nn.Module) -> bool:
    """Whether dropout is in a module; one in evaluation mode does not show it when it runs."""
    rates = (
        getattr(part, name, None)
        for part in module.modules()
        if "drop" in type(part).__name__.lower()
        for name in ("p", "drop_prob")
    )
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def recognize_mlp(module: nn.Module) -> MLP | None:
    """Return the function and the names of the projections of an MLP, gated or plain.

    Args:
        module: Anything. One with children of certain names, or with two or three linear layers, is
            tried out.

    Returns:
        ``(activation, gate, up, down)`` as ``MLPSite`` has them; None if the module computes
        something else, dropout included, or if its activation function is a module of its own that
        suffices.
    """
    for gate, up, down in _gated_children(module):
        beside = (child for name, child in module.named_children() if name not in (gate, up, down))
        if any(map(_drops, beside)):
            continue
        inner = 40 if gate == up else 20
        children: dict[str, nn.Module] = {
            gate: nn.Linear(12, inner, device="cpu"),
            down: nn.Linear(20, 12, device="cpu"),
        }
        if up is not None:
            children.setdefault(up, nn.Linear(12, 20, device="cpu"))
        for child in children.values():
            child.float().requires_grad_(False)
        x = _random(3, 12) * 2
        y = _run(module, x, {}, children)
        if y is None:
            continue
        first = children[gate](x)
        if up is None:
            factors = (first, torch.ones_like(first))
        else:
            factors = first.chunk(2, dim=-1) if gate == up else (first, children[up](x))
        name = _activation_of(y, lambda act, f=factors, d=children[down]: d(act(f[0]) * f[1]))  # type: ignore[misc]
        if name:
            return name, gate, up, down
    return None
