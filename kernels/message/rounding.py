"""Scales, rounding to codes and back, in plain torch.

A value becomes a level, the value of a code in units of the scale. Symmetric formats divide by a
scale that carries the largest magnitude of a group to the largest level; asymmetric ones subtract
the minimum first.

Finite values stay finite, up to the largest of fp32. Where a scale, a minimum or a decoded value
would not fit into its dtype, the group shrinks: what is decoded is smaller than the group was, by a
factor. That needs values within 2% of the largest of fp32, or beyond 65504 times the largest level
with fp16 scales, or an asymmetric group whose range is as wide as fp32.

Shape legend: R rows, N elements, G groups, S elements of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .format import FP32_MAX, FloatCode, MessageFormat, ScaleDtype

# Groups whose scale would be subnormal are stored as zeros: 1/scale could overflow.
MIN_SCALE = 2.0**-126
# More than what rounding a scale up, to 8 bits, adds to the range of a group.
WIDER = 1.0 + 2.0**-6


class GroupRange(NamedTuple):
    """Extremes of groups, before the norm of a transform.

    Attributes:
        low: ``[R, G]`` fp32, the smallest value; None for symmetric formats.
        high: ``[R, G]`` fp32, the largest value, or magnitude for symmetric formats. Either is NaN
            where the group has a NaN.
    """

    low: Tensor | None
    high: Tensor

    def widened(self, other: GroupRange) -> GroupRange:
        """Return the range of both."""
        high = torch.maximum(self.high, other.high)
        if self.low is None or other.low is None:
            return GroupRange(None, high)
        return GroupRange(torch.minimum(self.low, other.low), high)


class Scaling(NamedTuple):
    """How the values of groups become levels: ``(x * norm - minimum) * inverse``.

    Attributes:
        scale: ``[R, G]`` fp32 that the scale dtype holds; 0 where the range is too small to divide
            by, NaN where anything in the group is not finite.
        minimum: ``[R, G]`` fp32 that the scale dtype holds, 0 where the scale is NaN; None for
            symmetric formats.
        norm: ``[R, G]`` fp32, a power of two; None for symmetric formats, where it is a part of
            ``inverse``.
        inverse: ``[R, G]`` fp32; 0 where the scale is 0 or NaN.
    """

    scale: Tensor
    minimum: Tensor | None
    norm: Tensor | None
    inverse: Tensor


def round_scale_up(scale: Tensor, dtype: ScaleDtype) -> Tensor:
    """Round non-negative fp32 to a value of ``dtype`` that is not smaller, kept as fp32.

    Rounding up means that dividing by the scale never leaves the range of the code.
    """
    if dtype.truncated is not None:
        below = (1 << dtype.truncated) - 1
        if not below:
            return scale
        bits = (scale.view(torch.int32) + below) & ~below
        return torch.where(scale.isnan(), scale, bits.view(torch.float32))
    rounded = scale.to(torch.float16)
    up = (rounded.view(torch.int16) + 1).view(torch.float16)
    return torch.where(rounded < scale, up, rounded).to(torch.float32)


def round_minimum_down(minimum: Tensor, dtype: ScaleDtype) -> Tensor:
    """Round fp32 to a value of ``dtype`` that is not greater, kept as fp32; -0 becomes +0."""
    minimum = torch.where(minimum == 0, 0.0, minimum)
    if dtype.truncated is not None:
        below = (1 << dtype.truncated) - 1
        if not below:
            return minimum
        away_from_zero = torch.where(minimum < 0, below, 0)
        bits = (minimum.view(torch.int32) + away_from_zero) & ~below
        return torch.where(minimum.isnan(), minimum, bits.to(torch.int32).view(torch.float32))
    rounded = minimum.to(torch.float16)
    bits = rounded.view(torch.int16)
    down = torch.where(rounded > 0, bits - 1, bits + 1)
    down = torch.where(rounded == 0, torch.tensor(-0x7FFF, dtype=torch.int16), down)
    down = down.to(torch.int16).view(torch.float16)
    return torch.where(rounded > minimum, down, rounded).to(torch.float32)


def group_range(x: Tensor, valid: int, fmt: MessageFormat) -> GroupRange:
    """Find the extremes of each group.

    Args:
        x: ``[R, G, S]`` fp32.
        valid: elements of a row that count for the minimum (padding must not widen the range).
        fmt: the format.
    """
    if fmt.symmetric:
        return GroupRange(None, x.abs().amax(-1))
    groups, size = x.shape[1:]
    if valid == groups * size:
        return GroupRange(x.amin(-1), x.amax(-1))  # 4 times as fast as both at once
    beyond = torch.arange(groups * size).view(groups, size) >= valid
    low = x.masked_fill(beyond, float("inf")).amin(-1)
    return GroupRange(low, x.masked_fill(beyond, float("-inf")).amax(-1))


def scaling_of(extremes: GroupRange, norm: float, fmt: MessageFormat) -> Scaling:
    """Turn the extremes of groups into what scales their values.

    Args:
        extremes: of the values before ``norm``.
        norm: power of two; ``fmt.forward_norm`` for the output of ``hadamard_``, else 1.
        fmt: the format.
    """
    low, high = extremes
    if low is None:
        raw = (high * norm).div_(fmt.max_level)
        scale = round_scale_up(raw, fmt.scale).clamp(max=fmt.max_scale)
        scale = torch.where(raw < MIN_SCALE, 0.0, scale)
        scale = scale.masked_fill_(~raw.isfinite(), float("nan"))
        # Below `raw` only where it was limited: the group shrinks.
        inverse = torch.where(scale > 0, 1.0 / torch.maximum(scale, raw), 0.0)
        return Scaling(scale, None, None, inverse.mul_(norm))
    return asymmetric_scaling(low, high, norm, fmt.max_level, fmt)


def asymmetric_scaling(
    low: Tensor, high: Tensor, norm: float, max_level: float | Tensor, fmt: MessageFormat
) -> Scaling:
    """``scaling_of`` for asymmetric formats, whose largest level may differ by group.

    Args:
        low: ``[R, G]`` fp32, the smallest values.
        high: ``[R, G]`` fp32, the largest values.
        norm: as for ``scaling_of``.
        max_level: of all groups, or of each.
        fmt: the format; its code does not matter but for limits of fp16 scales.
    """
    low, high = low * norm, high * norm
    # With room for the scale to be rounded up. Groups that do not fit shrink by a power of two.
    minimum = round_minimum_down(low, fmt.scale)
    width = (high - minimum).mul_(WIDER)
    fits = (width <= fmt.max_width) & (width + minimum <= FP32_MAX)
    largest = torch.maximum(low.abs(), high.abs()).view(torch.int32)
    exponent = (254 + fmt.shrunk_exponent) - (largest >> 23)
    shrink = torch.where(fits, 1.0, (exponent << 23).view(torch.float32))
    minimum = round_minimum_down(low.mul_(shrink), fmt.scale)
    raw = high.mul_(shrink).sub_(minimum).div_(max_level)
    finite = raw <= FP32_MAX
    scale = torch.where(raw < MIN_SCALE, 0.0, round_scale_up(raw, fmt.scale))
    scale = torch.where(finite, scale, float("nan"))
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    return Scaling(scale, torch.where(finite, minimum, 0.0), shrink.mul_(norm), inverse)


def quantize_groups(
    x: Tensor, scaling: Scaling, noise: Tensor | None, fmt: MessageFormat
) -> Tensor:
    """Turn values into stored codes.

    Args:
        x: ``[R, G, S]`` fp32. Overwritten.
        scaling: of its groups.
        noise: same numel as ``x`` for stochastic rounding.
        fmt: the format.

    Returns:
        ``[R, G, S]`` uint8 codes; 0 in groups whose scale is NaN.
    """
    inverse = scaling.inverse.unsqueeze(-1)
    if scaling.minimum is None or scaling.norm is None:
        x.mul_(inverse)
    else:
        x.mul_(scaling.norm.unsqueeze(-1)).sub_(scaling.minimum.unsqueeze(-1)).mul_(inverse)
        x.clamp_(fmt.min_level, fmt.max_level)  # padding may lie outside the range of the group
    broken = scaling.scale.isnan().unsqueeze(-1)
    if broken.any():
        x.masked_fill_(broken, 0.0)
    codes = _round(x, noise, fmt)
    return codes.masked_fill_(broken, 0) if broken.any() else codes


def _round(x: Tensor, noise: Tensor | None, fmt: MessageFormat) -> Tensor:
    """Round levels to uint8 codes; ``x`` is overwritten."""
    code = fmt.parameters
    if fmt.kind == "table":
        thresholds = torch.tensor(fmt.thresholds, dtype=torch.float32)
        return torch.bucketize(x, thresholds, out_int32=True).to(torch.uint8)
    if noise is not None:
        return _round_stochastic(x, noise, fmt)
    if isinstance(code, FloatCode):
        return _round_to_float(x, code)
    return x.round_().add_(fmt.zero_code).to(torch.uint8)


def _round_stochastic(x: Tensor, noise: Tensor, fmt: MessageFormat) -> Tensor:
    """Round to ``fraction_bits`` places, add the noise and truncate; ``x`` is overwritten.

    What is a code already stays itself.
    """
    if fmt.kind == "integer":
        fixed = x.mul_(2.0**fmt.fraction_bits).round_().to(torch.int32)
        fixed += noise.view_as(x)
        fixed += fmt.zero_code << fmt.fraction_bits
        return fixed.bitwise_right_shift_(fmt.fraction_bits).to(torch.uint8)
    # Its smallest exponent becomes that of fp16, whose bits then begin with those of the code.
    half = x.mul_(2.0 ** (-14 - fmt.min_exponent)).to(torch.float16)
    bits = half.view(torch.int16).to(torch.int32).add_(noise.view_as(x))
    magnitude = bits.bitwise_right_shift(fmt.fraction_bits).bitwise_and_(fmt.magnitude_mask)
    sign = bits.bitwise_right_shift_(16 - fmt.bits).bitwise_and_(1 << (fmt.bits - 1))
    return magnitude.bitwise_or_(sign).to(torch.uint8)


def _round_to_float(x: Tensor, code: FloatCode) -> Tensor:
    """Round scaled values to the nearest small float by integers; ``x`` is overwritten."""
    bits = x.view(torch.int32)
    sign = bits.bitwise_right_shift(32 - code.bits).bitwise_and_(1 << (code.bits - 1))
    exponent = bits.bitwise_right_shift(23).bitwise_and_(0xFF)
    exponent = exponent.sub_(127).clamp_(min=code.min_exponent)
    # |x| in units of the last place of its own binade, so rounding is rounding to an integer.
    unit = (127 + code.mantissa_bits - exponent).bitwise_left_shift_(23).view(torch.float32)
    steps = x.abs_().mul_(unit).round_().to(torch.int32)
    # A carry out of the fraction moves into the exponent field by itself.
    steps += exponent.sub_(code.min_exponent).bitwise_left_shift_(code.mantissa_bits)
    return steps.bitwise_or_(sign).to(torch.uint8)


def dequantize_codes(codes: Tensor, fmt: MessageFormat) -> Tensor:
    """Turn stored codes into levels, in units of the scale.

    Args:
        codes: uint8, any shape.
        fmt: the format.

    Returns:
        fp32 levels of the same shape.
    """
    if fmt.kind == "integer":
        return codes.to(torch.float32).sub_(fmt.zero_code)
    wide = codes.to(torch.int32)
    if fmt.kind == "table":
        return torch.tensor(fmt.levels, dtype=torch.float32)[wide]
    # Read the code as an fp32 bit pattern with a tiny exponent, then rescale by a power of two.
    magnitude = (wide & fmt.magnitude_mask).bitwise_left_shift_(23 - fmt.mantissa_bits)
    sign = (wide & (1 << (fmt.bits - 1))).bitwise_left_shift_(32 - fmt.bits)
    rescale = 2.0 ** (126 + fmt.min_exponent)
    return magnitude.bitwise_or_(sign).view(torch.float32).mul_(rescale)
