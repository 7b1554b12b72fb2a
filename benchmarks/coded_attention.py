"""Attention that keeps codes of queries, keys and values, to show what 4 bits do to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lq_lightning.codecs import CodecSpec, decode, encode

_attend = F.scaled_dot_product_attention


def _decoded(message: Tensor, spec: CodecSpec, like: tuple[torch.Size, torch.dtype]) -> Tensor:
    shape, dtype = like
    return decode(spec, message, shape.numel(), dtype=dtype).view(shape)


class _CodedAttention(torch.autograd.Function):
    """The backward computes attention again, from the codes (AGoQ, section 8.1.3, case 1)."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHSD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        spec: CodecSpec,
        options: dict[str, Any],
    ) -> Tensor:
        """Attend exactly and keep codes."""
        inputs = (q_BHSD, k_BHSD, v_BHSD)
        ctx.save_for_backward(*(encode(spec, x.reshape(1, -1)) for x in inputs))
        ctx.spec, ctx.options = spec, options
        ctx.likes = [(x.shape, x.dtype) for x in inputs]
        return _attend(*inputs, **options)

    @staticmethod
    def backward(ctx: Any, dout_BHSD: Tensor) -> tuple[Tensor | None, ...]:
        """Attend from the codes and differentiate that."""
        messages = zip(ctx.saved_tensors, ctx.likes, strict=True)
        inputs = [_decoded(m, ctx.spec, like).requires_grad_() for m, like in messages]
        with torch.enable_grad():
            out = _attend(*inputs, **ctx.options)
        return (*torch.autograd.grad(out, inputs, dout_BHSD), None, None)


@contextmanager
def coded_attention(spec: CodecSpec) -> Iterator[None]:
    """Let every call of ``F.scaled_dot_product_attention`` keep codes; compiled graphs break there.

    Args:
        spec: Codec of queries, keys and values, each taken as one row.
    """

    @torch.compiler.disable
    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return _CodedAttention.apply(q, k, v, spec, options)

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _attend
