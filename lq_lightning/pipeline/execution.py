"""One step of one rank: the passes of its stages, and the messages between them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lq_lightning.foundation.groups import shared_split

from .message import BoundaryCodec, BoundaryMeta, Message
from .schedules import Action, Key, Program
from .split_backward import Received, SavedTensors, SplitBackward, receive

# Receives that are posted before they are needed, for each sending rank, at most. Transfers go on
# while this rank computes only into posted receives. More would only take memory for payloads: the
# link is busy as long as there is always one more.
_AHEAD = 4


# --- links between ranks ------------------------------------------------------------------------


class Work(Protocol):
    """A transfer under way, such as ``torch.distributed.Work``."""

    def wait(self) -> object:
        """Let the host (CPU tensors) or the current stream (CUDA tensors) wait for the transfer."""

    def is_completed(self) -> bool:
        """Return whether it is known to be done."""


class Links(Protocol):
    """Links to the other ranks of a pipeline. Messages between two ranks keep their order."""

    rank: int  # of this rank
    size: int  # of the pipeline
    occupy_device: bool  # while a transfer is under way, as with NCCL

    def send(self, payload: Tensor, peer: int) -> Work:
        """Start to send ``payload``, which must not change until the transfer is done."""

    def receive(self, payload: Tensor, peer: int) -> Work:
        """Start to receive into ``payload``."""


class ProcessGroupLinks:
    """Links over process groups: for NCCL one group for each direction between two ranks.

    NCCL runs the transfers of a communicator one after another on one stream. With one for both
    directions, arriving gradients would wait for departing hidden states, and ranks that post them
    in different orders would deadlock. With a communicator for each direction, every communicator
    has one sender and one receiver, and both know its order (``Program.messages``).

    Every rank of ``group`` must make one, at the same time: communicators are made here, where no
    rank waits for another in a different order. ``ways`` are pairs of sender and receiver within
    the group, in the same order on all ranks; ``own_groups`` (default: on CUDA) makes a group for
    each of them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        ways: Iterable[tuple[int, int]],
        own_groups: bool | None = None,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.occupy_device = device.type == "cuda"
        self._ranks = dist.get_process_group_ranks(group)
        ways = list(ways)
        if own_groups or (own_groups is None and device.type == "cuda"):
            self._groups = _own_groups(group, ways, device)
        else:  # gloo's ways are independent of each other
            self._groups = dict.fromkeys(ways, group)
        first = torch.zeros(1, dtype=torch.uint8, device=device)
        for source, target in ways:
            # The first transfer of a communicator makes it, for which both ranks wait. Later, one
            # could be waiting for one communicator while its peer waits for another.
            if self.rank == source:
                self.send(first, target).wait()
            elif self.rank == target:
                self.receive(first, source).wait()

    def send(self, payload: Tensor, peer: int) -> Work:
        """Start to send; on CUDA as soon as the current stream has made the payload."""
        group = self._groups[self.rank, peer]
        return started(dist.isend(payload, group=group, dst=self._ranks[peer]))

    def receive(self, payload: Tensor, peer: int) -> Work:
        """Start to receive into ``payload``.

        On CUDA the transfer begins when the current stream has done all work given before this
        call, and so everything that used the payload's memory last.
        """
        group = self._groups[peer, self.rank]
        return started(dist.irecv(payload, group=group, src=self._ranks[peer]))


