"""The ranks of a run as pipelines beside each other, and their process groups."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, RandomSampler

from lq_lightning._compat.torch import group_timeout
from lq_lightning.data_parallel import Topology
from lq_lightning.foundation.groups import shared_group, shared_mesh, shared_split

PIPELINE, DATA_PARALLEL = "pipeline", "data_parallel"


def stage_topology(world_size: int, rank: int, pipeline_size: int, ranks_per_node: int) -> Topology:
    """Ranks and nodes of the stage that a rank belongs to.

    A stage has neighbouring ranks. It lies within a node, covers whole nodes, or is cut by the
    edges of nodes into parts whose sizes have the greatest common divisor as their own: that many
    neighbours always share a node.

    Args:
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

    Attributes:
        mesh: 2-D, with the axes ``"pipeline"`` and ``"data_parallel"``.
        group: The ranks of this pipeline, in the order of its stages.
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


def draw_alike(loader: object, ranks: PipelineRanks) -> None:
    """Let the ranks of a pipeline shuffle alike where no ``DistributedSampler`` does.

    torch shuffles with the default random generator, which stages use differently (dropout in
    other layers), and with ``seed_everything(..., workers=True)`` Lightning seeds workers by their
    rank. All ranks of the pipeline call this in one order.

    Args:
        loader: Left alone unless it is a ``DataLoader`` that draws from the default generator.
    """
    if not isinstance(loader, DataLoader):
        return
    seed = torch.empty((), dtype=torch.int64).random_()
    dist.broadcast(seed, group=ranks.control_group, group_src=0)
    generator = torch.Generator().manual_seed(int(seed))
    if loader.generator is None:
        loader.generator = generator  # draws the seeds of workers
    if loader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", "0")):
        replica = ranks.stage_group.rank()
        loader.worker_init_fn = partial(pl_worker_init_function, rank=replica)
    if isinstance(loader.sampler, RandomSampler) and loader.sampler.generator is None:
        loader.sampler.generator = generator
