"""Process groups that one run after another uses, unless a failed one has left them unequal."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lq_testing import run_ranks

from lq_lightning.foundation.groups import (
    distrust_groups,
    note_failed_run,
    prepare_groups,
    shared_mesh,
    shared_split,
)

CPU = torch.device("cpu")


def _votes(parent: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    world = dist.group.WORLD if parent is None else parent
    assert world is not None
    return shared_split("votes", world, [[0, 1]], CPU)


def _reuse(rank: int, world_size: int) -> None:
    mesh = shared_mesh("cpu", {"outer": 2, "inner": 1})
    group = _votes()
    for uneven, failed, broken in (
        (False, (), ()),
        (False, (1,), ()),  # a rank failed where all were equally far
        (True, (), ()),  # as ranks are at the ends of a pipeline, say
        (True, (0,), ()),
        (False, (1,), (1,)),
    ):
        if uneven and rank == 0:
            dist.broadcast(torch.ones(1), src=0, group=group, async_op=True)  # nobody receives
        if rank in failed:
            note_failed_run()
        if rank in broken:
            distrust_groups()
        prepare_groups(None)
        renewed = bool(failed and uneven) or bool(broken)
        assert (_votes() is not group) == renewed
        assert (shared_mesh("cpu", {"outer": 2, "inner": 1}) is not mesh) == renewed
        group, mesh = _votes(), shared_mesh("cpu", {"outer": 2, "inner": 1})
        if not uneven or renewed:
            number = torch.tensor([float(rank)])
            dist.all_reduce(number, group=group)
            assert number.item() == 1.0
    assert shared_split("other", group, [[0, 1]], CPU) is not group
    assert shared_split("votes", group, [[0], [1]], CPU).size() == 1


def test_groups_are_used_again_while_ranks_are_in_step() -> None:
    run_ranks(_reuse, 2)
