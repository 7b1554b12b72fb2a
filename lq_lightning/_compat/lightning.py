"""Lightning: Trainer, helpers, metrics, and ranks of a run in a notebook.

Imported when called, so that only callers need lightning.
"""

from __future__ import annotations

import inspect
import os
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.io import CheckpointIO
    from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
    from lightning.pytorch.strategies.launchers.launcher import _Launcher
    from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput
    from torch.distributed.device_mesh import DeviceMesh
    from torchmetrics import Metric


class Window(NamedTuple):
    """Position of a micro-batch in its gradient accumulation window."""

    first: bool  # gradients start from zero
    last: bool  # an optimizer step follows


def accumulation_window(trainer: Trainer) -> Window:
    """The place of the micro-batch that runs now, with automatic optimization.

    The last batch of an epoch is the last of its window, however many that has.
    """
    loop = trainer.fit_loop
    first = loop.batch_idx % trainer.accumulate_grad_batches == 0
    return Window(first=first, last=not loop._should_accumulate())


def trainer_of(module: LightningModule) -> Trainer | None:
    """The Trainer that a module was given to, if any; ``module.trainer`` raises without one."""
    return module._trainer


def is_no_optimizer(optimizer: Any) -> bool:
    """Whether Lightning put it in place of a ``configure_optimizers`` that returned None."""
    from lightning.pytorch.core.optimizer import _MockOptimizer

    return isinstance(optimizer, _MockOptimizer)


def ddp_hook_of(strategy: Any) -> Callable[..., Any] | None:
    """The communication hook that a ``DDPStrategy`` was given; it leaves it out on CPUs."""
    return getattr(strategy, "_ddp_comm_hook", None)


def call_hooks(trainer: Trainer, name: str, *args: Any) -> None:
    """Call a hook on all callbacks, then on the LightningModule."""
    from lightning.pytorch.trainer import call

    call._call_callback_hooks(trainer, name, *args)
    call._call_lightning_module_hook(trainer, name, *args)


def use_own_sampling(trainer: Trainer) -> None:
    """Leave the user's data loaders alone, as on a single device: no DistributedSampler."""
    trainer._accelerator_connector.use_distributed_sampler = False


def replace_stop_check(
    trainer: Trainer,
    notify: Callable[[int, types.FrameType | None], None],
    notify_requeue: Callable[[int, types.FrameType | None], None],
    check: Callable[[], None],
) -> bool:
    """Replace Lightning's handlers of signals, and what its loop does before a training batch.

    Lightning registers the second handler under SLURM with ``auto_requeue``, for the environment's
    ``requeue_signal``; its own saves and requeues wherever the signal arrives.

    Returns:
        Whether this version of Lightning has all three; otherwise nothing is replaced.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    names = (
        (connector, "_sigterm_notifier_fn", notify),
        (connector, "_slurm_sigusr_handler_fn", notify_requeue),
        (loop, "_broadcast_sigterm_tensor", check),
    )
    if not all(hasattr(owner, name) for owner, name, _ in names):
        return False
    for owner, name, replacement in names:
        setattr(owner, name, replacement)
    if trainer.world_size == 1:  # Lightning checks after batches, also amid a validation

        def advance(data_fetcher: Any) -> None:
            check()
            type(loop).advance(loop, data_fetcher)

        loop.advance = advance  # type: ignore[method-assign]
    return True


def is_between_steps(trainer: Trainer) -> bool:
    """Before a batch: whether no gradients wait for further micro-batches."""
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return done % trainer.accumulate_grad_batches == 0


def replace_checkpoint_links(trainer: Trainer, replace: Callable[[Path, Path], None]) -> None:
    """Let ``ModelCheckpoint(save_last="link")`` replace its link by ``replace(link, target)``.

    Lightning removes the old link first, so that a killed run may leave none.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    own = ModelCheckpoint._link_checkpoint
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and type(callback)._link_checkpoint is own:
            callback._link_checkpoint = partial(_link, replace)  # type: ignore[method-assign]


