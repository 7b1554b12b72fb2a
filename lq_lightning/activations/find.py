"""Find the sites of a model, and the precision of its matrix products."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lq_lightning._compat.tensor_parallel import tensor_axis, tensor_shard
from lq_lightning.foundation.parameters import embeddings

from .policy import ActivationPolicy, Matmul, SiteKind
from .recognize import Recognizer, own_forward
from .recompute import find_recompute_units
from .sites import (
    ActivationSite,
    DropoutSite,
    FunctionSite,
    HookSite,
    LinearSite,
    MLPSite,
    MultiheadSite,
    NormSite,
    Proof,
    Site,
    is_checkpointed,
)

_MULTIPLE = 16  # dimensions that FP8 products take without padding
_ATTENTION_NAME = re.compile(r"attention|attn", re.IGNORECASE)
# Names of classes that recompute their forward, or wrap a module that does.
_CHECKPOINTED = {"GradientCheckpointingLayer", "CheckpointWrapper"}
# Modules without a site that save little or nothing.
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


class _Float8Layers:
    """Chooses the precision of products where a policy asks for FP8 without naming layers.

    As is usual in FP8 training (torchao's and NeMo's documentation recommend filters like these):
    the layers of the repeated blocks, but not the head that predicts tokens, whose errors are those
    of the loss, nor layers whose dimensions FP8 products would pad. Rules that name layers are
    obeyed.
    """

    def __init__(self, model: nn.Module, policy: ActivationPolicy) -> None:
        self._policy = policy
        units = find_recompute_units(model).values()
        self._inside = {id(module) for unit in units for module in unit.modules()}
        tables = embeddings(model)
        self._tables = {id(table.weight) for table in tables}
        self._tokens = max((table.num_embeddings for table in tables), default=0)

    def matmul(
        self, name: str, module: nn.Module, weight: Tensor | None, *, transposed: bool = False
    ) -> tuple[Matmul, str]:
        """Return the precision of a layer's products, and why it is not the policy's, if so.

        ``weight`` is ``[O, K]``, or ``[K, O]`` if ``transposed``.
        """
        named, usual = self._policy.matmul_rule("linear", name), self._policy.matmul
        if named is not None or usual == "native" or weight is None:
            return named or usual, ""
        rows, columns = weight.shape[:: -1 if transposed else 1]
        if id(weight) in self._tables or rows == self._tokens > columns:
            return "native", "predicts tokens"
        if not self._is_inside(module):
            return "native", "outside of the repeated blocks"
        axis, cut = tensor_axis(weight), tensor_shard(weight)
        shards = 1 if axis is None or cut is None else axis[2]
        if any(
            size % (_MULTIPLE * (shards if dim == cut else 1))
            for dim, size in enumerate(weight.shape)
        ):
            return "native", f"dimensions are no multiples of {_MULTIPLE}"
        return usual, ""

    def follow(self, kind: SiteKind, name: str, module: nn.Module) -> bool:
        """Return whether FP8 products are expected behind a norm, activation function or MLP."""
        named = self._policy.matmul_rule(kind, name)
        if (named or self._policy.matmul) == "native":
            return False
        return named is not None or self._is_inside(module)

    def _is_inside(self, module: nn.Module) -> bool:
        """Whether a module is in a block; all are, if nothing in the model is repeated."""
        return not self._inside or id(module) in self._inside


@dataclass(frozen=True, slots=True)
class Found:
    """A module and its site."""

    module: nn.Module
    site: Site


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsupported:
    """Modules, by class, that save what they always did or are packed by rule, and why."""

    modules: tuple[str, ...]
    count: int
    reason: str


class _Finder:
    def __init__(self, model: nn.Module, policy: ActivationPolicy) -> None:
        self.policy = policy
        self.model = model
        self.float8 = _Float8Layers(model, policy)
        self.recognizer = Recognizer()
        self.found: dict[int, Found] = {}  # by module
        self.functions: list[Found] = []
        self.unknown: list[tuple[str, nn.Module]] = []
        self.recomputed: set[int] = set()  # in unrecognized blocks that are checkpointed

    def add(self, module: nn.Module, site: Site) -> None:
        self.found[id(module)] = Found(module, site)

    def modules(self) -> None:
        """Give sites to modules that can be recognized by themselves."""
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
        fields = self._fields("activation", name, module, match.proof)
        self.add(module, MLPSite(activation=function, gate=gate, up=up, down=down, **fields))
        return True

    def _fields(
        self, kind: SiteKind, name: str, module: nn.Module, proof: Proof | None
    ) -> dict[str, Any]:
        """Fields of sites that encode their inputs."""
        amax = self.float8.follow(kind, name, module)
        return {"name": name, "codec": self.policy.codec(kind, name), "amax": amax, "proof": proof}

    def _leaf(self, name: str, module: nn.Module) -> Site | None:
        if (match := self.recognizer.norm(module)) is not None:
            layer, size = match.found
            names = {key for key, _ in module.named_parameters(recurse=False)}
            weight, bias = (key if key in names else None for key in ("weight", "bias"))
            fields = self._fields("norm", name, module, match.proof)
            return NormSite(layer=layer, size=size, weight=weight, bias=bias, **fields)
        if self.recognizer.linear(module):
            transposed = type(module).forward is not nn.Linear.forward
            values: Any = module.weight
            matmul, native = self.float8.matmul(name, module, values, transposed=transposed)
            return LinearSite(
                name=name,
                codec=self.policy.codec("linear", name),
                transposed=transposed,
                matmul=matmul,
                native=native,
            )
        if (match := self.recognizer.activation(module)) is not None:
            fields = self._fields("activation", name, module, match.proof)
            return ActivationSite(activation=match.found, **fields)
        plain = type(module) is nn.Dropout and own_forward(module) is None
        if plain and not module.inplace:
            return DropoutSite(name=name, codec=None)
        return None

    def _function(self, name: str, module: nn.Module) -> None:
        function = self.recognizer.function(module)
        if function is not None:
            attribute, activation = function
            fields = self._fields("activation", name, module, None)
            site = FunctionSite(activation=activation, attribute=attribute, **fields)
            self.functions.append(Found(module, site))

    def _is_unknown(self, module: nn.Module) -> bool:
        if isinstance(module, (*_HARMLESS, nn.MultiheadAttention)):
            return False
        is_metric = any(cls.__name__ == "Metric" for cls in type(module).__mro__)  # torchmetrics
        if is_metric or _LOSS_NAME.search(type(module).__name__):
            return False
        leaf = next(module.children(), None) is None
        return leaf or next(module.parameters(recurse=False), None) is not None

    def hooks(self) -> list[tuple[str, nn.Module]]:
        """Give sites to attention, checkpointed layers and unrecognized blocks; return these."""
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
                matmul, _ = self.float8.matmul(name, module, weight)
                self.add(
                    module, MultiheadSite(name=name, codec=None, kind="attention", matmul=matmul)
                )
            elif (
                self.policy.other is not None
                and self._is_attention(module)
                and not any(self._is_attention(m) for m in module.modules() if m is not module)
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

    def _is_attention(self, module: nn.Module) -> bool:
        if not _ATTENTION_NAME.search(type(module).__name__):
            return False
        parts = module.modules()
        return any(hasattr(m, "in_features") or isinstance(self.site(m), LinearSite) for m in parts)

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
        return known or linear < 2  # functional calls are not seen

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
    """Parts of a model that run one after the other: elements of its outermost lists, and what
    stands beside the lists, such as an embedding of patches.
    """
    lists = (nn.ModuleList, nn.Sequential)
    for key, part in module.named_children():
        holds_lists = any(isinstance(m, lists) for m in part.modules())
        runs = type(part).forward is not nn.Module.forward
        if runs and (isinstance(module, lists) or not holds_lists):
            yield prefix + key, part
        else:
            yield from _blocks(part, f"{prefix}{key}.")


def _unsupported(
    finder: _Finder, blocks: list[tuple[str, nn.Module]], policy: ActivationPolicy
) -> Iterator[Unsupported]:
    sites = ((m, finder.site(m)) for _, m in blocks)
    hooked = [m for m, site in sites if isinstance(site, HookSite) and site.kind == "other"]
    if hooked:
        names = tuple(sorted({type(m).__name__ for m in hooked}))
        inside = {id(m) for block in hooked for m in block.modules()}
        unknown = {type(m).__name__ for _, m in finder.unknown if id(m) in inside}
        if unknown:
            why = f"{', '.join(sorted(unknown))} in them"
        else:
            why = "linear layers, but no activation function that is seen"
        reason = f"not all of it is recognized ({why}): packed by rule as {policy.other}"
        yield Unsupported(modules=names, count=len(hooked), reason=reason)
        return
    modules = [m for _, m in finder.unknown if id(m) not in finder.recomputed]
    if modules:
        classes = tuple(sorted({type(module).__name__ for module in modules}))
        reason = "not recognized, and `other` is None: left as they are"
        yield Unsupported(modules=classes, count=len(modules), reason=reason)


def find_sites(model: nn.Module, policy: ActivationPolicy) -> tuple[list[Found], list[Unsupported]]:
    """Return the modules of a model with the sites to install, and what is not recognized."""
    finder = _Finder(model, policy)
    finder.modules()
    blocks = finder.hooks()
    return [*finder.found.values(), *finder.functions], list(_unsupported(finder, blocks, policy))
