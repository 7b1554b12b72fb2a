"""Replicas that differ between ranks, found by checksum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning._compat.torch import all_gather_flat
from lq_lightning.data_parallel.weight_difference import WeightDifferenceAllGather
from lq_lightning.foundation.topology import Topology

__all__ = ["invalidate_drifted"]


def invalidate_drifted(
    gathers: Sequence[WeightDifferenceAllGather], topology: Topology, group: dist.ProcessGroup
) -> list[str]:
    """Let replicas that differ between ranks be refreshed at their next gather.

    Args:
        gathers: Of all units, in the same order on every rank.
        topology: Ranks and nodes.
        group: All ranks of the topology; each has to call this.

    Returns:
        Names of the units that differ, the same list on every rank.
    """
    sums = [gather.replica.checksum() for gather in gathers]
    known = [(g, s) for g, s in zip(gathers, sums, strict=True) if s is not None]
    if not known:
        return []
    mine = torch.cat([s for _, s in known])
    every = mine.new_empty(topology.world_size, mine.numel())
    all_gather_flat(every.view(-1), mine, group)
    drifted = []
    for column, (gather, _) in enumerate(known):
        if _differs(every[:, column], gather, topology):
            drifted.append(gather.name)
            gather.replica.invalidate()
    return drifted


def _differs(sums: Tensor, gather: WeightDifferenceAllGather, topology: Topology) -> bool:
    if gather.shared_by_node:
        by_node = sums.view(topology.num_nodes, topology.node_size)
        return bool((by_node != by_node[:1]).any())
    return bool((sums != sums[0]).any())
