"""Find the sites of a model, and what is not recognized in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from .float8_layers import Float8Layers
from .policy import ActivationPolicy, SiteKind
from .recognize import Recognizer, own_forward
from .sites import (
    ActivationSite,
    DropoutSite,
    FunctionSite,
    HookSite,
    LinearSite,
    MLPSite,
    MultiheadSite,
    NormSite,
    Site,
    is_checkpointed,
)

__all__ = ["Found", "Left", "find_sites"]

_ATTENTION_NAME = re.compile(r"attention|attn", re.IGNORECASE)
# Classes, by name, that compute their input again or keep it as a container or wrapper does.
_CHECKPOINTED = {"GradientCheckpointingLayer", "CheckpointWrapper"}
# Modules without a site that save little or nothing: lookups, and what backward needs no input of.
_HARMLESS = (
    nn.Embedding,
    nn.Identity,
    nn.Dropout,
    nn.Flatten,
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterList,
    nn.ParameterDict,
)
_LOSS_NAME = re.compile(r"loss|rotary|position", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Found:
    """A module and its site."""

    module: nn.Module
    site: Site


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """Modules that save what they always did, or are packed by rule.

    Attributes:
        modules: names of their classes.
        count: how many there are.
        reason: why, and what is done instead.
    """

    modules: tuple[str, ...]
    count: int
    reason: str


class _Finder:
    def __init__(self, model: nn.Module, policy: ActivationPolicy) -> None:
        self.policy = policy
        self.model = model
        self.float8 = Float8Layers(model, policy)
        self.recognizer = Recognizer()
        self.found: dict[int, Found] = {}  # by module
        self.functions: list[Found] = []
        self.unknown: list[tuple[str, nn.Module]] = []
        self.recomputed: set[int] = set()  # in unrecognized blocks that are checkpointed

    def add(self, module: nn.Module, site: Site) -> None:
        self.found[id(module)] = Found(module, site)

    def modules(self) -> None:
        """Give sites to what can be recognized by itself."""
        inside: set[int] = set()  # of MLPs, but not their projections
        for name, module in self.model.named_modules():
            if self._mlp(name, module, inside) or id(module) in inside:
                continue
            site = self._leaf(name, module)
            if site is not None:
                self.add(module, site)
            elif self._is_unknown(module):
                self.unknown.append((name, module))
            if site is None:
                self._function(name, module)

    def _mlp(self, name: str, module: nn.Module, inside: set[int]) -> bool:
        match = self.recognizer.mlp(module)
        if match is None:
            return False
        function, gate, up, down = match.found
        names = (gate, up, down)
        projections = [part for key, part in module.named_children() if key in names]
        inside.update({id(m) for m in module.modules()})
        inside.difference_update(id(m) for part in projections for m in part.modules())
        site = MLPSite(
            name=name,
            codec=self.policy.codec("activation", name),
            activation=function,
            gate=gate,
            up=up,
            down=down,
            amax=self.float8.follow("activation", name, module),
            proof=match.proof,
        )
        self.add(module, site)
        return True

    def _leaf(self, name: str, module: nn.Module) -> Site | None:
        policy, follow = self.policy, self.float8.follow
        if (match := self.recognizer.norm(module)) is not None:
            layer, size = match.found
            names = {key for key, _ in module.named_parameters(recurse=False)}
            weight, bias = (key if key in names else None for key in ("weight", "bias"))
            return NormSite(
                name=name,
                codec=policy.codec("norm", name),
                layer=layer,
                size=size,
                weight=weight,
                bias=bias,
                amax=follow("norm", name, module),
                proof=match.proof,
            )
        if self.recognizer.linear(module):
            transposed = type(module).forward is not nn.Linear.forward
            values: Any = module.weight
            matmul, native = self.float8.matmul(
                "linear", name, module, values, transposed=transposed
            )
            return LinearSite(
                name=name,
                codec=policy.codec("linear", name),
                transposed=transposed,
                matmul=matmul,
                native=native,
            )
        if (match := self.recognizer.activation(module)) is not None:
            return ActivationSite(
                name=name,
                codec=policy.codec("activation", name),
                activation=match.found,
                amax=follow("activation", name, module),
                proof=match.proof,
            )
        plain = type(module) is nn.Dropout and own_forward(module) is None
        if plain and not module.inplace:
            return DropoutSite(name=name, codec=None)
        return None

    def _function(self, name: str, module: nn.Module) -> None:
        function = self.recognizer.function(module)
        if function is None:
            return
        attribute, activation = function
        site = FunctionSite(
            name=name,
            codec=self.policy.codec("activation", name),
            activation=activation,
            attribute=attribute,
            amax=self.float8.follow("activation", name, module),
        )
        self.functions.append(Found(module, site))

    def _is_unknown(self, module: nn.Module) -> bool:
        if isinstance(module, _HARMLESS) or _LOSS_NAME.search(type(module).__name__):
            return False
        if any(cls.__name__ == "Metric" for cls in type(module).__mro__):  # of torchmetrics
            return False
        if isinstance(module, nn.MultiheadAttention):
            return False
        leaf = next(module.children(), None) is None
        return leaf or next(module.parameters(recurse=False), None) is not None

    def hooks(self) -> list[tuple[str, nn.Module]]:
        """Give sites to attention, checkpointed layers and blocks in which not all is recognized.

        Returns:
            The blocks.
        """
        unrecognized = [(n, m) for n, m in _blocks(self.model) if not self._is_recognized(m)]
        blocks = [(n, m) for n, m in unrecognized if not self._is_checkpointed(m)]
        packed = {id(module) for _, module in blocks}
        for name, module in self.model.named_modules():
            if id(module) in self.found:
                continue
            if _may_be_checkpointed(module) and id(module) not in packed:
                self._hook(name, module, "checkpoint")
            elif _is_multihead(module):
                weight: Any = module.in_proj_weight
                matmul, _ = self.float8.matmul("linear", name, module, weight)
                self.add(
                    module, MultiheadSite(name=name, codec=None, kind="attention", matmul=matmul)
                )
            elif (
                self.policy.other is not None
                and self._is_attention(module)
                and self._is_innermost(module)
            ):
                self.add(module, HookSite(name=name, codec=None, kind="attention"))
        for name, module in blocks:
            if id(module) not in self.found:
                self._hook(name, module, "other")
        return blocks

    def _is_checkpointed(self, module: nn.Module) -> bool:
        found = _may_be_checkpointed(module) and is_checkpointed(module)
        if found:
            self.recomputed.update(id(m) for m in module.modules())
        return found

    def _is_innermost(self, module: nn.Module) -> bool:
        return not any(self._is_attention(m) for m in module.modules() if m is not module)

    def _is_attention(self, module: nn.Module) -> bool:
        if not _ATTENTION_NAME.search(type(module).__name__):
            return False
        return any(hasattr(m, "in_features") or self._is_linear(m) for m in module.modules())

    def _is_linear(self, module: nn.Module) -> bool:
        return isinstance(self.site(module), LinearSite)

    def _hook(self, name: str, module: nn.Module, kind: SiteKind) -> None:
        codec = self.policy.codec(kind, name)
        if codec is not None:
            self.add(module, HookSite(name=name, codec=codec, kind=kind))  # type: ignore[arg-type]

    def _is_recognized(self, block: nn.Module) -> bool:
        modules = {id(m) for m in block.modules()}
        if any(id(module) in modules for _, module in self.unknown):
            return False
        linear = sum(isinstance(self.site(m), LinearSite) for m in block.modules())
        functions = (ActivationSite, MLPSite)
        known = any(isinstance(self.site(m), functions) for m in block.modules())
        known = known or any(id(found.module) in modules for found in self.functions)
        return known or linear < 2  # a function that is called, not a module, is not seen

    def site(self, module: nn.Module) -> Site | None:
        found = self.found.get(id(module))
        return None if found is None else found.site


def _may_be_checkpointed(module: nn.Module) -> bool:
    return bool(_CHECKPOINTED & {cls.__name__ for cls in type(module).__mro__})


def _is_multihead(module: nn.Module) -> bool:
    """Whether a module computes what ``nn.MultiheadAttention`` does, with parameters of its own."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and own_forward(module) is None
        and "parametrizations" not in vars(module)["_modules"]
    )


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The parts of a model that are run one after the other: elements of its outermost lists.

    And what stands beside the lists, such as an embedding of patches.
    """
    lists = (nn.ModuleList, nn.Sequential)
    for key, part in module.named_children():
        holds_lists = any(isinstance(m, lists) for m in part.modules())
        runs = type(part).forward is not nn.Module.forward
        if runs and (isinstance(module, lists) or not holds_lists):
            yield prefix + key, part
        else:
            yield from _blocks(part, f"{prefix}{key}.")


def _is_packed(site: Site | None) -> bool:
    return isinstance(site, HookSite) and site.kind == "other"


def _left(
    finder: _Finder, blocks: list[tuple[str, nn.Module]], policy: ActivationPolicy
) -> Iterator[Left]:
    hooked = [m for _, m in blocks if _is_packed(finder.site(m))]
    if hooked:
        names = tuple(sorted({type(m).__name__ for m in hooked}))
        inside = {id(m) for block in hooked for m in block.modules()}
        unknown = {type(m).__name__ for _, m in finder.unknown if id(m) in inside}
        if unknown:
            why = f"{', '.join(sorted(unknown))} in them"
        else:
            why = "linear layers, but no activation function that is seen"
        reason = f"not all of it is recognized ({why}): packed by rule as {_name(policy.other)}"
        yield Left(modules=names, count=len(hooked), reason=reason)
        return
    modules = [m for _, m in finder.unknown if id(m) not in finder.recomputed]
    if modules:
        classes = tuple(sorted({type(module).__name__ for module in modules}))
        reason = "not recognized, and `other` is None: left as they are"
        yield Left(modules=classes, count=len(modules), reason=reason)


def _name(codec: object) -> str:
    return codec if isinstance(codec, str) else str(codec)


def find_sites(model: nn.Module, policy: ActivationPolicy) -> tuple[list[Found], list[Left]]:
    """Find what can be quantized in a model.

    Args:
        model: Any module; it is not changed.
        policy: The rules.

    Returns:
        Modules with the sites to install, and what is not recognized.
    """
    finder = _Finder(model, policy)
    finder.modules()
    blocks = finder.hooks()
    return [*finder.found.values(), *finder.functions], list(_left(finder, blocks, policy))
