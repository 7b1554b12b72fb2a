"""Optimizer step on quantized states in plain torch: the truth that the Triton kernel must match.

Works on any device, tensor by tensor. Every function does the same IEEE fp32 operations in the
same order as its twin in ``triton_kernels.py`` or ``triton_codes.py``.

Shape legend: D rows (dimension 0), L elements of a row, R groups, S elements of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from lq_lightning.kernels.message.reference import seed_words
from lq_lightning.kernels.optimizer_step.formats import (
    GROUP_SIZE,
    LARGEST_SCALE_BITS,
    LEAST_MANTISSA_BITS,
    MOST_MANTISSA_BITS,
    SIGNED_CODES,
    SMALLEST_BITS,
    UNSIGNED_CODES,
    StateFormat,
    codebook,
    groups_per_row,
    row_length,
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
ONE_CODE = 1.0 / SIGNED_CODES
# Adding it rounds an fp32 of small magnitude to an integer, which is then in the low bits.
ROUNDER = 12582912.0  # 1.5 * 2**23


def rounding_noise(
    seed: int,
    first_group: int,
    count: int,
    stream: int,
    device: torch.device,
    size: int = GROUP_SIZE,
) -> Tensor:
    """Return ``[count, S]`` int64 in ``[0, 2**32)``, which depend on seed and position only.

    A group has one random word per seed; its elements follow at equal distances modulo ``2**32``.
    So the noise of an element is uniform, and independent from seed to seed; within a group it is
    spread more evenly than independent noise would be.

    ``seed`` differs for every parameter and step; ``first_group`` is the number of the first group
    in the whole parameter; ``stream`` is 0 for the parameter, 1 and 2 for its states; ``size`` is
    S.
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
    steps = torch.arange(size, device=device) * STRIDE
    return (word[:, None] + steps) & _MASK_32


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def decode_groups(
    codes: Tensor, scale: Tensor, exponent: Tensor | None, fmt: StateFormat
) -> Tensor:
    """Turn ``[R, S]`` codes into fp32 values, NaN throughout where the scale is NaN.

    ``scale`` is ``[R]`` bf16, 0 for groups of zeros; ``exponent`` ``[R]`` uint8 for expanded
    formats.
    """
    if fmt.even:
        return codes.view(torch.int8).float() * scale.float()[:, None]
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
    x: Tensor, fmt: StateFormat, noise: Tensor | None = None, old: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Turn values into codes, with a fresh scale and exponent.

    Args:
        x: ``[R, S]`` fp32, contiguous. Below 2**-126 unsigned values count as zero, and signed ones
            too if the whole group is.
        fmt: the format.
        noise: ``[R, S]`` of ``rounding_noise``; None rounds to the nearer level.
        old: ``[R, S]`` fp32, the values before this step, which even formats need beside noise.

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
    if fmt.even:
        codes, scale_bits = _even_codes(x, safe, noise, old)
    elif fmt.expanded:
        smallest = bits.masked_fill(bits < SMALLEST_BITS, MAGNITUDE).amin(-1)
        span = (safe - smallest).clamp_(min=0)
        encode = _signed_split if fmt.signed else _unsigned_split
        codes, scale_bits, exponent = encode(bits, safe, span, noise)
    else:
        step = 0xFFFF if fmt.signed else 0x7FFFFF
        scale_bits = (safe + step) & ~step
        codes = _level_codes(bits, scale_bits.view(torch.float32), fmt, noise)
    scale = scale_bits.view(torch.float32)
    if fmt.signed and not fmt.even:
        codes |= (x.view(torch.int32) >> 24).bitwise_and_(0x80)
    codes = codes.masked_fill_(special[:, None], 0)  # the sign of NaN too: devices differ in it
    scale = scale.masked_fill(zero, 0.0).masked_fill_(broken, float("nan"))
    return codes.to(torch.uint8), scale.to(torch.bfloat16), exponent


