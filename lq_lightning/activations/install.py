"""Quantize the saved activations of a model, in place and reversibly."""

from __future__ import annotations

import difflib
import gc
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lq_lightning._compat.modules import tensor_parallel_parameters

from .adaptation import MAX_ERROR, Adaptation
from .find import Unsupported, find_sites
from .hooks import pack_around_checkpoint, unpack_around_checkpoint
from .measure import SavedTensors
from .parallel import carry_sources, has_layout, stop_carrying
from .policy import ActivationPolicy, ActivationRule, resolve_policy
from .recompute import install_recomputation, remove_recomputation
from .report import ActivationReport, make_report, without_sites
from .sites import (
    HookSite,
    LinearSite,
    NormSite,
    Site,
    install_site,
    is_checkpointed,
    policy_kind,
    quantizes,
    remove_site,
    site_of,
)


def _layer(site: Site | None) -> str:
    """Kind of layer for ``has_layout``, empty for all that computes with no shards."""
    if isinstance(site, LinearSite):
        return "transposed" if site.transposed else "linear"
    return "norm" if isinstance(site, NormSite) else ""


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def check_rules(
    model: nn.Module, sites: Iterable[tuple[nn.Module, Site]], policy: ActivationPolicy
) -> None:
    """Refuse rules without effect: a pattern with a typo must not pass for a setting.

    A rule that only sets ``matmul`` may name any module; any other has to name modules that save an
    activation of their own, of its kind.
    """
    if not policy.rules:
        return
    modules = {name: module for name, module in model.named_modules() if name}
    kinds = [
        (site.name, kind)
        for module, site in sites
        if (kind := policy_kind(site)) and (kind != "checkpoint" or is_checkpointed(module))
    ]
    for rule in policy.rules:
        matching = [name for name in modules if fnmatchcase(name, rule.module)]
        kept = [name for name, kind in kinds if rule.kind in (None, kind)]
        if not matching:
            raise _no_module(rule, model, list(modules), kept)
        found = any(fnmatchcase(name, rule.module) for name in kept)
        if not found and not rule.recompute and rule.matmul is None:
            for name, kind in kinds:
                if name in matching:
                    raise ValueError(
                        f"`ActivationRule(module={rule.module!r}, kind={rule.kind!r})` has no "
                        f"effect: nothing that it names is of this kind; `{name}` is of "
                        f"kind={kind!r}."
                    )
            raise _no_site(rule, matching, modules[matching[0]], kept)


def _no_module(
    rule: ActivationRule, model: nn.Module, modules: list[str], kept: list[str]
) -> ValueError:
    near = difflib.get_close_matches(rule.module, modules, 3, 0.5) or kept[:3]
    return ValueError(
        f"`ActivationRule(module={rule.module!r})` matches no module of `{type(model).__name__}`. "
        "Patterns are compared with whole names as in `named_modules()`"
        + (f", such as {_quoted(near)}" if near else "")
        + "; `*` stands for any characters, dots included."
    )


def _no_site(
    rule: ActivationRule, matching: list[str], module: nn.Module, kept: list[str]
) -> ValueError:
    inside = [name for name in kept if name.startswith(tuple(f"{m}." for m in matching))]
    if inside:
        advice = (
            f"name what is in it ({_quoted(inside[:3])}), for all of it "
            f"`module={rule.module + '.*'!r}`."
        )
    else:
        advice = "remove the rule."
    return ValueError(
        f"`ActivationRule(module={rule.module!r})` has no effect: `{matching[0]}` "
        f"({type(module).__name__}) saves no activation of its own; {advice}"
    )


