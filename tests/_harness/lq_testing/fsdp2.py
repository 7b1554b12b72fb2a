"""Models under raw FSDP2 with quantized collectives, and what tests ask of them on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lq_lightning._compat.fsdp2 import PackedGradients
from lq_lightning.data_parallel import (
    GradientQuantization,
    QuantizedCommunication,
    Topology,
    WeightQuantization,
    quantize_communication,
)
from lq_testing.devices import device
from lq_testing.models import Block, TinyLM, batch

QWD = WeightQuantization(group_size=64)
QWD8 = WeightQuantization(group_size=64, bits=8)
NODE = WeightQuantization(group_size=64, replica="node")
TLQ_HS = GradientQuantization()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def pretend_ranks(world_size: int, rank: int = 0) -> None:
    """Make a default group of which only this rank exists: its collectives move nothing.

    Enough for what is decided before the first message, in this process.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def tokens(step: int) -> Tensor:
    """This rank's tokens of one step, on its device."""
    return batch(step, dist.get_rank()).to(device())


def build(
    *,
    weights: WeightQuantization | None = None,
    gradients: GradientQuantization | None = None,
    node_size: int | None = None,
    block: type[Block] = Block,
    layers: int = 2,
    tied: bool = False,
    policy: MixedPrecisionPolicy | None = None,
    prepare: Callable[[TinyLM], None] | None = None,
    lr: float = 1e-2,
    **shard_kwargs: Any,
) -> tuple[TinyLM, torch.optim.Optimizer, QuantizedCommunication]:
    """A small language model of a unit per layer and a root, sharded over all ranks, and AdamW."""
    torch.manual_seed(0)
    model = TinyLM(block=block, layers=layers, tied=tied).to(device())
    if prepare is not None:
        prepare(model)
    shard_kwargs["mp_policy"] = policy or MixedPrecisionPolicy()
    shard_kwargs.setdefault("mesh", init_device_mesh(device().type, (dist.get_world_size(),)))
    for child in model.blocks:
        fully_shard(child, **shard_kwargs)
    fully_shard(model, **shard_kwargs)
    communication = quantize_communication(
        model,
        weights=weights,
        gradients=gradients,
        topology=Topology.of(shard_kwargs["mesh"], node_size=node_size),
        min_quantized_numel=256,
        seed=7,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)  # as users do: frozen ones too
    communication.register_optimizer(optimizer)
    return model, optimizer, communication


def shard(
    model: nn.Module,
    units: Iterable[nn.Module] = (),
    mesh: DeviceMesh | None = None,
    node_size: int | None = None,
    **options: Any,
) -> QuantizedCommunication:
    """Shard some units of a model and itself, by default over all ranks, and quantize."""
    mesh = mesh or init_device_mesh(device().type, (dist.get_world_size(),))
    for unit in (*units, model):
        fully_shard(unit, mesh=mesh)
    return quantize_communication(
        model,
        topology=Topology.of(mesh, node_size=node_size),
        **{"weights": None, "gradients": None, "min_quantized_numel": 256, **options},
    )


def train(
    model: TinyLM, optimizer: torch.optim.Optimizer, steps: int, first: int = 0, clip: float = 0.0
) -> list[float]:
    """Losses of some steps, averaged over ranks."""
    losses = []
    for step in range(first, first + steps):
        loss = model(tokens(step))
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def units(model: nn.Module) -> list[Any]:
    """The FSDP2 modules."""
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def replicas(model: nn.Module) -> list[Tensor]:
    """The weights that this rank computes with, in the order of ``parameters()``."""
    for unit in units(model):
        unit.unshard()
    values = [p.detach().clone() for p in model.parameters()]
    for unit in units(model):
        unit.reshard()
    return values


def same_on_all_ranks(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> bool:
    """Whether every rank of the group (by default all) has these values."""
    flat = torch.cat([t.float().flatten() for t in tensors])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, flat, group=group)
    return all(torch.equal(flat, other) for other in every)


def gradients(model: TinyLM, step: int = 0) -> list[Tensor]:
    """The whole gradients of one backward, of parameters that have one."""
    model(tokens(step)).backward()
    found = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


class UnitReduction:
    """The reduce-scatter of one unit, called as FSDP2 does.

    Args:
        communication: What has the unit.
        unit: Its number.
        dtype: In which it reduces.
    """

    def __init__(
        self,
        communication: QuantizedCommunication,
        unit: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.communication, self.dtype = communication, dtype
        self.scatter: Any = communication._units[unit].scatter
        params = self.scatter.unit.params()
        self.packed = tuple(range(len(params)))
        self.segments = {s.name: s for s in self.scatter.segments()}
        self.numel = sum(p.padded_shard_numel for p in params)
        self.layouts = self.scatter.layouts_of(self.packed, self.numel, dtype)
        self.world = communication.topology.world_size

    def random_slots(self) -> Tensor:
        """``[world, n]`` of this rank."""
        generator = torch.Generator().manual_seed(dist.get_rank())
        return torch.randn(self.world, self.numel, generator=generator).to(device(), self.dtype)

    def __call__(self, slots: Tensor, op: Any = dist.ReduceOp.AVG) -> Tensor:
        """This rank's part of the mean, ``[n]``; ``slots`` are not changed."""
        result = torch.empty(self.numel, dtype=self.dtype, device=device())
        self.scatter.expect(PackedGradients(self.packed, False))
        self.scatter(result, slots.clone().view(-1), self.communication.group, op)
        return result

    def exact(self, slots: Tensor) -> Tensor:
        """Return the mean that plain FSDP2 computes, in fp32."""
        every = [torch.empty_like(slots) for _ in range(self.world)]
        dist.all_gather(every, slots)
        return torch.stack(every)[:, dist.get_rank()].float().mean(dim=0)
