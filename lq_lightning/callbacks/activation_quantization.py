"""``Trainer(callbacks=[ActivationQuantization(...)])``: saved activations in few bits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lq_lightning._compat.float8 import float8_matmul_available
from lq_lightning._compat.torch import recompile_limit, release_host_memory
from lq_lightning.activations import (
    ActivationPlan,
    ActivationPolicy,
    MemoryBudget,
    QuantizedActivations,
    plan_activations,
    quantize_activations,
)
from lq_lightning.activations.adaptation import MAX_ERROR, Adaptation, is_adaptable, widen
from lq_lightning.activations.calibrate import FULL_PRECISION
from lq_lightning.activations.measure import CodeMeter, is_measured
from lq_lightning.activations.offload import Offload, find_blocks
from lq_lightning.activations.offload_share import Share
from lq_lightning.activations.policy import SiteKind, resolve_policy
from lq_lightning.activations.report import ActivationReport
from lq_lightning.activations.sites import Site, quantizes, sites_of
from lq_lightning.foundation.reporting import QuantizationReport
from lq_lightning.pipeline.partition import kept_stages

from .model_setup import AfterConfigureModel, check_hyperparameters, check_strategy
from .training_loss import accumulates, check_training_step, count_values, training_loss, untouched

# A key of the checkpoint, not a callback's state: for two callbacks with states, Lightning's own
# message would come before ours.
_KEY = "activation_quantization"
# Batches to try: a gradient scaler halves its first scale until nothing overflows, and a step may
# return no loss.
_TRIES = 16
_COMPILED_BEFORE = 16  # variants for evaluation, other shapes, and before the choice


class _RecipeAdaptation:
    """One choice of bits per ``fit``, saved in checkpoints; arguments are those of the callback."""

    def __init__(self, owner: str, recipe: Any, budget: Any, adapt: bool | float | None) -> None:
        if adapt is None:
            adapt = recipe == "auto" and budget is None
        if adapt is not False and budget is not None:
            raise ValueError(
                f"`{owner}(budget={budget!r}, adapt={adapt!r})`: a budget chooses all codes "
                "itself. Leave out one of both."
            )
        is_number = isinstance(adapt, (int, float)) and 0.0 < adapt < math.inf  # also True
        if adapt is not False and not is_number:
            raise ValueError(
                f"`{owner}(adapt={adapt!r})` is not supported: give True, False, or the relative "
                "error that all gradients together may have, such as 0.08."
            )
        self._owner = f"{owner}({recipe!r})" if isinstance(recipe, str) else owner
        self._max_error = MAX_ERROR if adapt is True else float(adapt)
        self._origin = {"recipe": str(recipe), "max_error": self._max_error}
        self._measuring: Adaptation | None = None
        self._tries = 0
        self._bits: dict[str, int] | None = None
        self._batch, self._fit = ExitStack(), ExitStack()  # contexts of the measured batch, the fit

    def stop(self) -> None:
        """Stop measuring; the choice stays, for checkpoints."""
        self._batch.close()
        self._fit.close()
        if self._measuring is not None:
            self._measuring.stop()
            self._measuring = None

    def reset(self) -> None:
        """Forget the choice."""
        self.stop()
        self._bits, self._tries = None, 0

    def state(self) -> dict[str, Any]:
        """Return the choice and its origin, for checkpoints; empty before the choice."""
        return {} if self._bits is None else {_KEY: {**self._origin, "bits": self._bits}}

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Take the choice of a checkpoint, if it is of the same recipe and bound."""
        state = checkpoint.get(_KEY, {})
        if {key: state.get(key) for key in self._origin} == self._origin:
            self._bits = dict(state["bits"])

    def prepare(self, handle: QuantizedActivations, strategy: Strategy) -> None:
        """Apply the choice of a checkpoint, or get ready to measure a batch.

        With a pipeline nothing is measured: no rank has all sites.
        """
        if not self._max_error or not any(map(is_adaptable, handle.sites)):
            return
        if self._bits is not None:
            widen(handle.sites, self._bits)
            self._allow_variants()
            self._tell(f"more bits at {len(self._bits)} sites, as the checkpoint says.")
        elif getattr(strategy, "pipeline", None) is not None:
            self._tell(
                "The stages of a pipeline are not measured. The recipe stays as it is, whatever "
                "the errors of its codes."
            )
        else:
            self._measuring = Adaptation(max_error=self._max_error, model_sites=handle.sites)

    def start(self) -> None:
        """Measure the batch that starts now, unless there is a choice."""
        if self._measuring is not None:
            # compiled code does not show what it encodes
            self._batch.enter_context(torch.compiler.set_stance("force_eager"))
            self._measuring.start()

    def finish(self) -> None:
        """Choose, after the backward pass of a measured batch; collective.

        Where nothing could be measured, as when gradients overflow, the next batch is tried.
        """
        if self._measuring is not None:
            adaptation, self._measuring = self._measuring, None
            adaptation.finish()
            self._batch.close()
            self._tries += 1
            if adaptation.reason and self._tries < _TRIES:
                sites = adaptation.model_sites
                self._measuring = Adaptation(max_error=self._max_error, model_sites=sites)
                return
            self._bits = adaptation.bits
            self._allow_variants()
            self._tell(adaptation.summary())

    def _allow_variants(self) -> None:
        """Let compiled code differ between blocks that shared it."""
        if self._bits:
            limit = recompile_limit(at_least=_COMPILED_BEFORE + len(self._bits))
            self._fit.enter_context(limit)

    def _tell(self, text: str) -> None:
        rank_zero_info(f"{self._owner}: {text}")


