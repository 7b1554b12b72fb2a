"""Linear layers that save no input: it is rebuilt from the codes of what made it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lq_lightning._compat.autograd import wanted_gradients, with_shape
from lq_lightning.kernels.message import parse_format, quantize
from lq_lightning.kernels.message.matrix import matrix_shape

from .autograd import as_matrix, matmul_dtype, refuse_second_derivative, without_autocast
from .meter import note_code
from .policy import SiteKind
from .sources import Codes, MatrixCodes, Shared, Source

__all__ = ["encode_source", "quantized_linear"]


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        codes: Codes,
        shared: Shared | None,
        dtype: torch.dtype,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(weight, *tensors)
        ctx.codes, ctx.shared, ctx.dtype = codes, shared, dtype
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.tensors = (True, True, bias is not None)
        bias = None if bias is None else bias.to(dtype)
        return F.linear(as_matrix(x).to(dtype), weight.to(dtype), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(ctx, "a linear layer")
        weight, *tensors = ctx.saved_tensors
        wanted_x, wanted_weight, wanted_bias = wanted_gradients(ctx, ctx.tensors)
        dtype = ctx.dtype
        dx = dweight = dbias = None
        if wanted_weight:

            def rebuild() -> Tensor:
                value: Tensor = ctx.codes.rebuild(tuple(tensors), dy.shape[0], dtype)
                return value

            x = rebuild() if ctx.shared is None else ctx.shared.get(dtype, rebuild)
            dweight = (dy.t() @ x).to(weight.dtype)
            del x
        if wanted_x:
            dx = (dy @ weight.to(dtype)).view(ctx.x_shape).to(ctx.x_dtype)
        if wanted_bias:
            dbias = dy.sum(0).to(ctx.bias_dtype)
        return (dx, dweight, dbias, None, None, None, *(None for _ in tensors))


def encode_source(x: Tensor, format: str, kind: SiteKind = "linear") -> Source:
    """Encode a tensor that has no source.

    Args:
        x: ``[..., N]`` fp32, bf16 or fp16.
        format: a ``MessageFormat`` as a string.
        kind: of the site that keeps the code.
    """
    rows = as_matrix(x.detach())
    shape = matrix_shape(parse_format(format), *rows.shape)
    message = quantize(rows.reshape(shape), None, format, 0)
    note_code(kind, x, message, format)
    codes = MatrixCodes(rows.shape[1], format)
    return Source(codes, (message,), message.new_empty(0, dtype=torch.float32))


def quantized_linear(x: Tensor, weight: Tensor, bias: Tensor | None, source: Source) -> Tensor:
    """Apply a linear layer that saves the tensors of a source instead of its input.

    Args:
        x: ``[..., K]`` fp32, bf16 or fp16.
        weight: ``[O, K]``; requires a gradient, or nothing would have to be saved.
        bias: ``[O]`` or None.
        source: of ``x``.

    Returns:
        ``[..., O]`` in autocast's dtype, or that of the operands.
    """
    if source.shared is not None:
        source.shared.join()
    dtype = matmul_dtype(x, weight)
    with without_autocast(x):
        y: Tensor = _QuantizedLinear.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, source.codes, source.shared, dtype, *source.tensors
        )
    return with_shape(y, (*x.shape[:-1], weight.shape[0]))  # here: it may be changed in place
