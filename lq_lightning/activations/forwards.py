"""The forward of each kind of site."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lq_lightning._compat.modules import has_global_hooks, is_sharded
from lq_lightning._compat.saved_tensors import has_storage

from .functions import encode_source, linear, quantized_activation, quantized_norm
from .hooks import pack_around_checkpoint, run_packed
from .policy import Matmul, is_worth_a_code
from .sites import (
    DIMS,
    ActivationSite,
    DropoutSite,
    FunctionSite,
    HookSite,
    LinearSite,
    MLPSite,
    MultiheadSite,
    NormSite,
    Site,
    is_checkpointed,
    site_of,
)
from .sources import Source, attach, format_alone, keep_alone, note_call, note_reader, source_of

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ATTENTION_OPTIONS = {
    "key_padding_mask",
    "need_weights",
    "attn_mask",
    "average_attn_weights",
    "is_causal",
}


def _takes_self_attention(module: nn.MultiheadAttention, options: Mapping[str, Any]) -> bool:
    """Return whether ``self_attention`` computes what the module would with these options."""
    return (
        not options.get("need_weights", True)
        and module.in_proj_weight is not None
        and module.bias_k is None
        and not module.add_zero_attn
        and options.keys() <= _ATTENTION_OPTIONS
    )


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def _self_attention(
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
    E]`` without a batch. Masks and ``is_causal``, a hint that ``attn_mask`` is causal, are as the
    module takes them. Returns the shape of ``projected``, with ``E`` channels.
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


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in _FLOATS and has_storage(x)


def _parameter(module: nn.Module, name: str | None) -> Tensor | None:
    value: Tensor | None = None if name is None else getattr(module, name)
    return value


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _only(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument of a call with one argument, also by name; None if it has more."""
    values = (*args, *kwargs.values())
    return values[0] if len(values) == 1 else None


def _is_wanted(site: Site, x: Any) -> bool:
    return site.enabled and site.codec is not None and _is_plain(x) and x.dim() in DIMS


def _stands(module: nn.Module, site: Site) -> bool:
    """Whether a site still computes what its module would; warns if not.

    A compiled graph does not check: later changes require a new compilation anyway.
    """
    if torch.compiler.is_compiling() or site.proof is None:
        return True
    if site.proof.holds() and not (has_global_hooks() and site.proof.leaves_out_modules):
        return True
    if not site.doubted:
        site.doubted = True
        rank_zero_warn(
            f"`{site.name}` ({type(module).__name__}) was changed since its saved activations "
            "were quantized: an attribute, a submodule or a hook. It runs its own forward now, "
            "without codes. Change modules before `quantize_activations`, or call "
            "`remove()` of the handle and quantize again."
        )
    return False


def _codes(site: Site, x: Any) -> bool:
    codec = site.codec
    if codec is None or not _is_wanted(site, x):
        return False
    known = not torch.compiler.is_compiling() and (codec, x.shape[-1]) in site.formats
    return known or is_worth_a_code(codec, x.shape[-1])


def _norm_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    site: NormSite = module.__dict__["_lq_site"]
    x = _only(args, kwargs)
    weight, bias = _parameter(module, site.weight), _parameter(module, site.bias)
    plain = _codes(site, x) and x.shape[-1] == site.size and not isinstance(weight, DTensor)
    if not plain or not _needs_gradient(x, weight, bias) or not _stands(module, site):
        return site.original(module, *args, **kwargs)
    format = site.format(x.shape[-1])
    # FSDP2 frees the parameters of a norm before the backward of a linear layer in another unit.
    copies = is_sharded(module)
    y = quantized_norm(x, weight, bias, site.layer, format, amax=site.amax, copies=copies)
    note_call(site, y, x=x, weight=weight, bias=bias)
    return y


def _activated(site: ActivationSite, x: Tensor) -> Tensor:
    format = site.format(x.shape[-1])
    y = quantized_activation(x, None, site.activation, format, amax=site.amax)
    note_call(site, y, x=x)
    return y


def _activation_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    site: ActivationSite = module.__dict__["_lq_site"]
    x = _only(args, kwargs)
    if not _codes(site, x) or not _needs_gradient(x) or not _stands(module, site):
        return site.original(module, *args, **kwargs)
    return _activated(site, x)


def _function_call(site: FunctionSite, *args: Any, **kwargs: Any) -> Any:
    x = _only(args, kwargs)
    if not _codes(site, x) or not _needs_gradient(x):
        if site.previous is None:
            raise AssertionError("the function that a site took the place of")
        return site.previous(*args, **kwargs)
    return _activated(site, x)


