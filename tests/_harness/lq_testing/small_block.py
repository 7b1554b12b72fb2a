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


class Conv1D(nn.Module):
    """As GPT-2's linear layer: the weight is ``[K, O]``, so that ``weight.t()`` is a view."""

    def __init__(self, nx: int, nf: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) / 8)
        self.bias = nn.Parameter(torch.randn(nf) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


def run(
    model: nn.Module, x: Tensor, *args: Tensor, call: Callable[..., Tensor] | None = None
) -> tuple[Tensor, SavedTensors]:
    """All gradients as one vector, of the input first, and what was saved."""
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    with SavedTensors(model) as saved:
        output = (model if call is None else call)(x, *args)
    found = torch.autograd.grad(output.float().square().sum(), leaves)
    return torch.cat([g.double().flatten() for g in found]), saved


def gradients(model: nn.Module, x: Tensor) -> Tensor:
    """All gradients as one vector, of the input first."""
    return run(model, x)[0]


def assert_close(coded: Tensor, exact: Tensor, bound: float = 0.01) -> None:
    error = float((coded - exact).norm() / exact.norm())
    assert 0 < error < bound, error


def saved_by(model: nn.Module, x: Tensor) -> SavedTensors:
    with SavedTensors(model) as saved:
        output = model(x)
    del output
    return saved


def saved_nbytes(model: nn.Module, x: Tensor) -> int:
    return saved_by(model, x).nbytes
