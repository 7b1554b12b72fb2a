"""Quantize the saved activations of a model, in place and reversibly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from .policy import ActivationPolicy, resolve_policy
from .recognize import recognize_activation, recognize_gated, recognize_norm
from .sites import (
    ActivationSite,
    GatedSite,
    LinearSite,
    NormSite,
    Site,
    install_site,
    remove_site,
    site_of,
)

__all__ = ["QuantizedActivations", "quantize_activations"]


@dataclass(frozen=True, slots=True)
class _Found:
    module: nn.Module
    site: Site


def _is_linear(module: nn.Module) -> bool:
    plain = type(module).forward is nn.Linear.forward
    return plain or type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _sites(model: nn.Module, policy: ActivationPolicy) -> Iterator[_Found]:
    inside_gated: set[int] = set()
    for name, module in model.named_modules():
        amax = policy.matmul_of(name) == "float8"
        gated = recognize_gated(module)
        if gated is not None:
            function, gate, up, down = gated
            projections = {id(module._modules[child]) for child in (gate, up, down)}
            inside_gated.update(id(m) for m in module.modules() if id(m) not in projections)
            codec = policy.codec("activation", name)
            site: Site = GatedSite(
                name=name,
                codec=codec,
                activation=function,
                gate=gate,
                up=up,
                down=down,
                amax=amax,
            )
            yield _Found(module, site)
        elif (layer := recognize_norm(module)) is not None:
            weight, bias = (
                key if module._parameters.get(key) is not None else None
                for key in ("weight", "bias")
            )
            codec = policy.codec("norm", name)
            yield _Found(
                module,
                NormSite(name=name, codec=codec, layer=layer, weight=weight, bias=bias, amax=amax),
            )
        elif _is_linear(module):
            site = LinearSite(
                name=name,
                codec=policy.codec("linear", name),
                transposed=type(module).forward is not nn.Linear.forward,
                matmul=policy.matmul_of(name),
            )
            yield _Found(module, site)
        elif (
            id(module) not in inside_gated
            and (activation := recognize_activation(module)) is not None
        ):
            codec = policy.codec("activation", name)
            yield _Found(
                module, ActivationSite(name=name, codec=codec, activation=activation, amax=amax)
            )


class QuantizedActivations:
    """The quantized activations of a model, until they are removed.

    Args:
        model: The model.
        policy: The rules.
    """

    def __init__(self, model: nn.Module, policy: ActivationPolicy) -> None:
        self.policy = policy
        self._found = list(_sites(model, policy))
        taken = [found for found in self._found if site_of(found.module) is not None]
        if taken:
            install_site(taken[0].module, taken[0].site)  # raises
        for found in self._found:
            install_site(found.module, found.site)

    @property
    def sites(self) -> list[Site]:
        """All sites, in the order of the model's modules."""
        return [found.site for found in self._found]

    def remove(self) -> None:
        """Give all modules their forwards back; idempotent."""
        for found in self._found:
            if site_of(found.module) is found.site:
                remove_site(found.module)


def quantize_activations(
    model: nn.Module, recipe: str | ActivationPolicy = "agoq"
) -> QuantizedActivations:
    """Keep what the backward of a model needs as codes.

    Changes how instances compute, nothing else: parameters, names, classes and ``repr`` stay. Call
    it before the model is sharded, compiled or wrapped.

    Args:
        model: Any module. What is not recognized is left as it is.
        recipe: ``"agoq"``, ``"coat"``, ``"fp8-4bit"``, or a policy.

    Returns:
        A handle; ``remove()`` undoes everything.

    Raises:
        ValueError: An unknown recipe.
        RuntimeError: The model is quantized already.
    """
    return QuantizedActivations(model, resolve_policy(recipe))
