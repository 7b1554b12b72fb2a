"""Quantize the saved activations of a model, in place and reversibly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from .adaptation import MAX_ERROR, Adaptation
from .checkpointed import pack_around_checkpoint, unpack_around_checkpoint
from .find import Left, find_sites
from .forwards import FORWARDS
from .measure import SavedTensors
from .policy import ActivationPolicy, resolve_policy
from .recompute import install_recomputation, remove_recomputation
from .report import ActivationReport, make_report, without_sites
from .rules import check_rules
from .sites import HookSite, Site, install_site, policy_kind, quantizes, remove_site, site_of

__all__ = ["QuantizedActivations", "quantize_activations"]


class QuantizedActivations:
    """The quantized activations of a model, until they are removed.

    Args:
        model: The model.
        policy: The rules.
    """

    def __init__(self, model: nn.Module, policy: ActivationPolicy) -> None:
        self.policy = policy
        self.model = model
        self._found, self._left = find_sites(model, policy)
        check_rules(model, ((found.module, found.site) for found in self._found), policy)
        taken = [found for found in self._found if site_of(found.module) is not None]
        for found in taken or self._found:  # the first that is taken raises
            install_site(found.module, found.site, FORWARDS[type(found.site)])
            if isinstance(found.site, HookSite) and found.site.kind == "checkpoint":
                pack_around_checkpoint(found.module, found.site)
        self._recomputed = install_recomputation(model, policy)

    def apply(self, policy: ActivationPolicy) -> None:
        """Keep from the next forward pass on what another policy says.

        Args:
            policy: All fields but ``matmul`` may differ from the present one. What the present one
                packs by saved-tensor hooks may get another codec or none; nothing else is packed.

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
    def left(self) -> list[Left]:
        """What is not recognized."""
        return list(self._left)

    @contextmanager
    def adapt(self, max_error: float = MAX_ERROR) -> Iterator[Adaptation]:
        """Measure what the codes do to gradients, and give sites more bits where that is too much.

        Run one forward and backward pass of a training step inside of the ``with`` block; it
        computes what it would without. Codes change at its end, those of norms, activation
        functions and MLPs, if they are integers. With several ranks all must call; all choose
        alike.

        Args:
            max_error: Largest expected relative error of all gradients together.

        Yields:
            What is measured and chosen, complete at the end of the block.
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
        """Say what is saved, per kind of module.

        Args:
            before: From ``measure(original=True)``.
            after: From ``measure()``. Without both, bytes per token are derived from the modules
                that say how wide their inputs are, each by itself; nothing is computed.

        Returns:
            A table, which ``str()`` lays out.
        """
        return make_report(self._found, self._left, before, after)

    def forget_absent(self) -> None:
        """Let go of modules that have left the model since, such as layers of other stages."""
        present = {id(module) for module in self.model.modules()}
        self._found = [found for found in self._found if id(found.module) in present]

    def remove(self) -> None:
        """Give all modules their forwards back; idempotent."""
        remove_recomputation(self._recomputed)
        self._recomputed = []
        for found in self._found:
            unpack_around_checkpoint(found.module)
            remove_site(found.module, found.site)


def quantize_activations(
    model: nn.Module, recipe: str | ActivationPolicy = "agoq"
) -> QuantizedActivations:
    """Keep what the backward of a model needs as codes.

    Changes how instances compute, nothing else: parameters, names, classes and ``repr`` stay. Call
    it before the model is sharded, compiled or wrapped.

    Args:
        model: Any module. Blocks in which not all is recognized are packed by rule, with a
            warning (``other`` of ``ActivationPolicy``).
        recipe: ``"agoq"``, ``"coat"``, ``"fp8-4bit"``, or a policy.

    Returns:
        A handle; ``remove()`` undoes everything. If there is nothing to quantize, a warning says
        so.

    Raises:
        ValueError: An unknown recipe, or a rule without effect: it matches no module, or none that
            keeps anything by itself.
        RuntimeError: The model is quantized already.
    """
    handle = QuantizedActivations(model, resolve_policy(recipe))
    if handle.is_idle and handle.policy.quantizes:
        rank_zero_warn(
            f"`quantize_activations` finds nothing to quantize in `{type(model).__name__}`: no "
            "normalization layer, activation function or MLP that it knows and that no rule "
            "excepts. The model computes and keeps what it did. "
            "`ActivationPolicy(linear='int8')` encodes the inputs of linear layers."
        )
    for part in handle.left:
        rank_zero_warn(
            f"Saved activations of {part.count} x {', '.join(part.modules)}: {part.reason}. Give "
            "them a rule, or `other` of `ActivationPolicy` a codec or None, to have it otherwise."
        )
    return handle
