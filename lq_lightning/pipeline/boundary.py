"""Codecs of stage boundaries by name or specification; here are those without a memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import get_args

import torch
from torch import Tensor

from lq_lightning.codecs import (
    CodecSpec,
    FloatingCode,
    decode,
    encode,
    flatten_rows,
    named_codec,
)
from lq_lightning.foundation.checks import check_choice, is_number
from lq_lightning.kernels.tah import TAHFormat, tah_dequantize, tah_quantize

from .aq_sgd import AQSGDCodec, AQSGDQuantization
from .message import (
    GROUP_TILES,
    BoundaryCodec,
    Message,
    StatelessCodec,
    check_channels,
    check_floats,
)
from .mixed import MixedCodec

__all__ = [
    "CODEC_NAMES",
    "AQSGDQuantization",
    "BoundaryCodec",
    "CastCodec",
    "GroupCodec",
    "Message",
    "TAHCodec",
    "TAHQuantization",
    "codec_classes",
    "make_boundary_codec",
]

_INTEGERS = tuple(f"int{bits}" for bits in range(2, 9))
CODEC_NAMES = (
    *("none", "bf16", "fp8", *_INTEGERS, *get_args(FloatingCode)),
    *("tah", "tah5", "aq_sgd", "amaq"),
)
# Channels that share a scale, forward and backward, as in the paper of TAH-Quant. "tah5", which is
# not in the paper, has the forward tile in both directions.
_FORWARD_TILE = 64
_BACKWARD_TILE = 32
_TAH_TILES = (8, 16, 32, 64, 128, 256)
_TAH_BITS = (None, 2, 3, 4, 5, 6, 7, 8)
_INT4_SHARE = 0.8  # of the tokens; section 4 of the paper


class CastCodec(StatelessCodec):
    """Sends values as they are, or cast to ``dtype``."""

    def __init__(self, name: str, dtype: torch.dtype | None) -> None:
        self.name = name
        self._dtype = dtype

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Refuse to cast values that are not floating-point numbers."""
        if self._dtype is not None and not dtype.is_floating_point:
            raise ValueError(
                f"The codec {self.name!r} rounds floating-point numbers and was given {dtype}. "
                "Choose the codec 'none'."
            )

    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of a payload."""
        return math.prod(shape) * (self._dtype or dtype).itemsize

    def _encode(self, x: Tensor) -> Tensor:
        values = torch.empty(x.shape, dtype=self._dtype or x.dtype, device=x.device)
        return values.copy_(x).view(-1).view(torch.uint8)

    def _decode(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return payload.view(self._dtype or dtype).view(shape).to(dtype, copy=True)


class GroupCodec(StatelessCodec):
    """Encodes groups of neighboring channels that share a scale.

    Args:
        name: name of the codec.
        spec: format of the groups, which must not cross tokens.
    """

    def __init__(self, name: str, spec: CodecSpec) -> None:
        if spec.group_size == "row" or spec.rounding == "stochastic":
            raise ValueError(
                f"A stage boundary cannot be coded with group_size={spec.group_size!r}, "
                f"rounding={spec.rounding!r}: every token needs scales of its own, and nothing "
                "seeds the noise. Use a group_size of 16 to 4096 and rounding='nearest'."
            )
        self.name = name
        self.spec = spec

    @property
    def options(self) -> str:
        """The specification."""
        return repr(self.spec)

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Refuse groups that would cross tokens, and dtypes that kernels do not take."""
        check_floats(self.name, dtype)
        check_channels(
            self.name, shape, int(self.spec.group_size), GROUP_TILES, "CodecSpec.group_size"
        )

    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of a payload."""
        return self.spec.nbytes(math.prod(shape))

    def _encode(self, x: Tensor) -> Tensor:
        rows = x.contiguous().view(-1, x.shape[-1])
        return encode(self.spec, flatten_rows(self.spec, rows)).view(-1)

    def _decode(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return decode(self.spec, payload.view(1, -1), math.prod(shape), dtype=dtype).view(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class TAHQuantization:
    """Tile-wise adaptive Hadamard quantization of stage boundaries (TAH-Quant, section 3).

    A tile is a run of neighboring channels of a token, with a scale and a minimum. Where its
    largest magnitude is more than twice the second largest, that value is swapped to the front and
    the tile transformed: the outlier becomes a constant offset, which the minimum absorbs.

    Attributes:
        tile_size: channels of a tile: 8, 16, 32, 64, 128 or 256; must divide the hidden size.
        bits: bits of every code, 2 to 8. None for the mix of INT3 and INT4 of the paper.
        int4_share: share of the tokens of each sequence in INT4; the others, with the lowest
            entropy of magnitudes, are INT3 in all tiles (version 1 of the paper). Their number is
            rounded down. 0 and 1 are ``bits=3`` and ``bits=4``. None for the 0.8 of the paper, and
            with ``bits``.
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
        check_choice(owner, "tile_size", self.tile_size, _TAH_TILES)
        if not isinstance(self.hadamard, bool):
            raise ValueError(
                f"`{owner}(hadamard={self.hadamard!r})` is not supported: choose True or False."
            )
        bits, share = self.bits, self.int4_share
        check_choice(owner, "bits", bits, _TAH_BITS)
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
        """The same options in the form that the kernels take."""
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
    """The codec of ``TAHQuantization``."""

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
            self.name, shape, self.config.tile_size, _TAH_TILES, "TAHQuantization.tile_size"
        )

    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of a payload."""
        return self._format.layout(*_three_dimensions(shape)).nbytes

    def _encode(self, x: Tensor) -> Tensor:
        payload: Tensor = tah_quantize(x.contiguous().view(_three_dimensions(x.shape)), self._text)
        return payload

    def _decode(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        values: Tensor = tah_dequantize(payload, *_three_dimensions(shape), self._text, dtype)
        return values.view(shape)


def _three_dimensions(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return sequences, tokens and channels."""
    return math.prod(shape[:-2]), math.prod(shape[-2:-1]), shape[-1]


