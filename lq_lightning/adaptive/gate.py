"""The trained bit widths of one place where values are quantized."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from lq_lightning.codecs.mixed import RANGES, Ranges, WidthTable
from lq_lightning.foundation.checks import check_choice, is_whole
from lq_lightning.foundation.streams import send_to

from .config import AdaptiveBitsConfig
from .slopes import error_slope

__all__ = ["BitGate", "Lines", "round_jointly"]

Lines = Literal["channel", "position"]

# Rows of a gate's state: the gate itself, Adam's two moments and its number of steps, and how many
# values of the line the last step that saw it had.
_GATE, _FIRST, _SECOND, _STEPS, _VALUES = range(5)
_ROWS = 5
# Models may be built, and code may run, where torch's defaults are others.
_OURS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


class BitGate:
    """A number per line that says how many bits the line gets.

    A line is a channel (the last dimension of what is quantized) or a position (the dimension
    before it): what shares a width, a scale and a minimum. Gates are no parameters of any module.
    They live on the CPU, where the sizes of messages are computed; their gradients are summed on
    the device of what is quantized.

    Widths are integers. They are rounded together, so that their sum is that of the bits, rounded,
    and change in ``GateOptimizer.step`` only.

    Args:
        config: Range of the bits, and where they start.
        lines: How many there are. None for channels: as many as the first tensor has.
        per: What a line is. Tensors may have fewer positions than the gate, but not more.
        name: For messages.
        ranges: Of its lines; None: those of ``config``.

    Raises:
        ValueError: ``lines`` is not positive, or missing for positions.
    """

    _state: Tensor | None
    _sums: Tensor | None
    _seen: Tensor | None
    _widths: Tensor | None

    def __init__(
        self,
        config: AdaptiveBitsConfig,
        lines: int | None = None,
        *,
        per: Lines = "channel",
        name: str = "gate",
        ranges: Ranges | None = None,
    ) -> None:
        check_choice(type(self).__name__, "per", per, ("channel", "position"))
        if lines is None and per == "position":
            raise ValueError(
                f"`{type(self).__name__}(per='position')` needs `lines`, the longest sequence: "
                "the first one need not be."
            )
        if lines is not None and (not is_whole(lines) or lines < 1):
            raise ValueError(
                f"`{type(self).__name__}(lines={lines!r})` must be a whole number of 1 or more."
            )
        if ranges is not None:
            check_choice(type(self).__name__, "ranges", ranges, RANGES)
        self.config = config
        self.ranges: Ranges = config.ranges if ranges is None else ranges
        self.per = per
        self.name = name
        self.counts = True  # whether backward passes are added up
        # Lets autograd record the quantization of values that need no gradient themselves.
        self.anchor = torch.zeros((), requires_grad=True, **_OURS)
        self._given_lines = lines
        self._tables: dict[int, WidthTable] = {}
        self.reset()

    @property
    def lines(self) -> int | None:
        """How many lines there are; None as long as no tensor has said so."""
        return None if self._state is None else self._state.shape[1]

    @property
    def state(self) -> Tensor:
        """``[5, lines]`` float32 on the CPU: gates, Adam's state, and values of each line.

        Raises:
            RuntimeError: Nothing has been quantized, so that nobody knows how many lines there are.
        """
        if self._state is None:
            raise RuntimeError(
                f"the gate `{self.name}` has not seen a tensor yet, so that its number of lines is "
                "not known: give `lines`, or quantize something first."
            )
        return self._state

    @state.setter
    def state(self, state: Tensor) -> None:
        if state.dim() != 2 or state.shape[0] != _ROWS or state.dtype != torch.float32:
            raise ValueError(
                f"the state of the gate `{self.name}` must be float32 of shape [{_ROWS}, lines], "
                f"got {state.dtype} of {list(state.shape)}."
            )
        if self._state is not None and state.shape != self._state.shape:
            raise ValueError(
                f"the gate `{self.name}` has {self.lines} lines, but the state to load has "
                f"{state.shape[1]}: it belongs to another model."
            )
        self._state = state
        self.refresh()

    @property
    def q(self) -> Tensor:
        """``[lines]`` float32 on the CPU: the gates."""
        return self.state[_GATE]

    @property
    def values(self) -> Tensor:
        """``[lines]`` float32: values of each line in the last step that saw it; 0 before."""
        return self.state[_VALUES]

    def bits(self) -> Tensor:
        """``[lines]`` float32: the real numbers behind the widths."""
        return bits_of(self.q, self.config)

    @property
    def widths(self) -> Tensor:
        """``[lines]`` int64 on the CPU: bits of each line, from 1 to 16."""
        if self._widths is None:
            with torch.inference_mode(False):
                self._widths = round_jointly(self.bits())
                seen = self.values > 0
                if not seen.all() and seen.any():  # positions that no sequence has take no bits
                    self._widths[seen] = round_jointly(self.bits()[seen])
        return self._widths

    def table(self, lines: int | None = None) -> WidthTable:
        """Return the widths as what codecs take.

        Args:
            lines: Only so many of the first ones, for sequences shorter than the gate.
        """
        count = self.state.shape[1] if lines is None else lines
        if count not in self._tables:
            with torch.inference_mode(False):
                self._tables[count] = WidthTable(self.widths[:count])
        return self._tables[count]

    def refresh(self) -> None:
        """Let widths follow the gates. Within an optimizer step they must not change."""
        self._widths = None
        self._tables.clear()

    # --- what is quantized --------------------------------------------------------------------

    def expect(self, lines: int) -> int:
        """Check a tensor's number of lines, or take it over.

        Raises:
            ValueError: It does not fit the gate.
        """
        if self._state is None:
            self._set_lines(lines)
        own = self.state.shape[1]
        if lines > own or (lines != own and self.per == "channel"):
            remedy = f"Only {own} are possible: gates that were trained belong to that model."
            if self.per == "position":
                remedy = f"Give at least {lines} `positions`, or cut sequences to {own}."
            raise ValueError(
                f"the gate `{self.name}` has {own} lines, but a tensor with {lines} {self.per}s "
                f"came to it. {remedy}"
            )
        return lines

    def accumulate(self, sums: Tensor, values: int) -> None:
        """Add what one backward pass says; called by ``adaptive_quantize``.

        Args:
            sums: ``[2, lines]`` or fewer lines, float32: for each line the sum of gradients times
                errors of quantization, and that of squared errors.
            values: In each of these lines.
        """
        if not self.counts:
            return
        lines = self.state.shape[1]
        self._message_values = values
        if self._sums is None or self._seen is None:
            self._sums, self._seen = sums.new_zeros(2, lines), torch.zeros(lines, **_OURS)
        self._sums[:, : sums.shape[1]] += sums
        self._seen[: sums.shape[1]] += values

    @property
    def grad(self) -> Tensor | None:
        """``[lines]`` float32 on the CPU: gradient of the loss to ``q``; None without a backward.

        A value moves with the width by its error of quantization times ``error_slope``.
        """
        return None if self._sums is None else self._sums[0].cpu() * self.slope()

    def slope(self) -> Tensor:
        """``[lines]`` float32: what the sums of ``accumulate`` are multiplied by."""
        sigma = torch.sigmoid(self.config.alpha * self.q)
        bits = self.config.alpha * (self.config.max_bits - self.config.min_bits)
        return error_slope(self.widths, self.ranges) * bits * sigma * (1.0 - sigma)

    def take(self, device: torch.device) -> Tensor:
        """Return what was accumulated, and begin anew.

        Returns:
            ``[3, lines]`` float32 on ``device``: both sums, and values per line. Zero without a
            backward.
        """
        if self._sums is None or self._seen is None:
            return torch.zeros(3, self.state.shape[1], dtype=torch.float32, device=device)
        taken = torch.stack([*self._sums.to(device), send_to(self._seen, device)])
        self.clear()
        return taken

    def clear(self) -> None:
        """Drop what was accumulated."""
        self._sums = self._seen = None

    def effective_bits(self) -> float:
        """Return the bits per value on the wire, for messages like the last one.

        Scales and minima are counted, and a table for all messages of the last step; lines of more
        than 8 bits count as 16. NaN before the first step.
        """
        seen = int((self.state[_VALUES] > 0).sum())  # the first ones
        if self._message_values == 0 or seen == 0:
            return math.nan
        messages = max(1, round(float(self.values.max()) / self._message_values))
        return self.table(seen).effective_bits(self._message_values, messages)

    def reset(self) -> None:
        """Begin anew, as after construction."""
        self.clear()
        self.refresh()
        self._state = None
        self._message_values = 0  # per line, of the last message
        if self._given_lines is not None:
            self._set_lines(self._given_lines)

    def _set_lines(self, lines: int) -> None:
        with torch.inference_mode(False):  # the first tensor may be one of a validation
            self._state = torch.zeros(_ROWS, lines, **_OURS)
            self._state[_GATE] = self.config.start


def bits_of(q: Tensor, config: AdaptiveBitsConfig) -> Tensor:
    """Return the bits of gates, float32."""
    return config.min_bits + (config.max_bits - config.min_bits) * torch.sigmoid(config.alpha * q)


def round_jointly(bits: Tensor) -> Tensor:
    """Round numbers to integers whose sum is theirs, rounded.

    Those with the largest fractions are rounded up; among equals the first ones. (Rounding each by
    itself would move the mean by up to half a bit.)

    Args:
        bits: ``[n]`` floating point, finite.

    Returns:
        ``[n]`` int64.
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
