"""Boundaries in as many bits per line as were learned for it (AMAQ, arXiv 2510.05468).

A line is what shares a width, a scale and a minimum: a channel over all tokens of a message, or a
position in the sequence over all channels. Widths belong to a boundary; both of its ends hold them,
and they change between steps only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from lq_lightning.codecs.mixed import (
    Ranges,
    WidthTable,
    decode_mixed,
    encode_and_round_mixed,
    encode_mixed,
)

from .message import BoundaryCodec, Message, check_floats, check_payload

__all__ = ["Lines", "MixedCodec", "StartingWidths"]

Lines = Literal["channel", "position"]
StartingWidths = Callable[[int], WidthTable]


class MixedCodec(BoundaryCodec):
    """The codec ``"amaq"``, of hidden states, and of gradients in the same widths.

    Ranges of hidden states are as ``begin`` says. Those of gradients are always full: few of their
    values are large, and these are what matters.

    Payloads are those of ``encode_mixed``. Boundaries without a table of their own have that which
    all begin with, which both ends know without a message. Where lines are positions, the first of
    a table serve shorter messages.
    """

    name = "amaq"

    def __init__(self) -> None:
        self._per: Lines = "channel"
        self._start: StartingWidths | None = None
        self._ranges: Ranges = "full"
        self._tables: dict[int, WidthTable] = {}
        self._starting: dict[int, WidthTable] = {}  # by number of lines
        self._first: dict[tuple[int, int], WidthTable] = {}  # by boundary and number of lines

    @property
    def tables(self) -> Mapping[int, WidthTable]:
        """Tables that were set, by boundary."""
        return self._tables

    def begin(self, start: StartingWidths, per: Lines, ranges: Ranges) -> None:
        """Say how boundaries begin, and forget all tables; on both ends alike.

        Args:
            start: Returns the first table of a boundary with so many lines.
            per: What a line is.
            ranges: Of hidden states that this end sends.
        """
        self.close()
        self._start, self._per, self._ranges = start, per, ranges

    def set_table(self, boundary: int, table: WidthTable) -> None:
        """Use these widths from the next message of a boundary on; on both ends alike."""
        self._tables[boundary] = table
        self._first = {key: known for key, known in self._first.items() if key[0] != boundary}

    def num_lines(self, shape: Sequence[int]) -> int:
        """Return how many lines a tensor ``[..., tokens, channels]`` has."""
        return shape[-1] if self._per == "channel" else shape[-2]

    def table(self, boundary: int, num_lines: int) -> WidthTable:
        """Return the widths of the lines of a message.

        Raises:
            ValueError: There are none: nothing learns them, or they are of other hidden states.
        """
        if self._start is None:
            raise ValueError(
                f"The codec {self.name!r} has no widths: they are learned by `AdaptiveBits`, which "
                "is missing. Add it to the callbacks of the Trainer, or choose another codec."
            )
        known = self._tables.get(boundary)
        if known is None:
            if num_lines not in self._starting:
                self._starting[num_lines] = self._start(num_lines)
            return self._starting[num_lines]
        if known.channels == num_lines:
            return known
        if self._per == "channel" or known.channels < num_lines:
            raise ValueError(
                f"The widths of boundary {boundary} are those of {known.channels} {self._per}s, "
                f"but hidden states have {num_lines}. {self._remedy()}"
            )
        key = boundary, num_lines
        if key not in self._first:
            self._first[key] = WidthTable(known.widths[:num_lines])
        return self._first[key]

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Refuse a run that learns no widths, other hidden states than theirs, and dtypes."""
        check_floats(self.name, dtype)
        if len(shape) < 2:
            raise ValueError(
                f"The codec {self.name!r} was given hidden states of shape {tuple(shape)}; "
                "expected [..., tokens, channels]. Choose the codec 'bf16'."
            )
        for boundary in self._tables or (0,):
            self.table(boundary, self.num_lines(shape))

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype, message: Message) -> int:
        """Return the bytes of a payload; see the base class."""
        return self._nbytes(message.boundary, shape)

    def encode(self, x: Tensor, message: Message) -> Tensor:
        """Return codes, scales and minima by width; see the base class."""
        return encode_mixed(*self._lines(x, message))

    def encode_and_round(self, x: Tensor, message: Message) -> tuple[Tensor, Tensor]:
        """Return the payload, and what the other end decodes from it, in shape and dtype of ``x``.

        In less time than both take apart; arguments and errors as for ``encode``.
        """
        payload, values = encode_and_round_mixed(*self._lines(x, message))
        return payload, self._in_shape(values, x.shape)

    def decode(
        self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, message: Message
    ) -> Tensor:
        """Return the values; see the base class."""
        check_payload(self.name, payload, self._nbytes(message.boundary, shape))
        num_lines = self.num_lines(shape)
        table = self.table(message.boundary, num_lines)
        values = decode_mixed(payload, table, _per_line(shape, num_lines), dtype)
        return self._in_shape(values, shape).contiguous()

    def bits_per_value(self, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Return the mean over the boundaries of this rank; their tables come on top."""
        sizes = [self._nbytes(boundary, shape) for boundary in self._tables or (0,)]
        return 8 * sum(sizes) / (len(sizes) * max(1, math.prod(shape)))

    def close(self) -> None:
        """Forget all widths."""
        self._start = None
        self._tables.clear()
        self._starting.clear()
        self._first.clear()

    def _lines(self, x: Tensor, message: Message) -> tuple[Tensor, WidthTable, Ranges]:
        """Return values of a line by lines, their widths, and their ranges."""
        self.check(x.shape, x.dtype)
        x = x.detach()
        num_lines = self.num_lines(x.shape)
        turned = x if self._per == "channel" else x.transpose(-1, -2)
        table = self.table(message.boundary, num_lines)
        lines = turned.reshape(_per_line(x.shape, num_lines), num_lines)
        return lines, table, "full" if message.backward else self._ranges

    def _in_shape(self, lines: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a view of lines as hidden states."""
        if self._per == "channel":
            return lines.view(tuple(shape))
        return lines.view(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)

    def _nbytes(self, boundary: int, shape: Sequence[int]) -> int:
        num_lines = self.num_lines(shape)
        return self.table(boundary, num_lines).nbytes(_per_line(shape, num_lines))

    def _remedy(self) -> str:
        if self._per == "position":
            return "Give `AdaptiveBits` as many `positions`, or cut sequences."
        return "Load a checkpoint of a model with this hidden size, or start without one."


def _per_line(shape: Sequence[int], num_lines: int) -> int:
    """Return how many values share a width."""
    return math.prod(shape) // num_lines if num_lines else 0
