"""Sites: modules whose saved activations are codes.

A site's forward is bound to the module's instance as a method, and finds the site in the module's
dictionary: copies of the module (``copy.deepcopy``) get a site and a method of their own. Classes
stay as they are.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from lq_lightning.codecs import CodecSpec

from .binding import Attached, bind_forward, unbind_forward
from .functions import NormLayer
from .policy import Matmul, SiteKind, fit_codec
from .proof import Proof

DIMS = (2, 3, 4, 5)  # numbers of dimensions for which recognition proves a site
_SITE = "_lq_site"
_FUNCTION = "_lq_function"
_MAX_WATCHED = 4


@dataclass(kw_only=True, slots=True)
class Site(Attached):
    """A module and how it keeps its activations.

    Attributes:
        name: name of the module in the model.
        codec: codec before it is fitted to a row; None for no code of its own. May be exchanged
            between steps.
        formats: formats of codes by codec and length of a row.
        previous: the forward that the instance had of its own, to be put back.
        enabled: False lets the module compute as without the site.
        removed: True once it is disabled for good, while something may still call its forward.
        proof: why it computes what the module does; None if it runs the module's own forward.
        doubted: whether a warning said that the proof no longer holds.
    """

    name: str
    codec: CodecSpec | None
    formats: dict[tuple[CodecSpec, int], str] = field(default_factory=dict)
    previous: Callable[..., Any] | None = None
    enabled: bool = True
    removed: bool = False
    proof: Proof | None = None
    doubted: bool = False

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
        layer: its arithmetic.
        size: values in a row.
        weight: name of its weight, None if it has none.
        bias: name of its bias, None if it has none.
        amax: whether FP8 products follow.
    """

    layer: NormLayer
    size: int
    weight: str | None
    bias: str | None
    amax: bool


@dataclass(kw_only=True, slots=True)
class ActivationSite(Site):
    """A module that is an activation function."""

    activation: str
    amax: bool


@dataclass(kw_only=True, slots=True)
class FunctionSite(ActivationSite):
    """A module with an activation function as an attribute that is not a module.

    Attributes:
        attribute: its name; ``previous`` is its value.
    """

    attribute: str


@dataclass(kw_only=True, slots=True)
class MLPSite(Site):
    """An MLP: ``down(act(up(x)))``, or gated: ``down(act(gate(x)) * up(x))``.

    Attributes:
        activation: name of the function.
        gate: submodule whose output the function takes.
        up: submodule that makes the other factor, None if there is none; if it is ``gate``, that
            one makes both, as halves of its last dimension, the gate first.
        down: output projection.
        amax: whether FP8 products follow.
    """

    activation: str
    gate: str
    up: str | None
    down: str
    amax: bool


@dataclass(kw_only=True, slots=True)
class LinearSite(Site):
    """A linear layer.

    Attributes:
        transposed: whether its weight is ``[K, O]`` (``Conv1D`` of GPT-2).
        matmul: precision of its products.
        native: why they are not in FP8 though the policy asks for it; empty if they are.
    """

    transposed: bool
    matmul: Matmul
    native: str


@dataclass(kw_only=True, slots=True)
class DropoutSite(Site):
    """Dropout; its output has no source, and nobody else saves it."""


@dataclass(slots=True)
class Regions:
    """Operators of a checkpointed layer, as far as they were watched.

    Attributes:
        continuous: number of graph nodes of each watched forward; a forward with another number
            has other operators.
        exact: why the input is kept exactly from now on; empty if it is not.
        watch: whether to watch the next forward.
        watched: number of watched forwards.
    """

    continuous: set[int] = field(default_factory=set)
    exact: str = ""
    watch: bool = True
    watched: int = 0

    def note(self, nodes: int, found: str = "") -> str:
        """Take in a watched forward; return why the input is kept exactly from now on, or "".

        Args:
            nodes: number of its graph nodes.
            found: first operator that is not known to be continuous.
        """
        self.watched += 1
        self.continuous.add(nodes)
        if found:
            self.exact = f"`{found}` in them is not known to be continuous"
        elif self.watched > _MAX_WATCHED:
            self.exact = "their operators change from call to call"
        return self.exact

    def takes_codes(self, nodes: int) -> bool:
        """Return whether a forward of so many nodes was found continuous; else watch the next."""
        is_known = nodes in self.continuous and not self.exact
        self.watch = not is_known
        return is_known


