"""Gradient sums in 8 bits with tensor and sequence parallelism."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lq_testing.cases import on_ranks, rank_tests
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel import QuantizedGradientBuffer

TOKENS, WIDTH = 8, 32
MICRO_BATCHES = 3
STOCHASTIC = CodecSpec(code="int8", group_size=32, rounding="stochastic")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PLAN = {
    "mix": SequenceParallel(),  # replicated, and its gradient the sum of those of tokens
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


class Net(nn.Module):
    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.plain = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mesh = mesh
        if mesh is not None:
            parallelize_module(self, mesh, PLAN)

    def forward(self, x: Tensor) -> Tensor:
        beside = self.plain(x).float().square().mean()
        if self.mesh is not None:  # this rank's tokens
            x = x.chunk(self.mesh.size(), 1)[self.mesh.get_local_rank()]
        x = self.down(torch.relu(self.up(self.mix(x))))
        return x.float().square().sum() / (2 * TOKENS * WIDTH) + beside


def tokens(index: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn(2, TOKENS, WIDTH, generator=generator)


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def accumulate(model: Any, buffer: QuantizedGradientBuffer, way: str, rank: int) -> None:
    model.zero_grad()
    for index in range(MICRO_BATCHES):
        last = index == MICRO_BATCHES - 1
        if way == "once":
            model.set_requires_gradient_sync(last)
        with nullcontext() if way == "once" else buffer.accumulating(not last):
            model(tokens(index, rank)).backward()
        if not last:
            assert buffer.nbytes > 0
    assert buffer.nbytes == 0


def add_up(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))  # a user's own
    data, tensor = mesh["dp"], mesh["tp"]
    exact = Net()
    for index, other in itertools.product(range(MICRO_BATCHES), range(2)):
        (exact(tokens(index, other)) / 2).backward()
    cases = [("once", None), ("once", BF16), ("every time", None), ("without FSDP2", None)]
    for (way, policy), codec in itertools.product(cases, (None, STOCHASTIC)):
        model: nn.Module = Net(tensor)
        seen = data.get_local_rank()
        if way == "without FSDP2":
            seen, expected = 0, Net()
            for index in range(MICRO_BATCHES):
                expected(tokens(index, 0)).backward()
        else:
            expected = exact
            fully_shard(model, mesh=data, mp_policy=policy or MixedPrecisionPolicy())
        buffer = QuantizedGradientBuffer(model, codec=codec, min_quantized_numel=256)
        assert {k.name for k in buffer.plan if not k.reason} == {
            f"{name}.weight" for name in ("mix", "up", "down", "plain")
        }
        for _ in range(2):  # the second window has gradients in place
            accumulate(model, buffer, way, seen)
            for name in ("mix", "up", "down", "plain"):
                found = model.get_submodule(name).weight.grad
                wanted = expected.get_submodule(name).weight.grad
                assert wanted is not None
                error = float((whole(found) - wanted).norm() / wanted.norm())
                assert 1e-4 < error < (0.03 if policy or codec else 0.012), (way, name, error)
            for name in ("mix", "plain"):
                own = model.get_submodule(name).weight.grad
                own = own.to_local() if isinstance(own, DTensor) else own
                copies = [torch.empty_like(own) for _ in range(2)]
                dist.all_gather(copies, own.contiguous(), group=tensor.get_group())
                assert torch.equal(*copies), (way, name)


test_on_ranks = rank_tests(on_ranks(add_up, 4))
