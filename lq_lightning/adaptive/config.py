"""Options of bit widths that are trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from types import NoneType
from typing import Any

from lq_lightning.foundation.checks import check_count, is_number

__all__ = ["SETTLED_SCALE", "TOLERANCE", "AdaptiveBitsConfig"]

SETTLED_SCALE = 0.1  # factor of `learning_rate` and `beta` once the target has been reached
TOLERANCE = 0.1  # bits by which the mean may miss the target after that
_MAX_WIDTH = 16  # bits


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveBitsConfig:
    """How gates turn into bits, and how both are trained.

    A gate ``q`` stands for ``min_bits + (max_bits - min_bits) * sigmoid(q)`` bits. Adam trains it
    on the loss of the model plus ``beta`` times the mean of ``sigmoid(q)`` squared. Once the mean
    of all bits has come down to ``target``, it is held there. (AMAQ, section 3; its values are the
    defaults.)

    Attributes:
        target: Mean bits over all gated values, scales and tables not counted.
        min_bits: Fewest bits of a channel, at least 1.
        max_bits: Most bits of a channel, at most 16.
        start_bits: Bits of every channel at the beginning, and the mean at which the first step
            levels their errors; see ``GateOptimizer``.
        beta: Weight of the penalty for bits against the loss of the model.
        learning_rate: Learning rate of Adam.
        reach_in_steps: Steps until the target is reached at the latest: the mean is clipped to a
            straight line from where it started. None: whenever ``beta`` and ``learning_rate``
            win over the gradient of the loss, which wants more bits. (Not in the paper.)
        owner: Name of the class that messages name; not kept.

    Raises:
        ValueError: A value that is no number or out of its range, or ``target`` that cannot be
            reached from ``start_bits`` by going down.
    """

    target: float = 4.0
    min_bits: float = 1.0
    max_bits: float = 16.0
    start_bits: float = 8.0
    beta: float = 0.02
    learning_rate: float = 1e-2
    reach_in_steps: int | None = None
    owner: InitVar[str] = "AdaptiveBitsConfig"

    def __post_init__(self, owner: str) -> None:
        """Check the values."""
        rate = self.learning_rate
        _check(owner, "learning_rate", rate, "more than 0, and finite", lambda v: 0 < v < math.inf)
        _check(owner, "beta", self.beta, "0 or more, and finite", lambda v: 0 <= v < math.inf)
        for field in ("min_bits", "max_bits"):
            value = getattr(self, field)
            _check(owner, field, value, "1 or more, and at most 16", lambda v: 1 <= v <= _MAX_WIDTH)
        check_count(owner, "reach_in_steps", self.reach_in_steps, 1, NoneType)
        if self.min_bits >= self.max_bits:
            raise ValueError(
                f"`{owner}(min_bits={self.min_bits:g}, max_bits={self.max_bits:g})` leaves nothing "
                "to choose from: `max_bits` must be larger."
            )
        limits = f"a number above `min_bits={self.min_bits:g}` and below `max_bits="
        limits += f"{self.max_bits:g}`: gates come close to both and reach neither"
        for field in ("target", "start_bits"):
            value = getattr(self, field)
            _check(owner, field, value, limits, lambda v: self.min_bits < v < self.max_bits)
        if self.start_bits < self.target:
            raise ValueError(
                f"`{owner}(start_bits={self.start_bits:g}, target={self.target:g})`: bits are "
                "brought down to the target, so they must start at it or above it."
            )

    @classmethod
    def preset(cls, target: float, **changes: Any) -> AdaptiveBitsConfig:
        """Return the paper's options for a target.

        From 3.5 bits on that is the range 1 to 16, starting at 8 (its runs of 4 bits); below, the
        range 1 to 8, starting at 6 (its runs of 3 bits).

        Args:
            target: Mean bits.
            **changes: Other values of attributes.
        """
        low = {"max_bits": 8.0, "start_bits": 6.0} if is_number(target) and target < 3.5 else {}
        return cls(**{"target": target, **low, **changes})

    @property
    def start(self) -> float:
        """The gate of ``start_bits``."""
        share = (self.start_bits - self.min_bits) / (self.max_bits - self.min_bits)
        return math.log(share / (1.0 - share))


def _check(
    owner: str, field: str, value: float, allowed: str, holds: Callable[[float], bool]
) -> None:
    if not (is_number(value) and holds(value)):
        raise ValueError(f"`{owner}({field}={value!r})` must be {allowed}.")