@dataclass(kw_only=True, slots=True)
class HookSite(Site):
    """A module whose saved tensors are packed by hooks.

    Attributes:
        kind: ``"attention"``, never with a codec: shields what it saves from the hooks of modules
            around it; ``"checkpoint"``: its inputs, while it is checkpointed; ``"other"``: every
            saved tensor that bears rounding.
        regions: operators of a checkpointed layer.
    """

    kind: Literal["attention", "checkpoint", "other"]
    regions: Regions = field(default_factory=Regions)


@dataclass(kw_only=True, slots=True)
class MultiheadSite(HookSite):
    """``nn.MultiheadAttention``, whose query, key and value projection is not a module.

    Attributes:
        matmul: precision of the products of that projection.
    """

    matmul: Matmul


def site_of(module: nn.Module) -> Site | None:
    """Return the site of a module, None if it has none."""
    site: Site | None = module.__dict__.get(_SITE)
    if site is None or site.removed:
        site = module.__dict__.get(_FUNCTION)
    return site


def sites_of(module: nn.Module) -> list[Site]:
    """Return all sites of a module: its own, and that of a function that it has."""
    found = (module.__dict__.get(key) for key in (_SITE, _FUNCTION))
    return [site for site in found if site is not None]


def policy_kind(site: Site) -> SiteKind | None:
    """Return the policy field that a site's codec comes from, None if it never has one."""
    if isinstance(site, HookSite):
        return None if site.kind == "attention" else site.kind
    if isinstance(site, NormSite):
        return "norm"
    if isinstance(site, (ActivationSite, MLPSite)):
        return "activation"
    return "linear" if isinstance(site, LinearSite) else None


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether a layer that may be checkpointed is: some say so, wrappers always are."""
    return bool(getattr(module, "gradient_checkpointing", True))


def quantizes(site: Site) -> bool:
    """Return whether a site keeps codes, or has FP8 products."""
    return site.codec is not None or isinstance(site, LinearSite) and site.matmul != "native"


def install_site(module: nn.Module, site: Site, forward: Callable[..., Any]) -> None:
    """Give a module a site; raise ``RuntimeError`` if it has one already.

    ``forward`` takes the module and its arguments, and finds the site by ``module._lq_site``; for a
    ``FunctionSite``, the site and the function's argument.
    """
    key = _FUNCTION if isinstance(site, FunctionSite) else _SITE
    earlier: Site | None = module.__dict__.get(key)
    if earlier is not None and not earlier.removed:
        raise RuntimeError(
            f"The saved activations of `{site.name}` are quantized already. Call `remove()` of the "
            "handle that `quantize_activations` returned first, or use one "
            "`ActivationQuantization` per Trainer."
        )
    module.__dict__[key] = site
    if isinstance(site, FunctionSite):
        site.previous = module.__dict__[site.attribute]
        module.__dict__[site.attribute] = partial(forward, site)
    elif earlier is not None and type(earlier) is type(site):
        site.previous = earlier.previous  # its wrapped forward finds the new site
    else:
        own = module.__dict__.get("forward")
        site.previous = own if earlier is None else earlier.previous
        bind_forward(module, forward, key)


def remove_site(module: nn.Module, site: Site) -> None:
    """Take a site from a module and restore its forward; does nothing if the site is not its own.

    Wrappers that were put around the site's forward since, as ``module.forward =
    torch.compile(module.forward)`` does, stay and find the original behind it.
    """
    key = _FUNCTION if isinstance(site, FunctionSite) else _SITE
    if module.__dict__.get(key) is not site or site.removed:
        return
    if isinstance(site, FunctionSite):
        present = module.__dict__.get(site.attribute)
        if isinstance(present, partial) and present.args[:1] == (
            site,
        ):  # otherwise it was set since
            module.__dict__[site.attribute] = site.previous
    elif not isinstance(module.__dict__.get("forward"), types.MethodType):
        site.enabled, site.removed = False, True
        return
    else:
        unbind_forward(module, site.previous, key)
    del module.__dict__[key]
