"""The ranks of a run as pipelines beside each other, and their process groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lq_lightning._compat.torch import group_timeout
from lq_lightning.data_parallel import Topology
from lq_lightning.foundation.groups import shared_group, shared_mesh, shared_split

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
        self.mesh = shared_mesh(device.type, {PIPELINE: pipeline_size, DATA_PARALLEL: replicas})
        self.device = device
        self.group: dist.ProcessGroup = self.mesh.get_group(PIPELINE)
        self.stage_group: dist.ProcessGroup = self.mesh.get_group(DATA_PARALLEL)
        self.control_group = _over_gloo(self.group, device)
        self.stage_control_group = _over_gloo(self.stage_group, device)

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
        """The group of some ranks of each pipeline, by their places.

        All ranks of the pipeline must call this in one order.

        Args:
            places: Ascending; this rank's own group is returned where it is none of them.
        """
        if list(places) == list(range(self.size)):
            return self.group
        others = [[place] for place in range(self.size) if place not in places]
        return shared_split("holders", self.group, [list(places), *others], self.device)


def _over_gloo(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    def make() -> dist.ProcessGroup:
        made: dist.ProcessGroup | None = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=group_timeout(dist.group.WORLD, device),
            backend="gloo",
            use_local_synchronization=True,
        )
        if made is None:
            raise AssertionError("this rank is in its own groups")
        return made

    return shared_group("over gloo", group, make)
