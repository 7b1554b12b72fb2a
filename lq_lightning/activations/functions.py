"""Norms, activation functions and linear layers that save codes, and what codes give back.

The kernels encode an input while they compute the output; backward rebuilds what it reads. A
normalization layer or an activation function attaches a source to its output, from which linear
layers behind it rebuild their input.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lq_lightning._compat.float8 import scaled_mm
from lq_lightning._compat.saved_tensors import wanted_gradients, with_shape
from lq_lightning.kernels.activation import (
    OF_POSITIVE_PART,
    activation_backward,
    activation_quantize,
)
from lq_lightning.kernels.float8 import float8_cast, float8_quantize
from lq_lightning.kernels.int8 import hadamard_size_of, int8_matmul, int8_quantize
from lq_lightning.kernels.norm import norm_backward, norm_quantize

from .policy import Matmul
from .sources import ActivationCodes, Codes, NormCodes, Shared, Source, as_matrix, attach, observers

_E4M3 = torch.float8_e4m3fn
# In shorter sequences, second terms for four rows cost more than they gain.
_MIN_SEQUENCE = 32


def _matmul_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Dtype of a linear layer's product: autocast's, or that of its operands."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # meta has no autocast
        return torch.get_autocast_dtype(device)
    return torch.promote_types(x.dtype, weight.dtype)


def _without_autocast(x: Tensor) -> AbstractContextManager[None]:
    device = x.device.type
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def _refuse_second_derivative(name: str) -> None:
    """Raise ``RuntimeError`` in a backward that runs with ``create_graph=True``."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"The backward of {name} was called with `create_graph=True`, but its saved "
            "activations are codes, which have no derivative. Exclude modules that need second "
            "derivatives (`ActivationPolicy(rules=[ActivationRule(module=...)])`), or call "
            "`remove()` of the handle first."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NormLayer:
    """The arithmetic of a normalization layer.

    ``kind`` is ``"layer"``, ``"rms"``, ``"rms_cast"`` (rounds before the weight, as Hugging Face's
    Llama does) or ``"rms_offset"`` (multiplies with ``1 + weight``, as Gemma does).
    """

    kind: str
    eps: float  # under the root
    output: str  # its dtype: the "input"'s, or "promoted" with the weight's
    functional: bool  # `torch.nn.functional`, which CUDA's autocast runs in fp32, result included


class _QuantizedNorm(torch.autograd.Function):
    """AGoQ, section 4.1.1, with two deviations: exact deviations, and codes without row means.

    The paper recomputes the deviation of a row from its code. 4 bytes per row (fp32) save a pass
    over the row wherever the output is rebuilt, and the bound of the paper's case 2 with an exact
    root is below that of its case 1. A LayerNorm does not see the mean of a row; in a code it would
    take up levels.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        kind: str,
        format: str,
        dtype: torch.dtype,
        amax: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y, rstd, message, largest = norm_quantize(
            as_matrix(x), weight, bias, eps, kind, format, dtype, amax
        )
        ctx.save_for_backward(message, rstd, weight)
        ctx.mark_non_differentiable(message, rstd, largest)
        ctx.set_materialize_grads(False)
        ctx.kind, ctx.format = kind, format
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.tensors = (True, weight is not None, bias is not None)
        ctx.dtypes = tuple(None if p is None else p.dtype for p in (weight, bias))
        return y, rstd, message, largest

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        none = (None,) * 5
        if dy is None:
            return (None, None, None, *none)
        _refuse_second_derivative("a normalization layer")
        message, rstd, weight = ctx.saved_tensors
        wanted_x, wanted_weight, wanted_bias = wanted_gradients(ctx, ctx.tensors)
        dx, dweight, dbias = norm_backward(
            *(message, rstd, as_matrix(dy), weight, ctx.kind, ctx.format, ctx.x_dtype),
            wanted_weight or wanted_bias,
        )
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            dx.view(ctx.x_shape) if wanted_x else None,
            dweight.to(weight_dtype) if wanted_weight else None,
            dbias.to(bias_dtype) if wanted_bias else None,
            *none,
        )


def output_dtype(
    layer: NormLayer, dtype: torch.dtype, weight: Tensor | None, device_type: str
) -> torch.dtype:
    """Return the dtype of a layer's output for an input of ``dtype``."""
    if layer.functional and device_type == "cuda" and torch.is_autocast_enabled("cuda"):
        return torch.float32
    if layer.output == "promoted" and weight is not None:
        return torch.promote_types(dtype, weight.dtype)
    return dtype


