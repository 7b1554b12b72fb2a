"""``Trainer(callbacks=[AdaptiveBits(...)])``: trained bit widths of hidden states."""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lq_lightning.adaptive import AdaptiveBitsConfig, BitGate, GateOptimizer, attach
from lq_lightning.adaptive.config import TOLERANCE
from lq_lightning.foundation.checks import check_count
from lq_lightning.pipeline.boundary_widths import BoundaryWidths

from .gate_placement import GatePlacement, PipelineGates, Removable, measured_bits, place_in_model
from .model_setup import AfterConfigureModel, check_hyperparameters, check_strategy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MOST_CURVES = 12
_PERCENTILES = (5, 25, 50, 75, 95)


def _check_run(callback: Callback, trainer: pl.Trainer, sites: Sequence[str]) -> None:
    name, strategy = type(callback).__name__, trainer.strategy
    cls = next(c for c in type(callback).__mro__ if c.__module__.startswith("lq_lightning."))
    if sum(isinstance(c, cls) for c in trainer.callbacks) > 1:  # type: ignore[attr-defined]
        raise ValueError(
            f"there are two `{cls.__name__}` in the Trainer, but all sites share one mean: give "
            "one the sites of both."
        )
    check_strategy(name, strategy)
    if getattr(strategy, "pipeline", None) is not None and list(sites) != ["boundaries"]:
        raise ValueError(
            f"`{name}(sites={list(sites)})`: in a pipeline, bits are those of what crosses the "
            "boundaries of stages. Leave `sites` as it is, or use another strategy."
        )
    if getattr(strategy, "nodes_train_alone", False):
        raise ValueError(
            f"`{name}` averages the gradients of its gates over all ranks in every step, but with "
            "`local_steps` nodes take steps, or skip them, alone: leave one of them out."
        )
    if trainer.precision == "64-true":
        raise ValueError(
            f"`{name}` does not encode fp64, which precision='64-true' computes in: use "
            "'32-true', 'bf16-true', 'bf16-mixed' or '16-mixed'."
        )


def _warn_if_missed(callback: Callback, optimizer: GateOptimizer) -> None:
    config = optimizer.config
    if optimizer.mean > config.target + TOLERANCE:
        remedy = (
            f"Raise `beta`, which is {config.beta:g}, or `learning_rate`, train on, or give "
            "`reach_in_steps`."
        )
        if config.reach_in_steps is not None:
            remedy = f"Train on, or give fewer `reach_in_steps`, which are {config.reach_in_steps}."
        rank_zero_warn(
            f"{type(callback).__name__}: the mean is {optimizer.mean:.2f} bits after "
            f"{optimizer.steps} steps and has not reached the target of {config.target:g}. {remedy}"
        )


def _show_bits(trainer: pl.Trainer, bits: Mapping[str, Tensor], max_bits: float) -> None:
    if not trainer.is_global_zero or not bits:
        return
    step = trainer.global_step
    for logger in trainer.loggers:
        add_figure: Any = getattr(getattr(logger, "experiment", None), "add_figure", None)
        if add_figure is not None and importlib.util.find_spec("matplotlib") is not None:
            add_figure("adaptive_bits/histogram", _draw_bits(bits, max_bits), global_step=step)
        else:
            values = torch.cat([each.double() for each in bits.values()])
            shares = torch.tensor(_PERCENTILES).double() / 100
            found = zip(_PERCENTILES, values.quantile(shares).tolist(), strict=True)
            logger.log_metrics({f"adaptive_bits/p{share:02d}": bit for share, bit in found}, step)


