"""Optimizer step on quantized states in plain torch: the truth that the Triton kernel must match.

Works on any device, tensor by tensor. Every function does the same IEEE fp32 operations in the
same order as its twin in ``triton_kernels.py``.

Shape legend: D rows (dimension 0), L elements of a row, R groups, S = 128 elements of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lq_lightning.kernels.message.reference import seed_words

from .formats import (
    EXPONENT_TABLE_SHIFT,
    GROUP_SIZE,
    LARGEST_SCALE_BITS,
    PLAIN_EXPONENT,
    SMALLEST_BITS,
    StateFormat,
    codebook,
    exponent_table,
    groups_per_row,
    row_length,
)

_SMALLEST_SQUARE = 2.0**-100
_MAGNITUDE = 0x7FFFFFFF
_CHUNK_NUMEL = 1 << 17


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
    levels, _ = codebook(fmt, codes.device)
    rows = levels if exponent is None else levels[exponent.int()]
    rows = (rows * scale.float()[:, None]).expand(len(codes), -1)
    return rows.gather(1, codes.long())


def encode_groups(x: Tensor, fmt: StateFormat) -> tuple[Tensor, Tensor, Tensor | None]:
    """Turn values into codes, with a fresh scale and exponent.

    Args:
        x: ``[R, S]`` fp32, contiguous. Magnitudes below 2**-126 count as zero.
        fmt: the format.

    Returns:
        Codes ``[R, S]`` uint8, scale ``[R]`` bf16 and, for expanded formats, exponent ``[R]``
        uint8. A group with anything that is not finite, or above 2**126, gets the scale
        NaN and codes 0.
    """
    bits = x.view(torch.int32) & _MAGNITUDE
    largest = bits.amax(-1)
    zero, broken = largest < SMALLEST_BITS, largest > LARGEST_SCALE_BITS
    special = zero | broken
    safe = largest.masked_fill(special, SMALLEST_BITS)
    scale = ((safe + 0xFFFF) & ~0xFFFF).view(torch.float32)
    _, thresholds = codebook(fmt, x.device)
    exponent = None
    if not fmt.expanded:
        rows = thresholds.expand(len(x), -1)
    else:
        smallest = bits.masked_fill(bits < SMALLEST_BITS, _MAGNITUDE).amin(-1)
        octaves = (safe - smallest).clamp_(min=0) >> EXPONENT_TABLE_SHIFT
        exponent = exponent_table(x.device)[octaves].masked_fill_(special, PLAIN_EXPONENT)
        rows = thresholds[exponent.int()]
    codes = torch.searchsorted(rows * scale[:, None], bits.view(torch.float32), out_int32=True)
    codes = codes.masked_fill_(bits < SMALLEST_BITS, 0).to(torch.uint8)
    if fmt.signed:
        codes |= (x.view(torch.int32) >> 24).bitwise_and_(0x80).to(torch.uint8)
    codes = codes.masked_fill_(special[:, None], 0)
    scale = scale.masked_fill_(zero, 0.0).masked_fill_(broken, float("nan"))
    return codes, scale.to(torch.bfloat16), exponent


def rounding_noise(seed: int, first: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return 16 random bits per element, which depend on seed and position only.

    Args:
        seed: of up to 64 bits.
        first: position of the first element in the whole parameter.
        shape: of the result; positions run on in row-major order.
        device: of the result.

    Returns:
        int32 in ``[0, 2**16)``.
    """
    key_a, key_b = seed_words(seed)
    count = 1
    for size in shape:
        count *= size
    position = torch.arange(first, first + count, device=device)
    low = (position & 0xFFFFFFFF).to(torch.int32)
    high = (position >> 32).to(torch.int32)
    x = low ^ key_a
    x ^= _shift_right(x, 16)
    x = x.mul_(0x7FEB352D) + (high * _signed(0xC2B2AE35) ^ key_b)
    x ^= _shift_right(x, 15)
    x.mul_(_signed(0x846CA68B))
    x ^= _shift_right(x, 16)
    return x.bitwise_and_(0xFFFF).view(list(shape))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _shift_right(x: Tensor, amount: int) -> Tensor:
    return (x >> amount).bitwise_and_((1 << (32 - amount)) - 1)


def round_stochastically(x: Tensor, noise: Tensor) -> Tensor:
    """Round fp32 to bf16, up with a probability equal to the distance to the lower neighbour."""
    bits = x.view(torch.int32)
    rounded = ((bits + noise) & ~0xFFFF).view(torch.float32)
    finite = (bits & _MAGNITUDE) < 0x7F800000
    return torch.where(finite, rounded, x).to(torch.bfloat16)


