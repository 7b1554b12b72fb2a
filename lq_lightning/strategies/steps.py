"""The half of the strategies that runs steps: forward, backward, optimizers, evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lq_lightning._compat.lightning import trainer_of
from lq_lightning._compat.modules import reset_iteration
from lq_lightning.checkpoint.strategy import CheckpointingStrategy
from lq_lightning.data_parallel import PackedAgreement
from lq_lightning.foundation.agreement import broadcast_module_states
from lq_lightning.foundation.groups import distrust_groups, note_failed_run
from lq_lightning.foundation.meta_start import check_values
from lq_lightning.plugins import FullyShardedPrecision
from lq_lightning.strategies.checks import check_loss
from lq_lightning.strategies.failures import (
    LostRankError,
    explain_lost_rank,
    explain_sharded_use,
    is_lost_rank,
    lost_rank_error,
    tell_others,
    why_not_saved,
)
from lq_lightning.strategies.gradients import DeferredReduction, FiniteGradients
from lq_lightning.strategies.root_forward import RootForward
from lq_lightning.strategies.sharding import ShardedModule, sharded
from lq_lightning.strategies.stop_signal import StopSignal

__all__ = ["SteppingStrategy"]


class SteppingStrategy(CheckpointingStrategy):
    """The step half of :class:`FullyShardedStrategy`, which sets what is declared here."""

    _attached_module: LightningModule | None
    _reduce_every_microbatch: bool
    _finite_gradients: FiniteGradients | None  # None: steps are never left out
    _stop_signal: StopSignal | None = None
    _deferred: DeferredReduction | None = None
    _training_began = False
    _why_not_saved: str | None = None
    num_skipped_steps = 0

    # --- for subclasses -----------------------------------------------------------------------

    def after_optimizer_step(self) -> None:
        """Called after every optimizer step that was not skipped."""

    def after_skipped_step(self) -> None:
        """Called on all ranks after an optimizer step was left out."""

    def before_save(self) -> None:
        """Called on all ranks, which are about to save a state together."""

    def on_step_error(self) -> None:
        """Called after an error in a step method or backward, before FSDP2's state is reset."""

    @property
    def step_group(self) -> dist.ProcessGroup | None:
        """The ranks that take or skip an optimizer step together; ``None`` are all."""
        return None

    @property
    def meeting(self) -> Callable[[], bool] | None:
        """Whether all ranks wait for each other before the next batch; ``None``: always."""
        return None

    # --- forward ------------------------------------------------------------------------------

    @property
    def _sharded(self) -> ShardedModule | None:
        return sharded(self._attached_module)

    @property
    def _forward(self) -> RootForward | None:
        return None if self._sharded is None else self._sharded.forward

    @property
    def _manual(self) -> RootForward | None:
        """Of a module whose ``training_step`` runs backward and optimizers itself."""
        module = self._attached_module
        return None if module is None or module.automatic_optimization else self._forward

    @property
    def _agreement(self) -> PackedAgreement | None:
        return None if self._sharded is None else self._sharded.agreement

    @contextmanager
    def _guard(self) -> Generator[None, None, None]:
        """Leave FSDP2 usable after an error (such as out of memory), explain a lost rank."""
        check_values(self._require_module())
        with explain_lost_rank(self.global_rank, self.world_size):
            try:
                yield
            except Exception as error:
                if self.world_size > 1 and not is_lost_rank(error):
                    tell_others(error, self.global_rank)
                if self._is_sharded and not is_lost_rank(error):
                    self.on_step_error()
                    if self._agreement is not None:
                        self._agreement.forget()
                    reset_iteration(self._require_module())
                raise

    @contextmanager
    def root_forward(self) -> Generator[None, None, None]:
        """Keep the root's own parameters gathered, and in their modules, for several calls.

        A hook may call submodules without it, as in ``self.net(x)``, and each call gathers what it
        needs. This gathers once for all of them, for example around ``self.model.generate(...)``,
        and for code that reads parameters of the root without a call. All ranks together; without
        gradients, except in ``training_step``. Harmless where nothing is sharded.
        """
        forward = self._forward
        with _NOTHING if forward is None else forward.gathered():
            yield

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._guard():
            result = step(*args, **kwargs)
        if self._is_sharded:
            self._show_shards()  # as hooks get them while training; FSDP2 keeps the root gathered
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step``, whose calls of submodules are in a forward of the root unit."""
        forward = self._forward
        with self._guard():
            if forward is None:
                return super().training_step(*args, **kwargs)
            with forward.step() as finish:
                return finish(super().training_step(*args, **kwargs))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``validation_step`` as a forward of the root unit."""
        return self._evaluate(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``test_step`` as a forward of the root unit."""
        return self._evaluate(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``predict_step`` as a forward of the root unit."""
        return self._evaluate(super().predict_step, *args, **kwargs)

    # --- backward -----------------------------------------------------------------------------

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Check the loss; end the forward in front of a ``manual_backward``."""
        if self._is_sharded:
            check_loss(closure_loss)
        if self._manual is not None:
            self._manual.before_backward(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Show shards with their gradients to the code after a ``manual_backward``."""
        if self._manual is not None:
            self._manual.after_backward()

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Backward, with an explanation if another rank is lost."""
        with self._guard():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients of the backward passes inside without reducing them.

        Lightning enters it for all but the last micro-batch of ``accumulate_grad_batches``. With
        manual optimization write ``with self.trainer.strategy.block_backward_sync():`` around
        ``self.manual_backward(loss)`` in all but the last micro-batch.
        """
        deferred = None if self._reduce_every_microbatch else self._deferred
        with _NOTHING if deferred is None else deferred.backward():
            yield

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Drop the state of an interrupted accumulation, or of gradients without a step."""
        if self._finite_gradients is not None:
            self._finite_gradients.forget()
        if self._deferred is not None:
            self._deferred.start_batch(self._require_module().trainer)

    def on_train_start(self) -> None:
        """Note that there is something to continue from here on."""
        self._training_began = True

    def on_train_end(self) -> None:
        """Stop all ranks after a signal that no batch followed."""
        if self._agreement is not None:
            self._agreement.finish()
        if self._stop_signal is not None:
            self._stop_signal.finish()

    # --- optimizer ----------------------------------------------------------------------------

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure (forward and backward) and step, unless gradients are not finite."""
        manual = self._manual
        run = closure if manual is None else _then(closure, manual.before_update)
        if self._agreement is not None:
            run = _then(run, self._agreement.check)
        with explain_lost_rank(self.global_rank, self.world_size):
            if self._finite_gradients is not None:
                result, stepped = self._step_if(self._finite_gradients, optimizer, run, **kwargs)
            else:
                result, stepped = super().optimizer_step(optimizer, run, model, **kwargs), True
            if self._deferred is not None:
                self._deferred.finish_window()
            if stepped:
                self.after_optimizer_step()
            if manual is not None:
                manual.after_update()
        return result

    def _step_if(
        self,
        finite: FiniteGradients,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> tuple[Any, bool]:
        precision = cast(FullyShardedPrecision, self.precision_plugin)
        result = precision.run_closure(self._require_module(), optimizer, closure)
        if finite.decide(optimizer, self.root_device, self.step_group):
            optimizer.step(**kwargs)
            return result, True
        self.num_skipped_steps += 1
        optimizer.zero_grad()
        self.after_skipped_step()
        self.warn_once(
            "optimizer step skipped because of infinite or NaN gradients "
            f"({self.num_skipped_steps} so far); disable with `skip_nonfinite_steps=False`"
        )
        return result, False

    def warn_once(self, message: str) -> None:
        """Warn of what the ranks of :attr:`step_group` have in common, on the first of them."""
        group = self.step_group
        if group is None:
            rank_zero_warn(message)
        elif group.rank() == 0:
            warnings.warn(f"node of rank {self.global_rank}: {message}", stacklevel=2)

    # --- checkpoints --------------------------------------------------------------------------

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        """Write a checkpoint, unless ``fit`` failed so that there is none; a warning says why."""
        if self._why_not_saved is not None:
            warnings.warn(
                f"rank {self.global_rank}: `{filepath}` is not saved: {self._why_not_saved}. What "
                "is there stays.",
                stacklevel=2,
            )
            return
        if self._agreement is not None:
            self._agreement.finish()  # gradients of other parameters must not get into a file
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state, with which a save begins; nothing if none can follow.

        ``OnExceptionCheckpoint`` saves on every rank that fails, and it may be the only one.
        """
        trainer = trainer_of(self._require_module())
        if trainer is None or not (trainer.state.fn == TrainerFn.FITTING and trainer.interrupted):
            self._why_not_saved = None
        elif self._why_not_saved is None:  # else another callback has waited for the others
            self._why_not_saved = why_not_saved(trainer.global_step, self._training_began)
        if self._why_not_saved is not None:
            return {}
        self.before_save()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state; nothing if no save can follow."""
        return {} if self._why_not_saved is not None else super().optimizer_state(optimizer)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, but not behind a save that did not take place."""
        if self._why_not_saved is None:
            super().barrier(name)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide with all ranks, but alone behind a save that did not take place."""
        if self._why_not_saved is not None:
            return decision
        return super().reduce_boolean_decision(decision, all)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, unless the one that was to replace it is not saved."""
        if self._why_not_saved is None:
            super().remove_checkpoint(filepath)

    # --- evaluation, errors -------------------------------------------------------------------

    def _share_buffers(self) -> None:
        if self._is_sharded and self.world_size > 1:
            module, group = self._require_module(), self.shard_ranks.group
            broadcast_module_states(module, parameters=False, group=group)

    def on_validation_start(self) -> None:
        """Evaluate with the same buffers (such as running statistics) on all ranks."""
        self._share_buffers()

    def on_test_start(self) -> None:
        """Evaluate with the same buffers on all ranks."""
        self._share_buffers()

    def on_predict_start(self) -> None:
        """Predict with the same buffers on all ranks."""
        self._share_buffers()

    def on_exception(self, exception: BaseException) -> None:
        """Say which rank failed and whether another one is the cause, or explain a use of shards.

        Raises:
            LostRankError: A collective outside of the steps lost its peer.
        """
        explained = isinstance(exception, LostRankError)
        if explained or is_lost_rank(exception):
            distrust_groups()
        else:
            note_failed_run()
        if self.world_size > 1 and is_lost_rank(exception) and not explained:
            raise lost_rank_error(exception, self.global_rank, self.world_size) from exception
        if self._is_sharded:
            explain_sharded_use(exception)
        if self.world_size > 1 and not explained:
            tell_others(exception, self.global_rank)


_NOTHING = nullcontext()


def _then(first: Callable[[], Any], second: Callable[[], None]) -> Callable[[], Any]:
    def both() -> Any:
        result = first()
        second()
        return result

    return both
