"""The process groups of the two levels of a topology."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from lq_lightning._compat.torch import split_group
from lq_lightning.foundation.topology import Topology

__all__ = ["RankGroups"]


class RankGroups(NamedTuple):
    """The process groups of a topology that one rank belongs to.

    Attributes:
        every: All ranks, in the topology's order.
        intra: Ranks of this node, in local-rank order.
        inter: Ranks with this local rank, in node order.
    """

    every: dist.ProcessGroup
    intra: dist.ProcessGroup
    inter: dist.ProcessGroup

    @classmethod
    def of(cls, topology: Topology, every: dist.ProcessGroup, device: torch.device) -> RankGroups:
        """Take the groups of the topology's mesh, or make them.

        Every rank of ``every`` must call this, in one order with the other groups that it makes. No
        other rank needs to: stages of a pipeline may call it at different times, and not equally
        often.

        Args:
            topology: Of the ranks of ``every``.
            every: The group that the model is sharded over. Groups made of it inherit its backend
                and timeout.
            device: Where the tensors are that will be sent.

        Raises:
            ValueError: ``topology`` is not one of these ranks.
        """
        ranks = dist.get_process_group_ranks(every)
        if (topology.world_size, topology.rank) != (len(ranks), dist.get_rank(every)):
            raise ValueError(
                f"`Topology(world_size={topology.world_size}, rank={topology.rank})` does not "
                f"match the process group, in which this is number {dist.get_rank(every)} of "
                f"{len(ranks)} ranks. `Topology.of(mesh, node_size=...)` with the mesh that the "
                "model is sharded over does."
            )
        if topology.mesh is not None:
            if topology.mesh.mesh.flatten().tolist() != ranks:
                raise ValueError(
                    f"the mesh of the topology has the ranks {topology.mesh.mesh.tolist()}, but "
                    f"the model is sharded over {ranks}: both need the same ranks in one order."
                )
            return cls(every, topology.mesh.get_group(1), topology.mesh.get_group(0))
        size = topology.node_size
        numbers = list(range(len(ranks)))
        nodes = [numbers[start : start + size] for start in range(0, len(ranks), size)]
        peers = [numbers[local::size] for local in range(size)]
        intra, inter = (
            every if len(rows) == 1 else split_group(every, rows, device) for rows in (nodes, peers)
        )
        return cls(every, intra, inter)