def update(
    rule: str, p: Tensor, g: Tensor, first: Tensor, second: Tensor | None, scalars: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Apply a rule to fp32 tensors; what the scalars are is in ``optimizer_step``.

    Returns:
        New parameter, first state and second state.
    """
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
    offset: int,
    rule: str,
    formats: Sequence[StateFormat],
    stochastic: bool,
) -> None:
    """Update a parameter and its states in place.

    Args:
        param: ``[D, ...]`` fp32 or bf16, contiguous.
        grad: same shape, contiguous.
        states: one or two, as the rule needs.
        scalars: eight, fp32.
        seed: for stochastic rounding.
        offset: position of the first element in the whole parameter.
        rule: a name of ``RULES``.
        formats: of the states.
        stochastic: round a bf16 parameter stochastically.
    """
    rows, length = param.shape[0], row_length(param.shape)
    if param.numel() == 0:
        return
    padded = groups_per_row(length) * GROUP_SIZE
    height = max(1, _CHUNK_NUMEL // padded)
    for start in range(0, rows, height):
        part = slice(start, min(start + height, rows))
        count = part.stop - start
        p, g = (_grouped(t[part].reshape(count, length), padded) for t in (param, grad))
        old = [_load(state, part, length, fmt) for state, fmt in zip(states, formats, strict=True)]
        new_p, *new = update(rule, p, g, old[0], old[1] if len(old) > 1 else None, scalars)
        for state, fmt, values in zip(states, formats, new, strict=False):
            if values is not None:
                _store(state, part, length, fmt, values)
        result = new_p.view(count, padded)[:, :length]
        target = param[part].view(count, length)
        if stochastic and param.dtype == torch.bfloat16:
            first = offset + start * length
            noise = rounding_noise(seed, first, (count, length), param.device)
            target.copy_(round_stochastically(result.contiguous(), noise))
        else:
            target.copy_(result)


def _grouped(rows: Tensor, padded: int) -> Tensor:
    """``[D, L]`` of any float dtype to ``[R, S]`` fp32, padded with zeros."""
    values = rows.float()
    if rows.shape[1] != padded:
        values = F.pad(values, (0, padded - rows.shape[1]))
    return values.reshape(-1, GROUP_SIZE)


def _load(state: State, part: slice, length: int, fmt: StateFormat) -> Tensor:
    padded = groups_per_row(length) * GROUP_SIZE
    rows = state.codes[part].reshape(-1, length)
    if state.scale is None:
        return _grouped(rows, padded)
    if length != padded:
        rows = F.pad(rows, (0, padded - length))
    exponent = None if state.exponent is None else state.exponent[part].reshape(-1)
    return decode_groups(rows.reshape(-1, GROUP_SIZE), state.scale[part].reshape(-1), exponent, fmt)


def _store(state: State, part: slice, length: int, fmt: StateFormat, values: Tensor) -> None:
    padded = groups_per_row(length) * GROUP_SIZE
    target = state.codes[part].view(-1, length)
    if state.scale is None:
        target.copy_(values.view(-1, padded)[:, :length])
        return
    codes, scale, exponent = encode_groups(_without_padding(values, length), fmt)
    target.copy_(codes.view(-1, padded)[:, :length])
    state.scale[part] = scale.view(-1, padded // GROUP_SIZE)
    if state.exponent is not None and exponent is not None:
        state.exponent[part] = exponent.view(-1, padded // GROUP_SIZE)


def _without_padding(values: Tensor, length: int) -> Tensor:
    """Set what lies beyond the end of a row to zero, whatever the update made of it."""
    padded = groups_per_row(length) * GROUP_SIZE
    if padded == length:
        return values.contiguous()
    rows = values.reshape(-1, padded).clone()
    rows[:, length:] = 0.0
    return rows.view(-1, GROUP_SIZE)


def decode_state(state: State, fmt: StateFormat) -> Tensor:
    """Return the values of a state, fp32, in the shape of the parameter."""
    if state.scale is None:
        return state.codes.float()
    out = torch.empty(state.codes.shape, dtype=torch.float32, device=state.codes.device)
    for part, length in _chunks(state.codes):
        values = _load(state, part, length, fmt)
        padded = groups_per_row(length) * GROUP_SIZE
        out[part].view(-1, length).copy_(values.view(-1, padded)[:, :length])
    return out


def encode_state(values: Tensor, state: State, fmt: StateFormat) -> None:
    """Write values, in the shape of the parameter, into a state."""
    for part, length in _chunks(values):
        padded = groups_per_row(length) * GROUP_SIZE
        grouped = _grouped(values[part].reshape(-1, length), padded)
        _store(state, part, length, fmt, grouped)


def _chunks(x: Tensor) -> list[tuple[slice, int]]:
    if x.numel() == 0:
        return []
    rows, length = x.shape[0], row_length(x.shape)
    height = max(1, _CHUNK_NUMEL // length)
    return [(slice(at, min(at + height, rows)), length) for at in range(0, rows, height)]
