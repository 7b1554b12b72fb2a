"""The states of a replica, and its checksum."""

from __future__ import annotations

import pytest
import torch

from lq_lightning.data_parallel.replica import Freshness, Replica, checksum


def _refreshed() -> Replica:
    replica = Replica()
    values, own = replica.begin_refresh(torch.arange(3.0), 2, 1)
    assert own.tolist() == values[3:].tolist() == [0, 1, 2]
    replica.complete()
    return replica


def test_a_replica_is_fresh_only_when_everything_was_written() -> None:
    replica = Replica()
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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [1, 7, (1 << 16) + 3])
def test_checksum_sees_one_changed_element(dtype: torch.dtype, numel: int) -> None:
    values = (torch.arange(numel) % 100).to(dtype)
    before = checksum(values)
    assert torch.equal(before, checksum(values.clone()))
    values[numel // 2] += 1
    assert not torch.equal(before, checksum(values))


def test_checksum_sees_equal_elements_that_change_alike() -> None:
    assert not torch.equal(checksum(torch.ones(1024)), checksum(torch.full((1024,), 2.0)))
