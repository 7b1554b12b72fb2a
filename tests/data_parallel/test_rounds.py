"""Tensors of rounds, against DiLoCo's outer step written out; each rank is a node of its own."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.local_steps import LR, MOMENTUM, SHAPES, first_weights, move_of
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore

from lq_lightning.codecs import CodecSpec, decode, encode
from lq_lightning.data_parallel.config import LocalSteps
from lq_lightning.data_parallel.meeting import Member, Round
from lq_lightning.data_parallel.node_mean import ERRORS
from lq_lightning.data_parallel.patient_store import PatientStore, keep_meeting_point
from lq_lightning.data_parallel.rounds import Arrived, LostNodeError, RoundOptimizer

WORLD = 3


class Node:
    """A model on one rank, whose steps add what they are told to."""

    def __init__(
        self, place: str, bits: int | None, dtype: torch.dtype = torch.float32, **options: bool
    ) -> None:
        self.rank, self.place, self.dtype = dist.get_rank(), Path(place), dtype
        self.model = nn.ParameterDict(
            {n: nn.Parameter(first_weights(n).to(dtype)) for n in sorted(SHAPES)}
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.config = LocalSteps(
            outer_lr=LR, outer_momentum=MOMENTUM, bits=bits, meet_at="127.0.0.1:1", **options
        )
        groups = [dist.new_group([rank]) for rank in range(WORLD)]
        self.place.mkdir(exist_ok=True)
        self.outer = RoundOptimizer(
            self.config,
            groups[self.rank],
            self.connect,
            "127.0.0.1",
            names={p: n for n, p in self.model.items()},
            min_quantized_numel=64,
            device=torch.device("cpu"),
        )
        self.outer.begin_step(self.optimizer)
        self.outer.is_open = False

    def connect(self) -> dist.Store:
        """Connect to the meeting point, where each test has its own names."""
        store = PatientStore(os.environ["MEET_AT"], 5).connect()
        return PrefixStore(f"{self.place}-{self.config}-{self.dtype}", store)

    def step(self, step: int) -> None:
        """A step of this node."""
        with torch.no_grad():
            for name, parameter in self.model.items():
                parameter.add_(move_of(name, step, self.rank).to(parameter.dtype))
        self.outer.steps += 1

    def file(self, number: int, rank: int) -> Path:
        """Where a node keeps its messages."""
        return self.place / f"round-{number}-{rank}"

    def exchange(self, present: Sequence[int], attempt: int = 0, wait: float = 20) -> Arrived:
        """Send and receive the next round."""
        counts: list[int] = [0] * WORLD
        dist.all_gather_object(counts, self.outer.steps)
        return self.send(present, counts, attempt, wait)

    def send(
        self, present: Sequence[int], steps: Sequence[int], attempt: int = 0, wait: float = 20
    ) -> Arrived:
        """Send and receive if this node is present."""
        members = tuple(Member(r, str(r), 0, steps[r]) for r in present)
        taken = Round(self.outer.number + 1, attempt, members, 0.0)
        return self.outer.send_and_receive(taken, str(self.rank), timedelta(seconds=wait))

    def round(self, *present: int) -> None:
        """Take part in a round of these nodes, or follow it."""
        number, counts = self.outer.number + 1, [0] * WORLD
        dist.all_gather_object(counts, self.outer.steps)
        if self.rank in present:
            arrived, file = self.send(present, counts), self.file(number, self.rank)
            self.outer.write(arrived, file)
            dist.barrier()
            assert {*self.outer.take(arrived, file)} == {*self.model.values()}
            assert self.outer.steps == 0
        else:
            dist.barrier()
            theirs, own = self.file(number, present[0]), self.file(number, self.rank)
            own.write_bytes(theirs.read_bytes())
            self.outer.follow(self.outer.read(own), own)
            assert self.outer.steps == counts[self.rank]
        assert self.outer.number == number

    def anchors(self) -> list[Tensor]:
        """What nodes have in common."""
        return [t for p in self.model.values() for t in self.outer.kept(p)]

    def assert_common(self, tensors: Sequence[Tensor]) -> None:
        """Fail unless all nodes have these tensors in every bit."""
        every: list[list[Tensor]] = [[] for _ in range(WORLD)]
        dist.all_gather_object(every, [t.detach().clone() for t in tensors])
        assert all(
            torch.equal(a, b) for other in every for a, b in zip(other, tensors, strict=True)
        )


def _coded(flat: Tensor, codec: CodecSpec) -> Tensor:
    return decode(codec, encode(codec, flat.view(1, -1)), flat.numel()).view(-1)


def _reference(
    plan: Sequence[tuple[Sequence[int], Sequence[int]]],
    name: str,
    config: LocalSteps,
    dtype: torch.dtype,
) -> tuple[list[Tensor], Tensor]:
    """Weights of all nodes and anchor after rounds of (steps of each node, members).

    Two nodes exchange everything, so nothing is rounded twice.
    """
    codec = config.codec() if len(SHAPES[name]) > 1 else None
    size = first_weights(name).numel()
    room = -size % codec.block_multiple if codec is not None else 0
    anchor = first_weights(name).to(dtype).float()
    velocity, weights = torch.zeros_like(anchor), [anchor.to(dtype) for _ in range(WORLD)]
    errors = [torch.zeros(size + room) for _ in range(WORLD)]
    done, before = [0] * WORLD, None
    for steps, members in plan:
        for node, count in enumerate(steps):
            for _ in range(count):
                weights[node] = weights[node] + move_of(name, done[node], node).to(dtype)
                done[node] += 1
        moved, learned = torch.zeros_like(anchor), sum(steps[node] > 0 for node in members)
        if before != members:
            errors = [torch.zeros(size + room) for _ in range(WORLD)]
        before = members
        for node in members:
            difference = (anchor.to(dtype).float() - weights[node].float()).flatten()
            difference = nn.functional.pad(difference, (0, room)) + errors[node]
            sent = difference if codec is None else _coded(difference, codec)
            moved += sent[:size].view(moved.shape) / learned
            if config.error_feedback:
                errors[node] = _coded(difference - sent, ERRORS)
        old = anchor.to(dtype)
        velocity = MOMENTUM * velocity + moved
        anchor = anchor - LR * (moved + MOMENTUM * velocity)
        weights = [
            anchor.to(dtype) if node in members else ((w.float() - old.float()) + anchor).to(dtype)
            for node, w in enumerate(weights)
        ]
    return weights, anchor


# --- on each rank -------------------------------------------------------------------------------

# Nodes 0 and 1 take three rounds, with no step of node 1 in the second; then node 0 is away, whose
# step before is in the first round after.
PLAN = (
    ((2, 1, 0), (0, 1)),
    ((1, 0, 0), (0, 1)),
    ((1, 2, 0), (0, 1)),
    ((1, 1, 1), (1, 2)),
    ((0, 1, 1), (1, 2)),
)


def _all_of_it(rank: int, world_size: int, place: str) -> None:
    meeting_point = keep_meeting_point(0) if rank == 0 else None
    ports = [meeting_point and meeting_point.port]
    dist.broadcast_object_list(ports)
    os.environ["MEET_AT"] = f"127.0.0.1:{ports[0]}"
    _formula(f"{place}/formula")
    _own_progress(f"{place}/own_progress")
    _three(f"{place}/three")
    _nobody_has_learned(f"{place}/nobody_has_learned")
    _lost(f"{place}/lost")
    _old_files(f"{place}/old_files")
    _given_up(f"{place}/given_up")


def _formula(place: str) -> None:
    bf16 = torch.bfloat16
    for bits, dtype, feedback in (
        (None, torch.float32, False),
        (4, torch.float32, False),
        (2, torch.float32, True),
        (None, bf16, False),
        (4, bf16, True),
    ):
        node, step = Node(place, bits, dtype, error_feedback=feedback), 0
        for steps, members in PLAN:
            for _ in range(steps[node.rank]):
                node.step(step)
                step += 1
            node.round(*members)
            node.assert_common(node.anchors())
            node.outer._mean.sent_nbytes = 0.0
        tolerance = {"rtol": 1e-5 if bits is None else 1e-4, "atol": 1e-6}
        if dtype == bf16 or feedback:
            tolerance = {"rtol": 1e-2, "atol": 2e-4 if feedback else 1e-6}
        for name, parameter in node.model.items():
            weights, anchor = _reference(PLAN, name, node.config, dtype)
            torch.testing.assert_close(parameter.data, weights[node.rank], **tolerance)
            torch.testing.assert_close(node.outer.kept(parameter)[0], anchor, **tolerance)


def _own_progress(place: str) -> None:
    """What a node has learned while it was away counts once it is back, and only once."""
    node = Node(f"{place}", None, error_feedback=False)
    if node.rank == 0:
        node.step(0)
    node.round(1, 2)
    for name, parameter in node.model.items():
        own = move_of(name, 0, 0) if node.rank == 0 else torch.zeros(())
        torch.testing.assert_close(parameter.data, first_weights(name) + own)
    node.round(0, 1, 2)
    node.assert_common([p.data for p in node.model.values()])
    for name, parameter in node.model.items():
        moved = LR * (1 + MOMENTUM) * move_of(name, 0, 0)
        torch.testing.assert_close(parameter.data, first_weights(name) + moved)
    for present in ((1, 2), (0, 1, 2)):  # away again, and back among the same nodes
        node.step(0)
        node.round(*present)
    node.assert_common(before := [p.data.clone() for p in node.model.values()])
    steps = node.outer.number
    node.round(0, 1)  # nobody has learned anything: not even the momentum moves
    assert node.outer.number == steps + 1
    assert all(map(torch.equal, before, [p.data for p in node.model.values()]))


def _three(place: str) -> None:
    """Three nodes sum messages of each other, and count as many as have learned."""
    for bits in (None, 4):
        node = Node(place, bits, error_feedback=False)
        if node.rank != 1:
            node.step(0)
        node.round(0, 1, 2)
        node.assert_common([*node.anchors(), *(p.data for p in node.model.values())])
        for name, parameter in node.model.items():
            mean = (move_of(name, 0, 0) + move_of(name, 0, 2)) / 2
            moved = parameter.data - first_weights(name)
            error = (moved - LR * (1 + MOMENTUM) * mean).norm() / mean.norm()
            assert error < (0.25 if bits and len(SHAPES[name]) > 1 else 1e-4)


def _nobody_has_learned(place: str) -> None:
    node = Node(place, 4, error_feedback=False)
    arrived = node.exchange((0, 1, 2))
    assert arrived == Arrived(3, 0, [])
    assert node.outer.sent_nbytes == 0


def _lost(place: str) -> None:
    """A lost node is an error, after which the others take the same round."""
    node = Node(place, 4, error_feedback=True)
    node.step(0)
    node.round(0, 1, 2)
    node.step(1)
    before = [p.data.clone() for p in node.model.values()]
    counts = [1] * WORLD
    if node.rank == 2:
        node.outer.drop_group()
    else:
        began = time.monotonic()
        with pytest.raises(LostNodeError):
            node.send((0, 1, 2), counts)
        assert time.monotonic() - began < 10  # not the whole time that a message may take
        assert all(map(torch.equal, before, [p.data for p in node.model.values()]))
        node.outer.drop_group()
        with pytest.raises(LostNodeError):  # whom it never reaches
            node.send((0, 1, 2), counts, attempt=1, wait=0.5)
        node.outer.drop_group()
        arrived, file = node.send((0, 1), counts, attempt=2), node.file(2, node.rank)
        node.outer.write(arrived, file)
        node.outer.take(arrived, file)
    dist.barrier()
    if node.rank == 2:
        node.outer.follow(node.outer.read(node.file(2, 0)), node.file(2, 0))
    node.assert_common(node.anchors())


def _old_files(place: str) -> None:
    node = Node(place, None, error_feedback=False)
    for step in range(6):
        node.step(step)
        node.round(0, 1, 2)
    kept = [number for number in range(1, 7) if node.file(number, node.rank).exists()]
    assert 2 <= len(kept) <= 4
    assert kept == [*range(7 - len(kept), 7)]


def _given_up(place: str) -> None:
    node = Node(place, None, error_feedback=False)
    node.step(0)
    assert {*node.outer.give_up()} == {*node.model.values()}
    assert node.outer.steps == 0
    for name, parameter in node.model.items():
        assert torch.equal(parameter.data, first_weights(name))
    for name in ("uneven", "tall"):
        node.model[name].requires_grad_(False)
    with pytest.raises(NotImplementedError, match="`tall` was frozen after it was trained"):
        node.outer.check_trained()
    for parameter in node.model.values():
        parameter.requires_grad_(True)
    node.outer.check_trained()
    node.model["tall"].data[0] = torch.nan
    with pytest.raises(RuntimeError, match="are not finite"):
        node.outer.check()
    node.outer.forget()
    with pytest.raises(NotImplementedError, match="begins to train 3 parameter"):
        node.outer.begin_step(node.optimizer)


def test_rounds() -> None:
    with tempfile.TemporaryDirectory() as place:
        run_ranks(_all_of_it, WORLD, place)
