"""Process groups that are made once for all runs of a process, and the groups of a topology.

A group has threads and open files, which torch frees only when it is destroyed. Nobody can tell
when that is safe: a module that was sharded over a group needs it until the garbage collector finds
the module, at different times on different ranks. So groups are kept as long as the default group
lives, and the next run of the same ranks reuses them. All ranks of a group ask for the same ones in
the same order, so that they find or make them together.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Hashable, Mapping
from datetime import timedelta
from functools import cache
from itertools import count
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lq_lightning._compat.torch import any_rank, in_step, inherit_timeout, split_group
from lq_lightning.foundation.topology import Topology

GroupOrMesh = TypeVar("GroupOrMesh", dist.ProcessGroup, DeviceMesh)


class _Made:
    """Groups and meshes that were made since the default group was initialized."""

    def __init__(self) -> None:
        self.world: dist.ProcessGroup | None = None
        self.groups: dict[Hashable, dist.ProcessGroup | DeviceMesh] = {}
        self.failed = False  # a run has failed on this rank: groups may be out of step
        self.broken = False  # ... in a way that shows no difference in numbers of operations

    def refresh(self) -> None:
        """Forget groups of a default group that was destroyed."""
        if self.world is not dist.group.WORLD:
            self.world = dist.group.WORLD
            self.groups, self.failed, self.broken = {}, False, False

    def all_groups(self) -> list[dist.ProcessGroup]:
        """Every group once, in the order in which they were made; the default group cannot be."""
        found: list[dist.ProcessGroup] = []
        for made in self.groups.values():
            if isinstance(made, DeviceMesh):
                found += map(made.get_group, range(made.ndim))
            else:
                found.append(made)
        return [group for group in dict.fromkeys(found) if group is not self.world]


_made = _Made()
_runs = count()  # never from the beginning again: a store may outlive a default group


@cache
def _keep_garbage_from_children() -> None:
    """Keep forked processes from destroying groups of their parent.

    A group's owner may be garbage in a cycle (as FSDP2's states). Collecting it in a forked worker
    would run the group's destructor, which joins threads that the worker does not have.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def _shared(key: Hashable, make: Callable[[], GroupOrMesh]) -> GroupOrMesh:
    _made.refresh()
    _keep_garbage_from_children()
    if key not in _made.groups:
        _made.groups[key] = make()
    return _made.groups[key]  # type: ignore[return-value]


def world_group() -> dist.ProcessGroup:
    """The default group, which has to exist."""
    world: dist.ProcessGroup | None = dist.group.WORLD
    if world is None:
        raise AssertionError("no process group is initialized")
    return world


def shared_mesh(device_type: str, axes: Mapping[str, int]) -> DeviceMesh:
    """Return the mesh of all ranks with these axes, made once; all ranks call it.

    Its groups have the timeout of the default group. ``axes`` has sizes by name, outer ones first.
    """

    def make() -> DeviceMesh:
        shape, names = tuple(axes.values()), tuple(axes)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        inherit_timeout(mesh)
        return mesh

    return _shared(("mesh", device_type, *axes.items()), make)


def shared_group(
    key: Hashable, parent: dist.ProcessGroup, make: Callable[[], dist.ProcessGroup]
) -> dist.ProcessGroup:
    """Return a group of ranks of ``parent``, made once for each key; all of its ranks call this.

    ``key`` is the same on all ranks of ``parent``: the group's purpose and ranks.
    """
    ranks = tuple(dist.get_process_group_ranks(parent))
    return _shared((key, ranks, dist.get_backend(parent)), make)


def shared_split(
    use: str, parent: dist.ProcessGroup, rows: list[list[int]], device: torch.device
) -> dist.ProcessGroup:
    """Return the ``split_group`` of the ranks in one row with this rank, made once per use.

    Other uses have groups of their own. All ranks of ``parent`` call it.
    """
    key = (use, tuple(map(tuple, rows)))
    return shared_group(key, parent, lambda: split_group(parent, rows, device))


def note_failed_run() -> None:
    """Compare the groups of all ranks before they are used again."""
    _made.failed = True


def distrust_groups() -> None:
    """Make new groups for the next run: messages may be missing in the present ones."""
    _made.failed = _made.broken = True


def prepare_groups(timeout: timedelta | None) -> None:
    """Agree before a run that groups may be reused; all ranks of the default group call it.

    After a run that failed on some rank, others may have operations under way that it never
    started, which would meet those of the next run. Then all ranks make new groups. Waits for the
    others for up to ``timeout``.
    """
    _made.refresh()
    if dist.get_world_size() == 1:
        return
    key = f"lq_lightning/runs/{next(_runs)}"
    if not any_rank(f"{key}/failed", _made.failed, timeout):
        return
    broken = _made.broken or not in_step(key, _made.all_groups())
    if any_rank(f"{key}/broken", broken, timeout):
        _made.groups.clear()
    _made.failed = _made.broken = False


class RankGroups(NamedTuple):
    """The process groups of a topology that one rank belongs to."""

    every: dist.ProcessGroup  # all ranks, in the topology's order
    intra: dist.ProcessGroup  # ranks of this node, in local-rank order
    inter: dist.ProcessGroup  # ranks with this local rank, in node order

    @classmethod
    def of(cls, topology: Topology, every: dist.ProcessGroup, device: torch.device) -> RankGroups:
        """Take the groups of the topology's mesh, or make them for tensors on ``device``.

        They inherit backend and timeout of ``every``.

        Every rank of ``every``, which the model is sharded over, must call this, in one order with
        the other groups that it makes. No other rank needs to: stages of a pipeline may call it at
        different times, and not equally often.

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
            every if len(rows) == 1 else shared_split(use, every, rows, device)
            for use, rows in (("node", nodes), ("peers", peers))
        )
        return cls(every, intra, inter)
