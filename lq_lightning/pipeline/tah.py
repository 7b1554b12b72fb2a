"""TAH-Quant: tiles of few bits, with a transform for those that have an outlier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from lq_lightning.foundation.checks import check_choice, is_number
from lq_lightning.kernels.tah import TAHFormat, tah_dequantize, tah_quantize

from .message import (
    Message,
    StatelessCodec,
    check_channels,
    check_floats,
    check_payload,
)

TILE_SIZES = (8, 16, 32, 64, 128, 256)
BITS = (None, 2, 3, 4, 5, 6, 7, 8)
# Of the tokens; section 4 of the paper.
_INT4_SHARE = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class TAHQuantization:
    """Tile-wise adaptive Hadamard quantization of stage boundaries (TAH-Quant, section 3).

    A tile is so many neighbouring channels of a token, with a scale and a minimum. Where its
    largest magnitude is more than twice the second largest, that value is swapped to the front and
    the tile transformed: the outlier becomes a constant offset, which the minimum absorbs.

    Attributes:
        tile_size: channels of a tile: 8, 16, 32, 64, 128 or 256; must divide the hidden size.
        bits: of every code, 2 to 8. None for the mix of INT3 and INT4 of the paper.
        int4_share: of the tokens of each sequence; the others, with the lowest entropy of
            magnitudes, are INT3 in all tiles (version 1 of the paper). Their number is rounded
            down. 0 and 1 are ``bits=3`` and ``bits=4``. None for the 0.8 of the paper, and with
            ``bits``.
        hadamard: swap and transform tiles with an outlier.

    Raises:
        ValueError: a value that is not listed above, or ``int4_share`` with ``bits``.
    """

    tile_size: int = 64
    bits: int | None = None
    int4_share: float | None = None
    hadamard: bool = True

    def __post_init__(self) -> None:
        """Check every field and their combination."""
        owner = type(self).__name__
        check_choice(owner, "tile_size", self.tile_size, TILE_SIZES)
        if not isinstance(self.hadamard, bool):
            raise ValueError(
                f"`{owner}(hadamard={self.hadamard!r})` is not supported: choose True or False."
            )
        bits, share = self.bits, self.int4_share
        check_choice(owner, "bits", bits, BITS)
        if bits is not None and share is not None:
            raise ValueError(
                f"`{owner}(bits={bits}, int4_share={share!r})` is not supported: the share mixes "
                "INT3 and INT4. Set bits alone, or leave bits=None."
            )
        if share is not None and not (is_number(share) and 0 <= share <= 1):
            raise ValueError(
                f"`{owner}(int4_share={share!r})` is not supported: choose a number from 0 (all "
                "INT3) to 1 (all INT4), or None."
            )

    @property
    def kernel_format(self) -> TAHFormat:
        """The same facts, as the kernels take them."""
        share = _INT4_SHARE if self.int4_share is None else self.int4_share
        int3_share = 1 - Fraction(repr(share))  # exact: 1 - 0.8 is not 0.2 in floats
        bits = self.bits or (3 if int3_share == 1 else 4)
        return TAHFormat(
            tile=self.tile_size,
            bits=bits,
            int3_share=Fraction(0) if self.bits or int3_share == 1 else int3_share,
            hadamard=self.hadamard,
        )


class TAHCodec(StatelessCodec):
    """The codec of ``TAHQuantization``.

    Args:
        name: of the codec.
        config: what the payloads look like.
    """

    def __init__(self, name: str, config: TAHQuantization) -> None:
        self.name = name
        self.config = config
        self._format = config.kernel_format
        self._text = str(self._format)

    @property
    def options(self) -> str:
        """The configuration."""
        return repr(self.config)

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Refuse tiles that would cross tokens, and dtypes that kernels do not take."""
        check_floats(self.name, dtype)
        if self._format.int3_share and len(shape) < 2:
            raise ValueError(
                f"The codec {self.name!r} ranks the tokens of a sequence and was given hidden "
                f"states of shape {tuple(shape)}; expected [..., tokens, channels]. Choose the "
                "codec 'tah5'."
            )
        check_channels(
            self.name, shape, self.config.tile_size, TILE_SIZES, "TAHQuantization.tile_size"
        )

    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of a payload."""
        return self._format.layout(*_three_dimensions(shape)).nbytes

    def encode(self, x: Tensor, message: Message) -> Tensor:
        """Return bits, codes, scales and outliers; see the base class."""
        self.check(x.shape, x.dtype)
        values = x.detach().contiguous().view(_three_dimensions(x.shape))
        payload: Tensor = tah_quantize(values, self._text)
        return payload

    def decode(
        self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, message: Message
    ) -> Tensor:
        """Return the values; see the base class."""
        check_payload(self.name, payload, self.size(shape, dtype))
        values: Tensor = tah_dequantize(payload, *_three_dimensions(shape), self._text, dtype)
        return values.view(tuple(shape))


def _three_dimensions(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return sequences, tokens and channels."""
    return math.prod(shape[:-2]), math.prod(shape[-2:-1]), shape[-1]