def _draw_bits(bits: Mapping[str, Tensor], max_bits: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    names = list(bits)
    if len(names) > _MOST_CURVES:  # as many as are distinguishable, evenly spread
        last = len(names) - 1
        names = [names[round(i * last / (_MOST_CURVES - 1))] for i in range(_MOST_CURVES)]
    for name in names:
        values = bits[name].double()
        counts = torch.histc(values, bins=int(4 * max_bits), min=0.0, max=max_bits)
        edges = torch.linspace(0.0, max_bits, counts.numel() + 1)
        shares = 100.0 * counts / values.numel()
        label = f"{name} (mean {values.mean():.2f})"
        axes.stairs(shares.numpy(), edges.numpy(), label=label)
    axes.set_xlabel("bits")
    axes.set_ylabel("channels, %")
    axes.legend(fontsize="small")
    return figure


class AdaptiveBits(Callback):
    """Quantizes hidden states in bit widths that are trained with the model.

    Every channel of every site has a gate, which stands for a number of bits.
    Gates start at many bits and are trained on the loss and on a penalty for bits until the mean
    over all sites has come down to ``target``; from then on the mean is held, and channels and
    sites that need more bits get them from those that need fewer. (AMAQ, arXiv 2510.05468.)

    Gates and their optimizer (Adam, no weight decay) belong to the callback, not to the model:
    parameters, names and state dict of the model are those of a run without it. They step when the
    model's optimizer does, are saved in the callback's part of checkpoints, and resumed bit for
    bit. While ``fit`` runs, evaluation is quantized in the same widths. When it ends the model is
    as it was; ``attach`` quantizes it again.

    Works with one optimizer, also under manual optimization, on a single device and with
    ``strategy="ddp"``, ``"quantized_fsdp"`` and ``ModelParallelStrategy``; and with
    ``QuantizedPipelineStrategy(forward_codec="amaq")``, where the sites are what crosses the
    boundaries of stages.

    Args:
        target: Mean bits over all quantized values.
        sites: ``"boundaries"``: in front of the model's first block and of its LM head.
            ``"layers"``: behind every block, too. Or names of modules, such as
            ``"model.layers.3:output"``; see ``lq_lightning.adaptive.find_sites``.
        min_bits: Fewest bits; None: 1.
        max_bits: Most bits; None: 16, or 8 for targets below 3.5.
        start_bits: Mean bits at the beginning, which the first step deals out to channels by their
            errors; None: 8, or 6 for targets below 3.5.
        beta: Weight of the penalty for bits against the loss. More: the target is reached sooner.
        learning_rate: Learning rate of the gates. It and ``beta`` fall to a tenth at the target.
        reach_in_steps: Optimizer steps in which the target is reached at the latest. None: sooner
            or later, by ``beta`` and ``learning_rate``, if they win over the loss.
        histogram_every_n_steps: Optimizer steps between two histograms for the loggers; 0: none.

    Attributes:
        optimizer: Trains the gates, and has their mean; None before the first ``fit``.

    Raises:
        ValueError: A value that is not listed above; or, before training starts: strategy, device
            or precision are not supported, there is a second one in the Trainer, the model has no
            such site, it has not one optimizer, or its hyperparameters hold quantized modules.
        RuntimeError: Lightning finds two of one class in the Trainer. In the first step: a site is
            not run, or differs between ranks. When a checkpoint is loaded: it has other gates.
    """

    def __init__(
        self,
        target: float = 4.0,
        sites: str | list[str] = "boundaries",
        min_bits: float | None = None,
        max_bits: float | None = None,
        start_bits: float | None = None,
        beta: float = 0.02,
        learning_rate: float = 1e-2,
        reach_in_steps: int | None = None,
        histogram_every_n_steps: int = 500,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        ends = {"min_bits": min_bits, "max_bits": max_bits, "start_bits": start_bits}
        self.config = AdaptiveBitsConfig.preset(
            target,
            owner=owner,
            beta=beta,
            learning_rate=learning_rate,
            reach_in_steps=reach_in_steps,
            **{name: value for name, value in ends.items() if value is not None},
        )
        check_count(owner, "histogram_every_n_steps", histogram_every_n_steps, 0)
        self._sites = [sites] if isinstance(sites, str) else list(sites)
        self._histogram_every_n_steps = histogram_every_n_steps
        self._model: weakref.ref[nn.Module] | None = None
        self.optimizer: GateOptimizer | None = None
        self._restored: dict[str, Any] | None = None
        self._placement: GatePlacement | None = None
        self._configure: AfterConfigureModel | None = None
        self._step_hooks: list[Removable] = []
        self._reset_steps()

    def _reset_steps(self) -> None:
        self._taken: tuple[Tensor, float] | None = None  # gradients and scale, until the step
        self._steps = 0
        self._logged = 0
        self._warned = False

    @property
    def gates(self) -> Mapping[str, BitGate]:
        """Gates by site; empty before the first ``fit``. With a pipeline, those of this rank."""
        return {} if self.optimizer is None else self.optimizer.gates

    def attach(self, module: nn.Module) -> Removable:
        """Quantize a model in the trained widths, outside of ``fit``.

        Args:
            module: A model with the modules of the trained one.

        Returns:
            A handle whose ``remove()`` undoes it.

        Raises:
            RuntimeError: There are no trained widths, neither of a ``fit`` nor loaded.
        """
        if self.optimizer is None and self._restored is not None:
            self._load(self._restored)
        if self.optimizer is None:
            raise RuntimeError(
                f"`{type(self).__name__}.attach` needs trained widths: call it after `fit`, or "
                "load the state of a checkpoint first."
            )
        return attach(module, self.optimizer.gates)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the run, and wait for the model to be complete."""
        self._remove()
        self._restored = None
        if stage == "fit":
            _check_run(self, trainer, self._sites)
            if getattr(trainer.strategy, "pipeline", None) is None:
                self._configure = AfterConfigureModel(
                    pl_module, lambda module: self._place(trainer, module)
                )

    def connect_boundaries(self, boundaries: BoundaryWidths, module: nn.Module) -> None:
        """Learn the widths of what crosses a pipeline's boundaries: see ``LearnsWidths``."""
        before, state = self._trained_on(module), self._restored
        if state is None and before is not None:
            state = before.state_dict()
            # after an error each rank has only its own
            state["gates"] = boundaries.gather(state["gates"])
        pipeline = PipelineGates(self.config, boundaries, state)
        self.optimizer, self._placement = pipeline.optimizer, pipeline.placement
        self._model = weakref.ref(module)

    def _trained_on(self, module: nn.Module) -> GateOptimizer | None:
        """The optimizer of another fit of the same model."""
        known = self._model() if self._model is not None else None
        return self.optimizer if known is module else None

    def _place(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        before = self._trained_on(module)
        self._placement = place_in_model(trainer, module, self._sites, self._make_gate)
        owners = {module.get_submodule(s.rpartition(":")[0]) for s in self._placement.gates}
        check_hyperparameters(module, owners.__contains__)
        self.optimizer = GateOptimizer(
            self._placement.gates,
            self.config,
            average=self._placement.average,
            total=self._placement.total,
        )
        if before is not None:
            self.optimizer.load_state_dict(before.state_dict())
        self._model = weakref.ref(module)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"`{type(self).__name__}` steps its gates when the optimizer of the model does, "
                f"but `configure_optimizers` returns {len(trainer.optimizers)}: use one optimizer, "
                "with parameter groups if parts need other options."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reset_steps()
        # A hook of torch: steps skipped by a loss scaler or the strategy do not call it.
        self._step_hooks = [trainer.optimizers[0].register_step_post_hook(self._after_step)]
        self._count(True)
        names = self.gates if self._placement is None else self._placement.sites
        sites = ", ".join(f"`{site}`" for site in names)
        config = self.config
        rank_zero_info(
            f"{type(self).__name__}: {len(names)} sites, bits per channel from "
            f"{config.min_bits:g} to {config.max_bits:g}, mean {self._require().mean:.2f} to "
            f"{config.target:g}: {sites}"
        )

    @override
    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
        if self._placement is not None and not self._placement.backward_in_step:
            for gate in self.gates.values():
                gate.clear()

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        self._taken = self._take(), scale

    def _take(self) -> Tensor:
        placement = self._placement
        if placement is None:
            raise AssertionError("Lightning calls `configure_model` before")
        if self._steps == 0:
            placement.check_channels()
        return self._require().take(placement.device)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Step the gates after the model's optimizer has stepped."""
        overflow: Tensor | None = getattr(optimizer, "found_inf", None)  # fused ones skip inside
        taken, scale = self._taken or (self._take(), 1.0)
        self._taken = None
        if overflow is not None and overflow.item():
            return
        gates = self._require()
        gates.step(taken, scale=scale)
        self._steps += 1
        if self._placement is not None:
            self._placement.after_step()
        if gates.skipped_lines and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{type(self).__name__}: gradients of {gates.skipped_lines} gates are infinite or "
                "NaN; they stay as they are in this step. Their number is logged as "
                "`adaptive_bits/skipped_lines`."
            )

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
        if self._steps == self._logged:
            return
        self._logged = self._steps
        pl_module.log_dict(self.metrics())
        every = self._histogram_every_n_steps
        if every and self._steps % every == 0:
            bits = {site: gate.bits() for site, gate in self.gates.items()}
            if self._placement is not None:
                bits = self._placement.join(bits)
            _show_bits(trainer, bits, self.config.max_bits)

    def metrics(self) -> dict[str, float]:
        """Return what is logged after each step.

        ``adaptive_bits/mean``: bits over all gated values. ``adaptive_bits/effective``: bits per
        value on the wire, with scales, minima and a width table per step, lines of more than 8 bits
        counted as 16. ``adaptive_bits/SITE``: mean bits of a site. ``adaptive_bits/skipped_lines``:
        number of gradients so far that were not finite, if any. The ranks of a pipeline call it
        together.
        """
        found = measured_bits(self._require(), self._placement)
        return {f"adaptive_bits/{name}": value for name, value in found.items()}

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._steps and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            _warn_if_missed(self, self._require())

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._count(False)  # evaluation may take gradients

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._count(True)

    def _count(self, counts: bool) -> None:
        for gate in self.gates.values():
            gate.counts = counts

    @override
    def state_dict(self) -> dict[str, Any]:
        """Gates, Adam's moments, and whether the target was reached; collective in a pipeline."""
        if self.optimizer is None:
            return {}
        state = self.optimizer.state_dict()
        return state if self._placement is None else self._placement.joined(state)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue bit for bit where the state was saved.

        Raises:
            ValueError: It has other gates, or gates that stand for other bits.
        """
        if not state_dict:
            return
        self._restored = state_dict
        if self._placement is not None:
            self._require().load_state_dict(state_dict)
        elif self.optimizer is not None and state_dict["gates"]:
            self._load(state_dict)  # used by `attach` and the next fit

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._placement is not None:
            self.optimizer = self._placement.finish(self._require())
        self._remove()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
        self._remove()

    def _remove(self) -> None:
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks = []
        self._taken = None
        if self._configure is not None:
            self._configure.remove()
            self._configure = None
        if self._placement is not None:
            self._placement.attached.remove()
            self._placement = None

    def _require(self) -> GateOptimizer:
        if self.optimizer is None:
            raise RuntimeError(f"`{type(self).__name__}` has no gates before the first `fit`.")
        return self.optimizer

    def _load(self, state: dict[str, Any]) -> None:
        optimizer = GateOptimizer({s: self._make_gate(s) for s in state["gates"]}, self.config)
        optimizer.load_state_dict(state)
        self.optimizer = optimizer

    def _make_gate(self, site: str) -> BitGate:
        return BitGate(self.config, name=site)
