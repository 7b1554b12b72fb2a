"""Messages in which every channel has a bit width of its own: AMAQ on the wire.

A channel shares a width, a scale and a minimum over all tokens (with ``x.t()``, a channel is a
token position). Channels of 1 to 8 bits are integers from one end of a range to the other (a width
of 1 has these two levels alone); wider ones are sent as bf16. The sender chooses the range: that of
the values, or one that leaves out a few outliers.

One token in 128 is sent as bf16, beside the codes: those with the largest magnitudes. In pretrained
models a few tokens of a sequence, the first above all, are a hundred times as large as the others
("massive activations", arXiv 2402.17762), and would decide the range of every channel. (Not in the
paper.) A message is that of the kernels, followed by these sections, each from a multiple of 16
bytes::

    [ codes, scales and minima | exact tokens, bf16 | their indices, int32 ]

Reference: AMAQ (arXiv 2510.05468); the paper gives no layout, see
``kernels/mixed_width/format.py``.
Shape legend: T tokens, N channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lq_lightning.foundation.streams import send_to
from lq_lightning.kernels.message import ALIGNMENT_NBYTES, round_up
from lq_lightning.kernels.mixed_width import (
    MAX_CODE_WIDTH,
    MAX_WIDTH,
    mixed_dequantize,
    mixed_layout,
    mixed_quantize,
    mixed_quantize_and_round,
    mixed_round_trip,
    width_counts,
    width_rows,
)

# Ranges of channels: of all values, or around the mean by the standard deviation.
Ranges = Literal["full", "fitted"]
RANGES = ("full", "fitted")
# Tokens of a message per exact token.
TOKENS_PER_EXACT = 128


class WidthTable:
    """Bit width of every channel of a message, known to both ends. Immutable.

    Args:
        widths: ``[N]`` integers from 1 to 16, at least one of them.

    Raises:
        ValueError: anything else.
    """

    __slots__ = ("_content", "_counts", "_rows", "_wide", "_widths")

    def __init__(self, widths: Tensor | Sequence[int]) -> None:
        given = widths if isinstance(widths, Tensor) else torch.tensor(widths)
        given = given.detach().cpu()
        integers = not (given.is_floating_point() or given.is_complex())
        if given.dim() != 1 or not given.numel() or not integers or given.dtype == torch.bool:
            raise ValueError(
                f"WidthTable was given {given.dtype} {tuple(given.shape)}; expected at least one "
                f"integer in one dimension, 1 to {MAX_WIDTH} bits per channel. Round bits first."
            )
        wrong = ((given < 1) | (given > MAX_WIDTH)).nonzero().view(-1)
        if wrong.numel():
            first = int(wrong[0])
            raise ValueError(
                f"WidthTable: channel {first} has {int(given[first])} bits; allowed: 1 to "
                f"{MAX_WIDTH}. Clamp the widths."
            )
        self._widths = given.to(torch.int64, copy=True)
        self._content = bytes(self._widths.tolist())
        self._counts = tuple(width_counts(self._widths))
        self._rows: dict[torch.device, Tensor] = {}
        self._wide: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def widths(self) -> Tensor:
        """``[N]`` int64 on the CPU, a copy."""
        return self._widths.clone()

    @property
    def channels(self) -> int:
        """N, the number of channels."""
        return len(self._content)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of channels of each width: 16 numbers, the first for a width of 1."""
        return self._counts

    @property
    def mean(self) -> float:
        """Mean width. Channels of more than 8 bits are sent in 16, see ``effective_bits``."""
        return sum(self._content) / self.channels

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of a message of ``[tokens, N]`` values, without the table.

        A multiple of 16; 0 for no tokens.

        Raises:
            ValueError: ``tokens`` is negative.
        """
        if tokens < 0:
            raise ValueError(f"tokens={tokens} must be at least 0. Pass the rows of the values.")
        exact = tokens // TOKENS_PER_EXACT
        sections = 2 * exact * self.channels, 4 * exact
        nbytes = mixed_layout(self._counts, tokens).nbytes
        return nbytes + sum(round_up(size, ALIGNMENT_NBYTES) for size in sections)

    def effective_bits(self, tokens: int, table_messages: int = 1) -> float:
        """Return the bits per value of ``[tokens, N]``, with all metadata.

        ``table_messages`` share one transmission of the table.

        Raises:
            ValueError: an argument is not positive.
        """
        if tokens < 1 or table_messages < 1:
            raise ValueError(
                f"tokens={tokens} and table_messages={table_messages} must be at least 1. Pass the "
                "rows of a message and the messages of an optimizer step."
            )
        table_nbytes = (self.channels + 1) // 2 / table_messages
        return 8 * (self.nbytes(tokens) + table_nbytes) / (tokens * self.channels)

    def pack(self) -> Tensor:
        """Return the table as ``[ceil(N / 2)]`` uint8 on the CPU.

        4 bits per channel, the width less one, low bits first. The last 4 bits are 0 if N is odd.
        """
        less_one = torch.nn.functional.pad(self._widths - 1, (0, self.channels % 2))
        return (less_one[0::2] | less_one[1::2] << 4).to(torch.uint8)

    @classmethod
    def unpack(cls, packed: Tensor, channels: int) -> WidthTable:
        """Undo ``pack`` for bytes that a peer has sent.

        Raises:
            ValueError: another dtype or size, or bits beyond the last channel that are not 0.
        """
        expected = ((channels + 1) // 2,)
        if channels < 1 or packed.dtype != torch.uint8 or tuple(packed.shape) != expected:
            raise ValueError(
                f"A table of {channels} widths is uint8 {expected}, at least one byte; got "
                f"{packed.dtype} {tuple(packed.shape)}. Both ends need the same boundary."
            )
        packed = packed.cpu()
        less_one = torch.stack((packed & 15, packed >> 4), dim=1).view(-1)
        if less_one[channels:].any():
            raise ValueError(
                f"A table of {channels} widths ends with {int(packed[-1]):#04x}; its high 4 bits "
                "must be 0. It was damaged, or has another size."
            )
        return cls(less_one[:channels].to(torch.int64) + 1)

    def __eq__(self, other: object) -> bool:
        """Return whether all widths are the same."""
        return isinstance(other, WidthTable) and torch.equal(self._widths, other.widths)

    def __hash__(self) -> int:
        """Hash the widths."""
        return hash(self._content)

    def __repr__(self) -> str:
        """Return how many channels have which width."""
        counts = {width: count for width, count in enumerate(self._counts, 1) if count}
        return f"WidthTable(channels={self.channels}, mean={self.mean:.3f}, counts={counts})"

    def rows(self, device: torch.device) -> Tensor:
        """Return the kernels' table of channels, made once for each device.

        It belongs to the stream on which the table is first used.
        """
        found = self._rows.get(device)
        if found is None:
            found = self._rows[device] = send_to(width_rows(self._widths), device)
        return found

    def wide_channels(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return channels of more than 8 bits, ``[n]`` int64, and their largest codes, float32.

        Made once for each device, for the stream on which the table is first used.
        """
        found = self._wide.get(device)
        if found is None:
            channels = (self._widths > MAX_CODE_WIDTH).nonzero().flatten()
            largest = torch.exp2(self._widths[channels].float()) - 1.0
            found = self._wide[device] = send_to(channels, device), send_to(largest, device)
        return found


