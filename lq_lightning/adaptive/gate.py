"""Trained bit widths of activations, their quantization, and the gradient to the widths."""

from __future__ import annotations

import math
import warnings
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from lq_lightning.codecs.mixed import (
    RANGES,
    Ranges,
    WidthTable,
    round_trip_mixed,
    split_tokens,
)
from lq_lightning.foundation.checks import check_choice, check_count

from .config import AdaptiveBitsConfig

__all__ = [
    "BitGate",
    "adaptive_quantize",
    "bits_of",
    "error_slope",
    "level_errors",
    "round_jointly",
]

# Rows of a gate's state: the gate itself, Adam's two moments and its number of steps, and the
# number of values that the channel had in the last step that saw it.
_GATE, _FIRST, _SECOND, _STEPS, _VALUES = range(5)
_ROWS = 5
# Models may be built, and code may run, where torch's defaults are others.
_OURS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}

# Mean square error of uniform codes of 0 to 9 bits for normal values of deviation 1, with the range
# that makes it least (Max, "Quantizing for minimum distortion", 1960).
_NORMAL_ERRORS = (
    *(1.0, 0.36338, 0.11885, 0.03744, 0.011543),
    *(3.4952e-3, 1.04e-3, 3.0433e-4, 8.7686e-5, 2.4919e-5),
)
_LOGS = [math.log(error) for error in _NORMAL_ERRORS]
# Slopes at 1 to 8 bits, from the widths below and above.
_FITTED_SLOPES = [(more - less) / 4 for less, more in zip(_LOGS, _LOGS[2:], strict=False)]
_BISECTIONS = 50
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class BitGate:
    """One trained number per channel (the last dimension), which stands for the channel's bits.

    Gates are no parameters of any module. They live on the CPU, where the sizes of messages are
    computed; their gradients are summed on the device of the quantized values.

    Widths are integers. They are rounded together, so that their sum is the rounded sum of the
    bits, and change in ``GateOptimizer.step`` only.

    Args:
        config: Range and start of the bits.
        channels: Number of channels; None to take it from the first tensor.
        name: Name in messages.
        ranges: Ranges of the codes; see ``encode_mixed``.
        lines: Former name of ``channels``.

    Raises:
        ValueError: ``channels`` is not positive, or ``ranges`` unknown.
    """

    _state: Tensor | None
    _sums: Tensor | None
    _table: WidthTable | None

    def __init__(
        self,
        config: AdaptiveBitsConfig,
        channels: int | None = None,
        *,
        name: str = "gate",
        ranges: Ranges = "fitted",
        lines: int | None = None,
    ) -> None:
        if lines is not None:
            message = f"`{type(self).__name__}(lines=...)` is called `channels` now."
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            channels = lines
        check_count(type(self).__name__, "channels", channels, 1, NoneType)
        check_choice(type(self).__name__, "ranges", ranges, RANGES)
        self.config = config
        self.ranges: Ranges = ranges
        self.name = name
        self.counts = True  # whether backward passes are added up
        # Lets autograd record the quantization of values that need no gradient themselves.
        self.anchor = torch.zeros((), requires_grad=True, **_OURS)
        self._given_channels = channels
        self.reset()

    @property
    def channels(self) -> int | None:
        """Number of channels; None before the first tensor."""
        return None if self._state is None else self._state.shape[1]

    @property
    def state(self) -> Tensor:
        """``[5, channels]`` float32 on the CPU: gates, Adam's state, and values of each channel."""
        if self._state is None:
            raise RuntimeError(
                f"the gate `{self.name}` has not seen a tensor yet, so that its number of channels "
                "is not known: give `channels`, or quantize something first."
            )
        return self._state

    @state.setter
    def state(self, state: Tensor) -> None:
        if state.dim() != 2 or state.shape[0] != _ROWS or state.dtype != torch.float32:
            raise ValueError(
                f"the state of the gate `{self.name}` must be float32 of shape [{_ROWS}, "
                f"channels], got {state.dtype} of {list(state.shape)}."
            )
        if self._state is not None and state.shape != self._state.shape:
            raise ValueError(
                f"the gate `{self.name}` has {self.channels} channels, but the state to load has "
                f"{state.shape[1]}: it belongs to another model."
            )
        self._state = state
        self.refresh()

    @property
    def q(self) -> Tensor:
        """``[channels]`` float32 on the CPU: the gates."""
        return self.state[_GATE]

    @property
    def values(self) -> Tensor:
        """``[channels]`` float32: values of each in the last step that had any; 0 before."""
        return self.state[_VALUES]

    def bits(self) -> Tensor:
        """``[channels]`` float32: the real numbers behind the widths."""
        return bits_of(self.q, self.config)

    @property
    def widths(self) -> Tensor:
        """``[channels]`` int64 on the CPU, a copy: bits of each channel, from 1 to 16."""
        return self.table().widths

    def table(self) -> WidthTable:
        """Return the widths in the form that codecs take."""
        if self._table is None:
            with torch.inference_mode(False):
                self._table = WidthTable(round_jointly(self.bits()))
        return self._table

    def refresh(self) -> None:
        """Update the widths. Within an optimizer step they must not change."""
        self._table = None

    # --- quantized values ---------------------------------------------------------------------

    def expect(self, channels: int) -> None:
        """Adopt the number of channels of the first tensor; refuse later ones with another."""
        if self._state is None:
            self._set_channels(channels)
        if channels != self.channels:
            raise ValueError(
                f"the gate `{self.name}` has {self.channels} channels, but a tensor with "
                f"{channels} channels came to it. Only {self.channels} are possible: gates that "
                "were trained belong to that model."
            )

    def accumulate(self, sums: Tensor, values: int) -> None:
        """Add the result of one backward pass; called by ``adaptive_quantize``.

        ``sums`` is ``[2, channels]`` float32: for each channel the sum of gradients times errors of
        quantization, and the sum of squared errors, over so many ``values`` per channel.
        """
        if not self.counts:
            return
        self._message_values = values
        if self._sums is None:
            self._sums, self._seen = sums.new_zeros(2, self.state.shape[1]), 0
        self._sums += sums
        self._seen += values

    @property
    def grad(self) -> Tensor | None:
        """``[channels]`` float32 on the CPU: gradient of the loss to ``q``; None before backward.

        A value moves with the width by its error of quantization times ``error_slope``.
        """
        return None if self._sums is None else self._sums[0].cpu() * self.slope()

    def slope(self) -> Tensor:
        """``[channels]`` float32: factor from the sums of ``accumulate`` to the gradient."""
        sigma = torch.sigmoid(self.q)
        bits = self.config.max_bits - self.config.min_bits
        return error_slope(self.widths, self.ranges) * bits * sigma * (1.0 - sigma)

    def take(self, device: torch.device) -> Tensor:
        """Return and reset both sums of ``accumulate`` and the values per channel.

        ``[3, channels]`` float32 on ``device``; zero without a backward pass.
        """
        if self._sums is None:
            return torch.zeros(3, self.state.shape[1], dtype=torch.float32, device=device)
        sums = self._sums.to(device)
        seen = torch.full_like(sums[:1], self._seen)
        self.clear()
        return torch.cat([sums, seen])

    def clear(self) -> None:
        """Drop the accumulated sums."""
        self._sums, self._seen = None, 0

    def effective_bits(self) -> float:
        """Return the bits per value on the wire, for messages like the last one.

        Scales and minima are counted, and a table for all messages of the last step; channels of
        more than 8 bits count as 16. NaN before the first step.
        """
        values = float(self.state[_VALUES].max())
        if self._message_values == 0 or values == 0:
            return math.nan
        messages = max(1, round(values / self._message_values))
        return self.table().effective_bits(self._message_values, messages)

    def reset(self) -> None:
        """Go back to the state after construction."""
        self.clear()
        self.refresh()
        self._state = None
        self._message_values = 0  # per channel, of the last message
        if self._given_channels is not None:
            self._set_channels(self._given_channels)

    def _set_channels(self, channels: int) -> None:
        with torch.inference_mode(False):  # the first tensor may be one of a validation
            self._state = torch.zeros(_ROWS, channels, **_OURS)
            self._state[_GATE] = self.config.start


