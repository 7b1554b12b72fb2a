"""Many small models of one shape at once: the GPT of ``gpt.py`` and a Llama with tied embeddings.

Weights are stacked, ``[M, ...]`` for M models, and every matrix product is one batched product:
some hundred models of a million parameters fill a GPU that one leaves idle. Parameters have the
names, order and fp32 arithmetic of the modules.

Shape legend: M models, B sequences, T tokens, C width, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]
Part = Callable[..., Tensor]

_BLOCK = re.compile(r"(?:blocks|model\.layers)\.\d+")
_ROTARY_BASE = 10000.0
_NORM_EPS = {"gpt": 1e-5, "llama": 1e-6}
_LAST = {
    "gpt": ("norm.weight", "norm.bias", "head.weight"),
    "llama": ("model.norm.weight", "model.embed_tokens.weight"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of a model.

    Attributes:
        arch: ``"gpt"``: LayerNorm, learned positions, GELU, embedding and head of their own;
            ``"llama"``: RMSNorm, rotary positions, SwiGLU, one table for embedding and head.
        layers: Transformer blocks.
        hidden: Width.
        intermediate: Width of the MLP.
        heads: Attention heads.
        seq: Tokens that the model sees at once.
    """

    arch: Literal["gpt", "llama"]
    layers: int
    hidden: int
    intermediate: int
    heads: int
    seq: int


