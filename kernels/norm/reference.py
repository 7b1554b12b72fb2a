"""Parts of norms in plain torch, of which the operators on a CPU are made.

Shape legend: T tokens, N features.
"""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("layer", "rms", "rms_cast", "rms_offset")


def centre(x: Tensor, kind: str) -> Tensor:
    """Return in fp32 what is encoded: ``x``, for "layer" without the mean of each row."""
    wide = x.to(torch.float32)
    return wide - wide.sum(-1, keepdim=True) / x.shape[1] if kind == "layer" else wide


def reciprocal_deviation(centred: Tensor, eps: float) -> Tensor:
    """Return the ``rstd`` of each row of what ``centre`` returned, fp32 ``[T, 1]``."""
    return 1.0 / torch.sqrt(centred.square().sum(-1, keepdim=True) / centred.shape[1] + eps)


def factor_of(weight: Tensor, kind: str) -> Tensor:
    """Return what ``x_hat`` is multiplied by, in fp32: the weight, or 1 + weight for Gemma's."""
    factor = weight.to(torch.float32)
    return 1.0 + factor if kind == "rms_offset" else factor


def normalize(
    centred: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    x_dtype: torch.dtype,
) -> Tensor:
    """Return the output of a norm in fp32, not rounded yet.

    ``centred`` is ``[T, N]`` fp32, exact or decoded; "rms_cast" rounds ``x_hat`` to ``x_dtype``,
    which the input of the norm had.
    """
    y = centred * rstd
    if kind == "rms_cast":
        y = y.to(x_dtype).to(torch.float32)
    if weight is not None:
        y = y * factor_of(weight, kind)
    return y if bias is None else y + bias.to(torch.float32)
