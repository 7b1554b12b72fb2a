"""Ranks and the nodes that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Level", "Topology"]

Level = Literal["intra", "inter"]
"""Where a message travels: within a node or between nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Which ranks share a node: rank ``r`` is number ``r % node_size`` of node ``r // node_size``.

    Attributes:
        world_size: Ranks that shard the model.
        rank: This rank.
        node_size: Ranks in one node. A smaller number than the machine really has emulates nodes.
    """

    world_size: int
    rank: int
    node_size: int

    def __post_init__(self) -> None:
        """Check that nodes are equally large.

        Raises:
            ValueError: The world size is no multiple of the node size, or a number is out of range.
        """
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

    @property
    def levels(self) -> tuple[Level, ...]:
        """Where messages travel; a world of one rank counts as one that has other nodes."""
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
