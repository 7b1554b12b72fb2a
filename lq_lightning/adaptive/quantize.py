"""Quantization of activations in trained widths, and the gradient to the gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from lq_lightning.codecs.mixed import WidthTable, round_trip_mixed, split_tokens

from .gate import BitGate

__all__ = ["adaptive_quantize"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.compiler.disable(reason="gradients of AdaptiveBits' gates are summed beside autograd")  # type: ignore[no-untyped-call, untyped-decorator]
def adaptive_quantize(x: Tensor, gate: BitGate, *, arrives: Tensor | None = None) -> Tensor:
    """Return ``x`` as it is after encoding in the widths of a gate and decoding.

    The gradient passes to ``x`` unchanged, straight through, also to values that a fitted range
    clips: with a zero there, what is far off would never come back. The gradient to the gates is
    the change of each value's error per bit (``error_slope``), evaluated at the integer widths
    that were used; backward adds it up in ``gate``, also where ``x`` needs no gradient.
    (AMAQ, section 3, which says only that gradients pass straight through.)

    Within checkpointed regions it is counted once; without gradients nothing is counted. Compiled
    code breaks its graph here.

    Args:
        x: ``[..., channels]``, float32, bfloat16 or float16. Each call is one message, in which all
            values of a channel share a scale.
        gate: Gate whose widths are used.
        arrives: Values that the other end decodes, where a codec sends ``x`` in the same widths.
            Then ``x`` itself is returned with their gradient, and nothing is quantized here.

    Returns:
        Shape and dtype of ``x``.

    Raises:
        ValueError: ``x`` has another dtype, no dimension, or channels that do not fit the gate;
            or ``arrives`` has another shape.
        NotImplementedError: ``x`` is a ``DTensor``.
    """
    if isinstance(x, DTensor):
        raise NotImplementedError(
            f"the gate `{gate.name}` got a DTensor of {tuple(x.placements)}: scales would be those "
            "of a part of each channel. Choose a site whose values are plain tensors."
        )
    if x.dtype not in _DTYPES:
        raise ValueError(
            f"the gate `{gate.name}` quantizes float32, bfloat16 and float16, not {x.dtype}."
        )
    if x.dim() < 1:
        raise ValueError(f"the gate `{gate.name}` needs tensors of 1 dimension or more, got [].")
    if arrives is not None and arrives.shape != x.shape:
        raise ValueError(
            f"the gate `{gate.name}` was given values of {list(x.shape)} of which "
            f"{list(arrives.shape)} arrive: give what is decoded from the same tensor."
        )
    gate.expect(x.shape[-1])
    if x.numel() == 0:
        return x
    if not torch.is_grad_enabled():
        if arrives is not None:
            return x
        return round_trip_mixed(_rows(x), gate.table(), gate.ranges).resize_(x.shape)
    result: Tensor = _AdaptiveQuantize.apply(x, gate.anchor, gate, arrives)  # type: ignore[no-untyped-call]
    return result


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _errors(x: Tensor, quantized: Tensor, table: WidthTable) -> Tensor:
    """What quantization added, bf16: step times distance to the nearest code, or to the end.

    Channels that travel as bf16 have the error that codes of their width and full range would
    have. Exact tokens, whose errors no width changes, have none.

    Args:
        x: ``[tokens, channels]``.
        quantized: The same, encoded and decoded.
        table: Widths of the channels.
    """
    # Rounded once: differences of bf16 are computed in fp32 and rounded to bf16, without copies.
    if torch.float16 in (x.dtype, quantized.dtype):
        x, quantized = x.float(), quantized.float()
    errors = (quantized - x).bfloat16()
    wide, largest = table.wide_channels(x.device)
    coded, exact_tokens = split_tokens(x)
    if wide.numel():
        values = coded.index_select(1, wide).float()
        low, high = torch.aminmax(values, dim=0)
        step = (high - low) / largest
        codes = (values - low) / step
        exact = (step * (codes.round() - codes)).masked_fill(step == 0, 0.0)
        errors.index_copy_(1, wide, exact.bfloat16())
    return errors if exact_tokens is None else errors.index_fill_(0, exact_tokens.indices, 0.0)


class _AdaptiveQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, gate: BitGate, arrives: Tensor | None
    ) -> Tensor:
        ctx.gate = gate
        rows, table = _rows(x), gate.table()
        if arrives is not None:
            ctx.save_for_backward(_errors(rows, _rows(arrives), table))
            return x.view_as(x)
        quantized = round_trip_mixed(rows, table, gate.ranges)
        ctx.save_for_backward(_errors(rows, quantized, table))
        # No view: FSDP2 loses its hook on a module's output where a view is changed in place.
        return quantized.resize_(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (errors,) = ctx.saved_tensors
        sums = (_rows(grad).float() * errors).sum(0)
        ctx.gate.accumulate(torch.stack([sums, errors.float().square().sum(0)]), errors.shape[0])
        return grad, None, None, None
