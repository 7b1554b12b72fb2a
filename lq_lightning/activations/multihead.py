"""``nn.MultiheadAttention`` of a tensor with itself, from projected queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["self_attention", "takes_self_attention"]

_TAKEN = {
    "key_padding_mask",
    "need_weights",
    "attn_mask",
    "average_attn_weights",
    "is_causal",
}


def takes_self_attention(module: nn.MultiheadAttention, options: Mapping[str, Any]) -> bool:
    """Return whether ``self_attention`` computes what the module would.

    Args:
        module: whose ``in_proj_weight`` is not None if its three inputs have one width.
        options: keyword arguments of its forward.
    """
    return (
        not options.get("need_weights", True)
        and module.in_proj_weight is not None
        and module.bias_k is None
        and not module.add_zero_attn
        and options.keys() <= _TAKEN
    )


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
    need_weights: bool = False,
    average_attn_weights: bool = True,
) -> Tensor:
    """Attend, and project the output.

    Args:
        module: Gives the number of heads, dropout and output projection.
        projected: ``[B, L, 3 * E]`` if ``module.batch_first``, else ``[L, B, 3 * E]``; ``[L, 3 *
            E]`` without a batch.
        key_padding_mask: As the module takes it.
        attn_mask: As the module takes it.
        is_causal: As the module takes it: a hint that ``attn_mask`` is causal.
        need_weights: False.
        average_attn_weights: Without a meaning here.

    Returns:
        Shape of ``projected``, with ``E`` channels.
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
    # In memory as the module's own output, by which dropout behind it draws the same mask.
    y = module.out_proj(mixed.permute(2, 0, 1, 3).flatten(2))
    if not batched:
        y = y.squeeze(1)
    elif module.batch_first:
        y = y.transpose(0, 1)
    result: Tensor = y
    return result
