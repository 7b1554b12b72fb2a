"""Activation functions, plain and gated, that keep their inputs as codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lq_lightning._compat.autograd import wanted_gradients, with_shape
from lq_lightning.kernels.activation import (
    OF_POSITIVE_PART,
    activation_backward,
    activation_quantize,
)

from .autograd import as_matrix, refuse_second_derivative
from .meter import note_code
from .sources import ActivationCodes, Source, attach

__all__ = ["quantized_activation"]


class _QuantizedActivation(torch.autograd.Function):
    """AGoQ, section 8.1.1: codes of the inputs are kept, all else is computed again."""

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
        refuse_second_derivative(ctx, "an activation function")
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
    """Return ``act(x)``, or ``act(x) * up``, keeping codes of ``x`` and ``up`` for backward.

    Args:
        x: ``[..., N]`` fp32, bf16 or fp16.
        up: same shape and dtype, or None.
        activation: a name that ``lq_lightning.kernels.activation`` knows.
        format: of the codes, a ``MessageFormat`` as a string.
        amax: find the largest magnitude of the output, for FP8 products.

    Returns:
        ``[..., N]`` of the dtype of ``x``, with a source.
    """
    y, message, up_message, largest = _QuantizedActivation.apply(x, up, activation, format, amax)  # type: ignore[no-untyped-call]
    y = with_shape(y, x.shape)  # here, so that it may be changed in place
    note_code("activation", x, message, format, positive=activation in OF_POSITIVE_PART)
    if up is not None:
        note_code("activation", up, up_message, format)
    codes = ActivationCodes(x.shape[-1], activation, format)
    attach(y, Source(codes, (message, up_message), largest))
    return y