def quantized_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    layer: NormLayer,
    format: str,
    *,
    amax: bool,
    copies: bool,
) -> Tensor:
    """Normalize the last dimension of ``[..., N]``, keeping a code of the input for backward.

    ``amax`` finds the largest magnitude of the output, for FP8 products. With ``copies`` the source
    of the result holds copies of weight and bias, whose memory may be freed before the backward of
    a layer that reads it.
    """
    dtype = output_dtype(layer, x.dtype, weight, x.device.type)
    y, rstd, message, largest = _QuantizedNorm.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, layer.eps, layer.kind, format, dtype, amax
    )
    y = with_shape(y, x.shape)  # here, so that it may be changed in place
    for each in observers():
        each.code("norm", x, message, format, centred=layer.kind == "layer")
    codes = NormCodes(x.shape[-1], format, layer.kind, x.dtype)
    constants = [None if p is None else p.detach() for p in (weight, bias)]
    if copies:
        constants = [None if p is None else p.clone() for p in constants]
    attach(y, Source(codes, (message, rstd, *constants), largest))
    return y


class _QuantizedActivation(torch.autograd.Function):
    """AGoQ, section 8.1.1: codes of the inputs are kept, all else is recomputed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor | None, activation: str, format: str, amax: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y, message, up_message, largest = activation_quantize(
            as_matrix(x), None if up is None else as_matrix(up), activation, format, amax
        )
        ctx.save_for_backward(message, up_message)
        ctx.mark_non_differentiable(message, up_message, largest)
        ctx.set_materialize_grads(False)
        ctx.activation, ctx.format, ctx.amax = activation, format, amax
        ctx.x_shape = x.shape
        ctx.dtypes = (x.dtype, None if up is None else up.dtype)
        ctx.tensors = (True, up is not None)
        return y, message, up_message, largest

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        none = (None,) * 3
        if dy is None:
            return (None, None, *none)
        _refuse_second_derivative("an activation function")
        message, up_message = ctx.saved_tensors
        wanted_x, wanted_up = wanted_gradients(ctx, ctx.tensors)
        dx, dup, _ = activation_backward(
            message, up_message, as_matrix(dy), ctx.activation, ctx.format, False
        )
        x_dtype, up_dtype = ctx.dtypes
        return (
            dx.view(ctx.x_shape).to(x_dtype) if wanted_x else None,
            dup.view(ctx.x_shape).to(up_dtype) if wanted_up else None,
            *none,
        )


def quantized_activation(
    x: Tensor, up: Tensor | None, activation: str, format: str, *, amax: bool
) -> Tensor:
    """Return ``act(x)``, or ``act(x) * up``, with a source, keeping codes of both for backward.

    ``x`` and ``up`` are ``[..., N]``; ``amax`` finds the largest magnitude of the output, for FP8
    products.
    """
    y, message, up_message, largest = _QuantizedActivation.apply(x, up, activation, format, amax)  # type: ignore[no-untyped-call]
    y = with_shape(y, x.shape)  # here, so that it may be changed in place
    for each in observers():
        each.code("activation", x, message, format, positive=activation in OF_POSITIVE_PART)
        if up is not None:
            each.code("activation", up, up_message, format)
    codes = ActivationCodes(x.shape[-1], format, activation)
    attach(y, Source(codes, (message, up_message), largest))
    return y


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
        _refuse_second_derivative("a linear layer")
        weight, *tensors = ctx.saved_tensors
        wanted_x, wanted_weight, wanted_bias = wanted_gradients(ctx, ctx.tensors)
        dtype = ctx.dtype
        dx = dweight = dbias = None
        if wanted_weight:

            def rebuild() -> Tensor:
                codes = ctx.codes.of(ctx.x_shape)
                value: Tensor = codes.rebuild(tuple(tensors), dy.shape[0], dtype)
                return value

            x = rebuild() if ctx.shared is None else ctx.shared.get(dtype, rebuild)
            dweight = (dy.t() @ x).to(weight.dtype)
            del x
        if wanted_x:
            dx = (dy @ weight.to(dtype)).view(ctx.x_shape).to(ctx.x_dtype)
        if wanted_bias:
            dbias = dy.sum(0).to(ctx.bias_dtype)
        return (dx, dweight, dbias, None, None, None, *(None for _ in tensors))


def _cast_weight(
    weight: Tensor, amax: Tensor | None, *, transpose: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast a weight to E4M3, ``[O, K]`` or with ``transpose`` ``[K, O]``; with scale and amax.

    Reads the weight as it lies in memory: that of ``Conv1D`` comes as a transposed view.
    """
    is_view = weight.stride(-1) != 1
    stored = weight.t() if is_view else weight
    columns = transpose is not is_view
    if amax is None:
        rows_q, columns_q, scale, amax = float8_quantize(stored, not columns, columns)
    else:
        rows_q, columns_q, scale = float8_cast(stored, amax, not columns, columns)
    return columns_q if columns else rows_q, scale, amax


def _sequence_length(x: Tensor) -> int:
    """Length of the sequences, whose first rows INT8 represents twice; 0 if short.

    ``[..., S, K]``; a matrix is one sequence. Where the second dimension is not time,
    other rows get second terms.
    """
    length = x.shape[-2] if x.dim() > 1 else 0
    return length if length >= _MIN_SEQUENCE else 0


