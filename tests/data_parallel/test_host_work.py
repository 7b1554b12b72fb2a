"""The work of the host in a step is the same on 2 and on 32 nodes."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lq_testing.fsdp2 import pretend_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from lq_lightning.codecs import spec as codecs
from lq_lightning.data_parallel import (
    GradientQuantization,
    Topology,
    WeightQuantization,
    quantize_communication,
    replica,
)

UNITS, WIDTH = 4, 256
OPERATORS = ("quantize_out", "dequantize_out", "requantize_out")


class Counts(TorchDispatchMode):
    """Counts what torch dispatches, and launches of kernels, which it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found["collectives" if func.namespace == "c10d" else str(func)] += 1
        return func(*args, **(kwargs or {}))

    def kernel(self, *_: object) -> None:
        self.found["kernels"] += 1

    def checksums(self, tensors: list[Tensor]) -> Tensor:
        self.found["kernels"] += 1
        return torch.zeros(len(tensors), dtype=torch.int64)


class Block(nn.Module):
    """Two linear layers behind a norm.

    What travels in full precision is no multiple of 16 bytes on any of these numbers of ranks: the
    operators that write zeros behind it would come and go with the number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.relu(self.up(self.norm(x))))


def _counts(nodes: int, gpus: int, rank: int, rounding: Any) -> Counter[str]:
    """Count what the third step of one rank dispatches."""
    pretend_ranks(nodes * gpus, rank)
    counts = Counts()
    launches = dict.fromkeys(OPERATORS, counts.kernel)
    try:
        with (
            mock.patch.multiple(codecs, **launches),
            mock.patch.object(replica, "checksums", counts.checksums),
        ):
            model = nn.Sequential(*[Block() for _ in range(UNITS)])
            mesh = init_device_mesh("cpu", (nodes * gpus,))
            for block in model:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            communication = quantize_communication(
                model,
                weights=WeightQuantization(replica="full"),
                gradients=GradientQuantization(rounding=rounding),
                topology=Topology.of(mesh, node_size=gpus),
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            communication.register_optimizer(optimizer)
            for _ in range(3):
                counts.found.clear()
                with counts:
                    model(torch.zeros(2, WIDTH)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return counts.found
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("gpus", "rounding", "each"), [(8, "nearest", 4), (1, "stochastic", 2)])
def test_counts_are_those_of_two_nodes(gpus: int, rounding: str, each: int) -> None:
    two, *many = [
        _counts(nodes, gpus, rank, rounding)
        for nodes, rank in ((2, 0), (32, 16 * gpus), (32, 32 * gpus - 1))
    ]
    assert many == [two, two]
    # Two encode and decode the exchange of all units at once, two read the shards around it.
    assert two["kernels"] == 4 + UNITS * each
