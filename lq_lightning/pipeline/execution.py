"""Runs one program: computations of this rank's stages, and the messages between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from .boundary import BoundaryCodec, Message
from .links import Inbox, Links, Outbox
from .schedules import Action, Key, Program
from .stage import Boundary, Stage
from .traffic import BoundaryTraffic

__all__ = ["Endpoint", "Execution", "Listener"]


class Listener(Protocol):
    """Encodes the hidden states that this rank sends in training, and hears their gradients."""

    def starts(self, boundary: Boundary) -> None:
        """A step begins, on all ranks of the pipeline; before anything is sent."""

    def encode(self, message: Message, hidden: Tensor) -> Tensor:
        """Return the payload of a hidden state, which stays as it is as long as it is kept."""

    def returned(self, message: Message, gradient: Tensor) -> None:
        """The gradient of what the other rank decoded is there; once for each hidden state.

        Args:
            message: That of the gradient.
            gradient: Not to be changed.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """What this rank sends and receives with.

    Attributes:
        links: ways to other ranks.
        outbox: payloads on their way.
        forward_codec: of hidden states.
        backward_codec: of gradients.
        traffic: counts what is sent.
        device: where tensors are.
    """

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

    Attributes:
        program: orders of all ranks.
        stages: those of this rank, by index.
        endpoint: what to send and receive with.
        boundary: what hidden states are.
        samples: identities of samples, by micro-batch.
        training: whether graphs are kept for backward passes.
        listener: encodes what is sent to other ranks; None in evaluation.
    """

    program: Program
    stages: Mapping[int, Stage]
    endpoint: Endpoint
    boundary: Boundary
    samples: tuple[Tensor | None, ...]
    training: bool
    listener: Listener | None = None
    _inbox: Inbox = field(init=False)
    _split: set[Action] = field(init=False)
    _local: dict[Key, Tensor] = field(init=False, default_factory=dict)
    _results: dict[int, Any] = field(init=False, default_factory=dict)

    def run(self) -> list[Any]:
        """Run the order of this rank; return what the last stage returned, by micro-batch."""
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
            self._compute(action)
        return [self._results[index] for index in sorted(self._results)]

    def _expected(self, peer: int) -> Iterator[tuple[Key, int, int]]:
        shape, dtype = self.boundary.shape, self.boundary.dtype
        links = self.endpoint.links
        for key, needs in self.program.messages(peer, links.rank, in_turn=links.occupy_device):
            yield key, needs, self.endpoint.codec(key).nbytes(shape, dtype, self._message(key))

    def _message(self, key: Key) -> Message:
        return Message(
            boundary=key.boundary,
            backward=key.backward,
            microbatch=key.microbatch,
            training=self.training,
            samples=self.samples[key.microbatch],
        )

    def _compute(self, action: Action) -> None:
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
        # On CUDA the current stream makes the payload, and the transfer is behind it.
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
        """Return the rank of a stage, None if it is on this rank: nothing is coded then."""
        return None if stage in self.stages else self.program.rank_of(stage)
