"""Optimizer step on quantized states in plain torch: the truth that the Triton kernel must match.

Works on any device, tensor by tensor. Every function does the same IEEE fp32 operations in the
same order as its twin in ``triton_kernels.py``; codes are in ``reference_codes.py``.

Shape legend: D rows (dimension 0), L elements of a row, R groups, S = 128 elements of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .formats import GROUP_SIZE, StateFormat, groups_per_row, row_length
from .reference_codes import (
    decode_groups,
    encode_groups,
    round_stochastically,
    rounding_noise,
)

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
    first_group: int,
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
        seed: of the noise.
        first_group: number of the first group in the whole parameter.
        rule: a name of ``RULES``.
        formats: of the states.
        stochastic: round a bf16 parameter stochastically.
    """
    rows, length = param.shape[0], row_length(param.shape)
    if param.numel() == 0:
        return
    row_groups = groups_per_row(length)
    padded = row_groups * GROUP_SIZE
    height = max(1, _CHUNK_NUMEL // padded)
    for start in range(0, rows, height):
        part = slice(start, min(start + height, rows))
        count = part.stop - start

        def noise(
            stream: int, first: int = first_group + start * row_groups, groups: int = count
        ) -> Tensor:
            return rounding_noise(seed, first, groups * row_groups, stream, param.device)

        p, g = (_grouped(t[part].reshape(count, length), padded) for t in (param, grad))
        old = [_load(state, part, length, fmt) for state, fmt in zip(states, formats, strict=True)]
        new_p, *new = update(rule, p, g, old[0], old[1] if len(old) > 1 else None, scalars)
        for stream, (state, fmt) in enumerate(zip(states, formats, strict=True), 1):
            values = new[stream - 1]
            if values is None:
                raise AssertionError(f"rule {rule} has fewer states than were given")
            _store(state, part, length, fmt, values, noise(stream) if fmt.quantized else None)
        target = param[part].view(count, length)
        if stochastic and param.dtype == torch.bfloat16:
            new_p = round_stochastically(new_p.contiguous(), noise(0))
        target.copy_(new_p.view(count, padded)[:, :length])


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


def _store(
    state: State,
    part: slice,
    length: int,
    fmt: StateFormat,
    values: Tensor,
    noise: Tensor | None = None,
) -> None:
    padded = groups_per_row(length) * GROUP_SIZE
    target = state.codes[part].view(-1, length)
    if state.scale is None:
        target.copy_(values.view(-1, padded)[:, :length])
        return
    codes, scale, exponent = encode_groups(_without_padding(values, length), fmt, noise)
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
    """Write values, in the shape of the parameter, into a state, rounded to the nearest level."""
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
