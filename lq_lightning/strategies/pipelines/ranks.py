"""The ranks of a run as pipelines beside each other, and their process groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lq_lightning._compat.torch import group_timeout, inherit_timeout, split_group
from lq_lightning.data_parallel import Topology

__all__ = ["DATA_PARALLEL", "PIPELINE", "PipelineRanks", "stage_topology"]

PIPELINE, DATA_PARALLEL = "pipeline", "data_parallel"


def stage_topology(world_size: int, rank: int, pipeline_size: int, ranks_per_node: int) -> Topology:
    """Ranks and nodes of the stage that a rank belongs to.

    A stage has neighbouring ranks. It lies within a node, covers whole nodes, or is cut by the
    edges of nodes into parts whose sizes have the greatest common divisor as their own: that many
    neighbours always share a node.

    Args:
        world_size: Ranks of the run.
        rank: This one.
        pipeline_size: Ranks along the pipeline; divides ``world_size``.
        ranks_per_node: Neighbouring ranks that share a machine.
    """
    replicas = world_size // pipeline_size
    return Topology(
        world_size=replicas,
        rank=rank % replicas,
        node_size=math.gcd(ranks_per_node, replicas),
    )


class PipelineRanks:
    """The mesh ``[pipeline, data_parallel]`` of a run.

    The pipeline is the outer axis: neighbouring ranks, which share a machine, hold the same layers
    and reduce gradients with each other, and the boundaries between stages fall between machines.
    A boundary moves activations of a few bits once per micro-batch, data parallelism several times
    the parameters, so that the slow link gets the smaller part.

    Every rank must make this, in one order with other groups.

    Args:
        pipeline_size: Ranks along the pipeline; divides the world size.
        device: Where this rank keeps its tensors.

    Attributes:
        mesh: 2-D, with the axes ``"pipeline"`` and ``"data_parallel"``.
        group: Ranks of this pipeline, in the order of its stages.
        control_group: The same ranks on gloo, for small messages between hosts.
        stage_group: Ranks with the same layers.
        stage_control_group: The same ranks on gloo.
    """

    def __init__(self, pipeline_size: int, device: torch.device) -> None:
        replicas = dist.get_world_size() // pipeline_size
        self.mesh = init_device_mesh(
            device.type, (pipeline_size, replicas), mesh_dim_names=(PIPELINE, DATA_PARALLEL)
        )
        inherit_timeout(self.mesh)
        self.device = device
        self.group: dist.ProcessGroup = self.mesh.get_group(PIPELINE)
        self.stage_group: dist.ProcessGroup = self.mesh.get_group(DATA_PARALLEL)
        self.control_group = _over_gloo(self.group, device)
        self.stage_control_group = _over_gloo(self.stage_group, device)
        self._holders: dict[tuple[int, ...], dist.ProcessGroup] = {}

    @property
    def size(self) -> int:
        """Ranks along the pipeline."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """Place of this rank in its pipeline."""
        return self.group.rank()

    @property
    def last(self) -> int:
        """Global rank of the end of this pipeline."""
        return dist.get_process_group_ranks(self.group)[-1]

    @property
    def replicas(self) -> int:
        """Ranks that hold the same layers."""
        return self.stage_group.size()

    def holders(self, places: Sequence[int]) -> dist.ProcessGroup:
        """The group of some ranks of each pipeline, by their places; made once.

        All ranks of the pipeline must call this in one order.

        Args:
            places: Ascending; this rank's own group is returned where it is none of them.
        """
        key = tuple(places)
        if key == tuple(range(self.size)):
            return self.group
        if key not in self._holders:
            others = [[place] for place in range(self.size) if place not in key]
            self._holders[key] = split_group(self.group, [list(key), *others], self.device)
        return self._holders[key]


def _over_gloo(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    made: dist.ProcessGroup | None = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=group_timeout(dist.group.WORLD, device),
        backend="gloo",
        use_local_synchronization=True,
    )
    if made is None:
        raise AssertionError("this rank is in its own groups")
    return made
