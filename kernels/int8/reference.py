"""INT8 operands and their product in plain torch: the truth of the Triton kernels.

Shape legend: R rows of K values, ``K16`` is K rounded up to a multiple of 16; N rows of the other
operand; P rows with a second term.

A row is transformed by blocks (``message.reference.hadamard_``, so that one large value is spread
over its block), divided by its largest magnitude, times 127, and rounded to nearest even. The
transform is orthogonal up to a factor, which the scales contain, so that the product of two
transformed rows is that of the rows.

A row is *peaked* if the square of one of its values is more than ``PEAK`` of the sum of all. The
first tokens of a sequence are so in pretrained models: one channel is a thousand times as large as
the others, of which INT8 would leave nothing. What the rounding of a peaked row loses is a second
row of INT8, in steps 254 times as fine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_tensor

from lq_lightning.kernels.message import reference as blocks
from lq_lightning.kernels.message import round_up

PEAK = 0.8
LEVELS = 127.0
# Steps of the second term in one of the first, which rounding is off by half at most.
FINER = 254.0
# Smaller magnitudes count as this one: the inverse is finite, and zeros stay zeros.
MIN_LARGEST = 2.0**-96
MAX_HADAMARD_SIZE = 128
ROW_MULTIPLE = 16  # bytes, which TMA demands of rows


def hadamard_size_of(numel: int) -> int:
    """Return the largest power of two up to 128 that divides rows of ``numel`` values."""
    return math.gcd(numel, MAX_HADAMARD_SIZE)


def step_norm(hadamard_size: int) -> float:
    """Return the factor of a row's largest transformed magnitude in its scale."""
    return hadamard_size**-0.5 / LEVELS


def quantize(x: Tensor, hadamard_size: int, *, peaks: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize ``[R, K]`` fp32, bf16 or fp16.

    Returns:
        int8 ``[R, K16]``; fp32 scales ``[R]``; int8 ``[R, K16]``, the second terms of rows that are
        peaked, and zeros for all others, or ``[0, K16]`` without ``peaks``.
    """
    numel = x.shape[1]
    values = x.float().contiguous().clone()
    if values.numel():
        values = blocks.hadamard_(values, hadamard_size)
    largest = values.abs().sum(1) if numel == 0 else values.abs().amax(1)
    finite = largest.isfinite()
    scale = largest.clamp_min(MIN_LARGEST) * step_norm(hadamard_size)
    scaled = values * (LEVELS / largest.clamp_min(MIN_LARGEST))[:, None]
    scaled = scaled.masked_fill(~finite[:, None], 0.0)
    q = scaled.round()
    second = q.new_empty(0, numel)
    if peaks:
        peak = x.float().abs().amax(1) * (LEVELS / largest.clamp_min(MIN_LARGEST))
        is_peak = peak.square() * (hadamard_size / PEAK) > scaled.square().sum(1)
        second = ((scaled - q) * FINER).round() * is_peak[:, None]
    missing = round_up(numel, ROW_MULTIPLE) - numel
    terms = (pad_tensor(term.to(torch.int8), (0, missing)) for term in (q, second))
    q, second = terms
    return q, scale.masked_fill(~finite, float("nan")), second


def products(q: Tensor, w: Tensor, scale: Tensor, w_scale: Tensor) -> Tensor:
    """Multiply int8 ``[R, K16]`` by ``[N, K16]``: fp32 ``[R, N]``, from exact sums."""
    sums = (q.double() @ w.double().t()).float()
    return sums * scale[:, None] * w_scale
