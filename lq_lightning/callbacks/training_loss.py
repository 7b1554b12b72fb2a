"""Run a LightningModule's ``training_step`` for its loss alone, without side effects on the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric

_SILENCED = ("log", "log_dict", "print")
_CONTAINERS = (list, dict, set, deque)
_VALUES = (bool, int, float, str, type(None))


def check_training_step(owner: str, module: pl.LightningModule) -> None:
    """Raise ``ValueError`` unless ``training_step`` can be run for its loss alone."""
    if not module.automatic_optimization:
        raise ValueError(
            f"`{owner}` runs `training_step` for its loss alone, but with manual optimization that "
            "steps the optimizer: use automatic optimization, or no budget but a recipe or policy."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"`{owner}` runs `training_step` on the same batch several times, but "
            "`training_step(self, dataloader_iter)` takes batches from the loader itself: take "
            "`batch` instead, or use no budget but a recipe or policy."
        )


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise RuntimeError(
            f"`training_step` returned {type(output).__name__} without a loss for the first batch, "
            "on which a memory budget is measured: return the loss, or a dict with the key 'loss'."
        )
    return loss


def training_loss(
    trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
) -> Callable[[], Tensor]:
    """Return a function that runs one forward pass as the strategy does and returns the loss.

    ``batch`` is on the device; each run gets a copy, which it may change.
    """
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def run() -> Tensor:
        copied = apply_to_collection(batch, Tensor, lambda t: t.clone(), allow_frozen=True)
        arguments = (copied, batch_idx) if takes_index else (copied,)
        # FSDP2's root module must be called
        if isinstance(trainer.strategy, ModelParallelStrategy):
            return _loss_of(trainer.strategy.training_step(*arguments))
        # DDP's wrapper expects a backward after each forward, so only the inner module is called
        with trainer.precision_plugin.train_step_context():
            return _loss_of(module.training_step(*arguments))

    return run


def accumulates(trainer: pl.Trainer) -> bool:
    """Return whether gradients of other batches exist during a step, now or in a later epoch."""
    return trainer.accumulate_grad_batches > 1 or any(
        isinstance(each, GradientAccumulationScheduler) and each.going_to_accumulate_grad_batches()
        for each in trainer.callbacks  # type: ignore[attr-defined]
    )


def count_values(batch: Any) -> int:
    """Return the number of values in all tensors of a batch."""
    values = 0

    def count(tensor: Tensor) -> Tensor:  # a `PackedSequence` is built again of what this returns
        nonlocal values
        values += tensor.numel()
        return tensor

    apply_to_collection(batch, Tensor, count, allow_frozen=True)
    return values


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, _CONTAINERS) else value


@contextmanager
def _attributes(module: nn.Module, names: list[str]) -> Iterator[None]:
    """Restore attributes; containers stay the same objects."""
    attributes = module.__dict__
    before = {name: (attributes[name], _copied(attributes[name])) for name in names}
    try:
        yield
    finally:
        for name, (value, copied) in before.items():
            if isinstance(value, (list, deque)):
                value.clear()
                value.extend(copied)
            elif isinstance(value, (dict, set)):
                value.clear()
                value.update(copied)
            else:
                value = copied
            attributes[name] = value


def _state(module: nn.Module) -> list[str]:
    """Attributes that a step may count or collect in; not those that Lightning sets."""
    if isinstance(module, Metric):
        return [n for n in vars(module) if n not in vars(nn.Module())]
    own = vars(pl.LightningModule())
    return [n for n, v in vars(module).items() if n not in own and type(v) in _CONTAINERS + _VALUES]


@contextmanager
def untouched(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    """Hide from the run what ``training_step`` logs, counts, collects or draws.

    ``log``, ``log_dict``, ``print`` and the loggers do nothing inside. Afterwards metrics, the
    numbers and containers that are attributes of the model, and random numbers (also of Python and
    NumPy; those of GPUs are left to the caller) are as before.
    """
    loggers, silenced = trainer.loggers, {n: vars(module).get(n) for n in _SILENCED}
    states = {m: _state(m) for m in module.modules() if m is module or isinstance(m, Metric)}
    with isolate_rng(include_cuda=False), ExitStack() as stack:
        for owner, names in states.items():
            stack.enter_context(_attributes(owner, names))
        try:
            trainer.loggers = [DummyLogger() for _ in loggers]
            for name in _SILENCED:
                module.__dict__[name] = lambda *args, **kwargs: None
            yield
        finally:
            trainer.loggers = loggers
            for name, own in silenced.items():
                if own is None:
                    del module.__dict__[name]
                else:
                    module.__dict__[name] = own
