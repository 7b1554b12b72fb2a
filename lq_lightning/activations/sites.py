"""Sites: modules whose saved activations are codes, and the forward that each of them gets.

A forward is bound to the module's instance as a method, and finds its site in the module's
dictionary: copies of the module (``copy.deepcopy``) get a site and a method of their own. Classes
stay as they are.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lq_lightning.codecs import CodecSpec

from .activation import quantized_activation
from .float8_linear import float8_linear
from .linear import encode_source, quantized_linear
from .norm import NormLayer, quantized_norm
from .policy import Matmul, fit_codec
from .sources import source_of

__all__ = [
    "ActivationSite",
    "GatedSite",
    "LinearSite",
    "NormSite",
    "Site",
    "install_site",
    "remove_site",
    "site_of",
]

_SITE = "_lq_site"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(kw_only=True, slots=True)
class Site:
    """A module and what it keeps.

    Attributes:
        name: of the module in the model.
        codec: of what it keeps, before it is fitted to a row; None if it keeps no code of its own.
            May be exchanged between steps.
        formats: of codes by the length of a row.
        previous: the forward that the instance had of its own, to be put back.
    """

    name: str
    codec: CodecSpec | None
    formats: dict[tuple[CodecSpec, int], str] = field(default_factory=dict)
    previous: Callable[..., Any] | None = None

    def format(self, numel: int) -> str:
        """Return the format of a code of rows of ``numel`` values."""
        if self.codec is None:
            raise AssertionError(f"{self.name} keeps no code of its own")
        if torch.compiler.is_compiling():
            return str(fit_codec(self.codec, numel).message_format)
        key = (self.codec, numel)
        if key not in self.formats:
            self.formats[key] = str(fit_codec(self.codec, numel).message_format)
        return self.formats[key]

    def original(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward as it would be without the site."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)


@dataclass(kw_only=True, slots=True)
class NormSite(Site):
    """A normalization layer.

    Attributes:
        layer: what it computes.
        weight: name of its weight, None if it has none.
        bias: name of its bias, None if it has none.
        amax: whether FP8 products follow.
    """

    layer: NormLayer
    weight: str | None
    bias: str | None
    amax: bool


@dataclass(kw_only=True, slots=True)
class ActivationSite(Site):
    """A module that is an activation function."""

    activation: str
    amax: bool


@dataclass(kw_only=True, slots=True)
class GatedSite(Site):
    """A gated MLP: ``down(act(gate(x)) * up(x))``.

    Attributes:
        activation: name of the function.
        gate: names of the submodules that make the two factors; if equal, one makes both, as halves
            of its last dimension, the gate first.
        up: see ``gate``.
        down: name of the output projection.
        amax: whether FP8 products follow.
    """

    activation: str
    gate: str
    up: str
    down: str
    amax: bool


@dataclass(kw_only=True, slots=True)
class LinearSite(Site):
    """A linear layer.

    Attributes:
        transposed: its weight is ``[K, O]`` (``Conv1D`` of GPT-2).
        matmul: precision of its products.
    """

    transposed: bool
    matmul: Matmul


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in _FLOATS and not isinstance(x, DTensor)


def _parameter(module: nn.Module, name: str | None) -> Tensor | None:
    value: Tensor | None = None if name is None else getattr(module, name)
    return value


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _norm_forward(module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    site: NormSite = module.__dict__[_SITE]
    weight, bias = _parameter(module, site.weight), _parameter(module, site.bias)
    plain = site.codec is not None and _is_plain(x) and not isinstance(weight, DTensor)
    if not plain or args or kwargs or not _needs_gradient(x, weight, bias):
        result: Tensor = site.original(module, x, *args, **kwargs)
        return result
    return quantized_norm(x, weight, bias, site.layer, site.format(x.shape[-1]), amax=site.amax)


def _activation_forward(module: nn.Module, x: Tensor) -> Tensor:
    site: ActivationSite = module.__dict__[_SITE]
    if site.codec is None or not _is_plain(x) or not _needs_gradient(x):
        result: Tensor = site.original(module, x)
        return result
    return quantized_activation(x, None, site.activation, site.format(x.shape[-1]), amax=site.amax)


def _gated_forward(module: nn.Module, x: Tensor) -> Tensor:
    site: GatedSite = module.__dict__[_SITE]
    if site.codec is None or not _is_plain(x) or not torch.is_grad_enabled():
        result: Tensor = site.original(module, x)
        return result
    if site.gate == site.up:
        gate, up = getattr(module, site.gate)(x).chunk(2, dim=-1)
    else:
        gate, up = getattr(module, site.gate)(x), getattr(module, site.up)(x)
    product = quantized_activation(
        gate, up, site.activation, site.format(gate.shape[-1]), amax=site.amax
    )
    projected: Tensor = getattr(module, site.down)(product)
    return projected


def _linear_forward(module: nn.Module, x: Tensor) -> Tensor:
    site: LinearSite = module.__dict__[_SITE]
    weight: Tensor = module.weight  # type: ignore[assignment]
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    plain = _is_plain(x) and not isinstance(weight, DTensor)
    float8 = site.matmul == "float8" and (torch.is_grad_enabled() or module.training)
    if not plain or not (float8 or _needs_gradient(weight)):
        result: Tensor = site.original(module, x)
        return result
    if site.transposed:
        weight = weight.t()
    source = source_of(x)
    if source is None and site.codec is not None and _needs_gradient(weight):
        source = encode_source(x, site.format(x.shape[-1]))
    if float8:
        return float8_linear(x, weight, bias, source)
    if source is None:
        original: Tensor = site.original(module, x)
        return original
    return quantized_linear(x, weight, bias, source)


_FORWARDS: dict[type[Site], Callable[..., Tensor]] = {
    NormSite: _norm_forward,
    ActivationSite: _activation_forward,
    GatedSite: _gated_forward,
    LinearSite: _linear_forward,
}


def site_of(module: nn.Module) -> Site | None:
    """Return the site of a module, None if it has none."""
    site: Site | None = module.__dict__.get(_SITE)
    return site


def install_site(module: nn.Module, site: Site) -> None:
    """Give a module the forward of a site.

    Raises:
        RuntimeError: It has one already.
    """
    if _SITE in module.__dict__:
        raise RuntimeError(
            f"The saved activations of `{site.name}` are quantized already. Call `remove()` of the "
            "handle that `quantize_activations` returned first, or use one "
            "`ActivationQuantization` per Trainer."
        )
    site.previous = module.__dict__.get("forward")
    module.__dict__[_SITE] = site
    module.__dict__["forward"] = types.MethodType(_FORWARDS[type(site)], module)


def remove_site(module: nn.Module) -> None:
    """Give a module its forward back; does nothing if it has no site."""
    site: Site | None = module.__dict__.pop(_SITE, None)
    if site is None:
        return
    if site.previous is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = site.previous
