"""Replicas of the weights: states, when they are fresh, what makes them stale, on gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing.cases import on_both, on_ranks, rank_tests
from lq_testing.fsdp2 import (
    BF16,
    QWD,
    QWD8,
    TLQ_HS,
    build,
    replicas,
    same_on_all_ranks,
    tokens,
    train,
)
from lq_testing.models import LoRABlock, TinyLM
from torch import Tensor

from lq_lightning.data_parallel import WeightQuantization, unit
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
    assert (replica.state, replica.slot, replica.fresh_values()) == (Freshness.STALE, None, None)
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


def _named(model: TinyLM) -> dict[str, Tensor]:
    """What this rank computes with, by name."""
    return dict(zip(dict(model.named_parameters()), replicas(model), strict=True))


def _config(replica: str) -> WeightQuantization:
    return WeightQuantization(group_size=64, replica=replica)  # type: ignore[arg-type]


# --- writes by something other than an optimizer step -------------------------------------------


def _outside_writes(rank: int, world: int, replica: str) -> None:
    model, optimizer, communication = build(weights=_config(replica))
    train(model, optimizer, 2)

    def assert_exact(expected_new_writes: bool) -> None:
        writes = sum(communication.external_weight_updates.values())
        for parameter, value in zip(model.parameters(), replicas(model), strict=True):
            assert torch.equal(parameter.full_tensor(), value)
        assert (sum(communication.external_weight_updates.values()) > writes) == expected_new_writes

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert_exact(True)
    train(model, optimizer, 1)
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    train(model, optimizer, 2)
    model.load_state_dict(saved)
    assert_exact(True)
    train(model, optimizer, 1)
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.to_local().add_(1)
    assert communication.replica_state_dict() == {}, "a checkpoint must not hold it either"
    assert_exact(False)
    train(model, optimizer, 1)
    for parameter in model.parameters():  # seen by no counter
        parameter.data.mul_(0.5)
    communication.invalidate()
    assert_exact(False)
    train(model, optimizer, 1)
    assert same_on_all_ranks(replicas(model))


def _write_of_one_rank(rank: int, world: int, replica: str, node_size: int) -> None:
    """Rank 1 alone writes to its shard of a block: never a deadlock, and all ranks follow."""
    model, optimizer, communication = build(weights=_config(replica), node_size=node_size)
    train(model, optimizer, 2)
    name = "blocks.1.up.weight"
    shard = dict(model.named_parameters())[name]

    def write() -> None:
        if rank == world - 1:
            with torch.no_grad():
                shard.to_local().add_(1)

    def arrived() -> bool:
        whole = shard.full_tensor()
        return torch.equal(_named(model)[name], whole)

    def evaluate() -> Tensor:
        with torch.no_grad():
            return model(tokens(9))

    # in validation: late by one forward pass
    stale, _ = evaluate(), write()
    assert torch.equal(evaluate(), stale)
    assert not torch.equal(evaluate(), stale)
    assert arrived()
    assert communication.external_weight_updates == {"blocks.1": 1}
    # between forward and backward, and between micro-batches
    loss = model(tokens(3))
    write()
    loss.backward()
    model(tokens(4)).backward()
    write()
    model(tokens(5)).backward()
    optimizer.step()
    optimizer.zero_grad()
    write()
    train(model, optimizer, 1)
    evaluate()
    assert arrived()
    # at once, if every rank says so
    write()
    communication.invalidate()
    assert arrived()
    # at a checkpoint, which has no pass after it
    write()
    evaluate()
    saved = communication.replica_state_dict()
    assert ("head.weight" in saved, name in saved) == (True, False)
    assert arrived()
    train(model, optimizer, 2)
    assert same_on_all_ranks(replicas(model))
    assert communication.check_replicas() == []
    counted = sum(communication.external_weight_updates.values())
    assert same_on_all_ranks([torch.tensor([counted], device=shard.device)])
    if rank == 0:  # a replica that one rank cannot use is saved by none
        communication.invalidate()
    assert communication.replica_state_dict() == {}
    assert arrived()


def _frozen_writes_before_a_step(rank: int, world: int) -> None:
    """As of a teacher that follows the student between backward and the optimizer step."""

    def freeze(model: TinyLM) -> None:
        model.blocks[0].up.weight.requires_grad_(False)

    model, optimizer, communication = build(weights=QWD, node_size=1, prepare=freeze)
    train(model, optimizer, 2)
    assert communication.external_weight_updates == {}
    weight = model.blocks[0].up.weight
    for count, writers in enumerate([(0, 1), (1,)], 1):
        model(tokens(2)).backward()
        if rank in writers:
            with torch.no_grad():
                weight.to_local().mul_(0.5)
        for _ in range(count):  # the second time two optimizers step, say
            optimizer.step()
        optimizer.zero_grad()
        for _ in range(len(writers) % 2 + 1):  # of one rank alone: a pass later
            model(tokens(3)).backward()
        optimizer.zero_grad()
        assert communication.external_weight_updates == {"blocks.0": count}
        whole = weight.full_tensor()
        assert torch.equal(_named(model)["blocks.0.up.weight"], whole), "it did not arrive"


def _assigned(rank: int, world: int) -> None:
    model, optimizer, _ = build(weights=QWD)
    train(model, optimizer, 1)
    weight = model.blocks[0].up.weight
    model.to(torch.float64).to(torch.float32)  # assigns `.data`, too, and tells FSDP2
    train(model, optimizer, 1)
    refused = pytest.raises(RuntimeError, match=r"`blocks\.0\.up\.weight` was.*copy_\(value\)")
    weight.data = weight.data + 1
    with refused:
        model(tokens(0))
    model(tokens(0)).backward()
    weight.data = weight.data + 1
    with refused:
        optimizer.step()
    train(model, optimizer, 1)
    local = weight._local_tensor
    local.data = local.data + 1
    with refused:
        model(tokens(0))


def _uneven(rank: int, world: int) -> None:
    model, optimizer, _ = build(weights=QWD)
    train(model, optimizer, 1)
    if rank == 0:  # as with one more batch to validate on
        with torch.no_grad():
            model(tokens(0))
    with pytest.raises(RuntimeError, match="equally many batches" if rank == 0 else "."):
        train(model, optimizer, 4)  # the rank that is behind may lose the connection first


# --- frozen weights -------------------------------------------------------------------------------


def _frozen(rank: int, world: int, node_size: int) -> None:
    """Optimizers get all parameters here, as users give them."""

    def freeze_block(model: TinyLM) -> None:
        model.blocks[0].requires_grad_(False)

    def freeze_all_but_one(model: TinyLM) -> None:
        model.requires_grad_(False)
        model.tiny.requires_grad_(True)

    for prepare, options, trained in (
        (freeze_block, {}, 2),
        (freeze_all_but_one, {}, 1),
        (None, {"block": LoRABlock}, 3),
    ):
        model, optimizer, communication = build(
            weights=QWD, gradients=TLQ_HS, node_size=node_size, prepare=prepare, **options
        )
        train(model, optimizer, 2)
        assert communication.traffic().exchanges == 2 * trained, "a frozen unit was exchanged"
        assert communication.external_weight_updates == {}
        assert communication.check_replicas(on_drift="raise") == []
    model, optimizer, communication = build(weights=QWD8, gradients=TLQ_HS, node_size=node_size)
    train(model, optimizer, 2)
    model.blocks[1].requires_grad_(False)
    before = communication.traffic()
    train(model, optimizer, 2)
    assert communication.traffic().since(before).exchanges == 2 * 2
    frozen = model.blocks[1].up.weight.full_tensor()
    model.blocks[1].requires_grad_(True)
    train(model, optimizer, 2)
    assert not torch.equal(model.blocks[1].up.weight.full_tensor(), frozen)
    for parameter, value in zip(model.parameters(), replicas(model), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), value, atol=2e-3, rtol=0)
    assert communication.external_weight_updates == {}


# --- inference mode -------------------------------------------------------------------------------


def _inference_before_training(rank: int, world: int, replica: str) -> None:
    expected = train(*build(weights=_config(replica), gradients=TLQ_HS)[:2], 3)
    model, optimizer, communication = build(weights=_config(replica), gradients=TLQ_HS)
    with torch.inference_mode():
        first = model(tokens(0))
    assert first.is_inference()
    assert train(model, optimizer, 3) == expected
    with torch.inference_mode():
        model(tokens(0))
    with torch.no_grad():
        model(tokens(0))
    train(model, optimizer, 1)
    assert communication.external_weight_updates == {}
    with torch.inference_mode():  # the model too, as `trainer.test` of a user's own block makes it
        model, _, _ = build(weights=_config(replica))
        tested = model(tokens(0))
    with torch.no_grad():
        assert torch.equal(model(tokens(0)), tested)


# --- errors and drift -----------------------------------------------------------------------------


def _failed_exchange(rank: int, world: int, replica: str) -> None:
    """Every rank runs out of memory in the second unit, catches that and goes on."""
    model, optimizer, communication = build(weights=_config(replica), node_size=1)
    train(model, optimizer, 1)
    encode, calls = unit.encode, []

    def fail(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        return encode(*args, **kwargs)

    model(tokens(1)).backward()
    unit.encode = fail
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    unit.encode = encode
    optimizer.zero_grad()
    saved = communication.replica_state_dict()
    assert "head.weight" in saved
    assert not any("blocks" in name for name in saved), "half an exchange was saved"
    for name, value in _named(model).items():
        if "blocks" in name:
            assert torch.equal(dict(model.named_parameters())[name].full_tensor(), value), name
    train(model, optimizer, 1)
    assert same_on_all_ranks(replicas(model))


def _corrupt(gather: Any, amount: float) -> None:
    """Change one quantized element of another node's part of this rank's replica."""
    run = next(r for r in gather._layout.runs if r.quantized)
    slots = gather.replica.values.view(2, -1)
    slots[1 - dist.get_rank()][run.start] += amount


def _drift(rank: int, world: int, replica: str) -> None:
    model, optimizer, communication = build(weights=_config(replica), node_size=1)
    assert communication.check_replicas() == []
    train(model, optimizer, 2)
    assert communication.check_replicas() == []
    gather = [u.gather for u in communication._units][1]
    if rank == 1:
        _corrupt(gather, 0.25)
    assert communication.check_replicas() == [gather.unit.name]
    train(model, optimizer, 1)
    assert communication.check_replicas() == []
    if rank == 0:
        _corrupt(gather, 1e-3)
    with pytest.raises(RuntimeError, match=rf"differ between ranks.*`{gather.unit.name}`"):
        communication.check_replicas(on_drift="raise")
    with pytest.raises(ValueError, match="on_drift='ignore'"):
        communication.check_replicas(on_drift="ignore")  # type: ignore[arg-type]


def _replica_is_the_only_copy(rank: int, world: int) -> None:
    model, optimizer, communication = build(weights=QWD, policy=BF16)
    train(model, optimizer, 2)
    numel, memory = 0, {}
    for gather in communication._difference_gathers():
        replica = gather.replica.values
        numel += world * sum(p.padded_shard_numel for p in gather.unit.params())
        storage = replica.untyped_storage()
        memory[storage.data_ptr()] = storage.nbytes()
        values = [*vars(gather).values(), *vars(gather.replica).values()]
        held = {v.untyped_storage().data_ptr() for v in values if isinstance(v, Tensor)}
        assert held == {replica.untyped_storage().data_ptr()}
        before = replica.clone()
        replicas(model)  # FSDP2 writes main weights into the output of each gather
        assert torch.equal(replica, before)
    assert sum(memory.values()) == 2 * numel


test_on_ranks = rank_tests(
    on_both(_outside_writes, 2, "full"),
    on_ranks(_outside_writes, 2, "node"),
    on_both(_write_of_one_rank, 2, "full", 1, timeout=60),
    on_both(_write_of_one_rank, 2, "node", 1, timeout=60),
    on_ranks(_write_of_one_rank, 4, "node", 2, timeout=60),
    on_both(_frozen_writes_before_a_step, 2, timeout=60),
    on_both(_assigned, 2),
    on_ranks(_uneven, 2, timeout=60),
    on_both(_frozen, 2, 1),
    on_ranks(_frozen, 2, 2),
    on_both(_inference_before_training, 2, "full"),
    on_both(_inference_before_training, 2, "node"),
    on_both(_failed_exchange, 2, "full"),
    on_both(_failed_exchange, 2, "node"),
    on_ranks(_drift, 2, "full"),
    on_both(_drift, 2, "node"),
    on_both(_replica_is_the_only_copy, 2),
)
