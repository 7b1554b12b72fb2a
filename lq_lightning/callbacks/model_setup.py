"""Parts of callbacks that change a model before it is sharded."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import nn


class AfterConfigureModel:
    """Calls a function once, after the next ``configure_model`` of a module.

    There a model is complete and, unless the user does it there, not sharded yet. Lightning has no
    callback hook between the two.
    """

    def __init__(
        self, module: pl.LightningModule, then: Callable[[pl.LightningModule], None]
    ) -> None:
        self._module = module
        self._own = module.__dict__.get("configure_model")  # a sharded module has one

        def configure_model(module: pl.LightningModule) -> None:
            if module is not self._module:  # a copy made since, which is not ours
                del module.__dict__["configure_model"]
                module.configure_model()
                return
            self.remove()
            module.configure_model()
            then(module)

        # Not `functools.wraps`: Lightning unwraps it and would find the method not overridden.
        self._method: Any = types.MethodType(configure_model, module)
        module.__dict__["configure_model"] = self._method

    def remove(self) -> None:
        """Restore the attribute; idempotent."""
        attributes = self._module.__dict__
        if attributes.get("configure_model") is not self._method:
            return
        if self._own is None:
            del attributes["configure_model"]
        else:
            attributes["configure_model"] = self._own


def check_strategy(name: str, strategy: Strategy) -> None:
    """Raise ``ValueError`` unless a callback of this name works with a strategy and its device.

    Classes of the package ``pytorch_lightning`` are others than those of ``lightning.pytorch``.
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
    if strategy.root_device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"`{name}` does not work on the device '{strategy.root_device}': choose the "
            "accelerator 'cuda' or 'cpu'."
        )


def check_hyperparameters(
    module: pl.LightningModule, is_quantized: Callable[[nn.Module], Any]
) -> None:
    """Refuse quantized modules in hyperparameters, which every checkpoint pickles."""
    for name, value in module.hparams.items():
        if isinstance(value, nn.Module) and any(map(is_quantized, value.modules())):
            raise ValueError(
                f"`{type(module).__name__}.hparams` holds the module `{name}`, which cannot be "
                "pickled into a checkpoint while its activations are quantized. Call "
                f"`self.save_hyperparameters(ignore=[{name!r}])`: its weights are in the state "
                "dict anyway."
            )