def _even_codes(
    x: Tensor, largest: Tensor, noise: Tensor | None, old: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Signed integers in the low byte, and scale bits, from values and the bits of the largest."""
    scale_bits = (largest.view(torch.float32) * ONE_CODE).view(torch.int32)
    scale_bits = ((scale_bits + 0xFFFF) & ~0xFFFF).clamp_(min=SMALLEST_BITS)
    scale = scale_bits.view(torch.float32)[:, None]
    levels = x * scale.reciprocal()
    if noise is not None:
        if old is None:
            raise AssertionError("noise of even formats needs old values")
        chance = (noise.int() >> 9 & 0x7FFFFF | 0x3F800000).view(torch.float32) - 1.5
        levels = levels + chance.masked_fill_((x - old).abs() >= scale, 0.0)
    return (levels + ROUNDER).view(torch.int32) & 0xFF, scale_bits


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
    """Round fp32 to bf16, up with a probability equal to the distance to the lower neighbour."""
    bits = x.view(torch.int32)
    rounded = ((bits + (noise >> 16).int()) & ~0xFFFF).view(torch.float32)
    finite = (bits & MAGNITUDE) < 0x7F800000
    return torch.where(finite, rounded, x).to(torch.bfloat16)


_SMALLEST_SQUARE = 2.0**-100
_CHUNK_NUMEL = 1 << 17

# MKL chooses the kernel of a root at its first call; where several threads make that call, one may
# compute its part coarsely (torch's issue 188792: 2 of 1800 processes here).
torch.ones(1, dtype=torch.float64, device="cpu").sqrt_()


@dataclass(frozen=True, slots=True)
class State:
    """Codes and constants of one state of a parameter ``[D, ...]``.

    Attributes:
        codes: shape of the parameter, uint8, or the fp32 values themselves.
        scale: ``[D, groups]`` bf16, or None for fp32 values.
        exponent: ``[D, groups]`` uint8, or None unless the format is expanded.
    """

    codes: Tensor
    scale: Tensor | None
    exponent: Tensor | None


def update(
    rule: str, p: Tensor, g: Tensor, first: Tensor, second: Tensor | None, scalars: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return new parameter and states, fp32; ``op.optimizer_step`` says what the scalars are."""
    if rule == "lion":
        beta1, weight1, beta2, weight2, _, _, decay, lr = scalars
        mixed = first * beta1 + g * weight1
        direction = torch.where(mixed.isnan(), mixed, torch.sign(mixed))  # sign(nan) is 0
        return p * decay - direction * lr, first * beta2 + g * weight2, None
    if rule in ("sgd", "nesterov"):
        momentum, weight, sign, _, _, _, l2, lr = scalars
        g = g + p * l2
        first = first * momentum + g * weight
        direction = g * sign + first * momentum if rule == "nesterov" else first
        return p - direction * lr, first, None
    if second is None:
        raise AssertionError(f"rule {rule} needs a second state")
    beta1, weight1, beta2, weight2, eps, _, decay, lr = scalars
    if rule == "adam":
        g = g + p * decay
    first = first * beta1 + g * weight1
    second = second * beta2 + (g * g) * weight2
    # In fp64, since torch's fp32 root is not correctly rounded on every CPU.
    root = second.masked_fill(second < _SMALLEST_SQUARE, _SMALLEST_SQUARE).double().sqrt_().float()
    denominator = root.masked_fill_(second.isinf(), float("nan")) + eps
    step = first * denominator.reciprocal_() * lr
    return (p if rule == "adam" else p * decay) - step, first, second


def step(
    param: Tensor,
    grad: Tensor,
    states: Sequence[State],
    scalars: Sequence[float],
    seed: int,
    first_group: int,
    rule: str,
    formats: Sequence[StateFormat],
    stochastic: bool,
) -> None:
    """Update a parameter and its states in place; arguments as for ``op.optimizer_step``."""
    size = formats[0].group_size
    for part, length in _chunks(param):
        count, row_groups = part.stop - part.start, groups_per_row(length, size)
        place = first_group + part.start * row_groups, count * row_groups
        noise = partial(rounding_noise, seed, *place, device=param.device, size=size)
        p, g = (_grouped(t[part].reshape(count, length), size) for t in (param, grad))
        old = [_load(state, part, length, fmt) for state, fmt in zip(states, formats, strict=True)]
        new_p, *new = update(rule, p, g, old[0], old[1] if len(old) > 1 else None, scalars)
        for stream, (state, fmt) in enumerate(zip(states, formats, strict=True), 1):
            values = new[stream - 1]
            if values is None:
                raise AssertionError(f"rule {rule} has fewer states than were given")
            chance = (noise(stream), old[stream - 1]) if fmt.quantized else (None, None)
            _store(state, part, length, fmt, values, *chance)
        target = param[part].view(count, length)
        if stochastic and param.dtype == torch.bfloat16:
            new_p = round_stochastically(new_p.contiguous(), noise(0))
        target.copy_(new_p.view(count, -1)[:, :length])


def _grouped(rows: Tensor, size: int) -> Tensor:
    """``[D, L]`` of any dtype to ``[R, S]``, padded with zeros; floats become fp32."""
    values = rows.float() if rows.is_floating_point() else rows
    if beyond := -rows.shape[1] % size:
        values = F.pad(values, (0, beyond))
    return values.reshape(-1, size)


def _load(state: State, part: slice, length: int, fmt: StateFormat) -> Tensor:
    grouped = _grouped(state.codes[part].reshape(-1, length), fmt.group_size)
    if state.scale is None:
        return grouped
    exponent = None if state.exponent is None else state.exponent[part].reshape(-1)
    return decode_groups(grouped, state.scale[part].reshape(-1), exponent, fmt)


def _store(
    state: State,
    part: slice,
    length: int,
    fmt: StateFormat,
    values: Tensor,
    noise: Tensor | None = None,
    old: Tensor | None = None,
) -> None:
    target = state.codes[part].view(-1, length)
    rows = values.view(len(target), -1)
    if state.scale is None:
        target.copy_(rows[:, :length])
        return
    if rows.shape[1] != length:  # whatever the update made of what lies beyond the end of a row
        rows = rows.clone()
        rows[:, length:] = 0.0
    codes, scale, exponent = encode_groups(rows.view(-1, fmt.group_size), fmt, noise, old)
    target.copy_(codes.view(rows.shape)[:, :length])
    state.scale[part] = scale.view(len(target), -1)
    if state.exponent is not None and exponent is not None:
        state.exponent[part] = exponent.view(len(target), -1)


def decode_state(state: State, fmt: StateFormat) -> Tensor:
    """Return the values of a state, fp32, in the shape of the parameter."""
    if state.scale is None:
        return state.codes.float()
    out = torch.empty(state.codes.shape, dtype=torch.float32, device=state.codes.device)
    for part, length in _chunks(state.codes):
        target = out[part].view(-1, length)
        target.copy_(_load(state, part, length, fmt).view(len(target), -1)[:, :length])
    return out


def encode_state(values: Tensor, state: State, fmt: StateFormat) -> None:
    """Write values, in the shape of the parameter, into a state, rounded to the nearest level."""
    for part, length in _chunks(values):
        rows = _grouped(values[part].reshape(-1, length), fmt.group_size)
        _store(state, part, length, fmt, rows)


def _chunks(x: Tensor) -> list[tuple[slice, int]]:
    if x.numel() == 0:
        return []
    rows, length = x.shape[0], row_length(x.shape)
    height = max(1, _CHUNK_NUMEL // (groups_per_row(length) * GROUP_SIZE))  # padded
    return [(slice(at, min(at + height, rows)), length) for at in range(0, rows, height)]
