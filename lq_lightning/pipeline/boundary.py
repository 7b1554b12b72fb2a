"""Codecs of stage boundaries by name or specification."""

from __future__ import annotations

import torch

from lq_lightning.codecs import CodecSpec, named_codec
from lq_lightning.foundation.checks import check_choice

from .aq_sgd import AQSGDCodec, AQSGDQuantization
from .boundary_widths import MixedCodec
from .message import (
    BoundaryCodec,
    CastCodec,
    CenteredCodec,
    GroupCodec,
    TAHCodec,
    TAHQuantization,
)

_INTEGERS = tuple(f"int{bits}" for bits in range(2, 9))
_GRADIENTS = ("none", "bf16", "fp8", *_INTEGERS)
_HIDDEN_STATES = (*_GRADIENTS, "tah", "tah5", "aq_sgd", "amaq")
_TILE = 64  # channels that share a scale, as in the paper of TAH-Quant


def check_codec_name(owner: str, option: str, codec: object, backward: bool) -> None:
    """Raise ``ValueError`` unless ``owner(option=codec)`` names a codec or specifies one."""
    names = _GRADIENTS if backward else _HIDDEN_STATES
    classes = (CodecSpec,) if backward else (TAHQuantization, AQSGDQuantization, CodecSpec)
    if not isinstance(codec, classes):
        check_choice(owner, option, codec, names, *classes)


def make_boundary_codec(
    codec: str | CodecSpec | TAHQuantization | AQSGDQuantization, backward: bool = False
) -> BoundaryCodec:
    """Return a new codec for one end of stage boundaries.

    Names: ``"none"`` sends values as they are, ``"bf16"`` rounded; ``"fp8"`` sends E4M3 with a
    bf16 scale per tile of 64 channels; ``"int2"`` to ``"int8"`` are asymmetric, with a bf16 scale
    and minimum per tile. For hidden states also: ``"tah"`` is ``TAHQuantization``, ``"tah5"``
    the same with ``bits=5``; ``"aq_sgd"`` is ``AQSGDQuantization``; and ``"amaq"`` has learned
    widths. ``"fp8"``, integers, ``"tah"`` and ``"tah5"`` of hidden states are codes of differences
    to the mean of the message (``CenteredCodec``); a ``CodecSpec`` or ``TAHQuantization`` is taken
    as it is.

    ``backward`` asks for a codec of gradients, whose codes are rounded stochastically. TAH-Quant
    rounds them to the nearest of 6 to 8 bits; but then the small values of a tile all become the
    same code, and what is lost is lost in the same direction at all boundaries and in all steps.

    Raises:
        ValueError: another name or type, or a specification that does not suit boundaries, such as
            one that rounds gradients to nearest.
    """
    check_codec_name("make_boundary_codec", "codec", codec, backward)
    if isinstance(codec, CodecSpec):
        if backward and codec.rounding == "nearest":
            raise ValueError(
                f"`backward_codec={codec!r}` is not supported: rounding to nearest moves gradients "
                "in the same direction at all boundaries. Choose rounding='stochastic', and a code "
                "with equal steps such as 'int5'."
            )
        return GroupCodec(codec.code, codec)
    if isinstance(codec, TAHQuantization):
        return TAHCodec("tah", codec)
    if isinstance(codec, AQSGDQuantization):
        return AQSGDCodec("aq_sgd", codec)
    if codec == "aq_sgd":
        return AQSGDCodec(codec, AQSGDQuantization())
    if codec == "amaq":
        return MixedCodec()
    if codec in ("tah", "tah5"):
        bits = None if codec == "tah" else 5
        return CenteredCodec(TAHCodec(codec, TAHQuantization(bits=bits)))
    if codec in ("none", "bf16"):
        return CastCodec(codec, torch.bfloat16 if codec == "bf16" else None)
    name = "fp8_e4m3" if codec == "fp8" else codec
    rounding = "stochastic" if backward else "nearest"
    spec = named_codec(name, _TILE, symmetric=codec not in _INTEGERS, rounding=rounding)
    codes = GroupCodec(codec, spec)
    return codes if backward else CenteredCodec(codes)
