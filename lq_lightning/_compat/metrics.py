"""State of torchmetrics between a step and its logging."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torchmetrics import Metric


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