def _link(
    replace: Callable[[Path, Path], None], trainer: Trainer, filepath: str, linkpath: str
) -> None:
    if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
        replace(Path(linkpath), Path(filepath))
    trainer.strategy.barrier()


def requeue_checkpoint_path(trainer: Trainer) -> str:
    """A new name where ``fit`` without ``ckpt_path`` looks for a checkpoint under SLURM."""
    return trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)


def restore_from(trainer: Trainer, path: str, begin: Callable[[object], None]) -> None:
    """Let the run that a strategy is setting up continue from a checkpoint, whatever it was given.

    ``begin`` is called first, once the module has its parameters, with the ``ckpt_path`` that the
    run was given: it is in the Trainer's hands already when it asks the strategy for its processes.
    """
    connector = trainer._checkpoint_connector

    def start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        del connector.resume_start  # of this run alone
        begin(checkpoint_path)
        connector.resume_start(path, weights_only)

    connector.resume_start = start  # type: ignore[method-assign]


def show_whole_totals(trainer: Trainer, total: int, trained: int, note: str) -> None:
    """Let ``ModelSummary`` show these numbers of parameters, with a note below its table.

    It sees the part of the model on this rank.
    """
    from lightning.pytorch.callbacks import ModelSummary
    from lightning_utilities.core.rank_zero import rank_zero_info

    def summarize(
        callback: Any, data: Any, here: int, unused: int, size: float, *args: Any, **kw: Any
    ) -> None:
        del callback.summarize  # of this run: another Trainer may have another model
        callback.summarize(data, total, trained, size * total / max(here, 1), *args, **kw)
        rank_zero_info(note)

    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelSummary):
            callback.summarize = partial(summarize, callback)  # type: ignore[method-assign]


def note_sigterm(trainer: Trainer) -> None:
    """Let ``trainer.received_sigterm`` be true until the next run."""
    trainer._signal_connector.received_sigterm = True