def _own_groups(
    group: dist.ProcessGroup, ways: Sequence[tuple[int, int]], device: torch.device
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Make a group for each way; return this rank's by way."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    groups = {}
    rest = list(ways)
    while rest:
        # Groups are made by all ranks together: as many at a time as have no rank in common.
        taken: list[tuple[int, int]] = []
        for way in rest:
            if all(set(way).isdisjoint(other) for other in taken):
                taken.append(way)
        rest = [way for way in rest if way not in taken]
        others = sorted(set(range(size)).difference(*taken))
        rows = [sorted(way) for way in taken]
        # Links of another engine reuse them: its messages have all arrived.
        use = f"links {taken}"  # both ways between two ranks have the same rows
        made = shared_split(use, group, [*rows, others] if others else rows, device)
        groups.update({way: made for way in taken if rank in way})
    return groups


def started(work: dist.Work | None) -> Work:
    """Return a transfer of a group that this rank is in."""
    if work is None:
        raise AssertionError("this rank is in the group")
    return work


class Outbox:
    """Payloads on their way to other ranks, which must live until they have arrived."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._sent: deque[tuple[Work, Tensor]] = deque()

    def send(self, payload: Tensor, peer: int) -> None:
        """Start to send a payload, and drop payloads that have arrived."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        self._sent.append((self._links.send(payload, peer), payload))

    def finish(self) -> None:
        """Wait for all of them: on CUDA the current stream waits.

        The memory of a payload is reused by the current stream only, which then runs after the
        transfer.
        """
        while self._sent:
            self._sent[0][0].wait()
            self._sent.popleft()


class Inbox:
    """Receives of one step, posted before they are needed, in the order in which peers send.

    Where transfers occupy the device, a receive is posted in its turn (``Program.messages``) and no
    sooner: whoever waits for the whole device (a benchmark of kernels in the first step, an
    allocator out of memory, a user) waits for all posted receives, which must not depend on what
    this rank does later.

    ``expected`` has for each peer its messages to this rank in its order, the number of
    computations of this rank after which the receive may be posted, and their bytes.
    """

    def __init__(
        self,
        links: Links,
        expected: Mapping[int, Iterator[tuple[Key, int, int]]],
        device: torch.device,
    ) -> None:
        self._links = links
        self._expected = expected
        self._next = {peer: next(messages, None) for peer, messages in expected.items()}
        self._done = 0
        self._device = device
        self._posted: dict[int, dict[Key, tuple[Work, Tensor]]] = {peer: {} for peer in expected}

    def advance(self, done: int) -> None:
        """Post what may be posted once this rank has made and sent ``done`` computations."""
        self._done = done
        for peer in self._expected:
            self._post(peer)

    def take(self, key: Key, peer: int) -> Tensor:
        """Return a payload, for use on the current stream, once it has arrived."""
        self._post(peer, until=key)
        work, payload = self._posted[peer].pop(key)
        # Before the wait: while this rank waits and computes, more arrives.
        self._post(peer)
        work.wait()
        return payload

    def _post(self, peer: int, until: Key | None = None) -> None:
        """Post receives in order: up to one that is needed, and as many as are worth it."""
        posted = self._posted[peer]
        # In turn there are few ahead, and peers may have to wait for all that they have sent.
        limit = math.inf if self._links.occupy_device else _AHEAD
        while (following := self._next[peer]) is not None:
            key, needs, nbytes = following
            if needs > self._done or (len(posted) >= limit and (until is None or until in posted)):
                return
            payload = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            posted[key] = (self._links.receive(payload, peer), payload)
            self._next[peer] = next(self._expected[peer], None)


# --- passes of a stage --------------------------------------------------------------------------


@dataclass(slots=True)
class _Kept:
    """State of a micro-batch from its forward pass on."""

    received: Received | None  # where the gradient of the input arrives; None on stage 0
    # Where backward starts; None if nothing in the stage needs a gradient. An edge, not the output:
    # the output is freed as soon as it is sent, unless the graph itself keeps it.
    output: GradientEdge | None
    saved: SavedTensors | None  # of nodes, if the backward pass is split


class Stage:
    """Runs the module of a stage on one micro-batch at a time.

    ``module(hidden)`` (on stage 0 ``module()``) returns the hidden state, and on the last stage a
    scalar loss in training, anything in evaluation; ``module.index`` is set to the micro-batch
    before. Its ``parameters()`` belong to this stage.
    """

    def __init__(self, module: nn.Module, index: int, num_stages: int) -> None:
        self.module = module
        self.index = index
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self._kept: dict[int, _Kept] = {}
        self._halves: dict[int, SplitBackward] = {}

    def _run(self, microbatch: int, hidden: Tensor | None) -> Any:
        self.module.index = microbatch  # type: ignore[assignment]
        return self.module() if hidden is None else self.module(hidden)

    def evaluate(self, microbatch: int, hidden: Tensor | None, boundary: BoundaryMeta) -> Any:
        """Return the output of a micro-batch."""
        output = self._run(microbatch, hidden)
        if not self.is_last:
            self._check_hidden(output, boundary)
        return output

    def forward(
        self, microbatch: int, hidden: Tensor | None, boundary: BoundaryMeta, split: bool = False
    ) -> Tensor:
        """Return the hidden state behind this stage, or on the last stage the loss; no graph.

        ``hidden`` is the state before this stage, without a graph; None on stage 0. ``split`` says
        that ``backward_input`` and ``backward_weight`` follow, not ``backward``.
        """
        received = None
        if hidden is not None:
            hidden, received = receive(hidden)
        saved = SavedTensors() if split else None
        with nullcontext() if saved is None else saved.recorded():
            output = self._run(microbatch, hidden)
        if self.is_last:
            if not isinstance(output, Tensor) or output.numel() != 1:
                found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
                raise RuntimeError(
                    f"the last stage has to return its loss as a tensor of one value, not {found}."
                )
            output = output.reshape(())
        else:
            self._check_hidden(output, boundary)
        edge = get_gradient_edge(output) if output.requires_grad else None
        self._kept[microbatch] = _Kept(received, edge, saved)
        result: Tensor = output.detach()
        return result

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Add to the gradients of the parameters; return the gradient of the input.

        ``gradient`` belongs to the output; None on the last stage.
        """
        kept = self._kept.pop(microbatch)
        if kept.output is not None:
            torch.autograd.backward((kept.output,), (gradient,))
        return None if kept.received is None else kept.received.take_gradient()

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of the input; keep what gradients of the parameters need."""
        kept = self._kept.pop(microbatch)
        if kept.received is None:
            return None
        if kept.output is not None:
            weights = self.module.parameters()
            half = SplitBackward(kept.output, kept.received, weights, kept.saved)
            half.backward_input(gradient)
            self._halves[microbatch] = half
        return kept.received.take_gradient()

    def backward_weight(self, microbatch: int) -> None:
        """Add to the gradients of the parameters, after ``backward_input``."""
        half = self._halves.pop(microbatch, None)
        if half is not None:
            half.backward_weight()

    def clear(self) -> None:
        """Drop all micro-batches, after an error."""
        self._kept.clear()
        self._halves.clear()

    def _check_hidden(self, hidden: object, boundary: BoundaryMeta) -> None:
        wanted = (tuple(boundary.shape), boundary.dtype)
        found = (tuple(hidden.shape), hidden.dtype) if isinstance(hidden, Tensor) else None
        if found != wanted:
            raise RuntimeError(
                f"stage {self.index} returned {found or type(hidden).__name__}, but hidden states "
                f"between stages are {wanted}: every stage has to return the same shape and dtype, "
                "that of the first boundary."
            )


# --- one step -----------------------------------------------------------------------------------


@dataclass(slots=True)
class BoundaryTraffic:
    """Counters of payloads from this rank to stages on other ranks since the start.

    Forward and backward count hidden states and gradients of training, tables count bit widths.
    """

    forward_bytes: int = 0
    forward_values: int = 0
    backward_bytes: int = 0
    backward_values: int = 0
    evaluation_bytes: int = 0
    table_bytes: int = 0

    def count(self, message: Message, nbytes: int, values: int) -> None:
        """Add one payload of ``nbytes`` that carries ``values``."""
        if not message.training:
            self.evaluation_bytes += nbytes
        elif message.backward:
            self.backward_bytes += nbytes
            self.backward_values += values
        else:
            self.forward_bytes += nbytes
            self.forward_values += values

    @property
    def sent(self) -> int:
        """All bytes sent by this rank."""
        payloads = self.forward_bytes + self.backward_bytes + self.evaluation_bytes
        return payloads + self.table_bytes

    def snapshot(self) -> BoundaryTraffic:
        """A copy that stops counting."""
        return replace(self)

    def since(self, earlier: BoundaryTraffic) -> BoundaryTraffic:
        """Counts since the snapshot ``earlier``."""
        values = {f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        return BoundaryTraffic(**values)


class Listener(Protocol):
    """Encodes the hidden states that this rank sends in training, and is given their gradients."""

    def starts(self, boundary: BoundaryMeta) -> None:
        """Prepare for a step, on all ranks of the pipeline, before anything is sent."""

    def encode(self, message: Message, hidden: Tensor) -> Tensor:
        """Return the payload of a hidden state, which stays unchanged while it is kept."""

    def returned(self, message: Message, gradient: Tensor) -> None:
        """Take the gradient of the decoded hidden state, without changing it; once for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Links, codecs and counters of this rank."""

    links: Links
    outbox: Outbox
    forward_codec: BoundaryCodec
    backward_codec: BoundaryCodec
    traffic: BoundaryTraffic
    device: torch.device

    def codec(self, key: Key) -> BoundaryCodec:
        """Return the codec of a message."""
        return self.backward_codec if key.backward else self.forward_codec


@dataclass(kw_only=True, slots=True)
class Execution:
    """One step of one rank; used once.

    ``stages`` are this rank's by index, ``samples`` the identities of samples by micro-batch.
    ``seed`` is that of the noise of codecs.
    """

    program: Program
    stages: Mapping[int, Stage]
    endpoint: Endpoint
    boundary: BoundaryMeta
    samples: tuple[Tensor | None, ...]
    training: bool
    seed: int | None = None
    listener: Listener | None = None
    _inbox: Inbox = field(init=False)
    _split: set[Action] = field(init=False)
    _local: dict[Key, Tensor] = field(init=False, default_factory=dict)
    _results: dict[int, Any] = field(init=False, default_factory=dict)

    def run(self) -> list[Any]:
        """Run the order of this rank; return the outputs of the last stage by micro-batch."""
        rank = self.endpoint.links.rank
        self._inbox = Inbox(
            self.endpoint.links,
            {peer: self._expected(peer) for peer in range(self.endpoint.links.size)},
            self.endpoint.device,
        )
        order = self.program.orders[rank]
        self._split = {action for action in order if action.kind == "I"}
        for done, action in enumerate(order):
            self._inbox.advance(done)
            self.compute(action)
        return [self._results[index] for index in sorted(self._results)]

    def _expected(self, peer: int) -> Iterator[tuple[Key, int, int]]:
        shape, dtype = self.boundary.shape, self.boundary.dtype
        links = self.endpoint.links
        for key, turn in self.program.messages(peer, links.rank):
            needs = turn if links.occupy_device else 0
            yield key, needs, self.endpoint.codec(key).nbytes(shape, dtype, self._message(key))

    def _message(self, key: Key) -> Message:
        return Message(
            boundary=key.boundary,
            backward=key.backward,
            microbatch=key.microbatch,
            training=self.training,
            samples=self.samples[key.microbatch],
            seed=self.seed,
        )

    def compute(self, action: Action) -> None:
        """Run one forward or backward pass of a micro-batch, with its messages."""
        stage, index = self.stages[action.stage], action.microbatch
        if action.kind == "F":
            hidden = None if stage.is_first else self._take(Key(stage.index - 1, False, index))
            if self.training:
                split = action._replace(kind="I") in self._split
                output = stage.forward(index, hidden, self.boundary, split)
            else:
                output = stage.evaluate(index, hidden, self.boundary)
            if stage.is_last:
                self._results[index] = output
            else:
                self._give(Key(stage.index, False, index), output)
        elif action.kind == "W":
            stage.backward_weight(index)
        else:
            gradient = None if stage.is_last else self._take(Key(stage.index, True, index))
            run = stage.backward if action.kind == "B" else stage.backward_input
            result = run(index, gradient)
            if result is not None:
                self._give(Key(stage.index - 1, True, index), result)

    def _give(self, key: Key, tensor: Tensor) -> None:
        """Hand a tensor to the stage on the other side of a boundary."""
        peer = self._other_side(key.boundary if key.backward else key.boundary + 1)
        if peer is None:
            self._local[key] = tensor
            return
        message = self._message(key)
        if self.listener is not None and not key.backward:
            payload = self.listener.encode(message, tensor)
        else:
            with torch.no_grad():
                payload = self.endpoint.codec(key).encode(tensor, message)
        # On CUDA the current stream makes the payload, and the transfer waits for that.
        self.endpoint.outbox.send(payload, peer)
        self.endpoint.traffic.count(message, payload.numel(), tensor.numel())

    def _take(self, key: Key) -> Tensor:
        """Return the tensor that the stage on the other side of a boundary has handed over."""
        peer = self._other_side(key.boundary + 1 if key.backward else key.boundary)
        if peer is None:
            return self._local.pop(key)
        payload = self._inbox.take(key, peer)
        message = self._message(key)
        with torch.no_grad():
            tensor = self.endpoint.codec(key).decode(
                payload, self.boundary.shape, self.boundary.dtype, message
            )
        if self.listener is not None and key.backward:
            self.listener.returned(message, tensor)
        return tensor

    def _other_side(self, stage: int) -> int | None:
        """Return the rank of a stage; None if it is this rank, where nothing is coded."""
        return None if stage in self.stages else self.program.rank_of(stage)
