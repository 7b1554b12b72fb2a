"""Blocks like Llama's and GPT's, and torch's plans to spread them over a tensor-parallel mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from lq_testing.small_llama import MLP

WIDTH, HEAD = 64, 16


class Attention(nn.Module):
    """Counts heads by what the projections return, as models under tensor parallelism do."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(WIDTH, eps=1e-5), Attention(bias=False)
        self.norm2, self.mlp = nn.RMSNorm(WIDTH, eps=1e-5), MLP(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPTMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act, self.dropout = nn.GELU(approximate="tanh"), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention(bias=True)
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), GPTMLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class HuggingFaceBlock(nn.Module):
    """A layer of transformers' Llama, called as its model does."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.llama import modeling_llama

        sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 1}
        heads = {"num_attention_heads": WIDTH // HEAD, "num_key_value_heads": 2}
        config = modeling_llama.LlamaConfig(**sizes, **heads, attn_implementation="sdpa")
        self.layer = modeling_llama.LlamaDecoderLayer(config, 0)
        position, width = torch.arange(8.0)[:, None], torch.arange(HEAD)[None] / HEAD
        self.turns = (position * width).cos()[None], (position * width).sin()[None]

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x, position_embeddings=self.turns)
        return made[0] if isinstance(made, tuple) else made


def _plan_of_layer() -> dict[str, ParallelStyle]:
    tokens, whole = Shard(1), Replicate()
    made: dict[str, ParallelStyle] = {
        f"layer.{n}": ColwiseParallel()
        for n in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    }
    made |= {f"layer.mlp.{n}": ColwiseParallel() for n in ("gate_proj", "up_proj")}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        made[f"layer.{name}"] = RowwiseParallel(output_layouts=tokens)
    for name in ("input_layernorm", "post_attention_layernorm"):
        made[f"layer.{name}"] = SequenceParallel()
    made["layer.self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": tokens},
        desired_input_kwarg_layouts={"hidden_states": whole},
    )
    made["layer.mlp"] = PrepareModuleInput(input_layouts=tokens, desired_input_layouts=whole)
    return made


def plan(block: nn.Module, way: str = "tokens") -> dict[str, ParallelStyle]:
    """Styles for a block.

    ``"whole"``: tokens are the same on all ranks. ``"tokens"``: sequence parallel, as in
    torchtitan. ``"local"``: the same with plain tensors between modules. ``"each"``: every
    projection gathers its input itself, and passes on DTensors within the MLP.
    """
    if isinstance(block, HuggingFaceBlock):
        return _plan_of_layer()
    tokens, whole = Shard(1), Replicate()
    first = [n for n, m in block.named_modules() if n.endswith(("q_proj", "k_proj", "v_proj"))]
    inner = [
        f"mlp.{n}" for n, _ in block.mlp.named_children() if n in ("gate_proj", "up_proj", "c_fc")
    ]
    last = ["attention.o_proj", "mlp.down_proj" if len(inner) == 2 else "mlp.c_proj"]
    given: dict[str, Any] = {"input_layouts": tokens} if way == "each" else {}
    made: dict[str, ParallelStyle] = {n: ColwiseParallel(**given) for n in first}
    made |= {n: ColwiseParallel(**given, use_local_output=way != "each") for n in inner}
    if way == "whole":
        return made | {n: RowwiseParallel() for n in last}
    made |= {n: RowwiseParallel(output_layouts=tokens) for n in last}
    made |= {n: SequenceParallel(use_local_output=way == "local") for n in ("norm1", "norm2")}
    if way != "each":
        for name in ("attention", "mlp"):
            made[name] = PrepareModuleInput(
                input_layouts=tokens,
                desired_input_layouts=whole,
                use_local_output=way == "local",
            )
    return made
