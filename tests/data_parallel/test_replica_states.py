"""The states of a replica."""

from __future__ import annotations

import torch

from lq_lightning.data_parallel.replica import Freshness, Replica, ReplicaMemory


def _refreshed() -> Replica:
    replica = Replica(ReplicaMemory(1), 0)
    values, own = replica.begin_refresh(torch.arange(3.0), 2, 1)
    assert own.tolist() == values[3:].tolist() == [0, 1, 2]
    replica.complete()
    return replica


def test_a_replica_is_fresh_only_when_everything_was_written() -> None:
    replica = Replica(ReplicaMemory(1), 0)
    assert not replica.begin_exchange()
    replica.restore(torch.ones(3))
    assert (replica.state, replica.slot is None) == (Freshness.RESTORED, False)
    assert not replica.begin_exchange(), "the main weights moved, its reference was never there"
    assert (replica.state, replica.slot) == (Freshness.STALE, None)
    replica = _refreshed()
    assert replica.begin_exchange()
    assert (replica.state, replica.slot, replica.checksum()) == (Freshness.STALE, None, None)
    replica.complete()
    assert replica.state is Freshness.FRESH
    memory = replica.values
    replica.restore(torch.full((3,), 7.0))
    assert replica.values is memory, "an exchange on another stream may still write to it"
    assert replica.slot is not None
    assert replica.slot.tolist() == [7, 7, 7]
    _, own = replica.begin_refresh(torch.zeros(3), 2, 0)
    assert (replica.state, own.tolist()) == (Freshness.STALE, [7, 7, 7])
    replica.complete()
    _, own = replica.begin_refresh(torch.zeros(3), 2, 0)
    assert own.tolist() == [0, 0, 0], "what was restored is used once"