def shapes(sizes: Sizes, vocab: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by its name, in the order of the module."""
    width, inner = sizes.hidden, sizes.intermediate
    if sizes.arch == "gpt":
        found: dict[str, tuple[int, ...]] = {"tokens.weight": (vocab, width)}
        found["positions.weight"] = (sizes.seq, width)
        block: dict[str, tuple[int, ...]] = {
            "norm1.weight": (width,),
            "norm1.bias": (width,),
            "qkv.weight": (3 * width, width),
            "out.weight": (width, width),
            "norm2.weight": (width,),
            "norm2.bias": (width,),
            "up.weight": (inner, width),
            "down.weight": (width, inner),
        }
        prefix, last = "blocks", {"norm.weight": (width,), "norm.bias": (width,)}
        last["head.weight"] = (vocab, width)  # type: ignore[assignment]
    else:
        found = {"model.embed_tokens.weight": (vocab, width)}
        block = {f"self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        block |= {f"mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        block["mlp.down_proj.weight"] = (width, inner)
        block |= {f"{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        prefix, last = "model.layers", {"model.norm.weight": (width,)}
    for index in range(sizes.layers):
        found |= {f"{prefix}.{index}.{name}": shape for name, shape in block.items()}
    return found | last


def units(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the parameters of each FSDP2 unit: blocks, and ``root`` with all others."""
    found: dict[str, list[str]] = {"root": []}
    for name in names:
        block = _BLOCK.match(name)
        found.setdefault(block[0] if block else "root", []).append(name)
    return found


def vocabulary(names: Sequence[str]) -> list[str]:
    """Return the names of the module's ``embedding_params``."""
    words = ("tokens.weight", "positions.weight", "head.weight", "model.embed_tokens.weight")
    return [name for name in names if name in words]


def initial(sizes: Sizes, vocab: int, seeds: Sequence[int]) -> Weights:
    """Draw fp32 weights ``[len(seeds), ...]`` on the CPU, each seed with a generator of its own.

    Normal with deviation 0.02, as in the modules; a GPT's projections into the residual stream have
    less.
    """
    inward = 0.02 / math.sqrt(2 * sizes.layers) if sizes.arch == "gpt" else 0.02
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    drawn = {}
    for name, shape in shapes(sizes, vocab).items():
        if len(shape) == 1:
            fill = torch.zeros if name.endswith("bias") else torch.ones
            drawn[name] = fill(len(seeds), *shape)
        else:
            scale = inward if name.endswith(("out.weight", "down.weight")) else 0.02
            each = [torch.randn(shape, generator=generator) for generator in generators]
            drawn[name] = torch.stack(each) * scale
    return drawn


def losses(
    sizes: Sizes,
    weights: Weights,
    tokens_MBT: Tensor,
    targets_MBT: Tensor,
    compiled: Callable[[Part], Part] = lambda part: part,
    after: Callable[[int, Tensor], Tensor] = lambda block, x: x,
) -> Tensor:
    """Return each model's mean next-token loss, ``[M]`` fp32.

    Args:
        sizes: Sizes of the models.
        weights: ``[M, ...]`` by name.
        tokens_MBT: Input tokens of each model, int64.
        targets_MBT: Next tokens.
        compiled: Compiles a block, and the end of the model.
        after: Takes what a block returns to what is read behind it.
    """
    gpt = sizes.arch == "gpt"
    x = _embed(weights["tokens.weight" if gpt else "model.embed_tokens.weight"], tokens_MBT)
    if gpt:
        x = x + weights["positions.weight"][:, None, : tokens_MBT.shape[2]]
    rotation = () if gpt else _rotation(sizes, x)
    block, end = (_gpt_block, _gpt_loss) if gpt else (_llama_block, _llama_loss)
    block, end, prefix = compiled(block), compiled(end), "blocks" if gpt else "model.layers"
    for index in range(sizes.layers):
        at = f"{prefix}.{index}."
        own = {n.removeprefix(at): w for n, w in weights.items() if n.startswith(at)}
        x = after(index, block(sizes, own, x, *rotation))
    return end({n: weights[n] for n in _LAST[sizes.arch]}, x, targets_MBT)


@cache
def _compiled(part: Part) -> Part:
    return torch.compile(part, fullgraph=True, dynamic=False)


def losses_of_compiled_blocks(*arguments: Any, **options: Any) -> Tensor:
    """Compute ``losses`` with one compiled graph that all blocks share.

    Embeddings stay outside: their compiled backward adds bf16 gradients in no fixed order.
    """
    return losses(*arguments, compiled=_compiled, **options)


def _token_losses(hidden_MBTC: Tensor, head: Tensor, targets_MBT: Tensor) -> Tensor:
    logits = _linear(hidden_MBTC, head).flatten(0, -2).float()
    each = F.cross_entropy(logits, targets_MBT.flatten(), reduction="none")
    return each.view(len(targets_MBT), -1).mean(dim=1)


def _linear(x_MBTC: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``[M, B, T, C]`` by each model's ``[M, D, C]``."""
    product = torch.bmm(x_MBTC.flatten(1, 2), weight.transpose(1, 2))
    return product.unflatten(1, x_MBTC.shape[1:3])


def _embed(table_MVC: Tensor, index_MBT: Tensor) -> Tensor:
    models, rows = table_MVC.shape[:2]
    first = torch.arange(models, device=index_MBT.device).view(-1, 1, 1) * rows
    return F.embedding(index_MBT + first, table_MVC.flatten(0, 1))


def _attend(q: Tensor, k: Tensor, v: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
    """Causal attention of ``[M, B, T, heads, D]``, to ``[M, B, T, C]``."""
    parts = [x.flatten(0, 1).transpose(1, 2) for x in (q, k, v)]
    found = F.scaled_dot_product_attention(
        rotate(parts[0]), rotate(parts[1]), parts[2], is_causal=True
    )
    return found.transpose(1, 2).unflatten(0, q.shape[:2]).flatten(3)


# --- the two architectures ------------------------------------------------------------------------


def _layer_norm(x: Tensor, weights: Weights, name: str) -> Tensor:
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    normed = F.layer_norm(x, x.shape[-1:], eps=_NORM_EPS["gpt"])
    return normed * weight[:, None, None] + bias[:, None, None]


def _gpt_block(sizes: Sizes, weights: Weights, x: Tensor) -> Tensor:
    qkv = _linear(_layer_norm(x, weights, "norm1"), weights["qkv.weight"])
    q, k, v = qkv.unflatten(-1, (sizes.heads, 3, -1)).unbind(4)
    x = x + _linear(_attend(q, k, v, lambda y: y), weights["out.weight"])
    inner = _linear(_layer_norm(x, weights, "norm2"), weights["up.weight"])
    return x + _linear(F.gelu(inner), weights["down.weight"])


def _gpt_loss(weights: Weights, x: Tensor, targets_MBT: Tensor) -> Tensor:
    return _token_losses(_layer_norm(x, weights, "norm"), weights["head.weight"], targets_MBT)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    exact = x.float()
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + _NORM_EPS["llama"])
    return weight[:, None, None] * normed.to(x.dtype)


def _rotation(sizes: Sizes, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position, ``[T, D]`` in the dtype of the hidden states."""
    depth, device = sizes.hidden // sizes.heads, like.device
    rates = _ROTARY_BASE ** -(torch.arange(0, depth, 2, device=device).float() / depth)
    angles = torch.arange(like.shape[2], device=device).float()[:, None] * rates
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _llama_block(sizes: Sizes, weights: Weights, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    def rotate(y: Tensor) -> Tensor:
        first, second = y.chunk(2, dim=-1)
        return y * cos + torch.cat((-second, first), dim=-1) * sin

    normed = _rms_norm(x, weights["input_layernorm.weight"])
    q, k, v = (
        _linear(normed, weights[f"self_attn.{part}_proj.weight"]).unflatten(-1, (sizes.heads, -1))
        for part in "qkv"
    )
    x = x + _linear(_attend(q, k, v, rotate), weights["self_attn.o_proj.weight"])
    normed = _rms_norm(x, weights["post_attention_layernorm.weight"])
    gate = F.silu(_linear(normed, weights["mlp.gate_proj.weight"]))
    inner = gate * _linear(normed, weights["mlp.up_proj.weight"])
    return x + _linear(inner, weights["mlp.down_proj.weight"])


def _llama_loss(weights: Weights, x: Tensor, targets_MBT: Tensor) -> Tensor:
    normed = _rms_norm(x, weights["model.norm.weight"])
    return _token_losses(normed, weights["model.embed_tokens.weight"], targets_MBT)
