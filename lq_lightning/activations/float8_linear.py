"""Linear layers whose matrix products are in FP8 and whose saved input is rebuilt as FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lq_lightning._compat.autograd import wanted_gradients, with_shape
from lq_lightning._compat.float8 import scaled_mm
from lq_lightning.kernels.float8 import float8_cast, float8_quantize
from lq_lightning.kernels.int8 import hadamard_size_of, int8_matmul, int8_quantize

from .autograd import as_matrix, matmul_dtype, refuse_second_derivative, without_autocast
from .policy import Matmul
from .sources import Codes, Shared, Source

__all__ = ["float8_linear"]

_E4M3 = torch.float8_e4m3fn
# Of shorter sequences second terms of four rows would cost more than they are worth.
_MIN_SEQUENCE = 32


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


def _sequence_length(x: Tensor) -> int:
    """Rows of a sequence in ``[..., S, K]``, whose first INT8 represents twice; 0 if it is short.

    All of a matrix are one sequence. Where the second dimension is no time, other rows are.
    """
    length = x.shape[-2] if x.dim() > 1 else 0
    return length if length >= _MIN_SEQUENCE else 0


def _forward_product(
    operand: tuple[Tensor, ...], weight: Tensor, dtype: torch.dtype, matmul: Matmul, length: int
) -> tuple[Tensor, Tensor]:
    """The output of a layer, and the largest magnitude of its weight.

    Args:
        operand: of ``_operand_of``.
        weight: ``[O, K]``.
        dtype: of the output.
        matmul: as of ``float8_linear``.
        length: of ``_sequence_length``.
    """
    if matmul == "int8_forward":
        size = hadamard_size_of(weight.shape[1])
        stored = weight if weight.stride(-1) == 1 else weight.contiguous()  # a view of Conv1D's
        weight_q, weight_scale, _, amax = int8_quantize(stored, size, True, 0)
        _, *terms = operand
        return int8_matmul(*terms[:2], weight_q, weight_scale, terms[2], length, dtype), amax
    scale, rows = operand
    weight_rows, weight_scale, amax = _cast_weight(weight, None, transpose=False)
    y = scaled_mm(rows, weight_rows, scale, weight_scale, dtype, fast_accumulation=True)
    return y, amax


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
        codes: Codes | None,
        shared: Shared | None,
        dtype: torch.dtype,
        matmul: Matmul,
        count: int,
        *tensors: Any,
    ) -> Tensor:
        operand, saved = tensors[:count], tensors[count:]
        scale = operand[0]
        y, amax = _forward_product(operand, weight, dtype, matmul, _sequence_length(x))
        if bias is not None:
            y = y + bias.to(dtype)
        # without a source the input itself is kept: attention keeps that of its output projection
        kept = (x,) if codes is None else saved
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


def _operand_of(x: Tensor, source: Source | None, matmul: Matmul) -> tuple[Tensor, ...]:
    """The input as the forward product takes it, made once for all layers that take it.

    Returns:
        Its scale in E4M3; then for ``"float8"`` its rows in E4M3, for ``"int8_forward"`` the first
        three results of ``int8_quantize``.
    """
    # A view of the tensor, which has its source, may have other sequences. Lengths are compared
    # instead of being keys, which a trace would take for constants.
    length = _sequence_length(x) if matmul == "int8_forward" else 0
    if source is not None and matmul in source.operands:
        made_for, kept = source.operands[matmul]
        if made_for == length:
            return kept
    matrix = as_matrix(x.detach())
    amax = None if source is None or source.amax.numel() == 0 else source.amax
    operand: tuple[Tensor, ...]
    if matmul == "int8_forward":
        size = hadamard_size_of(matrix.shape[1])
        *terms, largest = int8_quantize(matrix, size, amax is None, length)
        amax = largest if amax is None else amax
        operand = (float8_cast(matrix, amax, _E4M3, False, False)[2], *terms)
    elif amax is not None:
        rows, _, scale = float8_cast(matrix, amax, _E4M3, True, False)
        operand = (scale, rows)
    else:
        rows, _, scale, _ = float8_quantize(matrix, _E4M3, True, False)
        operand = (scale, rows)
    if source is not None:
        source.operands[matmul] = (length, operand)
    return operand


def float8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, source: Source | None, matmul: Matmul
) -> Tensor:
    """Apply a linear layer in FP8.

    Args:
        x: ``[..., K]`` fp32, bf16 or fp16.
        weight: ``[O, K]``; cast in every pass, never stored as FP8.
        bias: ``[O]`` or None.
        source: of ``x``; without one the input itself is saved.
        matmul: ``"float8"``, or ``"int8_forward"``, with an output from INT8.

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
        operand = _operand_of(x, source, matmul)
        y: Tensor = _Float8Linear.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, codes, shared, dtype, matmul, len(operand), *operand, *tensors
        )
    return with_shape(y, (*x.shape[:-1], weight.shape[0]))
