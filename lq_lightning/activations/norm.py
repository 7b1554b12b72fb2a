"""Normalization layers that keep their input as a code and rebuild the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lq_lightning._compat.autograd import wanted_gradients, with_shape
from lq_lightning.kernels.norm import norm_backward, norm_quantize

from .autograd import as_matrix, refuse_second_derivative
from .meter import note_code
from .sources import NormCodes, Source, attach

__all__ = ["NormLayer", "output_dtype", "quantized_norm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NormLayer:
    """What a normalization layer computes.

    Attributes:
        kind: ``"layer"``, ``"rms"``, ``"rms_cast"`` (rounds before the weight, as Hugging Face's
            Llama does) or ``"rms_offset"`` (multiplies with ``1 + weight``, as Gemma does).
        eps: term under the root.
        output: ``"input"``: the output has the input's dtype; ``"promoted"``: that of input and
            weight together.
        functional: it calls ``torch.nn.functional``, which CUDA's autocast runs in fp32, with an
            fp32 result.
    """

    kind: str
    eps: float
    output: str
    functional: bool


class _QuantizedNorm(torch.autograd.Function):
    """AGoQ, section 4.1.1, with two deviations: exact deviations, and codes without row means.

    The paper recomputes the deviation of a row from its code. 4 bytes per row (fp32) save a pass
    over the row wherever the output is rebuilt, and the bound of the paper's case 2 with an exact
    root is below that of its case 1. A LayerNorm does not see the mean of a row; in a code it would
    take levels away from what it does see.
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
        refuse_second_derivative(ctx, "a normalization layer")
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
    """Return the dtype of a layer's output.

    Args:
        layer: the layer.
        dtype: of its input.
        weight: of the layer, or None.
        device_type: where it runs.
    """
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
    """Normalize the last dimension, keeping a code of the input for backward.

    Args:
        x: ``[..., N]`` fp32, bf16 or fp16.
        weight: ``[N]`` or None.
        bias: ``[N]`` or None.
        layer: what to compute.
        format: of the code, a ``MessageFormat`` as a string.
        amax: find the largest magnitude of the output, for FP8 products.
        copies: let the source hold copies of weight and bias, whose memory may be freed before the
            backward of a layer that reads the output.

    Returns:
        ``[..., N]``, with a source.
    """
    dtype = output_dtype(layer, x.dtype, weight, x.device.type)
    y, rstd, message, largest = _QuantizedNorm.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, layer.eps, layer.kind, format, dtype, amax
    )
    y = with_shape(y, x.shape)  # here, so that it may be changed in place
    note_code("norm", x, message, format, centred=layer.kind == "layer")
    codes = NormCodes(x.shape[-1], layer.kind, format, x.dtype)
    constants = [None if p is None else p.detach() for p in (weight, bias)]
    if copies:
        constants = [None if p is None else p.clone() for p in constants]
    attach(y, Source(codes, (message, rstd, *constants), largest))
    return y
