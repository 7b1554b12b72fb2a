"""Lightning's Trainer and helpers; imported when called, so that only callers need lightning."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.io import CheckpointIO

__all__ = [
    "call_hooks",
    "convert_floating",
    "default_dtype",
    "fill_wrapping_checkpoint_io",
    "is_accumulating",
    "materialize_meta_tensors",
    "move_optimizers_to_device",
    "note_sigterm",
    "replace_stop_check",
    "starts_window",
    "use_own_sampling",
]


def is_accumulating(trainer: Trainer) -> bool:
    """Whether the micro-batch that runs now is not the last one before an optimizer step."""
    accumulating: bool = trainer.fit_loop._should_accumulate()
    return accumulating


def starts_window(trainer: Trainer) -> bool:
    """Whether the micro-batch that runs now is the first one after an optimizer step."""
    return bool(trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0)


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
    check: Callable[[], None],
) -> bool:
    """Replace Lightning's handler of SIGTERM, and what its loop does before a training batch.

    Returns:
        Whether this version of Lightning has both; otherwise nothing is replaced.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    names = (connector, "_sigterm_notifier_fn", notify), (loop, "_broadcast_sigterm_tensor", check)
    if not all(hasattr(owner, name) for owner, name, _ in names):
        return False
    for owner, name, replacement in names:
        setattr(owner, name, replacement)
    return True


def note_sigterm(trainer: Trainer) -> None:
    """Let ``trainer.received_sigterm`` be true until the next run."""
    trainer._signal_connector.received_sigterm = True


def convert_floating(data: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in a collection."""
    from lightning.fabric.plugins.precision.utils import _convert_fp_tensor
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(data, function=_convert_fp_tensor, dtype=Tensor, dst_type=dtype)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Create new tensors in ``dtype`` inside the context."""
    from lightning.fabric.plugins.precision.utils import _DtypeContextManager

    return cast("AbstractContextManager[None]", _DtypeContextManager(dtype))


def materialize_meta_tensors(module: nn.Module, device: torch.device) -> None:
    """Allocate a module built on the meta device and call its ``reset_parameters`` methods."""
    from lightning.fabric.utilities.init import _materialize_distributed_module

    _materialize_distributed_module(module, device)


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