def bits_of(q: Tensor, config: AdaptiveBitsConfig) -> Tensor:
    """Return the bits of gates, float32."""
    return config.min_bits + (config.max_bits - config.min_bits) * torch.sigmoid(q)


def round_jointly(bits: Tensor) -> Tensor:
    """Round ``[n]`` finite numbers to int64 whose sum is the rounded sum of the numbers.

    The largest fractions are rounded up; among equals the first ones. (Rounding each by itself
    would move the mean by up to half a bit.)
    """
    low = bits.floor()
    above = round(float(bits.double().sum())) - int(low.double().sum())
    if above == 0:
        return low.long()
    fractions = bits - low
    least = fractions.kthvalue(fractions.numel() - above + 1).values
    up, equal = fractions > least, fractions == least
    up |= equal & (equal.cumsum(0) <= above - up.sum())
    return low.long() + up


def error_slope(widths: Tensor, ranges: Ranges) -> Tensor:
    """Return the relative change of a quantization error per bit.

    Errors of a channel scale as the root of D, their mean square, so this is half of the slope of
    ln D. For full ranges D ~ (2^b - 1)^-2, which gives -ln 2 * 2^b / (2^b - 1). For fitted ranges D
    comes from normal values, where a bit also widens the range, and clipped values come closer.

    Channels of more than 8 bits, sent as bf16, count as codes of full range. All are negative.
    """
    steps = torch.exp2(widths.float())
    slopes = -math.log(2.0) * steps / (steps - 1.0)
    if ranges == "full":
        return slopes
    coded = len(_FITTED_SLOPES)
    fitted = torch.tensor(_FITTED_SLOPES, dtype=torch.float32)[widths.clamp(max=coded).long() - 1]
    return torch.where(widths <= coded, fitted, slopes)


