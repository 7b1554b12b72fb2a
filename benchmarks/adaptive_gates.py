"""AMAQ with its choices open: what ``adaptive_bits.py`` compares, in plain PyTorch.

A gate q per line (a channel, or a token position) gives bits, ``low + (high - low) * sigmoid(q)``,
and their rounded widths code the line. The gates' gradient comes from the backward pass of what is
coded; Adam steps all of them once per optimizer step of the model.

Shape legend: B sequences, S tokens of each, N channels; n gates of all sites.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from qat_baselines import NORMAL_ERRORS, SCALE_BITS, quantized
from torch import Tensor

INTEGER_BITS = 8  # wider lines travel as bf16


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveOptions:
    """How bits are learned; by default as in the paper, at 4 bits.

    Attributes:
        target: Mean of the bits of all lines, once it is reached.
        low: Least bits of a line.
        high: Most bits.
        start: Bits of all lines in the beginning.
        beta: Of the regulariser.
        learning_rate: Of Adam on the gates.
        later: What the learning rate is scaled by once the target is reached.
        tolerance: Of the mean, then.
        norm: The regulariser is the mean of sigmoids ("l1"), or of their squares ("l2").
        lines: What has a width.
        rounding: Of bits to widths: "remainder" keeps the sum of a site, "nearest" does not.
        clip: "mean" shifts all gates alike so that the mean stays, "each" holds every line at the
            target at least, "none" lets the regulariser go on.
        signal: Gradient of bits: "error" is that of the paper, gradient times rounding error;
            "fisher" is what the error adds to the loss by the empirical Fisher information.
        projected: Whether, at the target, the mean is taken off the gradient of bits, as a Lagrange
            multiplier would: bits go from lines below the mean to lines above it.
        solved: Whether bits come from the Fisher information at once, without Adam: by reverse
            water-filling, from a mean over so many steps; 0 for no.
        measured: Whether, then, the sum of a site is what "error" measured, and only its lines are
            compared by the Fisher information, which misses that errors of tokens are alike.
        descent: Steps in which the mean is brought down to the target, as held as it is later, and
            without a regulariser; 0 for the regulariser.
        shared: Whether Adam divides by one size of the gradient, that of all lines, so that lines
            move by what they matter and not by how little noise they have.
        apart: Whether, on a schedule, the mean of every site is held, and not that of all.
        fitted: Whether ranges are fitted, see ``qat_baselines.py``.
    """

    target: float = 4.0
    low: float = 1.0
    high: float = 16.0
    start: float = 8.0
    beta: float = 0.02
    learning_rate: float = 1e-2
    later: float = 0.1
    tolerance: float = 0.1
    norm: Literal["l1", "l2"] = "l2"
    lines: Literal["channel", "position"] = "channel"
    rounding: Literal["remainder", "nearest"] = "remainder"
    clip: Literal["mean", "each", "none"] = "mean"
    signal: Literal["error", "fisher"] = "error"
    projected: bool = False
    solved: int = 0
    measured: bool = False
    descent: int = 0
    shared: bool = False
    apart: bool = False
    fitted: bool = False

    def gate_of(self, bits: float) -> float:
        """Return the gate of some bits."""
        share = (bits - self.low) / (self.high - self.low)
        return math.log(share / (1 - share))


def widths_of(bits: Tensor, rounding: str) -> Tensor:
    """Round bits ``[n]`` to whole ones; "remainder" keeps their sum, rounded, ties by index."""
    if rounding == "nearest":
        return bits.round()
    widths = bits.floor()
    missing = int(bits.double().sum().round()) - int(widths.sum())
    largest = (bits - widths).sort(descending=True, stable=True).indices[:missing]
    widths[largest] += 1
    return widths


class Gate:
    """The gates of one site.

    Args:
        options: See there.
        lines: Number of them.
        device: That values are on.

    Attributes:
        q: ``[lines]`` fp32.
        grad: Of the loss, by bits, ``[lines]`` fp32: sums since the last step.
        energy: Likewise, Fisher information times what errors of codes are a known share of, by
            width: the variance where ranges are fitted, else the square of the range by 12.
        effects: ``[2, lines]``, sums since the last step: gradients times errors, and what the
            Fisher information expects these to be.
        widths: ``[lines]`` fp32, whole numbers.
    """

    def __init__(self, options: AdaptiveOptions, lines: int, device: torch.device) -> None:
        self.options = options
        self.q = torch.full((lines,), options.gate_of(options.start), device=device)
        self.grad = torch.zeros_like(self.q)
        self.energy = torch.zeros_like(self.q)
        self.effects = torch.zeros(2, lines, device=device)
        self.update_widths()

    def bits(self) -> Tensor:
        """Return the bits of all lines, ``[lines]`` fp32."""
        return self.options.low + (self.options.high - self.options.low) * self.q.sigmoid()

    def update_widths(self) -> None:
        """Round the bits."""
        self.widths = widths_of(self.bits(), self.options.rounding)

    def wire_bits(self, of_line: int, messages: int) -> float:
        """Return what a value takes on the wire.

        Args:
            of_line: Values of a line, which share a scale and a minimum.
            messages: That share a table of widths.
        """
        sent = torch.where(self.widths > INTEGER_BITS, 16.0, self.widths)
        scaled = (self.widths <= INTEGER_BITS) * SCALE_BITS + 4 / messages
        return float((sent + scaled / of_line).mean())

    def quantize(self, x: Tensor) -> Tensor:
        """Return ``[B, S, N]`` values after coding; in training, gradients go to the gates too."""
        if not torch.is_grad_enabled():
            return self._coded(x)[0].to(x.dtype)
        # Behind frozen embeddings nothing wants a gradient but the gates.
        x = x if x.requires_grad else x.detach().requires_grad_()
        result: Tensor = _Adaptive.apply(x, self)
        return result

    def shaped(self, of_lines: Tensor, shape: Sequence[int]) -> Tensor:
        """Return one number per line such that it broadcasts against values."""
        return of_lines if self.options.lines == "channel" else of_lines[: shape[1], None]

    @property
    def dims(self) -> tuple[int, int]:
        """What shares a line."""
        return (0, 1) if self.options.lines == "channel" else (0, 2)

    def _coded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the other end gets, and what codes of any width would give; both fp32."""
        values, widths = x.detach().float(), self.shaped(self.widths, x.shape)
        codes = quantized(values, widths, self.dims, self.options.fitted)
        return torch.where(widths > INTEGER_BITS, values.bfloat16().float(), codes), codes

    def shares(self, widths: Tensor) -> Tensor:
        """Return squares of errors by width, to something that does not depend on it."""
        if not self.options.fitted:
            return (torch.exp2(widths) - 1) ** -2
        known = torch.tensor(NORMAL_ERRORS, device=widths.device)
        return known[widths.clamp_max(INTEGER_BITS).long()] * 4 ** (
            INTEGER_BITS - widths
        ).clamp_max(0)

    def collect(self, grad: Tensor, error: Tensor) -> None:
        """Add what one backward pass says of the bits.

        The step of codes is ``range / (2^b - 1)``, so that an error of codes changes with b as
        ``-ln 2 * 2^b / (2^b - 1)`` times itself.

        Args:
            grad: Of the loss, a mean over B * S tokens, by values; ``[B, S, N]`` fp32.
            error: Of codes, likewise.
        """
        information = grad.square().sum(self.dims)
        lines = information.numel()
        levels = torch.exp2(self.widths[:lines])
        slope = -math.log(2) * levels / (levels - 1)
        tokens = grad.shape[0] * grad.shape[1]
        # The Fisher information of a mean over tokens is that of one, a sum of squares of gradients
        # of tokens: `tokens` times the square of what the mean gives them.
        information *= tokens
        expected = error.square().mean(self.dims)
        effects = torch.stack(((grad * error).sum(self.dims), information * expected))
        self.effects[:, :lines] += effects
        self.energy[:lines] += information * expected / self.shares(self.widths[:lines])
        self.grad[:lines] += effects[int(self.options.signal == "fisher")] * slope