def _mlp_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    site: MLPSite = module.__dict__["_lq_site"]
    x = _only(args, kwargs)
    wanted = _is_wanted(site, x)  # codes are of the wider inner tensors
    saves = wanted and (_needs_gradient(x) or _needs_gradient(*module.parameters()))
    if not saves or not _stands(module, site):
        return site.original(module, *args, **kwargs)
    up: Tensor | None = None
    gate = getattr(module, site.gate)(x)
    if site.gate == site.up:
        gate, up = gate.chunk(2, dim=-1)
    elif site.up is not None:
        up = getattr(module, site.up)(x)
        if (up.dtype, up.shape) != (gate.dtype, gate.shape):  # by hooks or adapters
            dtype = torch.promote_types(gate.dtype, up.dtype)
            shape = torch.broadcast_shapes(gate.shape, up.shape)  # type: ignore[no-untyped-call]
            gate, up = gate.to(dtype).expand(shape), up.to(dtype).expand(shape)
    inner = quantized_activation(
        gate, up, site.activation, site.format(gate.shape[-1]), amax=site.amax
    )
    note_call(site, inner, gate=gate, up=up)
    return getattr(module, site.down)(inner)


def _source(x: Tensor, site: Site) -> Source | None:
    """Source of a linear layer's input, made now if a code for this layer alone saves memory."""
    source = source_of(x)
    if source is not None:
        return source
    format = format_alone(x)
    if format is None and site.codec is not None:
        format = site.format(x.shape[-1])
    if format is None:
        return None
    source = encode_source(x, format)
    attach(x, source)  # for other layers that read it
    return source


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, source: Source | None, matmul: Matmul
) -> Tensor:
    y = linear(x, weight, bias, source, matmul)
    if source is not None:  # otherwise the weight has no gradient, or no site made x
        note_reader(x, y)
    return y


def _linear_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    site: LinearSite = module.__dict__["_lq_site"]
    x = _only(args, kwargs)
    weight: Tensor = module.weight  # type: ignore[assignment]
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    saves = _needs_gradient(weight)
    float8 = site.matmul != "native" and (torch.is_grad_enabled() or module.training)
    plain = site.enabled and _is_plain(x) and not isinstance(weight, DTensor)
    source = _source(x, site) if plain and saves else None
    if not plain or (source is None and not float8):
        return site.original(module, *args, **kwargs)
    weight = weight.t() if site.transposed else weight
    return _linear(x, weight, bias, source, site.matmul if float8 else "native")


def _dropout_forward(module: nn.Dropout, *args: Any, **kwargs: Any) -> Any:
    site: DropoutSite = module.__dict__["_lq_site"]
    x = _only(args, kwargs)
    source = source_of(x) if site.enabled and _is_plain(x) else None
    if source is not None and (module.p == 0 or not module.training):
        return x  # the original's result would have no source in a trace
    result = site.original(module, *args, **kwargs)
    if source is not None:
        keep_alone(result, source.codes.format)
    return result


@torch.compiler.disable(reason="saved-tensor hooks of quantized activations")  # type: ignore[no-untyped-call, untyped-decorator]
def _hooked_forward(module: nn.Module, site: HookSite, *args: Any, **kwargs: Any) -> Any:
    return run_packed(module, site, lambda: site.original(module, *args, **kwargs), (args, kwargs))


def _hook_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    site: HookSite = module.__dict__["_lq_site"]
    wanted = site.enabled and torch.is_grad_enabled()
    if site.kind == "checkpoint":
        wanted = wanted and module.training and is_checkpointed(module)
        if wanted:  # if checkpointing was switched on late: from the next call on
            pack_around_checkpoint(module, site)
    if not wanted or (site.codec is None and torch.compiler.is_compiling()):
        return site.original(module, *args, **kwargs)
    return _hooked_forward(module, site, *args, **kwargs)


def _is_linear(module: nn.Module) -> bool:
    """Whether attention may read a projection's weight without running its forward."""
    replaced = "forward" in module.__dict__ and not isinstance(site_of(module), LinearSite)
    return type(module).forward is nn.Linear.forward and not replaced


def _multihead_forward(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    site: MultiheadSite = module.__dict__["_lq_site"]
    weight = module.in_proj_weight
    itself = query is key and key is value and not args and _is_linear(module.out_proj)
    saves = site.enabled and itself and _needs_gradient(weight)
    source = source_of(query) if saves and _is_plain(query) else None
    if source is None or isinstance(weight, DTensor) or not _takes_self_attention(module, kwargs):
        return _hook_forward(module, query, key, value, *args, **kwargs)
    projected = _linear(query, weight, module.in_proj_bias, source, site.matmul)
    return _self_attention(module, projected, **kwargs), None


FORWARDS: dict[type[Site], Callable[..., Any]] = {
    NormSite: _norm_forward,
    ActivationSite: _activation_forward,
    FunctionSite: _function_call,
    MLPSite: _mlp_forward,
    LinearSite: _linear_forward,
    DropoutSite: _dropout_forward,
    HookSite: _hook_forward,
    MultiheadSite: _multihead_forward,
}
