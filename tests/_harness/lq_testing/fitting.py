"""A small model that learns a fixed map, for tests of optimizers."""

from __future__ import annotations

import torch
from torch import nn


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 72), nn.LayerNorm(72)
    return nn.Sequential(*layers).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> float:
    """Fit a fixed nonlinear map; return the mean loss of the last ten steps."""
    dtype = next(model.parameters()).dtype
    target = torch.randn(64, 72, generator=torch.Generator().manual_seed(1)) / 8
    losses = []
    for step in range(start, start + steps):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(100 + step))
        loss = (model(x.to(dtype)).float() - (x @ target).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-10:]) / len(losses[-10:])