def level_errors(widths: Tensor, errors: Tensor, low: float, high: float) -> Tensor:
    """Return bits of the same mean at which all channels expect the same error.

    A bit divides the mean square error by 4, so a channel gets half the binary logarithm of its
    error on top of the width that caused it, less a number common to all (reverse water-filling).

    ``errors`` are the finite mean square errors at ``widths``; channels with 0 get ``low``.
    """
    wanted = widths.double() + errors.double().log2() / 2.0
    goal = float(widths.double().mean())
    below = low - float(wanted.max())  # where no channel has more than `low`
    above = high - float(wanted[errors > 0].min())  # where none that counts has less than `high`
    for _ in range(_BISECTIONS):
        level = (below + above) / 2.0
        mean = float((wanted + level).clamp(low, high).mean())
        below, above = (below, level) if mean > goal else (level, above)
    return (wanted + below).clamp(low, high).float()


# --- quantization -----------------------------------------------------------------------------


@torch.compiler.disable(reason="gradients of AdaptiveBits' gates are summed beside autograd")  # type: ignore[no-untyped-call, untyped-decorator]
def adaptive_quantize(x: Tensor, gate: BitGate, *, arrives: Tensor | None = None) -> Tensor:
    """Return ``x`` as it is after encoding in the widths of a gate and decoding.

    The gradient passes to ``x`` unchanged, straight through, also to values that a fitted range
    clips: with a zero there, outliers would never come back. The gradient to the gates is
    the change of each value's error per bit (``error_slope``), evaluated at the integer widths
    that were used; backward adds it up in ``gate``, also where ``x`` needs no gradient.
    (AMAQ, section 3, which says only that gradients pass straight through.)

    Within checkpointed regions it is counted once; without gradients nothing is counted. Compiled
    code breaks its graph here.

    Args:
        x: ``[..., channels]``, float32, bfloat16 or float16. Each call is one message, in which all
            values of a channel share a scale.
        gate: Gate whose widths are used.
        arrives: Values that the other end decodes, where a codec sends ``x`` in the same widths.
            Then ``x`` itself is returned, and nothing is quantized here.

    Returns:
        Shape and dtype of ``x``.

    Raises:
        ValueError: ``x`` has another dtype, no dimension, or channels that do not fit the gate;
            or ``arrives`` has another shape.
        NotImplementedError: ``x`` is a ``DTensor``.
    """
    if isinstance(x, DTensor):
        raise NotImplementedError(
            f"the gate `{gate.name}` got a DTensor of {tuple(x.placements)}: scales would be those "
            "of a part of each channel. Choose a site whose values are plain tensors."
        )
    if x.dtype not in _DTYPES:
        raise ValueError(
            f"the gate `{gate.name}` quantizes float32, bfloat16 and float16, not {x.dtype}."
        )
    if x.dim() < 1:
        raise ValueError(f"the gate `{gate.name}` needs tensors of 1 dimension or more, got [].")
    if arrives is not None and arrives.shape != x.shape:
        raise ValueError(
            f"the gate `{gate.name}` was given values of {list(x.shape)} of which "
            f"{list(arrives.shape)} arrive: give what is decoded from the same tensor."
        )
    gate.expect(x.shape[-1])
    if x.numel() == 0:
        return x
    if not torch.is_grad_enabled():
        if arrives is not None:
            return x
        return round_trip_mixed(_rows(x), gate.table(), gate.ranges).resize_(x.shape)
    result: Tensor = _AdaptiveQuantize.apply(x, gate.anchor, gate, arrives)  # type: ignore[no-untyped-call]
    return result


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _errors(x: Tensor, quantized: Tensor, table: WidthTable) -> Tensor:
    """Return errors of quantization in bf16, ``[tokens, channels]`` as both inputs.

    An error is the step times the distance to the nearest code, or to the end of the range.
    Channels sent as bf16 have the error of codes of their width and full range. Exact tokens, whose
    errors no width changes, have none.
    """
    # Rounded once: differences of bf16 are computed in fp32 and rounded to bf16, without copies.
    if torch.float16 in (x.dtype, quantized.dtype):
        x, quantized = x.float(), quantized.float()
    errors = (quantized - x).bfloat16()
    wide, largest = table.wide_channels(x.device)
    coded, exact_tokens = split_tokens(x)
    if wide.numel():
        values = coded.index_select(1, wide).float()
        low, high = torch.aminmax(values, dim=0)
        step = (high - low) / largest
        codes = (values - low) / step
        exact = (step * (codes.round() - codes)).masked_fill(step == 0, 0.0)
        errors.index_copy_(1, wide, exact.bfloat16())
    return errors if exact_tokens is None else errors.index_fill_(0, exact_tokens.indices, 0.0)


class _AdaptiveQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, gate: BitGate, arrives: Tensor | None
    ) -> Tensor:
        ctx.gate = gate
        rows, table = _rows(x), gate.table()
        if arrives is not None:
            ctx.save_for_backward(_errors(rows, _rows(arrives), table))
            return x.view_as(x)
        quantized = round_trip_mixed(rows, table, gate.ranges)
        ctx.save_for_backward(_errors(rows, quantized, table))
        # No view: FSDP2 loses its hook on a module's output where a view is changed in place.
        return quantized.resize_(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (errors,) = ctx.saved_tensors
        sums = (_rows(grad).float() * errors).sum(0)
        ctx.gate.accumulate(torch.stack([sums, errors.float().square().sum(0)]), errors.shape[0])
        return grad, None, None, None
