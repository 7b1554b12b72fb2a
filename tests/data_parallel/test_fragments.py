"""Fragments that travel while nodes train alone, against the same rule in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.fsdp2 import same_on_all_ranks
from lq_testing.local_steps import LR, MOMENTUM, SHAPES, Nodes, first_weights, move_of
from lq_testing.streams import recorded_streams, replaced
from torch import Tensor, nn

from lq_lightning._compat.tensors import to_sharded_dtensor
from lq_lightning.codecs import CodecSpec, decode, encode
from lq_lightning.data_parallel import LocalSteps
from lq_lightning.data_parallel.local_steps import deal_out
from lq_lightning.foundation.streams import StreamStage

# By their sizes: the largest parameter first, each to the smaller fragment.
FRAGMENTS = {1: dict.fromkeys(SHAPES, 0), 2: {"uneven": 0, "tall": 1, "vector": 1}}
EIGHT = CodecSpec(code="int8", group_size=128)
FRAGMENTS[3] = {"uneven": 0, "tall": 1, "vector": 2}


class Simulated:
    """One parameter of all nodes, whole, in one process."""

    def __init__(self, name: str, nodes: int, config: LocalSteps) -> None:
        self.name, self.config, self.steps = name, config, 0
        self.anchor = first_weights(name)
        self.velocity = torch.zeros_like(self.anchor)
        self.weights = [self.anchor.clone() for _ in range(nodes)]
        self.errors = [torch.zeros_like(self.anchor) for _ in range(nodes)]
        self.flight: tuple[int, list[Tensor], Tensor] | None = None
        self.trained = False  # since it was sent

    def step(self, step: int) -> None:
        self.steps, self.trained = self.steps + 1, True
        self.weights = [w + move_of(self.name, step, n) for n, w in enumerate(self.weights)]
        every, count, delay = self.config.every, self.config.fragments, self.config.delay
        if self.flight is not None and self.flight[0] == self.steps:
            self.land()
        due = every * (FRAGMENTS[count][self.name] + 1) // count
        if (self.steps - due) % every == 0:
            self.send(self.steps + delay)
            if delay == 0:
                self.land()

    def send(self, landing: int) -> None:
        codec, moved = self.config.codec(), [self.anchor - w for w in self.weights]
        if codec is not None and len(SHAPES[self.name]) > 1:
            moved = [d + e for d, e in zip(moved, self.errors, strict=True)]
            sent = [_coded(d, codec) for d in moved]
            if self.config.error_feedback:
                self.errors = [_coded(d - s, EIGHT) for d, s in zip(moved, sent, strict=True)]
            moved = sent
        mean = torch.stack([d / len(moved) for d in moved]).sum(dim=0)
        self.flight = (landing, [w.clone() for w in self.weights], mean)
        self.trained = False

    def land(self) -> None:
        assert self.flight is not None
        _, sent, mean = self.flight
        self.flight = None
        self.velocity.mul_(MOMENTUM).add_(mean)
        self.anchor = self.anchor.sub(mean.add(self.velocity, alpha=MOMENTUM), alpha=LR)
        self.weights = [w - s + self.anchor for w, s in zip(self.weights, sent, strict=True)]

    def meet(self) -> None:
        if self.flight is not None:
            self.land()
        if self.trained:
            self.send(0)
            self.land()
        self.steps = 0


def _coded(whole: Tensor, codec: CodecSpec) -> Tensor:
    shards = []
    for shard in whole.chunk(2):
        message = encode(codec, shard.reshape(1, -1))
        shards.append(decode(codec, message, shard.numel()).view(shard.shape))
    return torch.cat(shards)


def _anchors(nodes: Nodes) -> list[Tensor]:
    """Whole anchors, in the order of names."""
    named = sorted(nodes.model.items())
    kept = [(p, nodes.outer.kept(p)) for _, p in named]
    return [to_sharded_dtensor(k[0].view(-1), p).full_tensor() for p, k in kept if k]


def _distances(nodes: Nodes, expected: dict[str, Simulated]) -> list[float]:
    """How far weights are from the expected ones, as a share of their way from the start."""
    found = []
    for name, value in nodes.weights().items():
        right = expected[name].weights[nodes.node]
        found.append(float((value - right).norm() / (right - first_weights(name)).norm()))
    return found


# --- on each rank -------------------------------------------------------------------------------


def _follows_the_rule() -> None:
    """Bit for bit in fp32; with codes, sums in another order change a code now and then."""
    cases: list[dict[str, Any]] = [
        {"every": 4, "fragments": 2, "delay": 2},
        {"every": 3, "fragments": 1, "delay": 3},
        {"every": 5, "fragments": 3},
        {"every": 4, "fragments": 2, "delay": 2, "bits": 4, "error_feedback": True},
        {"every": 2, "bits": 4, "error_feedback": True},
    ]
    for options in cases:
        nodes = Nodes(2, options.pop("bits", None), **options)
        expected = {name: Simulated(name, 2, nodes.config) for name in SHAPES}
        for step in range(11):
            nodes.step(step)
            for one in expected.values():
                one.step(step)
        assert same_on_all_ranks(_anchors(nodes))
        largest = 0.0 if nodes.config.bits is None else 0.05
        assert max(_distances(nodes, expected)) <= largest
        nodes.outer.outer_step()
        for one in expected.values():
            one.meet()
        assert nodes.are_alike()
        assert max(_distances(nodes, expected)) <= largest


def _feeds_errors_back() -> None:
    """After many messages of 2 bits no more is missing than the last ones have lost."""
    for count in (2, 4):
        missing = {}
        for feedback in (False, True):
            plain = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
            nodes = Nodes(count, 2, error_feedback=feedback, **plain)
            for _ in range(12):
                nodes.step(0)
            moved = [move_of("uneven", 0, n) for n in range(count)]
            mean = 12 * torch.stack(moved).mean(dim=0)
            lost = first_weights("uneven") + mean - nodes.weights()["uneven"]
            missing[feedback] = float(lost.norm() / mean.norm())
        assert missing[True] < 0.3 < 0.45 < missing[False], missing


def _resumes_within_a_flight() -> None:
    """Saving ends the flight; a loaded state goes on as the run that saved it."""
    for count, dtype in ((2, torch.float32), (4, torch.bfloat16)):
        options = {"every": 4, "fragments": 2, "delay": 2, "error_feedback": True}
        nodes = Nodes(count, 2, dtype, **options)
        for step in range(7):
            nodes.step(step)
        assert nodes.outer._flight is not None
        with pytest.raises(RuntimeError, match="7 steps alone"):
            nodes.outer.state()
        nodes.outer.outer_step()
        state = nodes.outer.state()
        saved = {kind: {n: t.clone() for n, t in found.items()} for kind, found in state.items()}
        weights = nodes.local_weights()
        found = []
        for resumed in (False, True):
            if resumed:
                nodes.start_again(weights)
                nodes.outer.load_state(saved)
            for step in range(7, 14):
                nodes.step(step)
            assert nodes.outer._flight is not None
            found.append(nodes.weights())
        assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def _leaves_frozen_ones_alone() -> None:
    nodes = Nodes(2, 4, frozen="tall", every=4, fragments=2, delay=2)
    for step in range(9):
        if step == 5:  # while its fragment is under way
            nodes.model["uneven"].requires_grad_(False).grad = None
        nodes.step(step)
    assert torch.equal(nodes.weights()["tall"], first_weights("tall"))
    before = nodes.weights()["uneven"]
    for step in range(9, 16):
        nodes.step(step)
    assert torch.equal(nodes.weights()["uneven"], before)
    for name in ("tall", "uneven"):  # one for the first time, one again
        nodes.model[name].requires_grad_(True)
    for step in range(16, 27):
        nodes.step(step)
    assert same_on_all_ranks(_anchors(nodes))
    nodes.outer.outer_step()
    assert nodes.are_alike()
    assert not torch.equal(nodes.weights()["uneven"], before)


def _errors_arrive_everywhere() -> None:
    """Before anything of the fragment is merged, and where that would be."""
    rank, node, options = dist.get_rank(), dist.get_rank() // 2, {"every": 4, "delay": 2}

    def flying(step: int) -> Nodes:
        nodes = Nodes(2, 4, **options)
        for number in range(step):
            nodes.step(number)
        return nodes

    nodes = flying(3)
    if rank == 3:
        with torch.no_grad():
            nodes.model["tall"].to_local()[0, 0] = float("nan")
    for step in (3, 4):
        nodes.step(step)
    anchors = _anchors(nodes)
    with pytest.raises(RuntimeError, match="node 1 are not finite any more after 4 steps"):
        nodes.step(5)
    assert all(torch.equal(a, b) for a, b in zip(anchors, _anchors(nodes), strict=True))

    nodes = flying(4)
    nodes.model["tall"].requires_grad_(node == 0)
    for step in range(4, 9):
        nodes.step(step)
    with pytest.raises(ValueError, match="`tall` is trained .* on rank 0 and missing on rank 2"):
        nodes.step(9)


def _waits_on_streams() -> None:
    """Nothing is read before it has arrived, and every wait is needed."""
    for count, mutant in ((2, True), (4, False)):
        with recorded_streams() as recorder:
            nodes = Nodes(count, 4, every=4, fragments=2, delay=2, error_feedback=True)
            for step in range(3 if mutant else 7):
                nodes.step(step)
            if mutant:
                with replaced(StreamStage, "join", lambda stage: None):
                    nodes.step(3)  # where a fragment is merged
        assert bool(recorder.races) == mutant


def _all(rank: int, world_size: int) -> None:
    for check in (
        _follows_the_rule,
        _feeds_errors_back,
        _resumes_within_a_flight,
        _leaves_frozen_ones_alone,
        _waits_on_streams,
        _errors_arrive_everywhere,
    ):
        check()


def test_fragments_travel_while_nodes_train() -> None:
    run_ranks(_all, 4)


# --- without other ranks ------------------------------------------------------------------------


def test_blocks_are_strided_over_the_depth() -> None:
    sizes = {"embed": 4, **{f"blocks.{index}": 1 for index in range(12)}, "head": 4}
    names = {
        nn.Parameter(torch.zeros(size, 3)): f"{unit}.{part}"
        for unit, size in sizes.items()
        for part in ("weight", "bias")
    }
    found = deal_out(names, ["blocks.1", *sizes], 4)
    units = [sorted({names[p].rpartition(".")[0] for p in part}) for part in found]
    assert [sum(sizes[unit] for unit in part) for part in units] == [5, 5, 5, 5]
    assert units[2] == [f"blocks.{index}" for index in (0, 10, 2, 4, 6)]
    with pytest.raises(
        ValueError, match=r"fragments=15\)` is not supported: the model has 14 unit"
    ):
        deal_out(names, sizes, 15)
