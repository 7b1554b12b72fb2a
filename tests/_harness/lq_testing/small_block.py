"""A small model whose saved activations are codes, and what tests ask about it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lq_lightning.activations import ActivationPolicy, QuantizedActivations
from lq_lightning.activations.measure import SavedTensors

WIDTH = 64
EXACT = ActivationPolicy(norm="int8", activation="int8")
Quantize = Callable[..., QuantizedActivations]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mlp = MLP()
        self.second = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x))
        return x + self.out(self.second(x))


def gradients(model: nn.Module, x: Tensor) -> Tensor:
    """All gradients as one vector, of the input first."""
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    found = torch.autograd.grad(model(x).float().square().sum(), leaves)
    return torch.cat([g.double().flatten() for g in found])


def assert_close(coded: Tensor, exact: Tensor, bound: float = 0.01) -> None:
    error = float((coded - exact).norm() / exact.norm())
    assert 0 < error < bound, error


def saved_nbytes(model: nn.Module, x: Tensor) -> int:
    with SavedTensors(model) as saved:
        output = model(x)
    del output
    return saved.nbytes
