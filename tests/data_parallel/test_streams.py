"""No two streams touch one memory unordered, and each wait that orders them is needed.

Ranks are CPU processes; `lq_testing.streams` makes the collectives believe that there are streams
and records what runs on them. FSDP2 has none on a CPU, so its gather and reduce streams are put
around the collectives here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lq_testing import run_ranks
from lq_testing.models import TinyLM, batch
from lq_testing.streams import Recorder, Stream, recorded_streams
from torch.distributed.fsdp import fully_shard

from lq_lightning.data_parallel import (
    GradientQuantization,
    Topology,
    WeightQuantization,
    quantize_communication,
)
from lq_lightning.data_parallel.exchange import ExchangeSchedule
from lq_lightning.data_parallel.reduce_scatter import TwoLevelReduceScatter
from lq_lightning.data_parallel.unit import DeferredReductions
from lq_lightning.data_parallel.weight_difference import WeightDifferenceAllGather
from lq_lightning.foundation.streams import SecondStage


def _on_own_stream(recorder: Recorder, call: Callable[..., Any]) -> Callable[..., Any]:
    """Run a collective as FSDP2 does: on a stream that waits for backward, which waits for it."""
    own = recorder.new_stream()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        caller = recorder.current
        own.wait_stream(caller)
        with recorder.on_stream(own):
            result = call(*args, **kwargs)
        caller.wait_event(own.record_event())
        return result

    return wrapped


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for what a mutant leaves out."""


# What each mutant leaves out; every one of them must be seen.
MUTANTS: dict[str, tuple[Any, str]] = {
    "an update waits for the exchanges": (ExchangeSchedule, "join"),
    "backward waits for deferred reductions": (DeferredReductions, "join"),
    "the second stage waits for the first": (Stream, "wait_stream"),
    "hand-overs are held until their stream has waited": (SecondStage, "join"),
    "readers wait for events": (Stream, "wait_event"),
}


@contextlib.contextmanager
def _without(mutant: str) -> Iterator[None]:
    if not mutant:
        yield
        return
    owner, name = MUTANTS[mutant]
    original = getattr(owner, name)
    setattr(owner, name, _nothing)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _races(rank: int, world: int, node_size: int, replica: str, mutant: str) -> list[str]:
    torch.manual_seed(0)
    with recorded_streams() as recorder:
        model = TinyLM()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        communication = quantize_communication(
            model,
            weights=WeightQuantization(group_size=64, replica=replica),  # type: ignore[arg-type]
            gradients=GradientQuantization(),
            topology=Topology(world_size=world, rank=rank, node_size=node_size),
            min_quantized_numel=256,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        communication.register_optimizer(optimizer)
        gather, reduce = WeightDifferenceAllGather.__call__, TwoLevelReduceScatter.__call__
        WeightDifferenceAllGather.__call__ = _on_own_stream(recorder, gather)  # type: ignore[method-assign]
        TwoLevelReduceScatter.__call__ = _on_own_stream(recorder, reduce)  # type: ignore[method-assign]
        try:
            with _without(mutant):
                for step in range(2):
                    for _ in range(2):  # the second result is added to the first
                        model(batch(step, rank)).backward()
                    optimizer.step()
                    optimizer.step()  # before anything has read the last exchange
                    optimizer.zero_grad()
                communication.check_replicas()
                model(batch(0, rank))
        finally:
            WeightDifferenceAllGather.__call__ = gather  # type: ignore[method-assign]
            TwoLevelReduceScatter.__call__ = reduce  # type: ignore[method-assign]
        communication.join()
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


@pytest.mark.parametrize("drop", [False, True])
def test_few_hand_overs_are_held(drop: bool) -> None:
    with recorded_streams(), _without_make_room(drop):
        stage = SecondStage(depth=2)
        held = []
        for _ in range(5):
            stage.make_room()
            stage.submit(torch.ones(2), lambda: None)
            held.append(len(stage._held))
    assert (max(held) <= 2) != drop


@contextlib.contextmanager
def _without_make_room(drop: bool) -> Iterator[None]:
    original = SecondStage.make_room
    if drop:
        SecondStage.make_room = _nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        SecondStage.make_room = original  # type: ignore[method-assign]
