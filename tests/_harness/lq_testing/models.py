"""Tiny models for distributed tests, with the shapes that make sharding awkward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 31
WIDTH = 24


class Block(nn.Module):
    """Pre-norm MLP block: two matrices, two 1-D tensors, a matrix whose dim 0 shards unevenly."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 3)
        self.down = nn.Linear(2 * width + 3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LoRABlock(Block):
    """A block with frozen matrices and small trained adapters."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(4, width) * 0.1)
        self.lora_b = nn.Parameter(torch.zeros(width, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


class OptionalBlock(Block):
    """A block of which one matrix is used only when ``use_extra`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.use_extra = True

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.extra(x) if self.use_extra else x


class TinyLM(nn.Module):
    """Embedding, blocks and a head, optionally tied; loss over random tokens is learnable."""

    def __init__(self, block: type[Block] = Block, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.tiny = nn.Parameter(torch.ones(1))  # one element: some ranks own nothing
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x * self.tiny)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def batch(step: int, rank: int, size: int = 4, length: int = 8) -> Tensor:
    """Tokens of one step on one rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCAB, (size, length), generator=generator)
