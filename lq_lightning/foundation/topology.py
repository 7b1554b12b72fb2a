"""Ranks and the nodes that they share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Level = Literal["intra", "inter"]
"""Network that carries a message: within a node or between nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Placement on nodes of the ranks that shard a model.

    Rank ``r`` is number ``r % node_size`` of node ``r // node_size``. Ranks are numbered within the
    mesh or group that the model is sharded over, which need not be the whole world: see :meth:`of`.

    Attributes:
        world_size: Number of ranks that shard the model.
        rank: Number of this rank.
        node_size: Ranks in one node. A smaller number than the machine really has emulates nodes.
        mesh: ``[nodes, node_size]`` mesh of these ranks whose process groups carry the messages;
            None makes such groups.
    """

    world_size: int
    rank: int
    node_size: int
    mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check that nodes are equally large.

        Raises:
            ValueError: The world size is no multiple of the node size, a number is out of range or
                none, or ``mesh`` has another shape.
        """
        for name in ("world_size", "rank", "node_size"):
            if type(value := getattr(self, name)) is not int:
                raise ValueError(f"`Topology({name}={value!r})` is not valid: give a whole number.")
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"`Topology(world_size={self.world_size}, rank={self.rank})` is not valid: "
                "rank must lie in [0, world_size)."
            )
        if not 1 <= self.node_size <= self.world_size or self.world_size % self.node_size:
            divisors = [d for d in range(1, self.world_size + 1) if self.world_size % d == 0]
            raise ValueError(
                f"`node_size={self.node_size}` does not divide the world size {self.world_size}: "
                f"every node must hold the same number of ranks. Allowed here: {divisors}."
            )
        shape = (self.num_nodes, self.node_size)
        if self.mesh is not None and self.mesh.shape != shape:
            raise ValueError(
                f"`Topology(mesh=...)` has the shape {tuple(self.mesh.shape)}, but "
                f"{self.num_nodes} nodes of {self.node_size} ranks need {shape}. "
                "`Topology.of(mesh)` takes the numbers from the mesh."
            )

    @classmethod
    def of(
        cls, ranks: DeviceMesh | dist.ProcessGroup | None = None, *, node_size: int | None = None
    ) -> Topology:
        """Return the topology of the ranks that a model is sharded over; called on each of them.

        With pipeline stages, for example, ``Topology.of(mesh["dp"], node_size=8)`` describes the
        stage that this rank belongs to. Models that the same ranks shard share their process groups
        if each gets the same 2-D mesh.

        Args:
            ranks: 1-D mesh or process group of these ranks, by default the default group; or a 2-D
                mesh ``[nodes, node_size]``, whose first axis crosses nodes.
            node_size: Ranks in one node. None takes it from a 2-D mesh; other ranks are one node.

        Raises:
            ValueError: ``ranks`` has more than two axes or not this rank, or ``node_size`` does not
                fit.
            RuntimeError: There is no default process group.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "`Topology.of` reads a process group, but none is initialized: call "
                "`torch.distributed.init_process_group` first, or give the numbers to `Topology`."
            )
        if isinstance(ranks, DeviceMesh):
            if ranks.ndim not in (1, 2):
                raise ValueError(
                    f"`Topology.of` got a mesh of {ranks.ndim} axes: give the 1-D mesh that the "
                    "model is sharded over, or a 2-D mesh [nodes, ranks of a node] of the same "
                    'ranks, such as `mesh["node", "local"]`.'
                )
            member = ranks.get_coordinate() is not None
            if member and ranks.ndim == 2:
                return cls._of_nodes(ranks, node_size)
            group = ranks.get_group() if member else None
        else:
            group = dist.group.WORLD if ranks is None else ranks
        if not isinstance(group, dist.ProcessGroup):  # torch has a placeholder for other groups
            raise ValueError(
                f"`Topology.of({ranks!r})`: rank {dist.get_rank()} does not belong to it. Give the "
                "group or mesh whose ranks shard this rank's model."
            )
        size = group.size()
        return cls(
            world_size=size,
            rank=dist.get_rank(group),
            node_size=size if node_size is None else node_size,
        )

    @classmethod
    def _of_nodes(cls, mesh: DeviceMesh, node_size: int | None) -> Topology:
        num_nodes, local = mesh.shape
        if node_size not in (None, local):
            raise ValueError(
                f"`node_size={node_size}` contradicts the mesh, whose second axis has {local} "
                "ranks: leave it out."
            )
        rank = mesh.get_local_rank(0) * local + mesh.get_local_rank(1)
        return cls(world_size=num_nodes * local, rank=rank, node_size=local, mesh=mesh)

    @property
    def levels(self) -> tuple[Level, ...]:
        """Levels on which messages are sent; a world of one rank counts as having other nodes."""
        if self.node_size == 1:
            return ("inter",)
        return ("intra",) if self.num_nodes == 1 else ("intra", "inter")

    @property
    def num_nodes(self) -> int:
        """Nodes in the world."""
        return self.world_size // self.node_size

    @property
    def node(self) -> int:
        """Index of this rank's node."""
        return self.rank // self.node_size

    @property
    def local_rank(self) -> int:
        """Index of this rank in its node."""
        return self.rank % self.node_size