class ActivationQuantization(Callback):
    """Keeps what backward needs as codes of few bits while ``fit`` runs.

    Normalization layers, activation functions and gated MLPs keep codes of their inputs, from which
    backward rebuilds the rest; linear layers behind them keep no input. Modules keep their classes,
    names and parameters, hence their checkpoints. When ``fit`` ends, also by an exception, they are
    as they were.

    Works with ``strategy="quantized_fsdp"``, ``"ddp"``, ``ModelParallelStrategy`` and on a single
    device, with layers made in ``__init__``, ``setup`` or ``configure_model``, before or after
    ``parallelize_module`` and ``fully_shard``. Ranks of a tensor-parallel group keep codes of their
    own tokens, and gather them in backward where a layer read the tokens of all.

    Args:
        recipe: ``"agoq"``: 5-bit codes. ``"auto"``: 4-bit codes, and more bits where the first
            batch shows that gradients need them. ``"coat"``: 8-bit codes and FP8 matrix products.
            ``"fp8-4bit"``: the codes of ``"agoq"`` and FP8 matrix products. Or an
            ``ActivationPolicy``, whose rules name modules as ``LightningModule.named_modules()``
            does.
        budget: Memory per device to fit into: ``"60GiB"``, a number as ``MemoryBudget`` takes it,
            or a ``MemoryBudget``. At the first training batch of each fit the model is measured on
            that batch (``plan_activations``), all ranks together, and each tensor is kept,
            recomputed, or becomes a code of 4 to 8 bits. ``recipe``, a name, then only says
            how matrix products are computed. Batches with more tokens than the first need
            more memory, with a warning.
        adapt: Bound on the relative error of all gradients from integer codes; sites get more
            bits after the first batch where it is exceeded. True is 0.08. By default True with
            ``"auto"``, else False.
        offload: Moves what the repeated blocks save to pinned host memory until backward reads it:
            a share of the saved bytes up to 1.0; host memory per rank, as a number of GiB above 1
            or as ``"40GiB"``; or ``"auto"``: all, and from the fourth forward pass on what the
            measured link hides behind forward, or more where the rest would not fit.

    Attributes:
        handle: Result of ``quantize_activations`` for the model; ``None`` outside of ``fit``.
        plan: Choice for ``budget``; ``None`` without one, before the first batch and after ``fit``.

    Raises:
        ValueError: ``recipe``, ``budget``, ``adapt`` or ``offload`` is something else; or, before
            training: strategy, device or precision are not supported, there is a second one in the
            Trainer, the model has nothing to quantize, or its hyperparameters hold modules; with a
            budget: manual optimization, or ``training_step(self, dataloader_iter)``; with
            ``offload``: no repeated blocks.
        RuntimeError: Before training starts: the model is quantized already, or a precision plugin
            replaced the modules. At the first batch: the budget cannot be met, says what would do;
            with ``offload``: too little host memory, or nothing could be moved.
    """

    def __init__(
        self,
        recipe: Literal["agoq", "auto", "coat", "fp8-4bit"] | ActivationPolicy = "agoq",
        budget: MemoryBudget | int | float | str | None = None,
        adapt: bool | float | None = None,
        offload: float | str | None = None,
    ) -> None:
        super().__init__()
        self.given = {"recipe": recipe, "budget": budget, "adapt": adapt, "offload": offload}
        self._policy = resolve_policy(recipe)
        self._recipe = recipe if isinstance(recipe, str) else type(recipe).__name__
        if budget is not None:
            if isinstance(recipe, ActivationPolicy):
                raise ValueError(
                    f"`{type(self).__name__}(recipe=ActivationPolicy(...), budget={budget!r})`: a "
                    "policy says what the budget is to choose. Leave out one of both; with a "
                    "budget, `recipe='coat'` or 'fp8-4bit' asks for FP8 matrix products."
                )
            if not isinstance(budget, MemoryBudget):
                budget = MemoryBudget(budget)
            self._policy = replace(FULL_PRECISION, matmul=self._policy.matmul)
        self._budget = budget
        if offload is not None:
            Share(offload)
            if budget is not None:
                raise ValueError(
                    f"`{type(self).__name__}(budget={budget.size!r}, offload={offload!r})`: a "
                    "budget chooses what is moved. Leave out `offload`, and give "
                    f"`budget=MemoryBudget({budget.size!r}, offload=True)`."
                )
        self._amount = offload
        self._offload: Offload | None = None
        self._blocks: list[str] = []
        self._adaptation = _RecipeAdaptation(type(self).__name__, recipe, budget, adapt)
        self._bits: tuple[int, int] | None = None
        self.plan: ActivationPlan | None = None
        self._planned_values = 0  # in the planned batch
        self._limit = ExitStack()
        self.handle: QuantizedActivations | None = None
        self._configure: AfterConfigureModel | None = None
        self._report: ActivationReport | None = None
        self._meter = CodeMeter()

    def compensate(self, at_most: int, bits: int) -> None:
        """Use other widths of integer codes in this ``fit``; see ``StageBitCompensation``.

        To be called while callbacks are set up, in any order.

        Args:
            at_most: Codes of so many bits or fewer are changed.
            bits: Their new width.

        Raises:
            ValueError: There is a budget, which chooses widths itself, or a code is no integer.
        """
        if self._budget is not None:
            raise ValueError(
                f"`{type(self).__name__}(budget={self._budget.size!r})` chooses the bits of each "
                "rank by its memory: remove `StageBitCompensation`, or the budget."
            )
        self._policy.with_bits(at_most, bits)
        self._bits = (at_most, bits)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the run, and wait for the model to be complete."""
        self._remove()
        if stage == "fit":
            self._adaptation.reset()
            self._check(trainer)
            if self._budget is not None:
                check_training_step(f"{type(self).__name__}(budget=...)", pl_module)
            self._configure = AfterConfigureModel(pl_module, self._quantize)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report what is quantized; refuse a precision plugin that replaced modules."""
        if self.handle is None:
            raise AssertionError("Lightning calls `configure_model` before")
        if in_stages := kept_stages(pl_module) is not None:
            self.handle.forget_absent()  # layers of other stages
            self._report = self.handle.report()
        modules = pl_module.modules()
        present = {id(v) for m in modules for v in vars(m).values() if isinstance(v, Site)}
        lost = [site.name for site in self.handle.sites if id(site) not in present]
        if lost:
            raise RuntimeError(
                f"`{type(self).__name__}` prepared `{lost[0]}`{_more(lost)}, which `"
                f"{type(trainer.precision_plugin).__name__}` has replaced since. Use the precision "
                "'32-true', 'bf16-true' or 'bf16-mixed', or remove one of the two."
            )
        self._meter = CodeMeter()
        self._meter.start()
        if self._budget is None:
            where = " in the stages of this rank" * in_stages
            rank_zero_info(f"{type(self).__name__}({self._recipe!r}){where}\n{self._report}")
        self.handle.follow_layouts()
        if native := self.handle.native_shards():
            rank_zero_info(
                f"{type(self).__name__}: `{native[0]}`{_more(native)} are tensor-parallel in a way "
                "that is not known; their modules are left as they are."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.handle is not None:
            self._adaptation.prepare(self.handle, trainer.strategy)
        if self._amount is not None:
            self._start_offload(pl_module, self._amount)

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
        if self._offload is not None:
            self._offload.check()
        if pl_module.automatic_optimization:  # manual steps may continue with backward passes
            self._adaptation.finish()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
        self._adaptation.finish()
        if self._offload is not None:
            self._offload.check_writes()  # where no optimizer of torch makes the steps
            self._offload.settle()
            if said := self._offload.share.decide(trainer.strategy.root_device):
                rank_zero_info(f"{type(self).__name__}(offload={self._amount!r}): {said}")

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_offload()  # Lightning moves weights and optimizer states to the host next

    @override
    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: Any) -> None:
        checkpoint.update(self._adaptation.state())

    @override
    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: Any) -> None:
        self._adaptation.load(checkpoint)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measure the first batch, or with a budget choose how activations are kept."""
        self._adaptation.start()
        if self._budget is None:
            return
        budget, values = self._budget, count_values(batch)
        if self.plan is not None:
            if values > self._planned_values > 0:
                warnings.warn(
                    f"`{type(self).__name__}(budget={budget.size!r})` was met on a batch of "
                    f"{self._planned_values} values, but batch {batch_idx} has {values}: it needs "
                    "more memory. Let the largest batch be the first, or cut batches to one size.",
                    stacklevel=1,
                )
                self._planned_values = 0  # warn once
            return
        if self.handle is None:
            raise AssertionError("Lightning calls `configure_model` before")
        self._planned_values = values
        self._meter.stop()
        with untouched(trainer, pl_module):
            self.plan = plan_activations(
                pl_module,
                training_loss(trainer, pl_module, batch, batch_idx),
                budget,
                optimizers=trainer.optimizers,
                accumulates=accumulates(trainer),
                matmul=self._policy.matmul,
                ranks=_ranks_of_node(trainer.strategy),
            )
        self.handle.apply(self.plan.policy)
        units = len(self.plan.calibration.units)  # compiled units may all differ
        self._limit.enter_context(recompile_limit(at_least=_COMPILED_BEFORE + units))
        self._meter.start()
        rank_zero_info(f"{type(self).__name__}(budget={budget.size!r})\n{self.plan.summary()}")
        if self.plan.offload_nbytes:
            self._start_offload(pl_module, f"{self.plan.offload_nbytes} B")

    def _start_offload(self, module: pl.LightningModule, amount: float | str) -> None:
        strategy = module.trainer.strategy
        self._offload = Offload(
            module,
            amount,
            device=strategy.root_device,
            ranks=_ranks_of_node(strategy),
            blocks=self._blocks,
        )

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._remove()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
        self._remove()

    def quantization_report(self) -> QuantizationReport | None:
        """Return bits and rounding errors of the codes of eager code; None outside of ``fit``.

        Per optimizer step, ``bytes_saved`` counts codes, and ``bytes_offloaded`` what was moved to
        the host; ``bits_per_saved_value`` includes scales;
        ``saved_<kind>_error`` is the error of a kind of the policy.
        """
        if self.handle is None:
            return None
        meter = self._meter
        counts = {"bytes_saved": meter.nbytes} if meter.nbytes else {}
        if self._offload is not None:
            counts["bytes_offloaded"] = self._offload.moved_nbytes
        return QuantizationReport(
            counts=counts,
            ratios={"bits_per_saved_value": (8.0 * meter.nbytes, meter.values)},
            errors={f"saved_{kind}_error": meter.take_errors(kind) for kind in get_args(SiteKind)},
        )

    def measure_quantization_errors(self, measure: bool) -> None:
        """Switch decoding of all codes, to measure errors, on or off."""
        self._meter.measure = measure

    def _check(self, trainer: pl.Trainer) -> None:
        name, strategy = type(self).__name__, trainer.strategy
        if [type(c) for c in trainer.callbacks].count(type(self)) > 1:  # type: ignore[attr-defined]
            raise ValueError(
                f"there are two `{name}` in the Trainer, but a model is quantized once: remove "
                "one. `ActivationPolicy(rules=[...])` gives modules formats of their own."
            )
        check_strategy(name, strategy)
        if self._budget is not None and getattr(strategy, "pipeline", None) is not None:
            raise ValueError(
                f"`{name}(budget={self._budget.size!r})` measures whole models, not the stages of "
                "a pipeline: remove the budget, and let `StageBitCompensation` choose bits."
            )
        rules = (rule.matmul for rule in self._policy.rules)
        fast = {self._policy.matmul, *rules} - {"native", None}
        if fast and (reason := float8_matmul_available(strategy.root_device)) is not None:
            raise ValueError(
                f"`{name}(recipe={self._recipe!r})`: {reason} `recipe='agoq'` does without."
            )
        if trainer.precision == "64-true":
            raise ValueError(
                f"`{name}` does not encode fp64, so that precision='64-true' leaves nothing to it: "
                "use '32-true', 'bf16-true' or 'bf16-mixed', or remove the callback."
            )

    def _compensated(self) -> ActivationPolicy:
        return self._policy if self._bits is None else self._policy.with_bits(*self._bits)

    def _quantize(self, module: pl.LightningModule) -> None:
        with torch.random.fork_rng([]):  # recognition draws random numbers
            self.handle = quantize_activations(module, self._compensated())
        check_hyperparameters(module, sites_of)
        if not any(map(quantizes if self._budget is None else is_measured, self.handle.sites)):
            raise ValueError(
                f"`{type(self).__name__}(recipe={self._recipe!r})` finds nothing to quantize in "
                f"`{type(module).__name__}`: no normalization layer, activation function or MLP "
                "that it knows and no rule excludes. Remove the callback, or give an "
                "`ActivationPolicy(linear='int8')`, which encodes the inputs of linear layers."
            )
        self._report = self.handle.report()  # before the strategy shards modules
        self._blocks = find_blocks(module)

    def _remove(self) -> None:
        self._meter.stop()
        self._adaptation.stop()
        self._limit.close()
        if self._configure is not None:
            self._configure.remove()
            self._configure = None
        self._stop_offload()
        if self.handle is not None:
            self.handle.remove()
            self.handle = self._report = self.plan = None
            self._bits = None

    def _stop_offload(self) -> None:
        if self._offload is not None:
            self._offload.remove()
            self._offload = None
            release_host_memory()


def _ranks_of_node(strategy: Strategy) -> int:
    return getattr(strategy, "num_processes", 1)


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
