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
            a single device.
    """
    known = (ModelParallelStrategy, DDPStrategy, SingleDeviceStrategy)
    if not isinstance(strategy, known) or isinstance(strategy, DeepSpeedStrategy):
        raise ValueError(
            f"`{name}` does not work with `{type(strategy).__name__}`: use "
            'strategy="quantized_fsdp", "ddp", `ModelParallelStrategy` or a single device.'
        )
