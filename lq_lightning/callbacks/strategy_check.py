"""The strategies that callbacks which change the model before it is sharded work with."""

from __future__ import annotations

from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)

__all__ = ["check_strategy"]


def check_strategy(name: str, strategy: Strategy) -> None:
    """Check that a callback works with a strategy.

    Args:
        name: Of the callback.
        strategy: Of the Trainer.

    Raises:
        ValueError: It is none of those of this package, DDP, ``ModelParallelStrategy`` and those of
            a single device, or one of the package ``pytorch_lightning``, whose classes are others.
    """
    if any(c.__module__.partition(".")[0] == "pytorch_lightning" for c in type(strategy).__mro__):
        raise ValueError(
            f"`{name}` works with `lightning.pytorch`, but this Trainer is of the other package, "
            "`pytorch_lightning`: import Trainer and LightningModule from lightning.pytorch."
        )
    known = (ModelParallelStrategy, DDPStrategy, SingleDeviceStrategy)
    if not isinstance(strategy, known) or isinstance(strategy, DeepSpeedStrategy):
        raise ValueError(
            f"`{name}` does not work with `{type(strategy).__name__}`: use "
            'strategy="quantized_fsdp", "ddp", `ModelParallelStrategy` or a single device.'
        )
