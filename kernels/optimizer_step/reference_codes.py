"""Codes of groups of values in plain torch: the truth that ``triton_codes.py`` must match.

Shape legend: R groups, S = 128 elements of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.message.reference import seed_words

from .formats import (
    GROUP_SIZE,
    LARGEST_SCALE_BITS,
    LEAST_MANTISSA_BITS,
    MOST_MANTISSA_BITS,
    SIGNED_CODES,
    SMALLEST_BITS,
    UNSIGNED_CODES,
    StateFormat,
    codebook,
    widest_spans,
)

MAGNITUDE = 0x7FFFFFFF
_MASK_32 = 0xFFFFFFFF
# Of one group and step, in turn: for the parameter, the first state and the second one.
STREAMS = (0x00000001, 0x85EBCA6B, 0xC2B2AE35)
STRIDE = 0x9E3779B1  # 2**32 over the golden ratio
# Below this distance from a level, in parts of the way to the next, the kernel cannot tell the two
# sides of a level apart. No noise is nearer to 0 or 1, so that both sides give the same code.
LEAST_NOISE = 2.0**-11


def rounding_noise(
    seed: int, first_group: int, count: int, stream: int, device: torch.device
) -> Tensor:
    """Return 32 random bits per element, which depend on seed and position only.

    A group has one random word per seed; its elements follow at equal distances modulo ``2**32``.
    So the noise of an element is uniform, and independent from seed to seed; within a group it is
    spread more evenly than independent noise would be.

    Args:
        seed: of up to 64 bits, another one for every parameter and step.
        first_group: number of the first group in the whole parameter.
        count: of groups, R.
        stream: 0 for the parameter, 1 and 2 for its states.
        device: of the result.

    Returns:
        ``[R, S]`` int64 in ``[0, 2**32)``.
    """
    key_a, key_b = seed_words(seed)
    group = torch.arange(first_group, first_group + count, device=device)
    x = (group & _MASK_32) ^ (key_a & _MASK_32)
    x ^= x >> 16
    x = x * 0x7FEB352D + ((group >> 32) * 0xC2B2AE35 & _MASK_32 ^ (key_b & _MASK_32)) & _MASK_32
    x ^= x >> 15
    x = x * _signed(0x846CA68B) & _MASK_32
    x ^= x >> 16
    word = x * STREAMS[stream] & _MASK_32
    steps = torch.arange(GROUP_SIZE, device=device) * STRIDE
    return (word[:, None] + steps) & _MASK_32


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def decode_groups(
    codes: Tensor, scale: Tensor, exponent: Tensor | None, fmt: StateFormat
) -> Tensor:
    """Turn codes into values.

    Args:
        codes: ``[R, S]`` uint8.
        scale: ``[R]`` bf16; 0 for groups of zeros, NaN for groups that were not finite.
        exponent: ``[R]`` uint8 for expanded formats.
        fmt: the format.

    Returns:
        ``[R, S]`` fp32, NaN throughout where the scale is NaN.
    """
    if exponent is None:
        return (codebook(fmt, codes.device) * scale.float()[:, None]).gather(1, codes.long())
    shift = (23 - exponent.int())[:, None]
    base = scale.float()[:, None]
    if fmt.signed:
        bits = base.view(torch.int32) + ((codes.int() & SIGNED_CODES) << shift)
        values = bits.view(torch.float32) - base
        return torch.where(codes >= 0x80, -values, values)
    bits = base.view(torch.int32) - (UNSIGNED_CODES - codes.int() << shift)
    values = bits.view(torch.float32).masked_fill(codes == 0, 0.0)
    return values.masked_fill(base.isnan(), float("nan"))


def encode_groups(
    x: Tensor, fmt: StateFormat, noise: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Turn values into codes, with a fresh scale and exponent.

    Args:
        x: ``[R, S]`` fp32, contiguous. Below 2**-126 unsigned values count as zero, and signed ones
            too if the whole group is.
        fmt: the format.
        noise: ``[R, S]`` of :func:`rounding_noise`; ``None`` rounds to the nearer level.

    Returns:
        Codes ``[R, S]`` uint8, scale ``[R]`` bf16 and, for expanded formats, exponent ``[R]``
        uint8. A group with anything that is not finite, or above 2**126, gets the scale
        NaN and codes 0.
    """
    bits = x.view(torch.int32) & MAGNITUDE
    largest = bits.amax(-1)
    zero, broken = largest < SMALLEST_BITS, largest > LARGEST_SCALE_BITS
    special = zero | broken
    safe = largest.masked_fill(special, SMALLEST_BITS)
    exponent: Tensor | None = None
    if fmt.expanded:
        smallest = bits.masked_fill(bits < SMALLEST_BITS, MAGNITUDE).amin(-1)
        span = (safe - smallest).clamp_(min=0)
        encode = _signed_split if fmt.signed else _unsigned_split
        codes, scale_bits, exponent = encode(bits, safe, span, noise)
    else:
        step = 0xFFFF if fmt.signed else 0x7FFFFF
        scale_bits = (safe + step) & ~step
        codes = _level_codes(bits, scale_bits.view(torch.float32), fmt, noise)
    scale = scale_bits.view(torch.float32)
    if fmt.signed:
        codes |= (x.view(torch.int32) >> 24).bitwise_and_(0x80)
    codes = codes.masked_fill_(special[:, None], 0)  # the sign of NaN too: devices differ in it
    scale = scale.masked_fill(zero, 0.0).masked_fill_(broken, float("nan"))
    return codes.to(torch.uint8), scale.to(torch.bfloat16), exponent


