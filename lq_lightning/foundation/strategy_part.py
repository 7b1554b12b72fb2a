"""What acts in the steps and checkpoints of a strategy that it does not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer


class StrategyPart:
    """A part of a strategy; its hooks run on all ranks and do nothing by default.

    Attributes:
        tensor_kinds: Kinds of tensors that :meth:`load_extra_state` wants from a checkpoint.
        weight_kinds: Kinds that :meth:`load_weights` wants.
    """

    tensor_kinds: tuple[str, ...] = ()
    weight_kinds: tuple[str, ...] = ()

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before forward, backward and the update."""

    def after_optimizer_step(self, stepped: bool) -> None:
        """Called after every optimizer step; ``stepped`` is False if it was skipped."""

    def on_step_error(self) -> None:
        """Called after an error in a step method or backward, before FSDP2's state is reset."""

    def before_save(self) -> None:
        """Called before all ranks save a state together."""

    def on_weights_loaded(self) -> None:
        """Called after a checkpoint has replaced the weights."""

    def load_weights(self, tensors: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore tensors that are loaded with the weights, also to evaluate or predict."""

    def extra_state(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Plain values for a checkpoint, and DTensors by kind and parameter."""
        return {}, {}

    def load_extra_state(
        self, values: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Restore what :meth:`extra_state` returned; tensors are sharded for this world size."""
