"""A model whose nodes train alone, by steps that are given."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lq_lightning.data_parallel import LocalSteps, OuterOptimizer, Topology
from lq_lightning.foundation.groups import RankGroups
from lq_testing.fsdp2 import same_on_all_ranks

LR, MOMENTUM = 0.7, 0.6
SHAPES = {"uneven": (51, 24), "vector": (24,), "tall": (64, 8)}


class Nodes:
    """A model sharded over the ranks of each node, whose steps add what they are told to.

    Modules and optimizers of odd nodes have their parameters in another order.

    Args:
        nodes: Their number; the world is 4.
        bits: Of the exchange.
        dtype: Of the weights.
        start: What the first weights are multiplied with on this rank.
        frozen: A parameter that is not trained at first.
        options: Further ones of ``LocalSteps``; each parameter is a unit.
    """

    def __init__(
        self,
        nodes: int,
        bits: int | None,
        dtype: torch.dtype = torch.float32,
        start: float = 1.0,
        frozen: str = "",
        **options: Any,
    ) -> None:
        self.nodes, self.node = nodes, dist.get_rank() * nodes // 4
        self.mesh = _mesh(nodes)
        self.model = nn.ParameterDict(
            {
                name: nn.Parameter(start * first_weights(name).to(dtype))
                for name in sorted(SHAPES, reverse=bool(self.node % 2))
            }
        )
        for name, parameter in self.model.items():
            parameter.requires_grad_(name != frozen)
        fully_shard(self.model, mesh=self.mesh["s"])
        options = {"every": 2, "outer_lr": LR, "outer_momentum": MOMENTUM, **options}
        self.config = LocalSteps(bits=bits, **options)
        own_order = sorted(SHAPES, key=lambda name: (name[self.node :], name))
        self.optimizer = torch.optim.SGD([self.model[name] for name in own_order], lr=1.0)
        self.outer = self.new_outer()

    def new_outer(self) -> OuterOptimizer:
        """Return an outer optimizer that has not begun."""
        assert dist.group.WORLD is not None
        return OuterOptimizer(
            self.config,
            Topology(world_size=4, rank=dist.get_rank(), node_size=4 // self.nodes),
            RankGroups(dist.group.WORLD, self.mesh.get_group("s"), self.mesh.get_group("n")),
            names={p: n for n, p in self.model.named_parameters()},
            min_quantized_numel=64,
            device=torch.device("cpu"),
        )

    def local_weights(self) -> dict[str, torch.Tensor]:
        """Copy this rank's shards."""
        return {n: p.detach().clone() for n, p in self.model.items()}

    def start_again(self, weights: dict[str, torch.Tensor]) -> None:
        """Put copied shards back, under a new outer optimizer."""
        with torch.no_grad():
            for name, parameter in self.model.items():
                parameter.copy_(weights[name])
        self.outer = self.new_outer()

    def step(self, step: int) -> None:
        """A step of this node, with the exchange that is due after it."""
        for name, parameter in self.model.items():
            assert isinstance(parameter, DTensor)
            move = -move_of(name, step, self.node).to(parameter.dtype)
            if parameter.requires_grad:
                parameter.grad = distribute_tensor(move, self.mesh["s"], parameter.placements)
        self.outer.begin_step(self.optimizer)
        self.optimizer.step()
        self.outer.steps += 1
        if self.outer.is_due:
            self.outer.exchange()

    def weights(self) -> dict[str, Tensor]:
        """Return whole copies of this node's weights."""
        return {n: p.full_tensor().detach().clone() for n, p in sorted(self.model.items())}

    def are_alike(self) -> bool:
        """Whether all nodes have equal weights."""
        return same_on_all_ranks(list(self.weights().values()))


@functools.cache
def _mesh(nodes: int) -> DeviceMesh:
    return init_device_mesh("cpu", (nodes, 4 // nodes), mesh_dim_names=("n", "s"))


def first_weights(name: str) -> Tensor:
    """Return the weights that a parameter starts from."""
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(len(name)))


def move_of(name: str, step: int, node: int) -> Tensor:
    """Return what a node's step adds to a parameter."""
    generator = torch.Generator().manual_seed(100 * step + 10 * node + len(name))
    return 0.01 * torch.randn(SHAPES[name], generator=generator)
