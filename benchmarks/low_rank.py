"""LoRA on the linear layers of a Llama's blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LowRank(nn.Module):
    """A linear layer plus ``alpha / rank * B A``, whose B starts at zero (Hu et al., 2021).

    Args:
        linear: Without bias; it is to be frozen.
        rank: Rank of the sum.
        alpha: See above.
    """

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, alpha / rank
        like = {"device": linear.weight.device, "dtype": torch.float32}
        self.down = nn.Parameter(torch.empty(rank, linear.in_features, **like))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank, **like))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both."""
        low = F.linear(F.linear(x, self.down), self.up)
        return self.linear(x).add(low, alpha=self.scale)


def add_low_rank(layers: nn.Module, rank: int, alpha: float) -> list[nn.Parameter]:
    """Put a low-rank sum beside every linear layer below a module; return their weights."""
    weights = []
    for module in list(layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(module, LowRank):
                low_rank = LowRank(child, rank, alpha)
                setattr(module, name, low_rank)
                weights += [low_rank.down, low_rank.up]
    return weights