def codec_classes(backward: bool) -> tuple[type, ...]:
    """Return the classes whose instances are accepted in place of a name."""
    forward_only = () if backward else (AQSGDQuantization,)
    return (TAHQuantization, *forward_only, CodecSpec)


def make_boundary_codec(
    codec: str | CodecSpec | TAHQuantization | AQSGDQuantization, backward: bool = False
) -> BoundaryCodec:
    """Return a new codec for one end of stage boundaries.

    Names: ``"none"`` sends values as they are, ``"bf16"`` rounded; ``"fp8"`` sends E4M3 with a
    bf16 scale per tile; ``"int2"`` to ``"int8"`` are asymmetric, with a bf16 scale and minimum per
    tile, other codes of ``CodecSpec`` have a scale alone; ``"tah"`` is ``TAHQuantization``,
    ``"tah5"`` the same with ``bits=5``; ``"aq_sgd"``, for hidden states only,
    ``AQSGDQuantization``; and ``"amaq"`` has learned widths. Tiles are 64 channels forward and 32
    backward, except for ``"tah5"``: 64 in both directions.

    Args:
        codec: a name, or a specification.
        backward: whether the codec is for gradients.

    Raises:
        ValueError: another name or type, or a specification that does not suit boundaries.
    """
    if isinstance(codec, CodecSpec):
        return GroupCodec(codec.name, codec)
    if isinstance(codec, TAHQuantization):
        return TAHCodec("tah", codec)
    if codec == "aq_sgd" or isinstance(codec, AQSGDQuantization):
        if backward:
            raise ValueError(
                f"`backward_codec={codec!r}` is not supported: a gradient is not close to the one "
                "of the last epoch. Choose 'int8', 'int6' or 'tah5'."
            )
        return AQSGDCodec("aq_sgd", AQSGDQuantization() if isinstance(codec, str) else codec)
    check_choice("make_boundary_codec", "codec", codec, CODEC_NAMES, *codec_classes(backward))
    if codec == "amaq":
        return MixedCodec()
    if codec in ("none", "bf16"):
        return CastCodec(codec, torch.bfloat16 if codec == "bf16" else None)
    tile = _BACKWARD_TILE if backward else _FORWARD_TILE
    if codec == "tah":
        return TAHCodec(codec, TAHQuantization(tile_size=tile))
    if codec == "tah5":
        return TAHCodec(codec, TAHQuantization(tile_size=_FORWARD_TILE, bits=5))
    name = "fp8_e4m3" if codec == "fp8" else codec
    return GroupCodec(codec, named_codec(name, tile, symmetric=codec not in _INTEGERS))
