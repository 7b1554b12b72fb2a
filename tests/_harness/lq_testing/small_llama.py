"""A small model in the shape of Llama: what calibration and memory budgets are tested on."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 64


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (2, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, 2 * width, bias=False)
        self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width, eps=1e-5), Attention(width)
        self.norm2, self.mlp = nn.RMSNorm(width, eps=1e-5), MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class SmallLlama(nn.Module):
    """Embedding, pre-norm blocks, norm and head; a buffer counts the forward passes."""

    calls: Tensor

    def __init__(self, layers: int = 2, width: int = 128, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def tokens(rank: int = 0, length: int = 32) -> Tensor:
    """Two sequences, other ones on each rank."""
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(rank))
