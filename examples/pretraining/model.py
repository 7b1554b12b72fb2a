"""A compact decoder in the shape of Llama, written for reading.

Pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU MLP. The blocks sit in
one ``nn.ModuleList`` of identical modules, which is what the strategy looks for when it decides by
itself what to shard.

Shape legend: ``B`` batch, ``T`` tokens, ``D`` hidden size, ``H`` heads, ``K`` key/value heads,
``E`` size of one head, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)  # no slots: jsonargparse reads defaults with vars()
class DecoderConfig:
    """Size and shape of the built-in decoder.

    Args:
        num_layers: Number of transformer blocks.
        hidden_size: Width of the residual stream.
        num_heads: Number of attention heads; must divide ``hidden_size``.
        num_kv_heads: Number of key/value heads (grouped-query attention); must divide
            ``num_heads``. Leave empty for one per head.
        intermediate_size: Width of the SwiGLU MLP. Leave empty for ``8/3 * hidden_size`` rounded up
            to a multiple of 32.
        tie_embeddings: Use one matrix for the input embedding and the output projection.
        rope_theta: Base of the rotary position frequencies.
        norm_eps: Term that keeps RMSNorm finite on zero rows.
        init_std: Standard deviation of the initial weights. Projections that write to the residual
            stream start smaller by ``sqrt(2 * num_layers)``.
    """

    num_layers: int = 4
    hidden_size: int = 192
    num_heads: int = 6
    num_kv_heads: int | None = None
    intermediate_size: int | None = None
    tie_embeddings: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("num_layers", "hidden_size", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}={getattr(self, name)}` must be at least 1.")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"`hidden_size={self.hidden_size}` does not split into "
                f"`num_heads={self.num_heads}` heads of an even size (rotary positions turn pairs "
                f"of channels). Choose a `hidden_size` that is a multiple of {2 * self.num_heads}."
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"`num_kv_heads={self.num_kv_heads}` must divide `num_heads={self.num_heads}`."
            )

    @property
    def kv_heads(self) -> int:
        """Key/value heads after filling in the default."""
        return self.num_kv_heads or self.num_heads

    @property
    def mlp_size(self) -> int:
        """Width of the MLP after filling in the default."""
        return self.intermediate_size or 32 * math.ceil(8 * self.hidden_size / 3 / 32)


def rotate(x_BHTE: Tensor, theta: float) -> Tensor:
    """Apply rotary embeddings to queries or keys at positions ``0..T-1``; angles are in fp32.

    Reference: RoFormer (arXiv:2104.09864), with the half-split channel pairing of Llama.
    """
    num_tokens, head_size = x_BHTE.shape[-2:]
    exponent_E = torch.arange(0, head_size, 2, device=x_BHTE.device, dtype=torch.float32)
    frequency_E = theta ** -(exponent_E / head_size)
    position_T = torch.arange(num_tokens, device=x_BHTE.device, dtype=torch.float32)
    angle_TE = torch.outer(position_T, frequency_E)
    cos_TE, sin_TE = angle_TE.cos(), angle_TE.sin()
    first, second = x_BHTE.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos_TE - second * sin_TE, second * cos_TE + first * sin_TE], dim=-1)
    return turned.to(x_BHTE.dtype)


class Attention(nn.Module):
    """Causal grouped-query self-attention with rotary positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_heads
        self.rope_theta = config.rope_theta
        self.grouped = config.kv_heads != config.num_heads
        kv_size = config.kv_heads * self.head_size
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Mix information from earlier tokens into each token."""
        B, T, _ = x_BTD.shape
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q_BHTE, k_BKTE, v_BKTE = (
            project(x_BTD).view(B, T, -1, self.head_size).transpose(1, 2) for project in projections
        )
        mixed_BHTE = F.scaled_dot_product_attention(
            rotate(q_BHTE, self.rope_theta),
            rotate(k_BKTE, self.rope_theta),
            v_BKTE,
            is_causal=True,
            enable_gqa=self.grouped,
        )
        return self.o_proj(mixed_BHTE.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU feed-forward network."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.down_proj = nn.Linear(config.mlp_size, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform each token by itself."""
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Block(nn.Module):
    """Attention, then MLP, each on a normalized residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Add the block's two updates to the residual stream."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Decoder(nn.Module):
    """The language model: tokens in, next-token logits out."""

    def __init__(self, config: DecoderConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        residual_std = config.init_std / math.sqrt(2 * config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if into_residual else config.init_std)

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return how ``tensor_parallel="auto"`` splits linear layers: by columns or rows."""
        return {
            "embedding": "embedding_rowwise",
            "lm_head": "colwise_gather_output",
            "blocks.*.attention.q_proj": "colwise",
            "blocks.*.attention.k_proj": "colwise",
            "blocks.*.attention.v_proj": "colwise",
            "blocks.*.attention.o_proj": "rowwise",
            "blocks.*.mlp.gate_proj": "colwise",
            "blocks.*.mlp.up_proj": "colwise",
            "blocks.*.mlp.down_proj": "rowwise",
        }

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the ``[B, T, V]`` next-token logits of ``[B, T]`` int64 token ids."""
        return self.lm_head(self.hidden_states(tokens_BT))

    def hidden_states(self, tokens_BT: Tensor) -> Tensor:
        """Return the ``[B, T, D]`` normalized states that the head makes logits of."""
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.norm(x_BTD)
