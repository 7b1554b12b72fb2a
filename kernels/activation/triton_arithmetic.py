"""Activation functions as Triton device functions; the twin of ``reference``.

With the hardware's exponential and reciprocal, a relative error of at most ``2**-21`` and
``abs(x) * 2**-23``; absolute, relative to the addends, where a derivative cancels.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from lq_lightning.kernels.activation import reference
from lq_lightning.kernels.message.triton_blocks import HAS_PTX

_QUICK_GELU = tl.constexpr(reference.QUICK_GELU)
_TANH = tl.constexpr(reference.TANH)
_TANH_CUBIC = tl.constexpr(reference.TANH_CUBIC)
_MORE_THAN_ROUNDED = tl.constexpr(reference.MORE_THAN_ROUNDED)
_LOG2_E = tl.constexpr(math.log2(math.e))
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_DENSITY = tl.constexpr(1.0 / math.sqrt(2.0 * math.pi))


@triton.jit
def exp2(x):
    """``2**x``; results below the smallest normal number are 0."""
    if HAS_PTX:
        asm: tl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
        y = tl.inline_asm_elementwise(asm, "=f,f", [x], tl.float32, True, 1)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def log2(x):
    """Logarithm of normal numbers: one instruction instead of a polynomial, within 2**-22."""
    if HAS_PTX:
        asm: tl.constexpr = "lg2.approx.ftz.f32 $0, $1;"
        y = tl.inline_asm_elementwise(asm, "=f,f", [x], tl.float32, True, 1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def reciprocal(x):
    """``1 / x``; x is infinite or at most ``2**126``, so that no result is subnormal."""
    if HAS_PTX:
        asm: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
        y = tl.inline_asm_elementwise(asm, "=f,f", [x], tl.float32, True, 1)
    else:
        y = 1.0 / x
    return y


@triton.jit
def _sigmoid(x):
    # A quarter of the denominator is at most 2**126, or infinite.
    power = exp2(x * -_LOG2_E)
    quarter = tl.full(x.shape, 0.25, tl.float32)
    return reciprocal(tl.fma(power, quarter, quarter)) * 0.25


@triton.jit
def value_and_derivative(x, ACTIVATION: tl.constexpr):
    """Value and derivative of the function at fp32 ``x``; ``reference.value_and_derivative``.

    A result that is not used costs nothing: the compiler removes it.
    """
    if ACTIVATION == "silu":
        gate = _sigmoid(x)
        value = x * gate
        derivative = gate + value * (1.0 - gate)
    elif ACTIVATION == "gelu":
        share = 0.5 + 0.5 * tl.erf(x * _SQRT_HALF)
        value = x * share
        derivative = share + x * (exp2(x * x * (-0.5 * _LOG2_E)) * _DENSITY)
    elif ACTIVATION == "gelu_tanh":
        square = x * x
        gate = _sigmoid(x * (square * _TANH_CUBIC + _TANH))
        value = x * gate
        derivative = gate + value * (1.0 - gate) * (square * (3.0 * _TANH_CUBIC) + _TANH)
    elif ACTIVATION == "quick_gelu":
        gate = _sigmoid(x * _QUICK_GELU)
        value = x * gate
        derivative = gate + value * _QUICK_GELU * (1.0 - gate)
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2")
        value = tl.where(x <= 0.0, 0.0, x)  # NaN stays
        derivative = tl.where(x > 0.0, 1.0, value)
        if ACTIVATION == "relu2":
            derivative = 2.0 * value
            value = value * value
    return value, derivative


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Value of the function at fp32 ``x``."""
    value, _ = value_and_derivative(x, ACTIVATION)
    return value


@triton.jit
def encoded_input(
    x,
    count,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """Values that codes of fp32 ``x`` are made of, ``[BLOCK]``; ``reference.encoded_input``.

    Zero from element ``count`` on unless ``FULL``, as ``x`` is.
    """
    if (ACTIVATION == "relu" or ACTIVATION == "relu2") and FORMAT.hadamard_size == 0:
        x = tl.where(x <= 0.0, 0.0, x)  # NaN stays
    if ACTIVATION == "relu" and FORMAT.hadamard_size == 0:
        groups = tl.reshape(x, (BLOCK // FORMAT.group_size, FORMAT.group_size))
        largest = tl.max(groups, 1)[:, None]  # that of a group with NaN, all lost, does not matter
        if FORMAT.symmetric:
            least = largest * FORMAT.smallest_share
            otherwise = groups
        else:
            HALF: tl.constexpr = 1.0 / (2.0 * FORMAT.max_level - 1.0)
            half = largest * HALF
            least = half * _MORE_THAN_ROUNDED
            otherwise = tl.where(groups == 0.0, -half, groups)
        groups = tl.where(groups > 0.0, tl.maximum(groups, least), otherwise)
        x = tl.reshape(groups, (BLOCK,))
        if not FULL:
            x = tl.where(tl.arange(0, BLOCK) < count, x, 0.0)
    return x
