"""Adapt a recipe of activation codes to the model: in the first batch, or as a checkpoint says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.rank_zero import rank_zero_info

from lq_lightning._compat.torch import recompile_limit
from lq_lightning.activations import QuantizedActivations
from lq_lightning.activations.adaptation import MAX_ERROR, Adaptation, is_adaptable, widen

__all__ = ["RecipeAdaptation"]

# In the checkpoint, not among the states of callbacks: Lightning's own message for two callbacks
# with states would come before ours.
_KEY = "activation_quantization"
_COMPILED_BEFORE = 16  # variants for evaluation and other shapes
# Batches at most: a gradient scaler halves its first scale until nothing overflows, and a step may
# return no loss.
_TRIES = 16


class RecipeAdaptation:
    """One choice of bits in each ``fit``, which checkpoints hold.

    Args:
        owner: Name of the callback, for messages.
        recipe: Its ``recipe``.
        budget: Its ``budget``.
        adapt: Its ``adapt``: a bound on the expected error of all gradients, True for the usual
            one, or None for that with the recipe ``"auto"`` where there is no budget.

    Raises:
        ValueError: ``adapt`` is something else, or there is a budget as well.
    """

    def __init__(self, owner: str, recipe: Any, budget: Any, adapt: bool | float | None) -> None:
        if adapt is None:
            adapt = recipe == "auto" and budget is None
        if adapt is not False and budget is not None:
            raise ValueError(
                f"`{owner}(budget={budget!r}, adapt={adapt!r})`: a budget chooses all codes "
                "itself. Leave out one of both."
            )
        is_number = isinstance(adapt, (int, float)) and 0.0 < adapt < math.inf  # True is
        if adapt is not False and not is_number:
            raise ValueError(
                f"`{owner}(adapt={adapt!r})` is not supported: give True, False, or the relative "
                "error that all gradients together may have, such as 0.08."
            )
        self._owner = f"{owner}({recipe!r})" if isinstance(recipe, str) else owner
        self._max_error = MAX_ERROR if adapt is True else float(adapt)
        self._origin = {"recipe": str(recipe), "max_error": self._max_error}
        self._measuring: Adaptation | None = None
        self._tries = 0
        self._bits: dict[str, int] | None = None
        self._batch, self._fit = ExitStack(), ExitStack()  # what holds for the one, for all of it

    def stop(self) -> None:
        """Stop measuring; the choice stays, for checkpoints."""
        self._batch.close()
        self._fit.close()
        if self._measuring is not None:
            self._measuring.stop()
            self._measuring = None

    def reset(self) -> None:
        """Forget the choice."""
        self.stop()
        self._bits, self._tries = None, 0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: the choice and what it was made for; nothing before."""
        return {} if self._bits is None else {_KEY: {**self._origin, "bits": self._bits}}

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Take the choice of a checkpoint, if it is of the same recipe and bound."""
        state = checkpoint.get(_KEY, {})
        if {key: state.get(key) for key in self._origin} == self._origin:
            self._bits = dict(state["bits"])

    def widen(self, handle: QuantizedActivations) -> None:
        """Apply the choice, if there is one, to sites with other codes than it was made for."""
        widen(handle.sites, self._bits or {})

    def prepare(self, handle: QuantizedActivations, strategy: Strategy) -> None:
        """Apply the choice of a checkpoint, or get ready to measure a batch.

        Args:
            handle: Of the model.
            strategy: Of the run; none with a pipeline is measured, no rank of which has all sites.
        """
        if not self._max_error or not any(map(is_adaptable, handle.sites)):
            return
        if self._bits is not None:
            self.widen(handle)
            self._allow_variants()
            self._tell(f"more bits at {len(self._bits)} sites, as the checkpoint says.")
        elif getattr(strategy, "pipeline", None) is not None:
            self._tell(
                "The stages of a pipeline are not measured. The recipe stays as it is, whatever "
                "the errors of its codes."
            )
        else:
            self._measuring = Adaptation(max_error=self._max_error, model_sites=handle.sites)

    def start(self) -> None:
        """Measure the batch that starts now, unless there is a choice."""
        if self._measuring is not None:
            # compiled code does not show what it encodes
            self._batch.enter_context(torch.compiler.set_stance("force_eager"))
            self._measuring.start()

    def finish(self) -> None:
        """Choose, after the backward pass of a batch that was measured; on all ranks.

        Where nothing could be measured, such as gradients that overflow, the next batch is.
        """
        if self._measuring is not None:
            adaptation, self._measuring = self._measuring, None
            adaptation.finish()
            self._batch.close()
            self._tries += 1
            if adaptation.reason and self._tries < _TRIES:
                again = Adaptation(max_error=self._max_error, model_sites=adaptation.model_sites)
                self._measuring = again
                return
            self._bits = adaptation.bits
            self._allow_variants()
            self._tell(adaptation.summary())

    def _allow_variants(self) -> None:
        """Let blocks that were alike, and shared compiled code, all differ from each other."""
        if self._bits:
            limit = recompile_limit(at_least=_COMPILED_BEFORE + len(self._bits))
            self._fit.enter_context(limit)

    def _tell(self, text: str) -> None:
        rank_zero_info(f"{self._owner}: {text}")
