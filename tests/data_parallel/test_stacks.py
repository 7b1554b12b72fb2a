"""Units of one shape whose differences are exchanged together: as if each were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing.fsdp2 import pretend_ranks, shard
from torch import Tensor, nn

from lq_lightning.codecs import CodecSpec, encode
from lq_lightning.data_parallel import (
    GradientQuantization,
    QuantizedCommunication,
    WeightQuantization,
    all_gather,
    install,
)
from lq_lightning.data_parallel.all_gather import WeightDifferenceAllGather
from lq_lightning.data_parallel.replica import Replica, ReplicaMemory
from lq_lightning.data_parallel.unit import MessageLayout, Run

WIDTH = 64


class Block(nn.Module):
    """Two matrices and, between them, a vector that travels in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build(
    blocks: int, world: int = 2, frozen: int = 0, rounding: Any = "nearest", **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, QuantizedCommunication]:
    """Blocks of one shape, behind a root of another, on one of several ranks."""
    pretend_ranks(world, rank=world - 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Block() for _ in range(blocks)])
    model[1 : 1 + frozen].requires_grad_(False)
    weights = WeightQuantization(group_size=64, **options)
    gradients = GradientQuantization(rounding=rounding)
    communication = shard(model, model[1:], weights=weights, gradients=gradients)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    communication.register_optimizer(optimizer)
    return model, optimizer, communication


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of units of each exchange. Every rank sends what this one does."""
    counts: list[int] = []

    def gather(output: Tensor, input: Tensor, group: Any) -> None:
        output.view(group.size(), -1).copy_(input.clone())

    encode_slots = WeightDifferenceAllGather._encode

    def counted(self: Any, layout: Any, slots: Tensor, reference: Tensor) -> Tensor:
        counts.append(len(slots))
        return encode_slots(self, layout, slots, reference)

    monkeypatch.setattr(all_gather, "all_gather_flat", gather)
    monkeypatch.setattr(WeightDifferenceAllGather, "_encode", counted)
    send = WeightDifferenceAllGather.send_exchange

    def sent(self: Any, exchange: Any) -> Tensor:
        received = send(self, exchange)
        memory = {tensor.untyped_storage().data_ptr() for tensor in (received, exchange.messages)}
        assert len(memory) == 2, "each is held for a stream of its own"
        return received

    monkeypatch.setattr(WeightDifferenceAllGather, "send_exchange", sent)
    return counts


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Compute with the replicas, and change the main weights by noise."""
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    model.reshard()  # type: ignore[operator]
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            local: Any = parameter
            noise = torch.randn(local.to_local().shape, generator=generator)
            parameter.grad = type(local).from_local(noise, local.device_mesh, local.placements)
    optimizer.step()


def values(communication: QuantizedCommunication) -> list[Tensor]:
    return [unit.gather.replica.values.clone() for unit in communication._units]  # type: ignore[union-attr]


@pytest.mark.parametrize("replica", ["full", "node"])
def test_replicas_are_those_of_units_that_are_alone(
    monkeypatch: pytest.MonkeyPatch, exchanged: list[int], replica: str
) -> None:
    found = []
    for most in (0, install.MAX_BUCKET_NUMEL):
        monkeypatch.setattr(install, "MAX_BUCKET_NUMEL", most)
        model, optimizer, communication = build(3, replica=replica)
        for seed in range(3):
            step(model, optimizer, seed)
        found.append((values(communication), communication.traffic()))
        dist.destroy_process_group()
    (alone, sent_alone), (together, sent_together) = found
    assert exchanged == [1] * 12 + [1, 3] * 3
    assert all(map(torch.equal, alone, together))
    assert sent_alone == sent_together


def test_a_stack_falls_apart_where_units_differ_and_grows_together_again(
    exchanged: list[int],
) -> None:
    model, optimizer, communication = build(2)
    first, second = (unit.gather for unit in communication._units[1:])

    def exchanges(seed: int) -> list[int]:
        exchanged.clear()
        step(model, optimizer, seed)
        return exchanged[1:]  # after the root's

    assert exchanges(0) == [2]
    first.replica.invalidate()  # type: ignore[union-attr]
    optimizer.step()
    assert exchanged[3:] == [1], "the first waits for a refresh, the second is sent"
    assert exchanges(1) == [2]
    model[2].up.weight.requires_grad_(False)
    assert exchanges(3) == [1, 1]
    optimizer.param_groups[0]["params"] = list(model[1].parameters())
    assert exchanges(4) == []
    assert second.replica.values is not None  # type: ignore[union-attr]


def test_a_part_of_a_stack_is_not_taken_for_the_whole(exchanged: list[int]) -> None:
    model, optimizer, _ = build(3)
    step(model, optimizer, 0)
    optimizer.param_groups[0]["params"] = list(model[1:3].parameters())
    step(model, optimizer, 1)
    assert exchanged == [1, 3, 1, 1]


