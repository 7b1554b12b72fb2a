"""Training of gates: Adam, the penalty for bits, and the target of their mean."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from .config import SETTLED_SCALE, TOLERANCE, AdaptiveBitsConfig
from .gate import BitGate, bits_of, level_errors

__all__ = ["GateOptimizer"]

_BETAS = 0.9, 0.999
# Adam's steps do not depend on the size of gradients as long as eps does not count. Those of gates
# shrink with their number: with 1e-8, fifty thousand of them would already slow each other down.
_EPS = 1e-16
_MARGIN = 0.25  # bits to either end of the range, where the sigmoid of a gate is nearly flat
_NEAR = 1e-4  # bits by which a clipped mean may miss its goal
_MOST_ROUNDS = 60
# Options that define the bits of a gate; and options of earlier versions that are fixed now, of
# which the first one defines bits, too.
_FIXED = ("min_bits", "max_bits")
_REMOVED = {
    "alpha": 1.0,
    "regularizer": "l2",
    "settled_scale": SETTLED_SCALE,
    "tolerance": TOLERANCE,
    "ranges": "fitted",
}


class GateOptimizer:
    """Trains gates, and holds the mean of their bits at the target.

    A step is one of Adam (no weight decay) on the gradient of the loss, which backward left in the
    gates, plus the gradient of ``beta`` times the mean of ``sigmoid(q)`` squared over all channels,
    the latter as long as the mean of the bits is above the target. Once the mean has come down to
    the target, it is clipped to within 0.1 bits of it by one shift of all gates, which keeps their
    differences, and the learning rate and ``beta`` are multiplied by 0.1. The mean is over all
    gated values: a channel counts as often as it has values. (AMAQ, sections 3.2 and A.1.) With
    ``reach_in_steps`` the mean is clipped on its way to the target, too.

    The first step of a gate moves the bits of its channels to where their errors of quantization
    would have been equal, at the same mean: a channel many times as large as the others gets its
    bits at once, for which Adam, whose steps are alike, would take hundreds. (Not in the paper.)

    Channels that the last backward passes did not reach stay as they are, as do those with a
    gradient that is not finite, which are counted in ``skipped_lines``.

    All is computed on the CPU in one order, so that equal gradients give equal gates.

    Args:
        gates: Gates by name, in the same order on all ranks.
        config: Options that all gates share.
        average: Averages a float32 tensor over data-parallel ranks, whose gates are replicas; it
            is called once per step, on the device of the gradients.
        total: Sums a float64 tensor on the CPU over ranks that have other gates, but one mean with
            these, such as the stages of a pipeline; called equally often on all of them.

    Raises:
        ValueError: There are no gates, or one of another configuration.
    """

    def __init__(
        self,
        gates: Mapping[str, BitGate],
        config: AdaptiveBitsConfig,
        *,
        average: Callable[[Tensor], Tensor] | None = None,
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        other = [name for name, gate in gates.items() if gate.config != config]
        if other:
            raise ValueError(
                f"the gate `{other[0]}` has another configuration than its optimizer: all gates "
                "that share a mean need one."
            )
        if not gates and total is None:
            raise ValueError("`GateOptimizer` needs at least one gate.")
        self.gates = dict(gates)
        self.config = config
        self.reached = config.start_bits == config.target
        self.steps = 0
        self.skipped_lines = 0
        self._start = config.start_bits
        self._average = average
        self._total = total
        self._mean: float | None = None
        self._lines = 0.0  # channels of all gates

    @property
    def mean(self) -> float:
        """Mean bits of all gated values, other stages included, after the last step."""
        return self.config.start_bits if self._mean is None else self._mean

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self.config.learning_rate * (SETTLED_SCALE if self.reached else 1.0)

    @property
    def beta(self) -> float:
        """Weight of the penalty in the next step; 0 while the mean is not above the target."""
        if self.mean <= self.config.target:
            return 0.0
        return self.config.beta * (SETTLED_SCALE if self.reached else 1.0)

    def take(self, device: torch.device | str = "cpu") -> Tensor:
        """Take the sums of backward passes out of the gates, for a later ``step``, or to drop them.

        Returns:
            ``[3, channels of all gates]`` float32 on ``device``.

        Raises:
            RuntimeError: A gate has not seen a tensor yet.
        """
        missing = [name for name, gate in self.gates.items() if gate.channels is None]
        if missing:
            raise RuntimeError(
                f"nothing has passed the site {', '.join(f'`{name}`' for name in missing)} before "
                "the first step: name sites that every step runs, or give the number of channels."
            )
        taken = [gate.take(torch.device(device)) for gate in self.gates.values()]
        none = torch.zeros(3, 0, dtype=torch.float32, device=device)
        return torch.cat([none, *taken], 1)

    def step(self, taken: Tensor | None = None, *, scale: float = 1.0) -> None:
        """Change gates and widths, once per step of the model's optimizer.

        Args:
            taken: Result of ``take``; None: take it now.
            scale: Factor of the loss, as for fp16; gradients are divided by it.
        """
        taken = self.take() if taken is None else taken
        if self._average is not None:
            taken = self._average(taken)
        sums, squares, seen = taken.cpu()
        gates = list(self.gates.values())
        none = sums.new_zeros(0)
        state = torch.cat([none.new_zeros(5, 0), *(gate.state for gate in gates)], 1)
        grad = sums / scale * torch.cat([none, *(gate.slope() for gate in gates)])
        parts = _slices(gates)
        for gate, part in zip(gates, parts, strict=True):
            if not gate.state[3].any():  # nor after steps of which no gradient was finite
                state[0, part] = self._levelled(gate, squares[part], seen[part])
        state[4] = torch.where(seen > 0, seen, state[4])
        if self._mean is None:
            self._mean = self._measure(state)[0]
        finite = grad.square().isfinite()  # Adam keeps squares
        self.skipped_lines += int((~finite & (seen > 0)).sum())
        self.steps += 1
        self._adam(state, grad + self._penalty_gradient(state[0]), finite & (seen > 0))
        self._clip(state)
        for gate, part in zip(gates, parts, strict=True):
            gate.state.copy_(state[:, part])
            gate.refresh()

    def _levelled(self, gate: BitGate, squares: Tensor, seen: Tensor) -> Tensor:
        """Return gates at which the channels of a new gate expect equal errors."""
        config = self.config
        low, high = config.min_bits + _MARGIN, config.max_bits - _MARGIN
        known = (seen > 0) & squares.isfinite()
        if not squares[known].any() or not low <= config.start_bits <= high:
            return gate.q
        bits = level_errors(gate.widths[known], squares[known] / seen[known], low, high)
        share = (bits - config.min_bits) / (config.max_bits - config.min_bits)
        q = gate.q.clone()
        q[known] = share.logit()
        return q

    def _penalty_gradient(self, q: Tensor) -> Tensor:
        sigma = torch.sigmoid(q)
        return sigma * (1.0 - sigma) * 2.0 * sigma * (self.beta / max(1.0, self._lines))

    def _adam(self, state: Tensor, grad: Tensor, moved: Tensor) -> None:
        """Step the channels in ``moved``; each counts its own steps."""
        q, first, second, steps = state[0], state[1], state[2], state[3]
        first = torch.where(moved, first.lerp(grad, 1.0 - _BETAS[0]), first)
        second = torch.where(moved, second.lerp(grad.square(), 1.0 - _BETAS[1]), second)
        steps = steps + moved
        corrections = [-torch.expm1(steps * math.log(beta)) for beta in _BETAS]  # 1 - beta ** steps
        divisor = (second / corrections[1]).sqrt() + _EPS
        change = torch.where(moved, first / corrections[0] / divisor, 0.0)
        state[0] = q - self.learning_rate * change
        state[1], state[2], state[3] = first, second, steps

    # --- the mean -----------------------------------------------------------------------------

    def _measure(self, state: Tensor, shift: float = 0.0) -> tuple[float, float]:
        """Return the mean of the bits, and its derivative by a shift of all gates."""
        config = self.config
        above = bits_of(state[0] + shift, config).double() - config.min_bits
        slopes = above * (1.0 - above / (config.max_bits - config.min_bits))
        values = state[4].double()
        count = values.sum()
        parts = [values @ above + config.min_bits * count, values @ slopes, count]
        sums = torch.stack([*parts, values.new_tensor(float(values.numel()))])
        if self._total is not None:
            sums = self._total(sums)
        weighted, slope, count, self._lines = sums.tolist()
        if count == 0:  # no backward yet
            return self.mean, 0.0
        return weighted / count, slope / count

    def _clip(self, state: Tensor) -> None:
        """Check whether the target is reached; from then on keep the mean near it."""
        mean, slope = self._measure(state)
        least, most = self._bounds(mean)
        goal = min(max(mean, least), most)
        if mean == goal or slope == 0.0:
            self._mean = mean
            return
        # Newton's method on an increasing function, bisection where it leaves the bracket. All
        # ranks see the same sums, so they make the same number of collectives.
        shift, low, high = 0.0, -torch.inf, torch.inf
        for _ in range(_MOST_ROUNDS):
            if abs(mean - goal) <= _NEAR:
                break
            low, high = (shift, high) if mean < goal else (low, shift)
            step = (goal - mean) / slope if slope > 0.0 else torch.inf * (goal - mean)
            shift += min(max(step, -4.0), 4.0)
            if not low < shift < high:
                shift = (low + high) / 2.0
            mean, slope = self._measure(state, shift)
        state[0] += shift
        self._mean = mean

    def _bounds(self, mean: float) -> tuple[float, float]:
        config, most = self.config, torch.inf
        if config.reach_in_steps is not None and not self.reached:
            left = max(0.0, 1.0 - self.steps / config.reach_in_steps)
            most = config.target + left * (self._start - config.target)
        self.reached = self.reached or min(mean, most) <= config.target
        if self.reached:
            return config.target - TOLERANCE, min(most, config.target + TOLERANCE)
        return -torch.inf, most

    # --- saving -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all state of later steps but gradients: tensors and plain values."""
        return {
            "config": asdict(self.config),
            "reached": self.reached,
            "steps": self.steps,
            "start": self._start,
            "mean": self._mean,
            "lines": self._lines,
            "skipped_lines": self.skipped_lines,
            "gates": {
                name: {"per": "channel", "state": gate.state.clone()}
                for name, gate in self.gates.items()
                if gate.channels is not None
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue bit for bit where ``state_dict`` was called.

        Another ``target`` is allowed: the mean goes down to it from where it is.

        Raises:
            ValueError: The state has other gates, or gates that mean something else.
        """
        saved, own = _REMOVED | state["config"], asdict(self.config)
        changed = {field: value for field, value in _REMOVED.items() if saved[field] != value}
        for field, value in changed.items():
            now = (
                f"the saved gates have `{field}={saved[field]!r}`, but `{field}={value!r}` is all "
                "that is left of this removed option"
            )
            if field == "alpha":
                raise ValueError(f"{now}: start from weights alone.")
            warnings.warn(f"{now}: they are trained with it from here on.", stacklevel=2)
        for field in _FIXED:
            if saved[field] != own[field]:
                raise ValueError(
                    f"the saved gates have `{field}={saved[field]!r}`, but `{field}={own[field]!r}`"
                    " is used now: the same gates would stand for other bits."
                )
        kinds = dict.fromkeys(self.gates, "channel")
        given = {name: entry["per"] for name, entry in state["gates"].items()}
        if given and given != kinds:
            raise ValueError(
                f"the saved gates are {_shown(given)}, but there are {_shown(kinds)} now: train "
                "on with the sites that were saved, or start from weights alone."
            )
        mean = state["mean"]
        again = saved["target"] == own["target"]
        if mean is not None and not again and mean < own["target"] - TOLERANCE:
            raise ValueError(
                f"the saved gates have {mean:.2f} bits on average, which is below the new target "
                f"of {own['target']:g}: bits are brought down only."
            )
        for name, gate in self.gates.items():
            gate.clear()
            if given:
                gate.state = state["gates"][name]["state"].detach().to("cpu", copy=True)
            else:  # saved before the first step
                gate.reset()
        self._mean, self._lines = mean, state["lines"]
        self.reached, self.steps = state["reached"] and again, state["steps"] if again else 0
        self._start = state["start"] if again or mean is None else mean
        self.skipped_lines = state["skipped_lines"]


def _slices(gates: Sequence[BitGate]) -> list[slice]:
    """Return the columns of each gate in the state of all."""
    ends = list(accumulate((gate.state.shape[1] for gate in gates), initial=0))
    return [slice(start, end) for start, end in pairwise(ends)]


def _shown(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"`{name}` (per {per})" for name, per in kinds.items())