def set_device_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Show the mesh to ``configure_model`` as ``self.device_mesh``."""
    module._device_mesh = mesh


def take_compiler(module: LightningModule) -> bool:
    """Let Lightning forget that ``torch.compile(module)`` made the module; whether it did."""
    compiled = module._compiler_ctx is not None
    module._compiler_ctx = None
    return compiled


def check_precision_with(strategy: type[Strategy], check: Callable[[str], None]) -> None:
    """Call ``check`` with the Trainer's ``precision`` if its strategy is a ``strategy``.

    Lightning's own check knows strategies by their base classes: it offers choices that a subclass
    may refuse, names another class, and is skipped where the strategy is given by name.
    """
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    original = getattr(_AcceleratorConnector, "_validate_precision_choice", None)
    if original is None:  # another Lightning; the plugin that it makes is checked all the same
        return

    def validate(connector: _AcceleratorConnector) -> None:
        if not isinstance(connector.strategy, strategy):
            original(connector)
        elif connector._precision_plugin_flag is None:
            check(connector._precision_flag)

    _AcceleratorConnector._validate_precision_choice = validate  # type: ignore[assignment, method-assign]


def check_trainer_options(
    check_connector: Callable[..., None], check_callbacks: Callable[[object], None]
) -> None:
    """Check what a new Trainer is given before Lightning does: by one function its ``strategy``,
    ``plugins`` and ``precision``, by the other its ``callbacks``.
    """
    from lightning.pytorch.trainer.connectors import accelerator_connector, callback_connector

    def before(owner: type, method: str, check: Callable[..., None], *names: str) -> None:
        original = getattr(owner, method, None)
        if original is None:  # another Lightning, whose own checks remain
            return

        @wraps(original)
        def checked(self: Any, *args: Any, **options: Any) -> Any:
            given = inspect.signature(original).bind_partial(self, *args, **options).arguments
            check(*map(given.get, names))
            return original(self, *args, **options)

        setattr(owner, method, checked)

    accelerators = accelerator_connector._AcceleratorConnector
    flags = "_check_config_and_set_final_flags"
    before(accelerators, flags, check_connector, "strategy", "plugins", "precision")
    before(callback_connector._CallbackConnector, "on_trainer_init", check_callbacks, "callbacks")


def convert_floating(data: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in a collection."""
    from lightning.fabric.plugins.precision.utils import _convert_fp_tensor
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(data, function=_convert_fp_tensor, dtype=Tensor, dst_type=dtype)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Create new tensors in ``dtype`` inside the context."""
    from lightning.fabric.plugins.precision.utils import _DtypeContextManager

    return cast("AbstractContextManager[None]", _DtypeContextManager(dtype))


@contextmanager
def refuse_norm_clipping(message: str) -> Iterator[None]:
    """Let ``torch.nn.utils.clip_grad_norm_`` raise inside, however it was imported.

    Raises:
        NotImplementedError: With the message, where it is called.
    """

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError(message)

    original = clip_grad._get_total_norm
    clip_grad._get_total_norm = refuse
    try:
        yield
    finally:
        clip_grad._get_total_norm = original


def move_optimizers_to_device(
    optimizers: list[torch.optim.Optimizer], device: torch.device
) -> None:
    """Move the state of optimizers."""
    from lightning.fabric.utilities.optimizer import _optimizers_to_device

    _optimizers_to_device(optimizers, device)


def fill_wrapping_checkpoint_io(
    checkpoint_io: CheckpointIO, inner: Callable[[], CheckpointIO]
) -> None:
    """Give a ``CheckpointIO`` that adds something (such as a thread) one to add it to."""
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

    if isinstance(checkpoint_io, _WrappingCheckpointIO) and checkpoint_io.checkpoint_io is None:
        checkpoint_io.checkpoint_io = inner()


# --- metrics ------------------------------------------------------------------------------------


def step_value(metric: Metric) -> Tensor | None:
    """Result of the last ``metric(...)``, if it was a single number."""
    value: Any = metric._forward_cache
    return value if isinstance(value, Tensor) and value.numel() == 1 else None


def set_step_value(metric: Any, value: Tensor | None) -> None:
    """Let a ``Metric`` look as if ``metric(...)`` had returned ``value``; its states stay."""
    metric._forward_cache = value
    metric._update_count = max(metric._update_count, 1)  # otherwise `compute` warns


def has_separate_lists(metric: Metric) -> bool:
    """Whether a list of its states is gathered entry by entry, not joined before."""
    states = metric._reductions.items()
    return any(how is None and isinstance(metric._defaults[name], list) for name, how in states)


# --- notebooks ----------------------------------------------------------------------------------


def launcher_where_it_runs(
    strategy: ModelParallelStrategy, launcher: _Launcher | None
) -> _Launcher | None:
    """Return ``launcher``, or in a notebook on one node one that works there.

    A script is started once more for each rank, a notebook cannot be. Its ranks are forked out of
    the kernel at every ``fit``, ``validate``, ``test`` and ``predict``, as with ``ddp_notebook``.
    Ranks that others start (torchrun, SLURM) have no launcher and get none. Forking needs a kernel
    that has not used CUDA yet: launching raises a RuntimeError otherwise.
    """
    from lightning.fabric.utilities.imports import _IS_INTERACTIVE

    if launcher is None or not _IS_INTERACTIVE or strategy.num_nodes > 1:
        return launcher
    return _notebook_launcher(strategy)


def _notebook_launcher(strategy: ModelParallelStrategy) -> _Launcher:
    """Return a launcher whose ranks shard the model, and give the notebook the whole of it."""
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
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(module, options=options)
    if not writes:
        return None
    path = Path(tempfile.mkdtemp(prefix="lq-notebook-"), "weights.ckpt")
    torch.save(state, path)
    return str(path)
