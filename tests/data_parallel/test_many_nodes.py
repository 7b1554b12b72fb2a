"""Messages of 32 nodes: each is what a call of its own would make, whatever shares a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lq_testing.fsdp2 import UnitReduction, pretend_ranks, shard
from torch import Tensor, nn

from lq_lightning.codecs import decode_reduce_encode, encode
from lq_lightning.data_parallel import (
    GradientQuantization,
    QuantizedCommunication,
    WeightQuantization,
    all_gather,
)
from lq_lightning.data_parallel.all_gather import MAX_GATHERED_PARTS

NODES = 32


def unit(rank: int, gpus: int, replica: Any = "full", nodes: int = NODES) -> QuantizedCommunication:
    """A linear layer with a bias on one rank of 32 nodes: one quantized run, one exact one."""
    pretend_ranks(nodes * gpus, rank)
    weights = WeightQuantization(group_size=64, replica=replica)
    gradients = GradientQuantization()
    return shard(nn.Linear(256, 128), node_size=gpus, weights=weights, gradients=gradients)


@pytest.mark.parametrize("node", [0, 13, NODES - 1])
def test_nodes_of_one_rank(node: int) -> None:
    reduction = UnitReduction(unit(node, 1))
    slots, layout = reduction.random_slots(), reduction.layouts.inter
    (index, run), *_ = layout.quantized
    messages = reduction.scatter.encode_for_nodes(slots.clone()[None], layout)[:, 0]
    others = [slots[other : other + 1] for other in range(NODES) if other != node]
    assert len(messages) == len(others) == NODES - 1
    spec = layout.spec_of(run)
    for message, slot in zip(messages, others, strict=True):
        expected = encode(spec, slot[:, run.start : run.stop])
        assert torch.equal(layout.part(message[None], index), expected)
        assert torch.equal(layout.exact(message[None]), layout.read_exact(slot))


@pytest.mark.parametrize("node", [0, 13, NODES - 1])
def test_nodes_of_two_ranks(node: int) -> None:
    reduction = UnitReduction(unit(2 * node + 1, 2))
    slots, (intra, inter) = reduction.random_slots(), reduction.layouts
    (index, run), *_ = intra.quantized
    levels = reduction.scatter
    within_of_units = levels.encode_for_node(slots.clone()[None], intra)
    within = within_of_units[:, 0]
    for local in range(2):
        for to in range(NODES):
            slot = slots[2 * to + local][None]
            expected = encode(intra.spec_of(run), slot[:, run.start : run.stop])
            assert torch.equal(intra.part(within[local, to][None], index), expected)
            assert torch.equal(intra.exact(within[local, to][None]), intra.read_exact(slot))
    between = levels.reduce_and_encode(within_of_units, reduction.layouts)[:, 0]
    others = [other for other in range(NODES) if other != node]
    for message, other in zip(between, others, strict=True):
        codes = intra.part(within[:, other : other + 1], index)
        expected = decode_reduce_encode(intra.spec_of(run), codes, run.numel, inter.spec_of(run))
        assert torch.equal(inter.part(message[None], index), expected)
        assert torch.equal(inter.exact(message), intra.exact(within[:, other]).sum(dim=0))


@pytest.mark.parametrize("nodes", [2, MAX_GATHERED_PARTS, NODES])
def test_shared_replica(monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    """Slots of many nodes reach their places in one piece."""
    gather: Any = unit(2, 2, replica="node", nodes=nodes)._units[0].gather
    slots = torch.arange(nodes * 2 * 6.0).view(nodes, 2, 6)  # rank ``l`` has ``[:, l]``
    pieces = []

    def gather_flat(output: Tensor, values: Tensor, group: Any) -> None:
        assert torch.equal(values, slots[:, 0].flatten())
        output.copy_(slots.transpose(0, 1).flatten())
        pieces.append(1)

    def all_gather_parts(outputs: Any, inputs: Any, group: Any) -> None:
        for node, (output, values) in enumerate(zip(outputs, inputs, strict=True)):
            assert torch.equal(values, slots[node, 0])
            output.copy_(slots[node].flatten())
        pieces.append(len(inputs))

    monkeypatch.setattr(all_gather, "all_gather_flat", gather_flat)
    monkeypatch.setattr(all_gather, "all_gather_parts", all_gather_parts)
    output = torch.zeros(slots.numel())
    gather._gather_node(output, slots[:, 0].flatten())
    assert torch.equal(output, slots.flatten())
    assert pieces == [nodes if nodes < NODES else 1]
