"""Arithmetic of norms as Triton device functions, operation by operation as in ``reference.py``.

Given equal ``rstd`` the bits are those of the reference, where kernels are compiled with
``enable_fp_fusion=False``. Shapes are any that broadcast.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lq_lightning.kernels.message.triton_blocks import round_output


@triton.jit
def factor_of(weight, KIND: tl.constexpr):
    """What ``x_hat`` is multiplied by, in fp32; ``reference.factor_of``."""
    factor = weight.to(tl.float32)
    if KIND == "rms_offset":
        factor = 1.0 + factor
    return factor


@triton.jit
def normalize(
    centred,
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
        centred: fp32, what ``reference.centre`` returns, exact or decoded.
        rstd: fp32, of the rows.
        weight: any float dtype, of the columns; used if ``WEIGHT``.
        bias: any float dtype, of the columns; used if ``BIAS``.
        KIND: one of ``reference.KINDS``.
        WEIGHT: Whether there is a weight.
        BIAS: Whether there is a bias.
        X_DTYPE: Triton dtype that the input of the norm had, to which "rms_cast" rounds ``x_hat``.
    """
    y = centred * rstd
    if KIND == "rms_cast":
        y = round_output(y, X_DTYPE).to(tl.float32)
    if WEIGHT:
        y = y * factor_of(weight, KIND)
    if BIAS:
        y = y + bias.to(tl.float32)
    return y
