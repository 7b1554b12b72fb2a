"""Linear layers whose matrix products are in FP8 and whose saved input is rebuilt as FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lq_lightning._compat.autograd import wanted_gradients, with_shape
from lq_lightning._compat.float8 import scaled_mm
from lq_lightning.kernels.float8 import float8_cast, float8_quantize

from .autograd import as_matrix, matmul_dtype, refuse_second_derivative, without_autocast
from .sources import Codes, Shared, Source

__all__ = ["float8_linear"]

_E4M3 = torch.float8_e4m3fn


def _cast_weight(
    weight: Tensor, amax: Tensor | None, *, transpose: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``[O, K]``, or with ``transpose`` ``[K, O]``, as E4M3, its scale, and its largest magnitude.

    From the weight as it lies in memory: that of ``Conv1D`` comes as a transposed view.
    """
    is_view = weight.stride(-1) != 1
    stored = weight.t() if is_view else weight
    columns = transpose is not is_view
    if amax is None:
        rows_q, columns_q, scale, amax = float8_quantize(stored, _E4M3, not columns, columns)
    else:
        rows_q, columns_q, scale = float8_cast(stored, amax, _E4M3, not columns, columns)
    return columns_q if columns else rows_q, scale, amax


class _Float8Linear(torch.autograd.Function):
    """COAT, part 2: one scale per tensor for all operands.

    Deviations: gradients are E4M3 like all else, because E5M2 rounds twice as coarsely and its
    longer range gained nothing, neither in models with outliers nor early in training. The largest
    magnitude is found by the kernel that makes a tensor instead of by a second reduction over
    maxima of groups (Group Scaling); the transposed operand of the weight gradient is rebuilt from
    the code of its source instead of being saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor,
        scale: Tensor,
        codes: Codes | None,
        shared: Shared | None,
        dtype: torch.dtype,
        *tensors: Tensor | None,
    ) -> Tensor:
        weight_rows, weight_scale, amax = _cast_weight(weight, None, transpose=False)
        y = scaled_mm(rows, weight_rows, scale, weight_scale, dtype, fast_accumulation=True)
        if bias is not None:
            y = y + bias.to(dtype)
        # without a source the input itself is kept: attention keeps that of its output projection
        kept = (x,) if codes is None else tensors
        if not weight.requires_grad:
            kept = ()
        ctx.save_for_backward(weight, amax, scale, *kept)
        ctx.codes, ctx.shared = codes, shared
        ctx.x_shape, ctx.x_dtype, ctx.dtype = x.shape, x.dtype, dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.tensors = (True, True, bias is not None)
        ctx.more = 5 + len(tensors)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(ctx, "a linear layer")
        weight, amax, scale, *kept = ctx.saved_tensors
        wanted_x, wanted_weight, wanted_bias = wanted_gradients(ctx, ctx.tensors)
        dy = as_matrix(dy)
        dx = dweight = dbias = None
        dy_rows, dy_columns, dy_scale, _ = float8_quantize(dy, _E4M3, wanted_x, wanted_weight)
        if wanted_weight:

            def rebuild() -> Tensor:
                if ctx.codes is None:
                    x = as_matrix(kept[0])
                    columns: Tensor = float8_cast(x, scale * 448.0, _E4M3, False, True)[1]
                else:
                    columns = ctx.codes.rebuild_float8(tuple(kept), dy.shape[0], scale)
                return columns

            columns = rebuild() if ctx.shared is None else ctx.shared.get(_E4M3, rebuild)
            dweight = scaled_mm(
                dy_columns, columns, dy_scale, scale, ctx.dtype, fast_accumulation=False
            )
            dweight = dweight.to(weight.dtype)
            del columns
        if wanted_x:
            weight_columns, weight_scale, _ = _cast_weight(weight, amax, transpose=True)
            dx = scaled_mm(
                dy_rows, weight_columns, dy_scale, weight_scale, ctx.dtype, fast_accumulation=False
            )
            dx = dx.view(ctx.x_shape).to(ctx.x_dtype)
        if wanted_bias:
            dbias = dy.sum(0).to(ctx.bias_dtype)
        return (dx, dweight, dbias, *(None,) * ctx.more)


def _rows_of(x: Tensor, source: Source | None) -> tuple[Tensor, Tensor]:
    """The input as E4M3 rows and its scale, made once for all layers that take it."""
    if source is not None and source.rows is not None:
        return source.rows
    matrix = as_matrix(x.detach())
    if source is not None and source.amax.numel() > 0:
        rows, _, scale = float8_cast(matrix, source.amax, _E4M3, True, False)
    else:
        rows, _, scale, _ = float8_quantize(matrix, _E4M3, True, False)
    if source is not None:
        source.rows = (rows, scale)
    return rows, scale


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, source: Source | None) -> Tensor:
    """Apply a linear layer in FP8.

    Args:
        x: ``[..., K]`` fp32, bf16 or fp16.
        weight: ``[O, K]``; cast in every pass, never stored as FP8.
        bias: ``[O]`` or None.
        source: of ``x``; without one the input itself is saved.

    Returns:
        ``[..., O]`` in autocast's dtype, or that of the operands.
    """
    dtype = matmul_dtype(x, weight)
    shared, codes = None, None
    tensors: tuple[Tensor | None, ...] = ()
    if source is not None:
        codes, tensors, shared = source.codes, source.tensors, source.shared
        if shared is not None:
            shared.join()
    with without_autocast(x):
        rows, scale = _rows_of(x, source)
        y: Tensor = _Float8Linear.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, rows, scale, codes, shared, dtype, *tensors
        )
    return with_shape(y, (*x.shape[:-1], weight.shape[0]))
