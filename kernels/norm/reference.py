"""Norms with a quantized input in plain torch: the truth that the Triton kernels must match.

Shape legend: T tokens, N features, R encoded rows of the message.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.matrix import decode_matrix, encode_matrix

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


def norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    fmt: MessageFormat,
    dtype: torch.dtype,
    amax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments and results as for ``op.norm_quantize``."""
    centred = centre(x, kind)
    rstd = reciprocal_deviation(centred, eps)
    y = normalize(centred, rstd, weight, bias, kind, x.dtype).to(dtype)
    largest = torch.zeros(int(amax), dtype=torch.float32)
    if amax and y.numel():
        largest = y.abs().amax().to(torch.float32).view(1)
    return y, rstd, encode_matrix(centred, fmt), largest


def norm_dequantize(
    message: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    numel: int,
    kind: str,
    fmt: MessageFormat,
    dtype: torch.dtype,
    x_dtype: torch.dtype,
) -> Tensor:
    """Arguments and results as for ``op.norm_dequantize``."""
    centred = decode_matrix(message, rstd.shape[0], numel, fmt)
    return normalize(centred, rstd, weight, bias, kind, x_dtype).to(dtype)


def norm_backward(
    message: Tensor,
    rstd: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    kind: str,
    fmt: MessageFormat,
    dtype: torch.dtype,
    parameters: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and results as for ``op.norm_backward``."""
    rows, numel = dy.shape
    x_hat = decode_matrix(message, rows, numel, fmt) * rstd
    wide = dy.to(torch.float32)
    gradient = wide if weight is None else wide * factor_of(weight, kind)
    along = (gradient * x_hat).sum(-1, keepdim=True) / numel
    dx = gradient - x_hat * along
    if kind == "layer":
        dx = dx - gradient.sum(-1, keepdim=True) / numel
    dx = (dx * rstd).to(dtype)
    dweight = (wide * x_hat).sum(0) if parameters else wide.new_empty(0)
    dbias = wide.sum(0) if parameters and kind == "layer" else wide.new_empty(0)
    return dx, dweight, dbias
