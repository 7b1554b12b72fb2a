"""What ``AdaptiveBits`` refuses before training starts, and warns of at its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lq_lightning.adaptive import GateOptimizer
from lq_lightning.adaptive.config import TOLERANCE
from lq_lightning.foundation.checks import is_whole

from .strategy_check import check_strategy

__all__ = [
    "check_count",
    "check_hyperparameters",
    "check_optimizers",
    "check_run",
    "warn_if_missed",
]

_DEVICES = ("cpu", "cuda")


def check_count(callback: Callback, field: str, value: object, least: int) -> None:
    """Refuse what is no whole number of at least ``least``.

    Raises:
        ValueError: ``value`` is something else.
    """
    if not is_whole(value) or value < least:
        raise ValueError(
            f"`{type(callback).__name__}({field}={value!r})` must be a whole number of {least} or "
            "more."
        )


def check_run(callback: Callback, trainer: pl.Trainer, sites: Sequence[str]) -> None:
    """Refuse a Trainer in which gates cannot be trained.

    Args:
        callback: That trains them.
        trainer: As far as its strategy's environment is set up.
        sites: Given by the user.

    Raises:
        ValueError: There are two of these callbacks, the strategy, device or precision is not
            supported, nodes train alone, or sites are given for a pipeline.
    """
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
    if strategy.root_device.type not in _DEVICES:
        raise ValueError(
            f"`{name}` does not work on the device '{strategy.root_device}': choose the "
            "accelerator 'cuda' or 'cpu'."
        )
    if trainer.precision == "64-true":
        raise ValueError(
            f"`{name}` does not encode fp64, which precision='64-true' computes in: use "
            "'32-true', 'bf16-true', 'bf16-mixed' or '16-mixed'."
        )


def check_optimizers(callback: Callback, trainer: pl.Trainer) -> None:
    """Refuse optimizers that do not step together.

    Raises:
        ValueError: There is none, or more than one.
    """
    if len(trainer.optimizers) != 1:
        raise ValueError(
            f"`{type(callback).__name__}` steps its gates when the optimizer of the model does, "
            f"but `configure_optimizers` returns {len(trainer.optimizers)}: use one optimizer, "
            "with parameter groups if parts need other options."
        )


def check_hyperparameters(module: pl.LightningModule, sites: Iterable[str]) -> None:
    """Refuse quantized modules among what every checkpoint holds pickled.

    Raises:
        ValueError: A hyperparameter is a module with a site in it.
    """
    owners = {id(module.get_submodule(site.rpartition(":")[0])) for site in sites}
    for name, value in module.hparams.items():
        if isinstance(value, nn.Module) and any(id(part) in owners for part in value.modules()):
            raise ValueError(
                f"`{type(module).__name__}.hparams` holds the module `{name}`, which cannot be "
                "pickled into a checkpoint while it is quantized. Call "
                f"`self.save_hyperparameters(ignore=[{name!r}])`: its weights are in the state "
                "dict anyway."
            )


def warn_if_missed(callback: Callback, optimizer: GateOptimizer) -> None:
    """Say so if the mean is still above the target.

    Args:
        callback: That trains gates.
        optimizer: Of these, after the last step.
    """
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