def _check_values(x_TN: Tensor, table: WidthTable) -> None:
    if x_TN.dim() != 2 or x_TN.shape[1] != table.channels:
        raise ValueError(
            f"x_TN has shape {tuple(x_TN.shape)}; expected [T, {table.channels}] for this table. "
            f"Use x.view(-1, {table.channels}), or .t() if channels are rows."
        )


def _is_fitted(ranges: Ranges) -> bool:
    if ranges not in RANGES:
        raise ValueError(f"ranges={ranges!r} is not known; allowed: 'full' and 'fitted'.")
    return ranges == "fitted"


class _ExactTokens(NamedTuple):
    """Tokens that are sent as bf16, beside the codes."""

    values: Tensor  # [E, N] bf16
    indices: Tensor  # [E] int64

    def restore(self, x_TN: Tensor) -> None:
        """Overwrite their tokens."""
        x_TN.index_copy_(0, self.indices, self.values.to(x_TN.dtype))

    def append_to(self, codes: Tensor) -> Tensor:
        """Return the message that begins with ``codes``."""
        sections = [codes]
        for section in (self.values, self.indices.to(torch.int32)):
            nbytes = section.contiguous().view(-1).view(torch.uint8)
            sections.append(
                torch.nn.functional.pad(nbytes, (0, -nbytes.numel() % ALIGNMENT_NBYTES))
            )
        return torch.cat(sections)


def split_tokens(x_TN: Tensor) -> tuple[Tensor, _ExactTokens | None]:
    """Return the values to be coded, and the tokens with the largest magnitudes.

    In the former, those are replaced by the first other token, so that the ranges of channels do
    not depend on them. Magnitudes are compared exactly and ties go to the first token, so that all
    devices choose alike; tokens with a NaN come first.
    """
    exact = x_TN.shape[0] // TOKENS_PER_EXACT
    if exact == 0 or x_TN.shape[1] == 0:
        return x_TN, None
    magnitudes = torch.linalg.vector_norm(x_TN, math.inf, dim=1)
    order = torch.sort(magnitudes, descending=True, stable=True).indices
    chosen, others = order[:exact], order[exact:]
    coded = x_TN.clone(memory_format=torch.contiguous_format)
    coded.index_copy_(0, chosen, x_TN.index_select(0, others.amin(0, keepdim=True).expand(exact)))
    return coded, _ExactTokens(x_TN.index_select(0, chosen).to(torch.bfloat16), chosen)


