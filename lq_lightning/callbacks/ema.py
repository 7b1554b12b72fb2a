"""Averages of the weights over training, of this rank's shards: EMA and SWA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from typing_extensions import override

from lq_lightning._compat.tensors import local_tensor
from lq_lightning.checkpoint.checkpointer import AVERAGE, show_shards
from lq_lightning.foundation.checks import check_count, is_number
from lq_lightning.foundation.parameters import clean_name
from lq_lightning.foundation.strategy_part import StrategyPart


class ShardAverages(StrategyPart):
    """Averages of the trained parameters, sharded as they are, and what puts them in their place.

    The quantized replicas follow: weights that are exchanged are gathered in full precision, and
    the replicas of training come back as they were, so that an evaluation changes no later step.
    """

    weight_kinds = (AVERAGE,)

    def __init__(self) -> None:
        self._strategy: Any = None
        self._module: nn.Module = nn.Module()
        self.averages: dict[str, Tensor] = {}  # by name of the parameter
        # called before a save, where nodes that train alone have one model
        self.update_if_due: Callable[[], None] = lambda: None
        # this rank's shards and their weights of training, while averages are in their place
        self._trained: list[tuple[Tensor, Tensor]] | None = None
        self._replicas: dict[str, Any] = {}

    def attach(self, strategy: Any, module: nn.Module, afresh: bool) -> None:
        """Average a module's parameters, and act in the checkpoints of its strategy."""
        if afresh or module is not self._module:
            self.on_weights_loaded()
        self._strategy, self._module = strategy, module
        if self not in strategy.parts:
            strategy.parts.append(self)

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        show_shards(self._module)  # not what a forward outside of the steps has left gathered
        return ((clean_name(name), p) for name, p in self._module.named_parameters())

    @torch.no_grad()
    def update(self, weight: float) -> None:
        """Move the averages towards the weights by ``weight``; new ones start from the weights."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, parameter in self._named():
            if name in self.averages:
                pairs.append((local_tensor(self.averages[name]), local_tensor(parameter)))
            elif parameter.requires_grad:
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                self.averages[name] = parameter.detach().to(dtype, copy=True)
        blend = get_ema_multi_avg_fn(1.0 - weight)  # type: ignore[no-untyped-call]
        alike = [pair for pair in pairs if pair[0].dtype == pair[1].dtype]
        if alike:
            blend([average for average, _ in alike], [own for _, own in alike], 1)
        for average, own in pairs:
            if average.dtype != own.dtype:  # one at a time, for memory
                blend([average], [own.to(average.dtype)], 1)

    @torch.inference_mode(False)
    @torch.no_grad()
    def apply(self) -> bool:
        """Put the averages in the place of the weights, unless they are; all ranks call it."""
        if not self.averages or self._trained is not None:
            return False
        if hasattr(self._strategy, "bring_nodes_together"):
            self._strategy.bring_nodes_together()  # of their own weights, not of the averages
        communication = self._strategy.communication
        if communication is not None:
            communication.join()  # exchanges still read the weights
            self._replicas = communication.replica_state_dict()
        self._trained = []
        for name, parameter in self._named():
            if name in self.averages:
                own = local_tensor(parameter)
                self._trained.append((own, own.clone()))
                own.copy_(local_tensor(self.averages[name]))
        self._continue_with({})
        return True

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self, with_replicas: bool = True) -> None:
        """Put the weights back, and the replicas, which takes all ranks."""
        if self._trained is None:
            return
        show_shards(self._module)
        for own, value in self._trained:  # not by name: an error leaves parameters gathered
            own.copy_(value)
        self._continue_with(self._replicas if with_replicas else {})
        self._trained, self._replicas = None, {}

    def _continue_with(self, replicas: Mapping[str, Tensor]) -> None:
        """Take the present weights as known, and gather them anew where there is no replica."""
        communication = self._strategy.communication
        if communication is not None:
            communication.load_state_dict(communication.state_dict(), replicas)

    def before_save(self) -> None:
        """Let the averages contain the steps before."""
        self.update_if_due()

    def on_weights_loaded(self) -> None:
        """Forget the averages of other weights."""
        self.averages, self._trained, self._replicas = {}, None, {}

    def load_weights(self, tensors: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue with the averages of the checkpoint."""
        saved = tensors.get(AVERAGE, {})
        self.averages = {
            name: saved[name].to(parameter.device, copy=True)
            for name, parameter in self._named()
            if name in saved
        }

    def extra_state(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """The averages."""
        if self._trained is not None:
            raise RuntimeError(
                "this checkpoint would have averaged weights beside the state of optimizers, and "
                "no run could continue from it. Save it after the evaluation (list a callback that "
                "saves in `on_validation_end` after `EMA`), or only the weights: "
                "`trainer.save_checkpoint(path, weights_only=True)`."
            )
        return {}, {AVERAGE: dict(self.averages)} if self.averages else {}


class EMA(Callback):
    """Exponential or equal average of the weights, for this package's strategies on any ranks.

    Each rank averages its shards of the trained parameters in fp32: 4 bytes per parameter, divided
    by the ranks that share it. Validation, test and prediction use the averages and need room for a
    second copy of the shards; training goes on with its own weights and replicas, bit for bit.
    Buffers, such as running statistics, stay those of training. Evaluations after ``fit`` use the
    averages whatever else a program has written to the weights: load others by ``ckpt_path``.
    Checkpoints hold both; ``python -m lq_lightning.checkpoint.consolidate --averaged`` makes the
    averages the weights of a file. Where nodes train alone (``local_steps``), averages move when
    nodes are brought together.

    There is no 8-bit form. At ``decay=0.9999`` an update is far below 1/256 of a code's step, which
    is the finest that stochastic rounding tells apart here: in 20,000 simulated steps int8 averages
    moved by less than 1% of what fp32 ones did, with either rounding.

    Args:
        decay: Part of the average that an optimizer step leaves; None averages all updates equally
            (SWA, without its learning rates).
        every_n_steps: Optimizer steps from one update to the next, over which ``decay`` counts too.
        start_step: Optimizer steps before the first update, which copies the weights.

    Raises:
        ValueError: An argument is out of its range; or, before training, the strategy is of another
            package.
    """

    def __init__(
        self, decay: float | None = 0.9999, every_n_steps: int = 1, start_step: int = 0
    ) -> None:
        super().__init__()
        if decay is not None and not (is_number(decay) and 0 < decay < 1):
            raise ValueError(
                f"`EMA(decay={decay!r})` is not valid: give a number between 0 and 1, or None for "
                "an equal average."
            )
        check_count("EMA", "every_n_steps", every_n_steps, 1)
        check_count("EMA", "start_step", start_step, 0)
        self._decay, self._every_n_steps, self._start_step = decay, every_n_steps, start_step
        self._averages = ShardAverages()
        self._step, self._num_updates = 0, 0

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the averages in the place of the weights inside, for instance to save these.

        All ranks together, and not in a training step. Nothing happens before the first update.
        """
        applied = self._averages.apply()
        try:
            yield
        finally:
            if applied:  # else an evaluation goes on with them
                self._averages.restore()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Become a part of the strategy."""
        strategy: Any = trainer.strategy
        if not isinstance(getattr(strategy, "parts", None), list):
            raise ValueError(
                "`EMA` averages shards of `quantized_fsdp` and `quantized_pipeline`, but the "
                f"strategy is `{type(strategy).__name__}`: use one of them, or Lightning's "
                "`EMAWeightAveraging`, which copies the module."
            )
        saves: Any = trainer.checkpoint_callbacks if stage == "fit" else ()
        if any(getattr(callback, "save_weights_only", False) for callback in saves):
            rank_zero_warn(
                "`save_weights_only=True` saves the weights of training, not the averages that "
                "`EMA` evaluates: leave it out, and make a file of the averages by `python -m "
                "lq_lightning.checkpoint.consolidate --averaged`."
            )
        starts = stage == "fit" and trainer.global_step == 0
        if starts:
            self._step, self._num_updates = 0, 0  # a resumed run loads them after this
        self._averages.attach(strategy, pl_module, afresh=starts)
        self._averages.update_if_due = partial(self._update, trainer)

    def _update(self, trainer: pl.Trainer) -> None:
        """Update if it is time, and nodes that train alone have one model."""
        shards, step = self._averages, trainer.global_step
        fits = trainer.state.fn == TrainerFn.FITTING
        due = step > self._start_step and step - self._step >= self._every_n_steps
        meeting: Callable[[], bool] | None = trainer.strategy.meeting  # type: ignore[attr-defined]
        together = meeting is None or meeting()
        if not (fits and due and together):
            return
        if not shards.averages:
            self._num_updates = 0
        if self._decay is None:
            shards.update(1.0 / (self._num_updates + 1))
        else:
            shards.update(1.0 - self._decay ** (step - self._step))
        self._step, self._num_updates = step, self._num_updates + 1

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Update the averages after an optimizer step."""
        self._update(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Update after the last outer step of nodes that train alone."""
        self._update(trainer)

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._update(trainer)
        self._averages.apply()

    def _end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._averages.restore()

    on_validation_epoch_start = on_test_epoch_start = on_predict_epoch_start = _begin
    # after the module's own hook at the end of an epoch, which may run the model once more
    on_validation_end = on_test_end = on_predict_end = _end

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Put the weights back, without the other ranks."""
        self._averages.restore(with_replicas=False)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Counts of steps and updates; the strategy saves the averages, sharded."""
        return {"step": self._step, "num_updates": self._num_updates}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting."""
        self._step, self._num_updates = state_dict["step"], state_dict["num_updates"]
