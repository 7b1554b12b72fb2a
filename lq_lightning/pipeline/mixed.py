"""Boundaries whose channels have learned bit widths (AMAQ, arXiv 2510.05468).

Widths belong to a boundary and are known to both of its ends. They change between steps only. The
values of a channel, over all tokens of a message, share a width, a scale and a minimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

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

__all__ = ["MixedCodec", "StartingWidths"]

StartingWidths = Callable[[int], WidthTable]


class MixedCodec(BoundaryCodec):
    """The codec ``"amaq"``, of hidden states, and of gradients in the same widths.

    Gradients always have full ranges: few of their values are large, and these are what matters.
    Payloads are those of ``encode_mixed``. Boundaries without a table of their own use the common
    starting table, which both ends know without a message.
    """

    name = "amaq"

    def __init__(self) -> None:
        self._start: StartingWidths | None = None
        self._ranges: Ranges = "full"
        self._tables: dict[int, WidthTable] = {}
        self._starting: dict[int, WidthTable] = {}  # by number of channels

    @property
    def tables(self) -> Mapping[int, WidthTable]:
        """Tables that were set, by boundary."""
        return self._tables

    def begin(self, start: StartingWidths, ranges: Ranges) -> None:
        """Set how boundaries start, and forget all tables; both ends call it alike.

        Args:
            start: returns the first table of a boundary with so many channels.
            ranges: ranges of the hidden states that this end sends.
        """
        self.close()
        self._start, self._ranges = start, ranges

    def set_table(self, boundary: int, table: WidthTable) -> None:
        """Use these widths from the next message of a boundary on; both ends call it alike."""
        self._tables[boundary] = table

    def table(self, boundary: int, channels: int) -> WidthTable:
        """Return the widths of a message.

        Raises:
            ValueError: nothing learns widths, or they are for other hidden states.
        """
        if self._start is None:
            raise ValueError(
                f"The codec {self.name!r} has no widths: they are learned by `AdaptiveBits`, which "
                "is missing. Add it to the callbacks of the Trainer, or choose another codec."
            )
        known = self._tables.get(boundary)
        if known is None:
            if channels not in self._starting:
                self._starting[channels] = self._start(channels)
            return self._starting[channels]
        if known.channels != channels:
            raise ValueError(
                f"The widths of boundary {boundary} are those of {known.channels} channels, but "
                f"hidden states have {channels}. Load a checkpoint of a model with this hidden "
                "size, or start without one."
            )
        return known

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Refuse a run that learns no widths, hidden states they do not fit, and other dtypes."""
        check_floats(self.name, dtype)
        if len(shape) < 2:
            raise ValueError(
                f"The codec {self.name!r} was given hidden states of shape {tuple(shape)}; "
                "expected [..., tokens, channels]. Choose the codec 'bf16'."
            )
        for boundary in self._tables or (0,):
            self.table(boundary, shape[-1])

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype, message: Message) -> int:
        """Return the bytes of a payload; see the base class."""
        return self._nbytes(message.boundary, shape)

    def encode(self, x: Tensor, message: Message) -> Tensor:
        """Return codes, scales and minima by width; see the base class."""
        return encode_mixed(*self._arguments(x, message))

    def encode_and_round(self, x: Tensor, message: Message) -> tuple[Tensor, Tensor]:
        """Return the payload, and what the other end decodes from it, in shape and dtype of ``x``.

        Takes less time than both apart; arguments and errors as for ``encode``.
        """
        payload, values = encode_and_round_mixed(*self._arguments(x, message))
        return payload, values.view(x.shape)

    def decode(
        self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, message: Message
    ) -> Tensor:
        """Return the values; see the base class."""
        check_payload(self.name, payload, self._nbytes(message.boundary, shape))
        table = self.table(message.boundary, shape[-1])
        return decode_mixed(payload, table, _tokens(shape), dtype).view(tuple(shape))

    def bits_per_value(self, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Return the mean over the boundaries of this rank, without their tables."""
        sizes = [self._nbytes(boundary, shape) for boundary in self._tables or (0,)]
        return 8 * sum(sizes) / (len(sizes) * max(1, math.prod(shape)))

    def close(self) -> None:
        """Forget all widths."""
        self._start = None
        self._tables.clear()
        self._starting.clear()

    def _arguments(self, x: Tensor, message: Message) -> tuple[Tensor, WidthTable, Ranges]:
        self.check(x.shape, x.dtype)
        table = self.table(message.boundary, x.shape[-1])
        values = x.detach().reshape(_tokens(x.shape), x.shape[-1])
        return values, table, "full" if message.backward else self._ranges

    def _nbytes(self, boundary: int, shape: Sequence[int]) -> int:
        return self.table(boundary, shape[-1]).nbytes(_tokens(shape))


def _tokens(shape: Sequence[int]) -> int:
    return math.prod(shape[:-1])
