"""Byte layout of a TAH-Quant message, as pure arithmetic.

``[B, S, N]`` values are cut into tiles of ``tile`` neighbouring channels. All tiles of a token have
the same bits; tokens of two widths, outliers and pivots are what an encoded row has no place for.
The message has these sections, each starting at a multiple of 16 bytes::

    [ bits of tokens | INT3 plane 2 | INT3 plane 1 | others | scales | minima | outliers | pivots ]

* A bit per token, 1 for INT4; nothing where all tokens have the same bits.
* The codes of the INT3 tokens, in order of their index, in planes of 2 bits and of 1 bit, and those
  of the other tokens: INT4, or any bits that all tokens have. Planes are those of
  ``message.format.PLANES``; with the same bits everywhere, a message begins like an encoded row.
* A scale and a minimum per tile.
* With the transform, a bit per tile, 1 where it was applied, and log2(tile) bits per tile for the
  pivot, in planes, 0 where it was not.

Exactly ``floor(share * S)`` tokens of a sequence are INT3, so the size depends on the shape
alone: sections are padded once per message, with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from lq_lightning.kernels.message import (
    MessageFormat,
    round_up,
    section_starts,
)
from lq_lightning.kernels.message.format import PLANES

# A tile has an outlier where its largest magnitude is more than as many times the second largest.
OUTLIER_RATIO = 2.0
TILE_SIZES = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class TAHLayout:
    """Sections of a message; offsets and sizes in bytes.

    Attributes:
        tokens: number in all sequences.
        low_tokens: INT3 tokens of all sequences.
        high_tokens: other tokens of all sequences.
        tiles: number in all sequences.
        outlier_offset: start of the bits of tiles.
        used: sizes of all sections, in order, without their padding.
    """

    tokens: int
    channels: int
    low_per_sequence: int
    low_tokens: int
    high_tokens: int
    tiles: int
    low_planes: tuple[int, ...]
    high_planes: tuple[int, ...]
    scale_offset: int
    minimum_offset: int
    outlier_offset: int
    pivot_planes: tuple[int, ...]
    used: tuple[int, ...]
    nbytes: int

    @property
    def adaptive(self) -> bool:
        """Whether the message says which tokens are INT3."""
        return self.low_tokens > 0


@dataclass(frozen=True, slots=True)
class TAHFormat:
    """Format as the kernels take it; travels through the operators as a string.

    Attributes:
        tile: channels that share scale, minimum and transform; one of ``TILE_SIZES``.
        bits: bits of a code, 2 to 8, in tokens that are not INT3; 4 where some are.
        int3_share: share of INT3 tokens of a sequence, from 0 to less than 1.
        hadamard: put the outlier first and transform, in tiles with an outlier.
    """

    tile: int
    bits: int
    int3_share: Fraction
    hadamard: bool

    @property
    def pivot_widths(self) -> tuple[int, ...]:
        """Widths of the planes of pivots in bits, low bits first."""
        return PLANES[self.tile.bit_length() - 1] if self.hadamard else ()

    @property
    def forward_norm(self) -> float:
        """Factor of the forward transform, a power of two."""
        return 2.0 ** -(self.tile.bit_length() // 2)

    @property
    def inverse_norm(self) -> float:
        """Factor of the inverse transform."""
        return 1.0 / (self.tile * self.forward_norm)

    def codes(self, bits: int) -> MessageFormat:
        """Return how tiles of so many bits are scaled and rounded."""
        return MessageFormat(f"int{bits}", self.tile, False, 0, False, "bfloat16")

    def __str__(self) -> str:
        """Encode as the string that the operators take; ``parse_tah_format`` is the inverse."""
        transform = "hadamard" if self.hadamard else "none"
        return f"tah/{self.tile}/{self.bits}/{self.int3_share}/{transform}"

    def layout(self, sequences: int, tokens: int, channels: int) -> TAHLayout:
        """Return the layout of a message of ``[sequences, tokens, channels]`` values.

        Raises:
            ValueError: the channels are not whole tiles.
        """
        shape = sequences, tokens, channels
        known = all(type(size) is int for size in shape)  # not in a trace with symbolic sizes
        return _cached_layout(self, *shape) if known else _layout(self, *shape)


def _layout(fmt: TAHFormat, sequences: int, tokens: int, channels: int) -> TAHLayout:
    if channels % fmt.tile:
        raise ValueError(
            f"{channels} channels are not whole tiles of {fmt.tile}. Choose a tile that divides "
            "them."
        )
    tiles = sequences * tokens * channels // fmt.tile
    low_per_sequence = tokens * fmt.int3_share.numerator // fmt.int3_share.denominator
    low, every = sequences * low_per_sequence, sequences * tokens
    high = every - low
    planes = len(PLANES[fmt.bits])
    used = [
        -(-every // 8) if low else 0,
        *(low * channels * width // 8 for width in PLANES[3]),
        *(high * channels * width // 8 for width in PLANES[fmt.bits]),
        2 * tiles,
        2 * tiles,
        -(-tiles // 8) if fmt.hadamard else 0,
        *(round_up(tiles, 8) * width // 8 for width in fmt.pivot_widths),
    ]
    starts = section_starts(used)
    return TAHLayout(
        tokens=every,
        channels=channels,
        low_per_sequence=low_per_sequence,
        low_tokens=low,
        high_tokens=high,
        tiles=tiles,
        low_planes=(starts[1], starts[2]),
        high_planes=tuple(starts[3 : 3 + planes]),
        scale_offset=starts[3 + planes],
        minimum_offset=starts[4 + planes],
        outlier_offset=starts[5 + planes],
        pivot_planes=tuple(starts[6 + planes : -1]),
        used=tuple(used),
        nbytes=starts[-1],
    )


_cached_layout = lru_cache(maxsize=4096)(_layout)


@lru_cache(maxsize=256)
def parse_tah_format(text: str) -> TAHFormat:
    """Parse the string form of a format.

    Raises:
        ValueError: ``text`` is not what ``str(TAHFormat(...))`` returns.
    """
    parts = text.split("/")
    # the share is "numerator/denominator", or just "0" or "1"
    name, tile, bits, *share, transform = parts if len(parts) > 4 else [""] * 5
    known = name == "tah" and bits in map(str, range(2, 9)) and transform in ("none", "hadamard")
    int3_share = Fraction("/".join(share)) if known else Fraction(0)
    mixed = int3_share and (bits != "4" or int3_share >= 1)
    if not known or int(tile) not in TILE_SIZES or mixed:
        raise ValueError(
            f"format={text!r} is not a format of TAH-Quant; expected 'tah/tile/bits/share/"
            "none|hadamard'. Build it with str(TAHFormat(...))."
        )
    return TAHFormat(
        tile=int(tile),
        bits=int(bits),
        int3_share=int3_share,
        hadamard=transform != "none",
    )