class QuantizedActivations:
    """The activations of a model, quantized by the rules of a policy until they are removed."""

    def __init__(self, model: nn.Module, policy: ActivationPolicy) -> None:
        self.policy = policy
        self.model = model
        self._found, self._unsupported = find_sites(model, policy)
        check_rules(model, ((found.module, found.site) for found in self._found), policy)
        taken = [found for found in self._found if site_of(found.module) is not None]
        for found in taken or self._found:  # raises at the first module that has a site
            install_site(found.module, found.site)
            if isinstance(found.site, HookSite) and found.site.kind == "checkpoint":
                pack_around_checkpoint(found.module, found.site)
        self._recomputed = install_recomputation(model, policy)
        self.follow_layouts()

    def apply(self, policy: ActivationPolicy) -> None:
        """Keep activations by another policy from the next forward pass on.

        Args:
            policy: All fields but ``matmul`` may differ from the present one. Modules that the
                present one packs by saved-tensor hooks may get another codec or none; no others are
                packed.

        Raises:
            ValueError: Another ``matmul``.
        """
        if policy.matmul != self.policy.matmul:
            raise ValueError(
                f"`apply(ActivationPolicy(matmul={policy.matmul!r}))`: the products of this model "
                f"are {self.policy.matmul!r}. Call `remove()`, then `quantize_activations`."
            )
        remove_recomputation(self._recomputed)
        for site in self.sites:
            if (kind := policy_kind(site)) is not None:
                site.codec = policy.codec(kind, site.name)
        self._recomputed = install_recomputation(self.model, policy)
        self.policy = policy

    @property
    def sites(self) -> list[Site]:
        """All sites, in the order of the model's modules."""
        return [found.site for found in self._found]

    @property
    def is_idle(self) -> bool:
        """Whether the model keeps and computes what it would without."""
        return not self._recomputed and not any(map(quantizes, self.sites))

    @property
    def unsupported(self) -> list[Unsupported]:
        """Modules that are not recognized."""
        return list(self._unsupported)

    @property
    def left(self) -> list[Unsupported]:
        """Old name of ``unsupported``."""
        warnings.warn(
            "`QuantizedActivations.left` is `unsupported` now.", DeprecationWarning, stacklevel=2
        )
        return self.unsupported

    @contextmanager
    def adapt(self, max_error: float = MAX_ERROR) -> Iterator[Adaptation]:
        """Measure the effect of codes on gradients, and give sites more bits where it is too large.

        Run one forward and backward pass of a training step inside of the ``with`` block; it
        computes what it would without. Codes change at its end, those of norms, activation
        functions and MLPs, if they are integers. With several ranks all must call; all choose
        alike.

        Args:
            max_error: Bound on the expected relative error of all gradients together.

        Yields:
            The measurement and the choice, complete at the end of the block.
        """
        adaptation = Adaptation(max_error=max_error, model_sites=self.sites)
        adaptation.start()
        try:
            yield adaptation
        finally:
            adaptation.stop()
        adaptation.finish()

    @contextmanager
    def measure(self, *, original: bool = False) -> Iterator[SavedTensors]:
        """Count what a forward inside of the ``with`` block saves for backward.

        Args:
            original: Let the model save what it would without quantization.

        Yields:
            The counts; keep the forward's output until the end of the block.
        """
        with ExitStack() as stack:
            if original:
                stack.enter_context(without_sites(self.sites))
            yield stack.enter_context(SavedTensors(self.model))

    def report(
        self, *, before: SavedTensors | None = None, after: SavedTensors | None = None
    ) -> ActivationReport:
        """Report saved activations per kind of module; ``str()`` lays out the table.

        Args:
            before: Result of ``measure(original=True)``.
            after: Result of ``measure()``. Without both, bytes per token are derived from the
                modules that say how wide their inputs are, each by itself; nothing is computed.
        """
        return make_report(self._found, self._unsupported, before, after)

    def follow_layouts(self) -> None:
        """Let codes pass the hooks of ``parallelize_module``: call it again if that comes later."""
        carry_sources(self.model)

    def native_shards(self) -> list[str]:
        """Tensor-parallel parameters of modules that keep and compute what torch does."""
        owners: dict[str, dict[str, Any]] = {}
        for name, where in tensor_parallel_parameters(self.model).items():
            owner, _, key = name.rpartition(".")
            owners.setdefault(owner, {})[key] = (self.model.get_parameter(name), *where)
        native = []
        for owner, tensors in owners.items():
            module = self.model.get_submodule(owner)
            kind = _layer(site_of(module))
            if not isinstance(module, nn.Embedding) and not (kind and has_layout(kind, tensors)):
                native += [f"{owner}.{key}" for key in tensors]
        return native

    def forget_absent(self) -> None:
        """Forget modules that have left the model since, such as layers of other stages."""
        present = {id(module) for module in self.model.modules()}
        self._found = [found for found in self._found if id(found.module) in present]
        gc.collect()  # bound forwards are cycles, which would keep weights of other stages

    def remove(self) -> None:
        """Give all modules their forwards back; idempotent."""
        remove_recomputation(self._recomputed)
        self._recomputed = []
        for found in self._found:
            unpack_around_checkpoint(found.module)
            remove_site(found.module, found.site)
        stop_carrying(self.model)


def quantize_activations(
    model: nn.Module, recipe: str | ActivationPolicy = "agoq"
) -> QuantizedActivations:
    """Keep what the backward of a model needs as codes.

    Changes how instances compute, nothing else: parameters, names, classes and ``repr`` stay. Call
    it before the model is sharded, compiled or wrapped.

    Args:
        model: Any module. Unrecognized blocks are packed by rule, with a warning (``other`` of
            ``ActivationPolicy``).
        recipe: ``"agoq"``, ``"auto"``, ``"coat"``, ``"fp8-4bit"``, or a policy.

    Returns:
        A handle; ``remove()`` undoes everything. If there is nothing to quantize, a warning says
        so.

    Raises:
        ValueError: An unknown recipe, or a rule without effect: it matches no module, or none that
            saves an activation of its own.
        RuntimeError: The model is quantized already.
    """
    handle = QuantizedActivations(model, resolve_policy(recipe))
    if handle.is_idle and handle.policy.quantizes:
        rank_zero_warn(
            f"`quantize_activations` finds nothing to quantize in `{type(model).__name__}`: no "
            "normalization layer, activation function or MLP that it knows and no rule excludes. "
            "The model stays as it is. "
            "`ActivationPolicy(linear='int8')` encodes the inputs of linear layers."
        )
    for part in handle.unsupported:
        rank_zero_warn(
            f"Saved activations of {part.count} x {', '.join(part.modules)}: {part.reason}. A "
            "rule for them, or another `other` of `ActivationPolicy`, changes that."
        )
    return handle
