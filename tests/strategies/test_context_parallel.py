"""Sequences that several ranks share, written as the documentation shows it: one model."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lq_testing.lightning_models import Losses, run_trainer, trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.attention.bias import causal_lower_right
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lq_lightning import QuantizedFSDPStrategy

TOKENS, WIDTH, HEADS, WORDS = 8, 32, 2, 50
STEPS, BATCH = 6, 2


def attention(q: Tensor, k: Tensor, v: Tensor, context: DeviceMesh | None) -> Tensor:
    """Causal attention; each is ``[batch, heads, tokens of this rank, size]``."""
    if context is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    k, v = (
        DTensor.from_local(x, context, [Shard(2)]).full_tensor(grad_placements=[Partial()])
        for x in (k, v)
    )
    own = q.shape[2]
    seen = own * (context.get_local_rank() + 1)
    mask = causal_lower_right(own, seen)
    return F.scaled_dot_product_attention(q, k[:, :, :seen], v[:, :, :seen], attn_mask=mask)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, context: DeviceMesh | None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        return x + self.out(attention(q, k, v, context).transpose(1, 2).flatten(2))


class LongSequences(pl.LightningModule):
    def __init__(self, context_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.context_size = context_size
        self.context: DeviceMesh | None = None
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def configure_model(self) -> None:
        if self.context is None:
            shape = (self.trainer.world_size // self.context_size, self.context_size)
            kind = self.device_mesh.device_type  # type: ignore[union-attr]
            mesh = init_device_mesh(kind, shape, mesh_dim_names=("replica", "context"))
            self.context = mesh["context"]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tokens, targets = batch[:, :-1], batch[:, 1:]  # before the sequence is cut
        places = torch.arange(tokens.shape[1], device=tokens.device)
        if self.context is not None:
            part = self.context.get_local_rank()
            tokens, targets = (x.chunk(self.context_size, 1)[part] for x in (tokens, targets))
            places = places.chunk(self.context_size)[part]
        x = self.embed(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x, self.context)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    def train_dataloader(self) -> Any:
        replicas = self.trainer.world_size // self.context_size
        replica = self.trainer.global_rank // self.context_size
        sampler = DistributedSampler(Sequences(), replicas, replica, shuffle=False)
        return DataLoader(Sequences(), batch_size=BATCH, sampler=sampler)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class Sequences(Dataset[Tensor]):
    def __len__(self) -> int:
        return 2 * BATCH * STEPS

    def __getitem__(self, index: int) -> Tensor:
        start = torch.randint(WORDS, (), generator=torch.Generator().manual_seed(index))
        return (start + 3 * torch.arange(TOKENS + 1)) % WORDS


def _one_process(replicas: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of whole batches."""
    module, data = LongSequences(1), Sequences()
    optimizer, losses = module.configure_optimizers(), []
    for step in range(STEPS):
        first = step * BATCH * replicas
        batch = torch.stack([data[i] for i in range(first, first + BATCH * replicas)])
        loss = module.training_step(batch, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(module.named_parameters())


def _train(options: dict[str, Any], root: str) -> tuple[list[float], dict[str, Tensor]]:
    module, losses = LongSequences(context_size=2), Losses()
    strategy = QuantizedFSDPStrategy(**options)
    run = trainer(strategy, root, 4, callbacks=[losses])
    run.fit(module)
    mean = run.strategy.reduce(torch.tensor(losses.values), reduce_op="mean")
    return mean.tolist(), {n: p.full_tensor() for n, p in module.named_parameters()}  # type: ignore[attr-defined]


def _context_of_two(rank: int, world: int, root: str) -> None:
    expected, weights = _one_process(replicas=2)
    losses, found = _train({"weights": "none", "gradients": "none"}, root)
    assert losses == pytest.approx(expected, abs=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5)
    for node_size in (1, 2):
        losses, found = _train({"min_quantized_numel": 64, "node_size": node_size}, root)
        assert losses == pytest.approx(expected, rel=0.02)
        assert losses[-1] < losses[0] - 1
        assert any(not torch.equal(found[name], weight) for name, weight in weights.items())


def test_context_ranks_train_as_one_process(tmp_path: Any) -> None:
    run_trainer(_context_of_two, 4, str(tmp_path))
