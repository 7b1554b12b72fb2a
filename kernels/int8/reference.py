"""INT8 operands and their product in plain torch: the truth of the Triton kernels.

Shape legend: R rows of K values, ``K16`` is K rounded up to a multiple of 16; N rows of the other
operand; S rows of a sequence; P rows with a second term.

A row is transformed by blocks (``message.reference.hadamard_``, so that one large value is spread
over its block), divided by its largest magnitude, times 127, and rounded to nearest even. The
transform is orthogonal up to a factor, which the scales contain, so that the product of two
transformed rows is that of the rows.

The first ``FIRST`` rows of a sequence, those of the tokens that attention sinks into, matter to all
others and have the largest outliers in pretrained models. What their rounding loses is a second row
of INT8, in steps 254 times as fine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_tensor

from lq_lightning.kernels.message import reference as blocks
from lq_lightning.kernels.message import round_up

# Rows of each sequence with second terms.
FIRST = 4
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
    return 1.0 / (LEVELS * math.sqrt(hadamard_size))


def second_rows(rows: int, length: int) -> int:
    """Return P, of R rows in sequences of ``length``, which may be symbolic, or 0 for no sequence.

    In sequences shorter than ``FIRST`` some of them belong to no row.
    """
    return rows // length * FIRST if length else 0


def rows_with_second(rows: int, length: int) -> Tensor:
    """Return ``[P]`` int64, the rows that have second terms; R or more for what belongs to none."""
    index = torch.arange(second_rows(rows, length))
    row, within = index // FIRST * length, index % FIRST
    return torch.where(within < length, row + within, rows)


def quantize(x: Tensor, hadamard_size: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize ``[R, K]`` fp32, bf16 or fp16.

    Returns:
        int8 ``[R, K16]``; fp32 scales ``[R]``; int8 ``[P, K16]``, the second terms.
    """
    rows, numel = x.shape
    values = x.float().contiguous().clone()
    if values.numel():
        values = blocks.hadamard_(values, hadamard_size)
    largest = values.abs().sum(1) if numel == 0 else values.abs().amax(1)
    finite = largest.isfinite()
    largest = largest.clamp_min(MIN_LARGEST)
    scale = (largest * step_norm(hadamard_size)).masked_fill(~finite, float("nan"))
    scaled = (values * (LEVELS / largest)[:, None]).masked_fill(~finite[:, None], 0.0)
    q = scaled.round()
    second = ((scaled - q) * FINER).round()
    second = pad_tensor(second, (0, 0, 0, 1))[rows_with_second(rows, length)]
    missing = round_up(numel, ROW_MULTIPLE) - numel
    q, second = (pad_tensor(term.to(torch.int8), (0, missing)) for term in (q, second))
    return q, scale, second


def products(q: Tensor, w: Tensor, scale: Tensor, w_scale: Tensor) -> Tensor:
    """Multiply int8 ``[R, K16]`` by ``[N, K16]``: fp32 ``[R, N]``, from exact sums."""
    sums = (q.double() @ w.double().t()).float()
    return sums * scale[:, None] * w_scale
