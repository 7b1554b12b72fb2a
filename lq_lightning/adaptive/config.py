"""Options of bit widths that are trained."""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass
from typing import Any, Literal

from lq_lightning.codecs.mixed import RANGES, Ranges
from lq_lightning.foundation.checks import check_choice, is_number, is_whole

__all__ = ["MAX_WIDTH", "AdaptiveBitsConfig", "Regularizer"]

Regularizer = Literal["l2", "l1"]

MAX_WIDTH = 16  # of a line, in bits


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveBitsConfig:
    """How gates turn into bits, and how both are trained.

    A gate ``q`` stands for ``min_bits + (max_bits - min_bits) * sigmoid(alpha * q)`` bits. It is
    trained by Adam on the loss of the model plus ``beta`` times the mean of ``sigmoid(alpha * q)``
    squared. Once the mean of all bits has come down to ``target``, it is held there. (AMAQ, section
    3; its values are the defaults.)

    Attributes:
        target: Mean bits over all gated values, scales and tables not counted.
        min_bits: Fewest bits of a line, from 1 on.
        max_bits: Most bits of a line, to 16.
        start_bits: Bits of every line at the beginning, and the mean to which the first step moves
            them so that lines expect equal errors; see ``GateOptimizer``.
        alpha: Slope of the sigmoid. The bits move ``alpha`` times as far at one learning rate.
        regularizer: What is pushed down: the mean of squares (``"l2"``) or of values (``"l1"``) of
            the sigmoids.
        beta: Its weight against the loss of the model.
        learning_rate: Of Adam.
        settled_scale: ``learning_rate`` and ``beta`` are multiplied by this once the target has
            been reached.
        tolerance: How far the mean may be from ``target`` after that, in bits.
        reach_in_steps: Steps in which the target is reached at the latest: the mean is clipped to
            a straight line from where it started. None: whenever ``beta`` and ``learning_rate``
            win over the gradient of the loss, which wants more bits. (Not in the paper.)
        ranges: Of lines of up to 8 bits: ``"fitted"`` to their mean and deviation, which clips the
            values that are farthest off, where that promises a smaller error; or ``"full"``, from
            the minimum to the maximum; see ``encode_mixed``. (The paper says nothing about it.)
        owner: Class that messages name; not kept.

    Raises:
        ValueError: A value that is no number or out of its range, or ``target`` that cannot be
            reached from ``start_bits`` by going down.
    """

    target: float = 4.0
    min_bits: float = 1.0
    max_bits: float = 16.0
    start_bits: float = 8.0
    alpha: float = 1.0
    regularizer: Regularizer = "l2"
    beta: float = 0.02
    learning_rate: float = 1e-2
    settled_scale: float = 0.1
    tolerance: float = 0.1
    reach_in_steps: int | None = None
    ranges: Ranges = "fitted"
    owner: InitVar[str] = "AdaptiveBitsConfig"

    def __post_init__(self, owner: str) -> None:
        """Check the values."""
        check_choice(owner, "regularizer", self.regularizer, ("l2", "l1"))
        check_choice(owner, "ranges", self.ranges, RANGES)
        for field in ("alpha", "learning_rate", "tolerance"):
            _check_range(owner, field, getattr(self, field), 0.0, math.inf, open_below=True)
        _check_range(owner, "beta", self.beta, 0.0, math.inf)
        _check_range(owner, "settled_scale", self.settled_scale, 0.0, 1.0)
        _check_range(owner, "min_bits", self.min_bits, 1.0, MAX_WIDTH)
        _check_range(owner, "max_bits", self.max_bits, 1.0, MAX_WIDTH)
        steps = self.reach_in_steps
        if steps is not None and (not is_whole(steps) or steps < 1):
            raise ValueError(
                f"`{owner}(reach_in_steps={steps!r})` must be a whole number of 1 or more, or None."
            )
        if self.min_bits >= self.max_bits:
            raise ValueError(
                f"`{owner}(min_bits={self.min_bits:g}, max_bits={self.max_bits:g})` leaves nothing "
                "to choose from: `max_bits` must be larger."
            )
        for field in ("target", "start_bits"):
            value = getattr(self, field)
            if not (is_number(value) and self.min_bits < value < self.max_bits):
                raise ValueError(
                    f"`{owner}({field}={value!r})` must be a number above "
                    f"`min_bits={self.min_bits:g}` and below `max_bits={self.max_bits:g}`: gates "
                    "come close to both and reach neither."
                )
        if self.start_bits < self.target:
            raise ValueError(
                f"`{owner}(start_bits={self.start_bits:g}, target={self.target:g})`: bits are "
                "brought down to the target, so they must start at it or above it."
            )

    @classmethod
    def preset(cls, target: float, **changes: Any) -> AdaptiveBitsConfig:
        """Return what the paper uses for a target.

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
        return math.log(share / (1.0 - share)) / self.alpha


def _check_range(
    owner: str, field: str, value: float, low: float, high: float, *, open_below: bool = False
) -> None:
    above = is_number(value) and (value > low if open_below else value >= low)
    if not above or value > high or value == math.inf:
        least = f"more than {low:g}" if open_below else f"{low:g} or more"
        most = "finite" if high == math.inf else f"at most {high:g}"
        raise ValueError(f"`{owner}({field}={value!r})` must be {least}, and {most}.")
