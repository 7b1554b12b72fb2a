"""Codecs of stage boundaries by name or specification."""

from __future__ import annotations

from typing import get_args

import torch

from lq_lightning.codecs import CodecSpec, FloatingCode, named_codec
from lq_lightning.foundation.checks import check_choice

from .aq_sgd import AQSGDCodec, AQSGDQuantization
from .boundary_widths import MixedCodec
from .message import BoundaryCodec, CastCodec, GroupCodec, TAHCodec, TAHQuantization

_INTEGERS = tuple(f"int{bits}" for bits in range(2, 9))
CODEC_NAMES = (
    *("none", "bf16", "fp8", *_INTEGERS, *get_args(FloatingCode)),
    *("tah", "tah5", "aq_sgd", "amaq"),
)
# Channels that share a scale, forward and backward, as in the paper of TAH-Quant. "tah5", which is
# not in the paper, has the forward tile in both directions.
_FORWARD_TILE = 64
_BACKWARD_TILE = 32


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
    backward, except for ``"tah5"``: 64 in both directions. ``backward`` asks for a codec of
    gradients.

    Raises:
        ValueError: another name or type, or a specification that does not suit boundaries.
    """
    if isinstance(codec, CodecSpec):
        return GroupCodec(codec.code, codec)
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
