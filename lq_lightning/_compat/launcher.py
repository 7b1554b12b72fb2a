"""Ranks of a run in a notebook, from Lightning's private launchers.

A script is started once more for each rank, a notebook cannot be. Its ranks are forked out of the
kernel at every ``fit``, ``validate``, ``test`` and ``predict``, as with ``ddp_notebook``. Lightning
is imported for types, or by those who call.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning.pytorch.strategies.launchers.launcher import _Launcher
    from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput


def launcher_where_it_runs(
    strategy: ModelParallelStrategy, launcher: _Launcher | None
) -> _Launcher | None:
    """Return ``launcher``, or in a notebook on one node one that works there.

    Ranks that others start (torchrun, SLURM) have no launcher and get none. Forking needs a kernel
    that has not used CUDA yet: launching raises a RuntimeError otherwise.
    """
    from lightning.fabric.utilities.imports import _IS_INTERACTIVE

    if launcher is None or not _IS_INTERACTIVE or strategy.num_nodes > 1:
        return launcher
    return _notebook_launcher(strategy)


def _notebook_launcher(strategy: ModelParallelStrategy) -> _Launcher:
    """Return a launcher whose ranks shard the model, and the notebook gets the whole of it."""
    from lightning.pytorch.strategies.launchers.multiprocessing import (
        _MultiProcessingLauncher,
        _WorkerOutput,
    )
    from lightning.pytorch.trainer.states import TrainerFn

    class NotebookLauncher(_MultiProcessingLauncher):
        def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
            # All ranks together; Lightning would save what rank 0 holds, which are its shards.
            weights = None
            if trainer.state.fn == TrainerFn.FITTING:
                weights = _save_weights(trainer.lightning_module, trainer.is_global_zero)
            if not trainer.is_global_zero:
                return None
            best = getattr(trainer.checkpoint_callback, "best_model_path", None)
            extra = self.get_extra_results(trainer)
            return _WorkerOutput(best, weights, trainer.state, results, extra)

        def _recover_results_in_main_process(
            self, worker_output: _WorkerOutput, trainer: Trainer
        ) -> None:
            weights = worker_output.weights_path
            if weights is not None:
                trainer.lightning_module.configure_model()  # so far only the ranks have
            super()._recover_results_in_main_process(worker_output, trainer)
            if weights is not None:
                Path(weights).parent.rmdir()

    return NotebookLauncher(strategy, start_method="fork")


def _save_weights(module: nn.Module, writes: bool) -> str | None:
    """Gather the weights of all ranks and return where the rank that writes put them."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(module, options=options)
    if not writes:
        return None
    path = Path(tempfile.mkdtemp(prefix="lq-notebook-"), "weights.ckpt")
    torch.save(state, path)
    return str(path)
