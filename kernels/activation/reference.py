"""Activation functions and what is encoded of their inputs in plain torch, on the CPU.

All arithmetic is fp32 and rounded once, whatever the dtype of the tensors. Shape legend: T rows,
N columns, R encoded rows of a message (see ``message.matrix``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lq_lightning.kernels.message import MessageFormat

QUICK_GELU = 1.702
# gelu_tanh(x) = x * sigmoid(x * (TANH + TANH_CUBIC * x**2)), since 1 + tanh(z) = 2 sigmoid(2 z).
TANH = 2.0 * math.sqrt(2.0 / math.pi)
TANH_CUBIC = 0.044715 * TANH
# By how much of half a level a value has to be above zero, so that it does not become code 0
# whatever the scale and the minimum of its group are rounded by: 2**-7 each.
MORE_THAN_ROUNDED = 2.0**-5


def _silu(x: Tensor) -> tuple[Tensor, Tensor]:
    gate = torch.sigmoid(x)
    value = x * gate
    return value, gate + value * (1.0 - gate)


def _gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    share = 0.5 + 0.5 * torch.erf(x * math.sqrt(0.5))
    density = torch.exp(-0.5 * x * x) * (1.0 / math.sqrt(2.0 * math.pi))
    return x * share, share + x * density


def _gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    square = x * x
    gate = torch.sigmoid(x * (TANH + TANH_CUBIC * square))
    value = x * gate
    return value, gate + value * (1.0 - gate) * (TANH + 3.0 * TANH_CUBIC * square)


def _relu(x: Tensor) -> tuple[Tensor, Tensor]:
    value = torch.relu(x)
    return value, torch.where(x > 0.0, 1.0, value)  # NaN stays, unlike in torch's own gradient


def _relu2(x: Tensor) -> tuple[Tensor, Tensor]:
    positive = torch.relu(x)
    return positive * positive, 2.0 * positive


def _quick_gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    gate = torch.sigmoid(QUICK_GELU * x)
    value = x * gate
    return value, gate + QUICK_GELU * value * (1.0 - gate)


_FUNCTIONS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "relu2": _relu2,
    "quick_gelu": _quick_gelu,
}
ACTIVATIONS: tuple[str, ...] = tuple(_FUNCTIONS)
# Those that only depend on max(x, 0), and so do their derivatives.
OF_POSITIVE_PART = ("relu", "relu2")


def value_and_derivative(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return value and derivative of the function named ``activation`` at fp32 ``x``.

    NaN gives NaN in both. So do infinities where they do in torch: all but ``relu`` and ``relu2``
    take -inf to NaN.
    """
    return _FUNCTIONS[activation](x)


def encoded_input(x: Tensor, activation: str, fmt: MessageFormat) -> Tensor:
    """Return what the message of fp32 ``[T, N]`` ``x`` is made of.

    For ``OF_POSITIVE_PART`` that is ``max(x, 0)``, except in a format with a transform, which would
    spread what it mixes to the zeros.

    The derivative of ``relu`` is the sign of its input, which rounding to nearest loses around
    zero. In an asymmetric format what is not positive becomes minus half a level, so that it alone
    has code 0 and positive values decode to half a level at least. In a symmetric one, where zero
    is a level, positive values are raised to the smallest level above. So the sign is exact unless
    a group is too small for its scale dtype to tell it from zero. ``relu2`` is rounded as it is:
    its derivative is small around zero.
    """
    if activation not in OF_POSITIVE_PART or fmt.hadamard_size:
        return x
    positive = torch.where(x <= 0.0, 0.0, x)  # NaN stays, and no zero is negative
    if activation == "relu2" or not x.numel():
        return positive
    rows, numel = x.shape
    groups = F.pad(positive, (0, -numel % fmt.group_size)).view(rows, -1, fmt.group_size)
    largest = groups.amax(-1, keepdim=True)
    if fmt.symmetric:
        least, otherwise = largest * fmt.smallest_share, groups
    else:
        half = largest * (1.0 / (2.0 * fmt.max_level - 1.0))  # of a level, from -half to largest
        least, otherwise = half * MORE_THAN_ROUNDED, torch.where(groups == 0.0, -half, groups)
    kept = torch.where(groups > 0.0, torch.maximum(groups, least), otherwise)
    return kept.view(rows, -1)[:, :numel]


def amax(x: Tensor) -> Tensor:
    """Largest magnitude, NaN if there is one, as fp32 ``[1]``; 0 of nothing."""
    return x.abs().amax().float().view(1) if x.numel() else torch.zeros(1, dtype=torch.float32)
