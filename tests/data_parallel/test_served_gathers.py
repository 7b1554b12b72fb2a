"""Gathers that read a replica instead of FSDP2's copies of shards, and those that may not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lq_testing.fsdp2 import pretend_ranks, shard
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from lq_lightning._compat.fsdp2 import GatheredWeights, bypass_all_gather
from lq_lightning.data_parallel import QuantizedCommunication, WeightQuantization
from lq_lightning.data_parallel.all_gather import WeightDifferenceAllGather
from lq_lightning.data_parallel.replica import StaleReplicaConsensus

WIDTH, BLOCKS = 64, 2


class Gathers:
    """Counts of what gathers have done since the last look."""

    def __init__(self) -> None:
        self._counts = {"by FSDP2": 0, "read": 0, "votes": 0}

    def add(self, name: str) -> None:
        self._counts[name] += 1

    def since(self) -> tuple[int, int, int]:
        """Gathers by FSDP2, those that read a replica, and votes."""
        counts = tuple(self._counts.values())
        self._counts = dict.fromkeys(self._counts, 0)
        return counts[0], counts[1], counts[2]


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> Gathers:
    counts = Gathers()
    gather, read = _fsdp_param_group.foreach_all_gather, WeightDifferenceAllGather.read
    start = StaleReplicaConsensus._start

    def gathered(*args: Any, **kwargs: Any) -> Any:
        counts.add("by FSDP2")
        return gather(*args, **kwargs)

    def counted(self: Any) -> Any:
        found = read(self)
        if found is not None:
            counts.add("read")
        return found

    def started(*args: Any) -> Any:
        counts.add("votes")
        return start(*args)

    monkeypatch.setattr(_fsdp_param_group, "foreach_all_gather", gathered)
    monkeypatch.setattr(WeightDifferenceAllGather, "read", counted)
    monkeypatch.setattr(StaleReplicaConsensus, "_start", started)
    return counts


def build(
    node_size: int = 1, **options: Any
) -> tuple[nn.Sequential, torch.optim.Optimizer, QuantizedCommunication]:
    """Two blocks that FSDP2 shards over two ranks, of which the other sends what this one does."""
    pretend_ranks(2)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)])
    weights = WeightQuantization(group_size=64, **options)
    communication = shard(model, model, node_size=node_size, weights=weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    communication.register_optimizer(optimizer)
    return model, optimizer, communication


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_only_the_first_gather_and_refreshes_are_those_of_fsdp2(gathers: Gathers) -> None:
    model, optimizer, _ = build()
    step(model, optimizer)
    assert gathers.since() == (BLOCKS, BLOCKS, 1), "forward refreshes, backward reads"
    step(model, optimizer)
    assert gathers.since() == (0, 2 * BLOCKS, 1)
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
        model[0].weight.mul_(0.5)
        assert gathers.since() == (0, BLOCKS, 1)
        model(torch.ones(2, WIDTH))
    assert gathers.since() == (1, BLOCKS - 1, 1), "the written unit is refreshed"


def test_a_gather_outside_of_a_pass_votes_once(gathers: Gathers) -> None:
    model, optimizer, communication = build()
    step(model, optimizer)
    gathers.since()
    block: Any = model[0]
    block.unshard()
    assert gathers.since() == (0, 1, 1)
    block.reshard()
    with torch.no_grad():
        block.weight.mul_(0.5)
    block.unshard()
    assert gathers.since() == (1, 0, 1)
    block.unshard()
    assert gathers.since() == (0, 0, 0), "it is gathered already"
    block.reshard()
    communication.invalidate()
    block.unshard()
    assert gathers.since() == (1, 0, 1), "one that has to gather votes, too"
    block.reshard()
    block.unshard()
    assert gathers.since() == (0, 1, 1)


def test_fsdp2_gathers_what_nodes_share(gathers: Gathers) -> None:
    model, optimizer, _ = build(node_size=2, replica="node")
    for votes in range(2):
        step(model, optimizer)
        assert gathers.since() == (2 * BLOCKS, 0, 1), votes


def test_units_that_backward_does_not_need_are_not_read_for_it(gathers: Gathers) -> None:
    model, optimizer, _ = build()
    block: Any = model[0]  # whose input has no gradient
    block.set_unshard_in_backward(False)
    step(model, optimizer)
    gathers.since()
    step(model, optimizer)
    assert gathers.since() == (0, 2 * BLOCKS - 1, 1)


@pytest.mark.parametrize("hooks", [False, True])
def test_parameters_with_hooks_for_gathers_are_gathered_by_fsdp2(hooks: bool) -> None:
    shard: Any = torch.ones(4)
    if hooks:
        shard.fsdp_pre_all_gather = lambda mesh: ((shard,), None)
    gathered: list[bool] = []
    group: Any = SimpleNamespace(
        fsdp_params=[SimpleNamespace(_sharded_local_tensor=shard)],
        is_sharded=True,
        unshard_in_backward=True,
        _training_state=TrainingState.FORWARD,
        _all_gather_result=None,
    )

    def unshard(async_op: bool = False) -> None:
        gathered.append(async_op)
        group._all_gather_result = AllGatherResult(shard, None, None, [], [], [4])

    group.unshard = unshard
    bypass_all_gather(group, lambda: pytest.fail("replaced by the next one"))
    found = iter((None, GatheredWeights(torch.zeros(8), None)))
    bypass_all_gather(group, lambda: next(found))
    for _ in range(3):
        group._all_gather_result = None
        group.unshard(True)
    assert gathered == [True] * (2 + hooks)
    assert group._all_gather_result.all_gather_output.tolist() == (
        [1.0] * 4 if hooks else [0.0] * 8
    )
    assert group._all_gather_result.all_gather_input_split_sizes == [4]