def test_assigned_data_that_was_noted_unchecked_is_still_refused() -> None:
    model, _, communication = build(1)
    watch = communication._units[1].gather._watch  # type: ignore[union-attr]
    weight: Any = model[1].up.weight

    def written() -> bool:
        with torch.no_grad():
            weight.add_(1)
        return watch.take()

    assert written()
    weight._local_tensor.data = weight._local_tensor.clone()
    watch.note()  # as when a checkpoint is loaded
    with pytest.raises(RuntimeError, match="`1.up.weight` was assigned"):
        written()


def test_units_that_turn_out_to_have_several_dtypes_are_not_stacked() -> None:
    for second, stacked in ((torch.float32, True), (torch.bfloat16, False)):
        memory = ReplicaMemory(2)
        replicas = [Replica(memory, index) for index in range(2)]
        for replica, dtype in zip(replicas, (torch.float32, second), strict=True):
            assert not memory.holds(replicas)
            replica.begin_refresh(torch.zeros(4, dtype=dtype), 2, 0)
            assert replica.own is not None
            assert replica.own.dtype == dtype
        assert memory.holds(replicas) == stacked


def test_which_units_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def stacks(**options: Any) -> list[int]:
        _, _, communication = build(5, **options)
        gathers: list[Any] = [unit.gather for unit in communication._units]
        dist.destroy_process_group()
        return [len([g for g in gathers if g.memory is m]) for m in {g.memory: 0 for g in gathers}]

    assert stacks() == [1, 5]
    assert stacks(frozen=2) == [1, 2, 3]
    monkeypatch.setattr(install, "MAX_BUCKET_NUMEL", 2 * 8 * WIDTH**2 + 2 * 4 * WIDTH)
    assert stacks() == [1, 2, 2, 1]


@pytest.mark.parametrize(("rounding", "shared"), [("nearest", 2), ("stochastic", 0)])
def test_units_with_noise_of_their_own_are_reduced_alone(rounding: str, shared: int) -> None:
    _, _, communication = build(2, rounding=rounding)
    scatters: list[Any] = [unit.scatter for unit in communication._units]
    assert sum(scatter.bucket is not None for scatter in scatters) == shared


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.ones(16, 16), torch.ones(256)),
        (torch.ones(5, 16), torch.ones(6, 16)),
        (torch.ones(6, 16), torch.ones(6, 16, dtype=torch.bfloat16)),
    ],
)
def test_units_of_other_shapes_and_dtypes_that_are_sharded_alike_are_not_stacked(
    first: Tensor, second: Tensor
) -> None:
    pretend_ranks(2)
    model = nn.Module()
    model.units = nn.ModuleList(nn.ParameterList([unit]) for unit in (first, second))
    communication = shard(model, model.units, weights=WeightQuantization())
    gathers: list[Any] = [unit.gather for unit in communication._units]
    assert gathers[0].memory is not gathers[1].memory


@pytest.mark.parametrize(
    ("times", "dtype", "ranks", "kept"),
    [
        (1, torch.float32, [0, 1], True),
        (1, torch.float32, [1], False),  # as of `reshard_after_forward=1`
        (2, torch.float32, [0, 1], False),  # as of `fsdp_pre_all_gather`
        (4, torch.uint8, [0, 1], True),  # as of several dtypes
        (1, torch.uint8, [0, 1], False),
    ],
)
def test_only_gathers_of_the_shards_of_all_ranks_make_replicas(
    exchanged: list[int], times: int, dtype: torch.dtype, ranks: list[int], kept: bool
) -> None:
    _, _, communication = build(1)
    gather: Any = communication._units[1].gather
    numel = times * sum(p.padded_shard_numel for p in gather.unit.params())
    slot, output = torch.arange(numel).to(dtype), torch.zeros(len(ranks) * numel, dtype=dtype)
    gather(output, slot, dist.new_group(ranks))
    assert torch.equal(output, slot.repeat(len(ranks)))
    assert (gather.replica.values is not None) == kept


@pytest.mark.parametrize(("local", "nodes", "units"), [(1, 3, 4), (2, 1, 3), (2, 3, 4), (3, 2, 1)])
def test_messages_of_all_units_nodes_and_ranks(local: int, nodes: int, units: int) -> None:
    spec = CodecSpec(code="int4", group_size=64)
    gap = Run(100, 5, False)
    layout = MessageLayout([Run(0, 300, True, (gap,)), Run(300, 7, False)], [spec], torch.float32)
    values = torch.randn(local, units, nodes, 307)
    messages = layout.allocate(local, units, nodes, device=values.device)
    slots = torch.randn(units, nodes * local, 307)
    expected = slots.clone()
    for rank, unit, node in torch.cartesian_prod(*map(torch.arange, (local, units, nodes))):
        message, value = messages[rank, unit, node], values[rank, unit, node]
        target = expected[unit, node * local + rank]
        layout.exact_to_messages(value, message)
        encode(spec, value[None, :300], out=layout.part(message[None], 0))
        one = message[None, None, None]
        WeightDifferenceAllGather._decode(layout, one, target[None, None])
        assert torch.equal(target[300:], layout.exact(message)[5:])
    WeightDifferenceAllGather._decode(layout, messages, slots)
    assert torch.equal(slots, expected)
