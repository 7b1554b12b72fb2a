"""Byte layout of a message in which every line has a width of its own, as pure arithmetic.

``[T, N]`` values: T tokens of N lines, mostly channels. Lines of width 1 to 8 are integer codes
with a scale and a minimum per line; wider ones travel as bf16. Lines are sorted by width, equal
ones by index. A code is cut into the planes of ``message.format.PLANES``, but a plane holds those
of all widths, so this is not the layout of a row. Sections start at multiples of 16 bytes::

    [ bf16 | 8-bit plane | 4-bit plane | 2-bit plane | 1-bit plane | scales | minima ]

* A plane holds, of all lines that have it, in their sorted order, the codes of a line one token
  after the other, neighbours sharing a byte. A line is padded with zeros to a multiple of 8 tokens.
* Scales and minima are bf16, of the lines that are not bf16, in their sorted order.

A message of no tokens has no bytes. Everything is a function of the number of tokens and of how
many lines have each width, so both ends that know the widths know the size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lq_lightning.kernels.message import MessageFormat, round_up, section_starts

MAX_WIDTH = 16
# Wider lines travel as bf16.
MAX_CODE_WIDTH = 8
# Widths of planes, in the order of the message. That of bf16 is a plane, too.
PLANES = (16, 8, 4, 2, 1)
# Tokens that share whole words of every plane.
TOKENS_PER_WORD = 8
# How scales and minima are rounded; the largest level is that of the line.
SCALES = MessageFormat("int8", 0, False, 0, False, "bfloat16")

# By width from 1 on: half of the range, in standard deviations, at which uniform codes of normal
# values have the least mean square error (Max, "Quantizing for minimum distortion", 1960).
HALF_RANGES = (0.7979, 1.4935, 2.0511, 2.514, 2.9162, 3.278, 3.6111, 3.9222)
# Mean and deviation of a line are those of codes of so many levels, as integers, whose sums do not
# depend on their order. A line of T values deviates by its range / sqrt(2 * T) at least, or by
# 1023 / sqrt(2 * T) of these levels: rounding to them adds to that 1% for 100,000 values at worst.
MOMENT_LEVELS = 1023
MOMENT_CENTER = 512
# Mean square errors that are expected of codes, by width from 1 on: of normal values of deviation 1
# in a fitted range (Max), and of values anywhere in the full range, which is ``MOMENT_LEVELS``. The
# two codes of 1 bit are its ends, far from most values.
FITTED_ERRORS = (
    *(0.36338, 0.11885, 0.03744, 0.011543),
    *(3.4952e-3, 1.04e-3, 3.0433e-4, 8.7686e-5),
)
FULL_ERRORS = (
    MOMENT_LEVELS**2 / 4,
    *((MOMENT_LEVELS / (2**width - 1)) ** 2 / 12 for width in range(2, 9)),
)

# Rows of what ``width_rows`` returns; those of planes follow.
ORDER_ROW, WIDTH_ROW, PLACE_ROW, FIRST_PLANE_ROW = 0, 1, 2, 3


def sent_width(width: int) -> int:
    """Return the bits of one value of a line in a message."""
    return width if width <= MAX_CODE_WIDTH else MAX_WIDTH


@dataclass(frozen=True, slots=True)
class MixedLayout:
    """Sections of a message; offsets and sizes in bytes.

    Attributes:
        padded_tokens: tokens of a line that have a code.
        plane_lines: lines that have each plane of ``PLANES``.
        coded_lines: lines with a scale and a minimum.
        ends: end of each section, in order; zeros follow up to the start of the next.
    """

    padded_tokens: int
    plane_lines: tuple[int, ...]
    plane_offsets: tuple[int, ...]
    scale_offset: int
    minimum_offset: int
    coded_lines: int
    ends: tuple[int, ...]
    nbytes: int


def mixed_layout(counts: Sequence[int], tokens: int) -> MixedLayout:
    """Return the layout for numbers of lines by width; ``tokens`` may be symbolic in a trace."""
    key = tuple(counts)
    return _cached_layout(key, tokens) if type(tokens) is int else _layout(key, tokens)


def _layout(counts: tuple[int, ...], tokens: int) -> MixedLayout:
    padded = round_up(tokens, TOKENS_PER_WORD)
    lines = [
        sum(count for width, count in enumerate(counts, 1) if sent_width(width) & plane)
        for plane in PLANES
    ]
    coded = sum(counts[:MAX_CODE_WIDTH])
    used = [count * padded * plane // 8 for count, plane in zip(lines, PLANES, strict=True)]
    used += [2 * coded if tokens else 0] * 2
    starts = section_starts(used)
    planes = len(PLANES)
    return MixedLayout(
        padded_tokens=padded,
        plane_lines=tuple(lines),
        plane_offsets=tuple(starts[:planes]),
        scale_offset=starts[planes],
        minimum_offset=starts[planes + 1],
        coded_lines=coded,
        ends=tuple(start + size for start, size in zip(starts, used, strict=False)),
        nbytes=starts[-1],
    )


_cached_layout = lru_cache(maxsize=4096)(_layout)


def width_counts(widths: Tensor) -> list[int]:
    """Return how many of the integer ``[N]`` widths are 1, 2, ... ``MAX_WIDTH``."""
    return torch.bincount(widths.to(torch.int64), minlength=MAX_WIDTH + 1)[1:].tolist()


def width_rows(widths: Tensor) -> Tensor:
    """Return what kernels need to know about every line.

    Args:
        widths: ``[N]`` integers from 1 to ``MAX_WIDTH``, on the CPU.

    Returns:
        ``[8, N]`` int32: the line at each place of the sorted order (``ORDER_ROW``); and by line
        the bits that it is sent in (``WIDTH_ROW``), its place in the sorted order (``PLACE_ROW``),
        and from ``FIRST_PLANE_ROW`` on its place among those that have each plane of ``PLANES``,
        which means nothing where it has not.
    """
    widths = widths.to(torch.int32)
    order = torch.sort(widths, stable=True).indices
    sent = torch.where(widths <= MAX_CODE_WIDTH, widths, MAX_WIDTH)
    rows = torch.empty(FIRST_PLANE_ROW + len(PLANES), widths.numel(), dtype=torch.int32)
    rows[ORDER_ROW] = order
    rows[WIDTH_ROW] = sent
    rows[PLACE_ROW, order] = torch.arange(widths.numel(), dtype=torch.int32)
    for row, plane in enumerate(PLANES, FIRST_PLANE_ROW):
        member = (sent[order] & plane != 0).to(torch.int32)
        rows[row, order] = member.cumsum(0, dtype=torch.int32) - member
    return rows