def _signed_split(
    bits: Tensor, largest: Tensor, span: Tensor, noise: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes without signs, scale bits and mantissa bits, from magnitudes as bit patterns."""
    mantissa_bits = torch.full_like(span, LEAST_MANTISSA_BITS)
    for widest in widest_spans():
        mantissa_bits += span <= widest
    shift = 23 - mantissa_bits
    # The largest level over the scale, and the least power of two for which it is enough.
    reach = ((SIGNED_CODES << shift) + 0x3F800000).view(torch.float32) - 1.0
    scale_bits = largest - reach.view(torch.int32) + (0x3F800000 + 0x7FFFFF)
    scale_bits = (scale_bits & ~0x7FFFFF).clamp_(min=SMALLEST_BITS)
    scale = scale_bits.view(torch.float32)
    shifted = (bits.view(torch.float32) + scale[:, None]).view(torch.int32)
    if noise is None:
        rounding = (1 << shift >> 1)[:, None]
    else:
        rounding = (noise >> (mantissa_bits + 9)[:, None]).int()
    codes = (shifted - scale_bits[:, None] + rounding) >> shift[:, None]
    return codes, scale_bits, mantissa_bits.to(torch.uint8)


def _unsigned_split(
    bits: Tensor, largest: Tensor, span: Tensor, noise: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale bits and mantissa bits, from bit patterns."""
    # So many low bits of the pattern fall away that what is left fits 253 codes.
    span = span + (span >> 6)
    shift = (span.float().view(torch.int32) >> 23) - (126 + 8)
    shift = shift.clamp_(23 - MOST_MANTISSA_BITS, 23 - LEAST_MANTISSA_BITS)
    unit = 1 << shift
    top = (largest + unit - 1) & -unit
    if noise is None:
        rounding = (unit >> 1)[:, None]
    else:
        # The mean of the logarithm is kept if the upper level is taken with the probability
        # f + f (1 - f) (upper - lower) / (2 lower), f being how far it is from the lower one. The
        # last factor is 3/8 / 2**n on average over an octave.
        kept = (23 - shift)[:, None]
        curve = noise * (0xFFFFFFFF - noise) >> 32
        skewed = noise + (3 * curve >> (kept + 3))
        rounding = (skewed >> (kept + 9)).int()
    codes = (bits - (top - UNSIGNED_CODES * unit)[:, None] + rounding) >> shift[:, None]
    codes = codes.clamp_(min=1).masked_fill_(bits < SMALLEST_BITS, 0)
    return codes, top, (23 - shift).to(torch.uint8)


def _level_codes(bits: Tensor, scale: Tensor, fmt: StateFormat, noise: Tensor | None) -> Tensor:
    """Codes of a codebook without signs, from magnitudes as bit patterns."""
    levels = codebook(fmt, bits.device)[: fmt.num_levels].expand(len(bits), -1)
    if fmt.signed:
        x, rows = bits.view(torch.float32), levels * scale[:, None]
    else:
        size = bits.masked_fill(bits < SMALLEST_BITS, 0).view(torch.float32)
        x, rows = size / scale[:, None], levels.contiguous()  # exact: powers of two
    codes = torch.searchsorted(rows, x, right=True, out_int32=True) - 1
    codes = codes.clamp_(max=fmt.num_levels - 2)
    low, high = (rows.gather(1, (codes + index).long()) for index in (0, 1))
    if noise is None:
        chance = torch.full_like(x, 0.5)
    else:
        chance = (noise.int() >> 9 & 0x7FFFFF | 0x3F800000).view(torch.float32) - 1.0
        chance = chance.clamp_(LEAST_NOISE, 1.0 - LEAST_NOISE)
    if fmt.signed:
        chance = torch.where(codes == 0, chance.clamp(min=0.5), chance)
        return codes + (chance * (high - low) < x - low)
    # The first two terms of the logarithms of x / low and of high / low.
    upper = chance * ((high - low) * (x + low)) < (x - low) * (high + low)
    return codes + torch.where(codes == 0, bits >= SMALLEST_BITS, upper)


def round_stochastically(x: Tensor, noise: Tensor) -> Tensor:
    """Round fp32 to bf16, up with a probability equal to the distance to the lower neighbour.

    Args:
        x: fp32.
        noise: of :func:`rounding_noise`.
    """
    bits = x.view(torch.int32)
    rounded = ((bits + (noise >> 16).int()) & ~0xFFFF).view(torch.float32)
    finite = (bits & MAGNITUDE) < 0x7F800000
    return torch.where(finite, rounded, x).to(torch.bfloat16)