def _forward_product(
    operand: tuple[Tensor, ...], weight: Tensor, dtype: torch.dtype, matmul: Matmul, length: int
) -> tuple[Tensor, Tensor]:
    """Product with a weight ``[O, K]``, of ``dtype``, and the largest magnitude of the weight."""
    if matmul == "int8_forward":
        size = hadamard_size_of(weight.shape[1])
        # Conv1D's is a transposed view
        stored = weight if weight.stride(-1) == 1 else weight.contiguous()
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
        # without a source the input itself is saved; attention saves its output projection's anyway
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
        _refuse_second_derivative("a linear layer")
        weight, amax, scale, *kept = ctx.saved_tensors
        wanted_x, wanted_weight, wanted_bias = wanted_gradients(ctx, ctx.tensors)
        dy = as_matrix(dy)
        dx = dweight = dbias = None
        dy_rows, dy_columns, dy_scale, _ = float8_quantize(dy, wanted_x, wanted_weight)
        if wanted_weight:

            def rebuild() -> Tensor:
                if ctx.codes is None:
                    x = as_matrix(kept[0])
                    columns: Tensor = float8_cast(x, scale * 448.0, False, True)[1]
                else:
                    codes = ctx.codes.of(ctx.x_shape)
                    columns = codes.rebuild_float8(tuple(kept), dy.shape[0], scale)
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
    """Quantize the input for the forward product, once for all layers that read it.

    The E4M3 scale comes first, then the rows in E4M3, or three results of ``int8_quantize``.
    """
    # A view shares the source but may have other sequence lengths. They are compared instead of
    # being keys, because a trace would specialize on keys.
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
        operand = (float8_cast(matrix, amax, False, False)[2], *terms)
    elif amax is not None:
        rows, _, scale = float8_cast(matrix, amax, True, False)
        operand = (scale, rows)
    else:
        rows, _, scale, _ = float8_quantize(matrix, True, False)
        operand = (scale, rows)
    if source is not None:
        source.operands[matmul] = (length, operand)
    return operand


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, source: Source | None, matmul: Matmul
) -> Tensor:
    """Apply a linear layer that saves the tensors of its input's source instead of the input.

    Args:
        x: ``[..., K]`` fp32, bf16 or fp16.
        weight: ``[O, K]``; cast in every pass, never stored as FP8.
        bias: ``[O]`` or None.
        source: source of ``x``; without one, FP8 products save the input itself.
        matmul: ``"native"`` needs a source and a weight that requires a gradient.

    Returns:
        ``[..., O]`` in autocast's dtype, or in the dtype of the operands.
    """
    dtype = _matmul_dtype(x, weight)
    codes, shared = (None, None) if source is None else (source.codes, source.shared)
    tensors = () if source is None else source.tensors
    if shared is not None:
        shared.consumers += 1
    y: Tensor
    with _without_autocast(x):
        if matmul == "native":
            y = _QuantizedLinear.apply(x, weight, bias, codes, shared, dtype, *tensors)  # type: ignore[no-untyped-call]
        else:
            operand = _operand_of(x, source, matmul)
            y = _Float8Linear.apply(  # type: ignore[no-untyped-call]
                x, weight, bias, codes, shared, dtype, matmul, len(operand), *operand, *tensors
            )
    return with_shape(y, (*x.shape[:-1], weight.shape[0]))  # here: it may be changed in place


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def self_attention(
    module: nn.MultiheadAttention,
    projected: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """``nn.MultiheadAttention`` of a tensor with itself, from projected queries, keys and values.

    ``projected`` is ``[B, L, 3 * E]`` if ``module.batch_first``, else ``[L, B, 3 * E]``; ``[L, 3 *
    E]`` without a batch. Returns the shape of ``projected``, with ``E`` channels.
    """
    heads = module.num_heads
    batched = projected.dim() == 3
    x = projected if batched else projected.unsqueeze(0)
    if batched and not module.batch_first:
        x = x.transpose(0, 1)
    batch, length = x.shape[:2]
    shape = (batch, length, heads, x.shape[-1] // (3 * heads))
    q, k, v = (part.reshape(shape).transpose(1, 2) for part in x.chunk(3, dim=-1))
    if is_causal and key_padding_mask is None:
        mask = None
    else:
        is_causal, mask = False, None
        if attn_mask is not None:
            mask = _additive(attn_mask, q.dtype)
            mask = mask.view(batch, heads, length, length) if mask.dim() == 3 else mask
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, q.dtype).view(batch, 1, 1, length)
            mask = padding if mask is None else mask + padding
    p = module.dropout if module.training else 0.0
    mixed = F.scaled_dot_product_attention(q, k, v, mask, p, is_causal)
    # Same strides as the module's own output, so that dropout behind it draws the same mask.
    y = module.out_proj(mixed.permute(2, 0, 1, 3).flatten(2))
    if not batched:
        y = y.squeeze(1)
    elif module.batch_first:
        y = y.transpose(0, 1)
    result: Tensor = y
    return result
