"""No two streams touch one memory unordered, and each wait that orders them is needed.

Ranks are CPU processes; `lq_testing.streams` makes the collectives believe that there are streams
and records what runs on them. FSDP2 has none on a CPU, so its gather and reduce streams are put
around the collectives here.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lq_testing import run_ranks
from lq_testing.fsdp2 import TLQ_HS, build
from lq_testing.models import TinyLM, batch
from lq_testing.streams import Recorder, Stream, on_own_stream, recorded_streams, replaced

from lq_lightning.data_parallel import WeightQuantization, install
from lq_lightning.data_parallel.all_gather import WeightDifferenceAllGather
from lq_lightning.data_parallel.communication import ExchangeSchedule
from lq_lightning.data_parallel.reduce_scatter import TwoLevelReduceScatter
from lq_lightning.data_parallel.replica import Replica, ReplicaMemory
from lq_lightning.data_parallel.unit import DeferredReductions
from lq_lightning.foundation.streams import StreamStage


def _copied_out_from(recorder: Recorder, read: Callable[..., Any]) -> Callable[..., Any]:
    """Let what FSDP2 copies from wait for the event that it gets, as it does on a GPU."""

    def wrapped(*args: Any) -> Any:
        found = read(*args)
        if found is not None:
            recorder.current.wait_event(found.written)
        return found

    return wrapped


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for what a mutant leaves out."""


# What each mutant leaves out; every one of them must be seen.
MUTANTS: dict[str, tuple[Any, str]] = {
    "an update waits for the exchanges": (ExchangeSchedule, "join"),
    "backward waits for deferred reductions": (DeferredReductions, "join"),
    "the second stage waits for the first": (Stream, "wait_stream"),
    "hand-overs are held until their stream has waited": (StreamStage, "join"),
    "readers wait for events": (Stream, "wait_event"),
}


def _without(mutant: str) -> contextlib.AbstractContextManager[None]:
    if not mutant:
        return contextlib.nullcontext()
    return replaced(*MUTANTS[mutant], _nothing)


def _train(
    model: TinyLM, optimizer: torch.optim.Optimizer, communication: Any, rank: int, steps: int
) -> None:
    for step in range(steps):
        for _ in range(2):  # the second result is added to the first
            model(batch(step, rank)).backward()
        optimizer.step()
        optimizer.step()  # before anything has read the last exchange
        optimizer.zero_grad()
    communication.check_replicas()
    model(batch(2, rank)).backward()  # all reductions are deferred, and the update reads them next
    communication.measure_errors = True
    optimizer.step()
    communication.errors()
    _fail_an_exchange(model, optimizer, communication)
    model(batch(0, rank))


def _fail_an_exchange(model: TinyLM, optimizer: torch.optim.Optimizer, communication: Any) -> None:
    """A user catches out of memory in the second unit's exchange, and writes to the weights."""
    original, count = WeightDifferenceAllGather.send_exchange, itertools.count()

    def fail(gather: WeightDifferenceAllGather, exchange: Any) -> Any:
        if next(count):
            raise MemoryError
        return original(gather, exchange)

    with replaced(WeightDifferenceAllGather, "send_exchange", fail), pytest.raises(MemoryError):
        optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    communication.invalidate()


def _races(rank: int, world: int, node_size: int, replica: str, mutant: str) -> list[str]:
    torch.manual_seed(0)
    held = [0]
    submit = StreamStage.submit

    def counting(stage: StreamStage, *args: Any) -> None:
        submit(stage, *args)
        held[0] = max(held[0], len(stage._held))

    with contextlib.ExitStack() as stack:
        recorder = stack.enter_context(recorded_streams())
        if node_size > 1:  # three exchanges, so that the first is let go of on the way; else two
            stack.enter_context(replaced(install, "MAX_BUCKET_NUMEL", 0))
        read = _copied_out_from(recorder, WeightDifferenceAllGather.read)
        stack.enter_context(replaced(WeightDifferenceAllGather, "read", read))
        weights = WeightQuantization(group_size=64, replica=replica)  # type: ignore[arg-type]
        built = build(weights=weights, gradients=TLQ_HS, node_size=node_size)
        model, optimizer, communication = built
        stack.enter_context(replaced(StreamStage, "submit", counting))
        for owner in (WeightDifferenceAllGather, TwoLevelReduceScatter):
            own = on_own_stream(recorder, owner.__call__)
            stack.enter_context(replaced(owner, "__call__", own))
        stack.enter_context(_without(mutant))
        _train(model, optimizer, communication, rank, 1 if mutant else 2)
        communication.join()
    assert held[0] == 2, "three reductions, of which two may be on their way"
    return [f"{race.kind}: {race.first} -> {race.second}" for race in recorder.races]


def _all_races(rank: int, world: int) -> dict[str, list[str]]:
    found = {}
    for node_size, replica in ((1, "full"), (2, "full"), (2, "node")):
        found[f"{node_size} {replica}"] = _races(rank, world, node_size, replica, "")
    for mutant in MUTANTS:
        found[mutant] = _races(rank, world, 1, "full", mutant)
    return found


def test_streams_are_ordered_and_every_wait_is_needed() -> None:
    for found in run_ranks(_all_races, 2):
        for name, races in found.items():
            assert bool(races) == (name in MUTANTS), (name, races[:5])


@pytest.mark.parametrize("restored", [False, True])
def test_what_a_replica_is_refreshed_from_outlives_its_use_on_the_stream_of_a_gather(
    restored: bool,
) -> None:
    with recorded_streams() as recorder:
        replica, gathering = Replica(ReplicaMemory(1), 0), recorder.new_stream()
        slot, saved = torch.ones(64), torch.zeros(64)
        gathering.wait_stream(recorder.current)
        if restored:
            replica.restore(saved)
        with recorder.on_stream(gathering):
            replica.begin_refresh(slot, 2, 0)
            replica.complete()
        del slot, saved  # nothing has waited for the gather
        torch.ones(64)
    assert not recorder.races


def test_shared_memory_of_replicas_is_used_after_the_point_where_it_was_allocated() -> None:
    with recorded_streams() as recorder:
        memory, streams = ReplicaMemory(2), [recorder.new_stream() for _ in range(2)]
        for index, stream in enumerate(streams):
            with recorder.on_stream(stream):
                before = torch.ones(8).sum()  # in memory that is handed out next
                memory.row(index, 8, before)
        first, second = streams
        assert second.clock[first.number] == first.clock[first.number] > 0


def test_replicas_that_were_written_together_are_read_after_that() -> None:
    with recorded_streams() as recorder:
        memory, writing = ReplicaMemory(2), recorder.new_stream()
        replicas = [Replica(memory, index) for index in range(2)]
        for replica in replicas:
            replica.begin_refresh(torch.ones(8), 2, 0)
            replica.complete()
        writing.wait_stream(recorder.current)
        assert memory.rows is not None
        with recorder.on_stream(writing):
            memory.rows.add_(1)
            replicas[0].complete()
            replicas[1].complete_with(replicas[0])
        values = replicas[1].fresh_values()
        assert values is not None
        values.sum()
    assert not recorder.races
