"""A small language model that tensor-parallel ranks cut in `configure_model`."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCABULARY, LENGTH = 32, 8


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.mlp(self.norm(x))
        return result


class ParallelLM(nn.Module):
    def __init__(self, depth: int = 2, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def plan(depth: int, sequence: bool) -> dict[str, Any]:
    """A plan with the norms and the residual stream sharded along tokens, or replicated."""
    found: dict[str, Any] = {}
    for i in range(depth):
        found[f"blocks.{i}.mlp.up"] = ColwiseParallel()
        found[f"blocks.{i}.mlp.down"] = RowwiseParallel()
    if not sequence:
        return {**found, "head": ColwiseParallel(output_layouts=Replicate())}
    found["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    for i in range(depth):
        found[f"blocks.{i}.norm"] = SequenceParallel()
        found[f"blocks.{i}.mlp"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
        found[f"blocks.{i}.mlp.down"] = RowwiseParallel(output_layouts=Shard(1))
    found["norm"] = SequenceParallel()
    found["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return found


def batch(index: int, size: int = 4) -> Tensor:
    numbers = torch.Generator().manual_seed(index)
    start = torch.randint(VOCABULARY, (size, 1), generator=numbers)
    return (start + 3 * torch.arange(LENGTH)) % VOCABULARY


class ParallelModule(pl.LightningModule):
    """``sequence``: None leaves the model whole."""

    def __init__(
        self,
        sequence: bool | None = False,
        depth: int = 2,
        width: int = 16,
        lr: float = 1e-2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.sequence, self.depth, self.lr = sequence, depth, lr
        torch.manual_seed(seed)
        self.net = ParallelLM(depth, width)

    def configure_model(self) -> None:
        if self.sequence is not None:
            mesh = self.device_mesh["tensor_parallel"]  # type: ignore[index]
            parallelize_module(self.net, mesh, plan(self.depth, self.sequence))

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        logits = self.net(tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)