def encode_mixed(x_TN: Tensor, table: WidthTable, ranges: Ranges = "full") -> Tensor:
    """Encode values, each channel in the bits of the table.

    Args:
        x_TN: ``[T, N]`` fp32, bf16 or fp16, any strides, on a CPU or a CUDA device.
        table: N widths.
        ranges: of channels of up to 8 bits. ``"full"``: from the minimum to the maximum.
            ``"fitted"``: as many deviations around the mean as have the least mean square error for
            normal values in so many bits (Max, 1960; .80, 1.49, 2.05, 2.51 ... 3.92), within the
            full range; values outside become the nearest end. Channels for which the full range
            promises a smaller error use that. The other end need not know.

    Returns:
        ``[table.nbytes(T)]`` uint8, contiguous.

    Raises:
        ValueError: a shape, dtype or ``ranges`` other than above.

    Determinism: bit-identical for equal input; same bits on CPU and CUDA.
    Error: one token in 128, those with the largest magnitudes, has the error of bf16, also if it is
    not finite. Other values are off by at most half a step, if within the range, for widths up to
    8; a step is the range by (2**width - 1), its minimum rounded down and then the step rounded up
    to bf16, each by less than 1%. A channel of up to 8 bits with a NaN or an infinity in other
    tokens decodes to NaN; a wider one keeps each value.
    """
    _check_values(x_TN, table)
    coded, exact = split_tokens(x_TN.detach())
    encoded: Tensor = mixed_quantize(
        coded, table.rows(x_TN.device), table.counts, _is_fitted(ranges)
    )
    return encoded if exact is None else exact.append_to(encoded)


def encode_and_round_mixed(
    x_TN: Tensor, table: WidthTable, ranges: Ranges = "full"
) -> tuple[Tensor, Tensor]:
    """Return the results of ``encode_mixed`` and ``round_trip_mixed``, in less time than both take.

    For a sender that needs the values which the receiver decodes. Arguments and errors are those of
    ``encode_mixed``.
    """
    _check_values(x_TN, table)
    coded, exact = split_tokens(x_TN.detach())
    encoded, rounded = mixed_quantize_and_round(
        coded, table.rows(x_TN.device), table.counts, _is_fitted(ranges)
    )
    if exact is None:
        return encoded, rounded
    exact.restore(rounded)
    return exact.append_to(encoded), rounded


def decode_mixed(payload: Tensor, table: WidthTable, tokens: int, dtype: torch.dtype) -> Tensor:
    """Decode ``[table.nbytes(tokens)]`` uint8 of ``encode_mixed`` to a new ``[tokens, N]``.

    ``table`` is the sender's, ``dtype`` float32, bfloat16 or float16.

    Raises:
        ValueError: a payload of another size or dtype, or another ``dtype``.
    """
    nbytes = table.nbytes(tokens)
    if payload.dtype != torch.uint8 or tuple(payload.shape) != (nbytes,):
        raise ValueError(
            f"A payload of {payload.dtype} {tuple(payload.shape)}; {tokens} tokens in this table "
            f"are uint8 ({nbytes},). Decode with the table and the tokens of the sender."
        )
    # Kernels read words; a peer's bytes may lie anywhere in a buffer.
    if payload.data_ptr() % ALIGNMENT_NBYTES or not payload.is_contiguous():
        payload = payload.clone(memory_format=torch.contiguous_format)
    rows = table.rows(payload.device)
    end = mixed_layout(table.counts, tokens).nbytes
    decoded: Tensor = mixed_dequantize(payload[:end], rows, table.counts, tokens, dtype)
    exact = tokens // TOKENS_PER_EXACT
    if exact:
        nbytes = 2 * exact * table.channels
        values = payload[end : end + nbytes].view(torch.bfloat16).view(exact, -1)
        start = end + round_up(nbytes, ALIGNMENT_NBYTES)
        # as a peer has sent them: a damaged index must not reach other memory
        indices = payload[start : start + 4 * exact].view(torch.int32).to(torch.int64)
        _ExactTokens(values, indices.clamp_(0, tokens - 1)).restore(decoded)
    return decoded


def round_trip_mixed(x_TN: Tensor, table: WidthTable, ranges: Ranges = "full") -> Tensor:
    """Return the values that ``decode_mixed`` makes of ``encode_mixed``, in the dtype of ``x_TN``.

    Nothing is packed, and nothing is differentiated. Arguments and errors are those of
    ``encode_mixed``; the result is a new ``[T, N]``.
    """
    _check_values(x_TN, table)
    coded, exact = split_tokens(x_TN.detach())
    rounded: Tensor = mixed_round_trip(coded, table.rows(x_TN.device), _is_fitted(ranges))
    if exact is not None:
        exact.restore(rounded)
    return rounded
