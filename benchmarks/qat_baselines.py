"""Baselines of ``adaptive_bits.py``: asymmetric codes of one width, gradients straight through.

What shares a scale and a minimum, both of bf16: the whole tensor, a channel (over all tokens of a
message), a token (over all channels), or neighbouring channels of one token. Ranges are those of
the values, or fitted to their deviation.

Shape legend: B sequences, S tokens of each, N channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

Shared = Literal["tensor", "channel", "token"] | int
SCALE_BITS = 32  # a scale and a minimum
# By width: half of the range, in standard deviations, at which uniform codes of normal values have
# the least mean square error (Max, 1960). From 9 bits on nothing is left out.
NORMAL_HALF_RANGES = (0.0, 0.798, 1.494, 2.051, 2.514, 2.916, 3.279, 3.614, 3.93, *[math.inf] * 8)
# Likewise: this error, for a deviation of 1.
NORMAL_ERRORS = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 3.495e-3, 1.041e-3, 3.035e-4, 8.714e-5)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, x_hat: Tensor) -> Tensor:
        return x_hat

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def straight_through(x: Tensor, x_hat: Tensor) -> Tensor:
    """Return ``x_hat``, with the gradient of ``x``."""
    result: Tensor = _StraightThrough.apply(x, x_hat)
    return result


def bf16_beyond(x: Tensor, up: bool) -> Tensor:
    """Round fp32 to bf16, never down (``up``) or never up; the result is fp32."""
    bits = x.view(torch.int32)
    toward_zero = bits & -(2**16)
    from_zero = toward_zero + 2**16 * (bits != toward_zero).int()
    return torch.where((x > 0) == up, from_zero, toward_zero).view(torch.float32)


def minimum_and_scale(
    x: Tensor, widths: Tensor | int, dims: tuple[int, ...], fitted: bool
) -> tuple[Tensor, Tensor]:
    """Return the minimum and the step of codes, rounded so that nothing is clipped by that.

    Args:
        x: fp32.
        widths: Bits of codes; they broadcast against the result. Above 8, nothing is fitted.
        dims: That share a step; they are kept with size 1.
        fitted: The range is not that of the values, but of the codes of so many bits that have the
            least error for normal values; within that of the values.
    """
    lines = x.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))
    shape = [1 if index in dims else size for index, size in enumerate(x.shape)]
    low, high = (end.view(shape) for end in torch.aminmax(lines, dim=-1))
    if fitted:
        deviation, mean = (m.view(shape) for m in torch.std_mean(lines, dim=-1))
        half = torch.tensor(NORMAL_HALF_RANGES, device=x.device)
        reach = half[torch.as_tensor(widths, device=x.device).long()] * deviation
        low, high = torch.maximum(low, mean - reach), torch.minimum(high, mean + reach)
    levels = torch.exp2(torch.as_tensor(widths, device=x.device).float()) - 1
    low = bf16_beyond(low, up=False)
    scale = bf16_beyond((high - low) / levels, up=True)
    return low, scale.clamp_min(torch.finfo(torch.bfloat16).tiny)


def quantized(
    x: Tensor, widths: Tensor | int, dims: tuple[int, ...], fitted: bool = False
) -> Tensor:
    """Return fp32 values after codes of some bits; arguments as above."""
    low, scale = minimum_and_scale(x, widths, dims, fitted)
    most = torch.exp2(torch.as_tensor(widths, device=x.device).float()) - 1
    codes = ((x - low) / scale).round_()
    return torch.minimum(codes.clamp_(min=0), most).mul_(scale).add_(low)


def quantizer(shared: Shared, bits: int, fitted: bool = False) -> Callable[[Tensor], Tensor]:
    """Return what quantizes ``[B, S, N]`` values of any floating-point type.

    Args:
        shared: What shares a scale; a number is that of neighbouring channels of one token.
        bits: Of every code.
        fitted: See above.
    """

    def quantize(x: Tensor) -> Tensor:
        values = x.detach().float()
        if isinstance(shared, int):
            parts = values.unflatten(-1, (-1, shared))
            x_hat = quantized(parts, bits, (3,), fitted).flatten(-2)
        else:
            dims = {"tensor": (0, 1, 2), "channel": (0, 1), "token": (2,)}[shared]
            x_hat = quantized(values, bits, dims, fitted)
        return straight_through(x, x_hat.to(x.dtype))

    return quantize


def bits_per_value(shared: Shared, bits: int, shape: tuple[int, int, int]) -> float:
    """Return what a ``[B, S, N]`` message takes, scales and minima included."""
    tokens, channels = shape[0] * shape[1], shape[2]
    named = {"tensor": tokens * channels, "channel": tokens, "token": channels}
    return bits + SCALE_BITS / (shared if isinstance(shared, int) else named[shared])
