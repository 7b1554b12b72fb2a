"""Act on a model when it is complete, and not sharded yet."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

__all__ = ["AfterConfigureModel"]


class AfterConfigureModel:
    """Calls a function once, behind the next ``configure_model`` of a module.

    That is where a model is complete and, unless the user does it there, not sharded yet. Lightning
    has no callback hook between the two.
    """

    def __init__(
        self, module: pl.LightningModule, then: Callable[[pl.LightningModule], None]
    ) -> None:
        self._module = module
        self._own = module.__dict__.get("configure_model")  # of a sharded module

        def configure_model(module: pl.LightningModule) -> None:
            if module is not self._module:  # a copy, made since: it is nobody's to act on
                del module.__dict__["configure_model"]
                module.configure_model()
                return
            self.remove()
            module.configure_model()
            then(module)

        # Not `functools.wraps`: Lightning looks behind it and finds nothing overridden.
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
