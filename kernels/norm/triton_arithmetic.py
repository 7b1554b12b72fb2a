"""Arithmetic of norms as Triton device functions, operation by operation as in ``reference.py``.

Given equal statistics the bits are those of the reference, where kernels are compiled with
``enable_fp_fusion=False``. Shapes are any that broadcast.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lq_lightning.kernels.message.triton_blocks import round_output


@triton.jit
def load_statistics(stats_ptr, row, KIND: tl.constexpr):
    """Mean and reciprocal standard deviation of row ``row`` (int64, any shape) of ``stats``, fp32.

    The mean says nothing for RMS kinds, whose ``stats`` are ``[T, 1]`` (``[T, 2]`` for "layer").
    """
    if KIND == "layer":
        mean = tl.load(stats_ptr + 2 * row)
        rstd = tl.load(stats_ptr + 2 * row + 1)
    else:
        rstd = tl.load(stats_ptr + row)
        mean = rstd
    return mean, rstd


@triton.jit
def standardize(x, mean, rstd, KIND: tl.constexpr):
    """``x_hat`` of fp32 ``x``; ``reference.standardize``."""
    if KIND == "layer":
        x = x - mean
    return x * rstd


@triton.jit
def factor_of(weight, KIND: tl.constexpr):
    """What ``x_hat`` is multiplied by, in fp32; ``reference.factor_of``."""
    factor = weight.to(tl.float32)
    if KIND == "rms_offset":
        factor = 1.0 + factor
    return factor


@triton.jit
def normalize(
    x,
    mean,
    rstd,
    weight,
    bias,
    KIND: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    X_DTYPE: tl.constexpr,
):
    """Output of a norm in fp32, not rounded yet; ``reference.normalize``.

    Args:
        x: fp32 input.
        mean: fp32, of the rows; used for the kind "layer" only.
        rstd: fp32, of the rows.
        weight: any float dtype, of the columns; used if ``WEIGHT``.
        bias: any float dtype, of the columns; used if ``BIAS``.
        KIND: one of ``reference.KINDS``.
        WEIGHT: Whether there is a weight.
        BIAS: Whether there is a bias.
        X_DTYPE: Triton dtype that the input of the norm had, to which "rms_cast" rounds ``x_hat``.
    """
    y = standardize(x, mean, rstd, KIND)
    if KIND == "rms_cast":
        y = round_output(y, X_DTYPE).to(tl.float32)
    if WEIGHT:
        y = y * factor_of(weight, KIND)
    if BIAS:
        y = y + bias.to(tl.float32)
    return y