class _Adaptive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Gate) -> Tensor:
        received, codes = gate._coded(x)
        values = x.detach().float()
        ctx.gate = gate
        ctx.save_for_backward(codes.sub_(values).to(x.dtype))
        return received.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (error,) = ctx.saved_tensors
        ctx.gate.collect(grad.float(), error.float())
        return grad, None


class GateTrainer:
    """Adam on the gates of all sites, with the regulariser and the hold of the mean.

    Args:
        options: See there.
        gates: Of all sites; a line of each is as many values.

    Attributes:
        reached: Step after which the mean was at the target, or None.
        means: Mean bits after every step.
    """

    def __init__(self, options: AdaptiveOptions, gates: Sequence[Gate]) -> None:
        self.options, self.gates = options, gates
        self.reached: int | None = None
        self.means: list[float] = []
        self._first = torch.zeros_like(self._joined(lambda gate: gate.q))
        self._second = torch.zeros_like(self._first)
        self._energy = torch.zeros_like(self._first)
        self._effects = torch.zeros(2, len(gates), device=self._first.device)

    def _joined(self, part: Callable[[Gate], Tensor]) -> Tensor:
        return torch.cat([part(gate) for gate in self.gates])

    def step(self, share: float) -> None:
        """Step all gates.

        Args:
            share: What gradients since the last step are scaled by.
        """
        options = self.options
        q, by_bits = self._joined(lambda g: g.q), self._joined(lambda g: g.grad) * share
        energy = self._joined(lambda g: g.energy) * share
        q = self._solution(energy) if options.solved else q - self._adam(self._gradient(q, by_bits))
        if options.apart:
            parts = q.split([len(gate.q) for gate in self.gates])
            q = torch.cat([self._shifted(part, self._target()) for part in parts])
        q = self._held(q)
        for gate, part in zip(self.gates, q.split([len(g.q) for g in self.gates]), strict=True):
            gate.q = part.clone()
            gate.grad.zero_()
            gate.energy.zero_()
            gate.effects.zero_()
            gate.update_widths()

    def _gradient(self, q: Tensor, by_bits: Tensor) -> Tensor:
        options = self.options
        open_share = q.sigmoid()
        slope = open_share * (1 - open_share)
        if options.projected and (self.reached is not None or options.descent):
            # Along the surface of equal mean bits.
            by_bits = by_bits - (self._site_means(by_bits) if options.apart else by_bits.mean())
        grad = by_bits * (options.high - options.low) * slope
        if not options.descent and (self.reached is None or options.clip != "mean"):
            power = 2 * open_share if options.norm == "l2" else 1.0
            grad = grad + options.beta / len(q) * power * slope
        return grad

    def _site_means(self, of_lines: Tensor) -> Tensor:
        parts = of_lines.split([len(gate.q) for gate in self.gates])
        return torch.cat([part.mean().expand(len(part)) for part in parts])

    def _adam(self, grad: Tensor) -> Tensor:
        step, rate = len(self.means) + 1, self.options.learning_rate
        rate *= 1.0 if self.reached is None else self.options.later
        self._first.lerp_(grad, 0.1)
        self._second.lerp_(grad.square(), 0.001)
        size = self._second.mean() if self.options.shared else self._second
        second = (size / (1 - 0.999**step)).sqrt_().add_(1e-12)
        return rate * self._first / (1 - 0.9**step) / second

    def _solution(self, energy: Tensor) -> Tensor:
        """Return gates at which a bit of any line lowers the loss alike: reverse water-filling."""
        options = self.options
        step = len(self.means) + 1
        share = 1 / min(step, options.solved)
        self._energy.lerp_(energy, share)
        sums = torch.stack([gate.effects.sum(1) for gate in self.gates], 1)
        self._effects.lerp_(sums, share)
        energy = self._energy
        if options.measured:
            lines = torch.tensor([len(gate.q) for gate in self.gates], device=energy.device)
            factors = (self._effects[0] / self._effects[1].clamp_min(1e-30)).clamp(0.1, 10)
            energy = energy * factors.repeat_interleave(lines)
        # A bit divides squared errors by 4, or by 3.3 where ranges are fitted.
        logs = energy.clamp_min(1e-30).log2() / (1.72 if options.fitted else 2.0)
        if self.reached is None and not options.descent:
            self.reached = step
        edge = 0.01

        def bits(level: float) -> Tensor:
            return (logs - level).clamp(options.low + edge, options.high - edge)

        level = bisect(lambda at: float(bits(at).mean()), self._target(), -100.0, 100.0)
        share_open = (bits(level) - options.low) / (options.high - options.low)
        return share_open.logit()

    def _target(self) -> float:
        options = self.options
        if not options.descent:
            return options.target
        share = min(1.0, (len(self.means) + 1) / options.descent)
        return options.start + share * (options.target - options.start)

    def _shifted(self, q: Tensor, mean: float) -> Tensor:
        """Return gates of a mean of bits, by one shift of all of them."""
        open_share = (mean - self.options.low) / (self.options.high - self.options.low)
        return q - bisect(lambda by: float((q - by).sigmoid().mean()), open_share, -30.0, 30.0)

    def _held(self, q: Tensor) -> Tensor:
        options = self.options

        def mean() -> float:
            return float(q.sigmoid().mean()) * (options.high - options.low) + options.low

        if options.clip == "each":
            q = q.clamp_min(options.gate_of(options.target))
        if self.reached is None and (
            mean() <= options.target + 1e-3 or len(self.means) + 1 == options.descent
        ):
            self.reached = len(self.means) + 1
        if (self.reached is not None and options.clip == "mean") or options.descent:
            target = self._target()
            least, most = target - options.tolerance, target + options.tolerance
            if not least <= mean() <= most:
                q = self._shifted(q, min(max(mean(), least), most))
        self.means.append(mean())
        return q


def bisect(falling: Callable[[float], float], value: float, left: float, right: float) -> float:
    """Return where a falling function takes a value."""
    for _ in range(50):
        middle = (left + right) / 2
        left, right = (middle, right) if falling(middle) > value else (left, middle)
    return (left + right) / 2
