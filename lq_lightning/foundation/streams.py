"""CUDA streams: the only place that makes, names and switches them, and work on them in stages.

[Note: streams]

*Who runs where.* The host issues everything in one order, the same on every rank. On a GPU that
order is spread over streams:

==================== ==============================================================================
stream               work
==================== ==============================================================================
computing            forward, backward, optimizer steps: the stream current where users call us.
                     FSDP2 copies weights out of full replicas here
FSDP2's gather ones  copy-in of shards, then our gather: it refreshes the replica, or gathers it
                     within a node
FSDP2's reduce one   our reduce-scatter up to the last level; of a bucket, at its last unit, or
                     on the computing one when backward ends
exchange, first      after an optimizer step: difference, encode
exchange, second     the gather between nodes; of one node, the gather within it
exchange, third      the gather within the node, decode, add to the replica
reductions, second   the last exchange of gradient reductions
reductions, third    decode its messages and add them to the result
votes                the reduction of a few bytes that ranks agree by, which may wait for the
                     checksums of shards on the computing stream or FSDP2's gather ones
==================== ==============================================================================

*Nothing but transfers on the network's streams.* Wherever a stream would decode one unit before it
sends the next one, the network would wait meanwhile, once for every unit. So transfers over the
slowest network follow each other on a stream that does nothing else, and wait for what they send
alone (:class:`NetworkStages`).

*What waits for what.* A stage that hands something over records an event; who reads it, or writes
over it, waits for that event first:

- A gather waits for the last write to its replica (exchange or refresh), not for other units; of a
  full replica that has been written it is no more than FSDP2's wait for that event.
- The next exchange of a unit waits for the same event, and the first stream as a whole for the
  computing one, which reads what the gathers copied out.
- An optimizer step waits for all exchanges, which read the main weights: it would change them.
- Backward's caller waits for all deferred reductions when backward ends.

*What is held until when.* The caching allocator gives freed memory to the next tensor of the stream
it was allocated on, at once. So a tensor that another stream still uses is either held until its
own stream has waited for that use (:class:`SecondStage`), or the allocator is told of the use
(:func:`record_use`) before the last reference goes. Gradients that wait for others of their bucket
are in memory of the computing stream, which is told where they are read (``GradientBucket``). The
replica lives as long as its unit; where it is replaced, the replacing stream has waited for all
writes to it, and its use is recorded. Memory that units share comes from the stream of the first
one that is gathered; streams of others wait for that point (``ReplicaMemory``), before which the
same memory may have been in other use.

*Order of collectives.* Collectives of one process group run in the order of the host's calls,
whatever streams they are issued on. Whether one is issued may depend only on what all ranks know
alike: the program's course, and what they have agreed on (``data_parallel/replica.py``),
never on what one rank sees in its own shards.

*Errors.* The host may raise between two of these steps. What was being written is then marked as
not usable before the first step, not after the last, and everything that waits ends up waiting for
all streams, also those on which nothing was completed.

Tests replace :func:`has_streams`, :func:`new_stream`, :func:`current_stream`, :func:`on_stream` and
:func:`record_use` here, so call them through this module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

__all__ = [
    "NetworkStages",
    "SecondStage",
    "current_stream",
    "has_streams",
    "new_stream",
    "on_stream",
    "record_use",
]


def has_streams(device: torch.device) -> bool:
    """Whether work on this device runs on streams, beside the host."""
    return device.type == "cuda"


def new_stream() -> torch.cuda.Stream:
    """Make a stream of high priority, as FSDP2's own are.

    Small kernels must not queue behind a matrix product.
    """
    return torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]


def current_stream() -> torch.cuda.Stream:
    """Return the stream on which the current device is given work now."""
    return torch.cuda.current_stream()


def on_stream(stream: torch.cuda.Stream) -> AbstractContextManager[None]:
    """Give work to ``stream`` within this context."""
    return torch.cuda.stream(stream)


def record_use(tensor: Tensor) -> None:
    """Let the allocator keep ``tensor``'s memory until the current stream has come this far.

    Call it for a tensor allocated on another stream before the last reference to it goes: where the
    current stream is then, counts. Nothing happens on a device without streams.
    """
    if has_streams(tensor.device):
        tensor.record_stream(current_stream())


class SecondStage:
    """The second stage of a pipeline, on a CUDA stream of its own (see [Note: streams]).

    The first stage runs on whatever stream is current: it calls :meth:`make_room`, prepares
    tensors, and hands them to :meth:`submit`. They were allocated on its stream, so they are held
    until that stream has waited for the second stage; only then may their memory be used again.

    Args:
        depth: Hand-overs that are held at the same time; the first stage waits for the oldest
            beyond that, which bounds the memory.
    """

    def __init__(self, depth: int = 2) -> None:
        self._depth = depth
        self._stream: torch.cuda.Stream | None = None
        self._held: deque[tuple[Tensor, torch.cuda.Stream, torch.cuda.Event]] = deque()

    def make_room(self) -> None:
        """Let streams that handed over wait until less than ``depth`` hand-overs are in use.

        Not the current stream, which may be another one: memory goes back to where it came from.
        """
        while len(self._held) >= self._depth:
            _, first, done = self._held.popleft()
            first.wait_event(done)

    def submit(self, handed_over: Tensor, work: Callable[[], None]) -> None:
        """Run ``work``, which reads ``handed_over``, after what the current stream has so far.

        If ``work`` raises, ``handed_over`` is held all the same: part of it may be under way.
        """
        if self._stream is None:
            self._stream = new_stream()
        first = current_stream()
        self._stream.wait_stream(first)
        with on_stream(self._stream):
            try:
                work()
            finally:
                self._held.append((handed_over, first, self._stream.record_event()))

    def join(self) -> None:
        """Let the current stream wait for everything submitted, and hold nothing any more."""
        while self._held:
            _, first, done = self._held.popleft()
            first.wait_event(done)
        if self._stream is not None:
            current_stream().wait_stream(self._stream)


class NetworkStages:
    """The second and third stage of a pipeline: a transfer, and work on what it received.

    Each has a CUDA stream of its own: a transfer starts when the one before it is done and what it
    sends is there, even if nothing was done yet with what that one received.
    """

    def __init__(self) -> None:
        self._transfers, self._received = SecondStage(), SecondStage()

    def make_room(self) -> None:
        """Let the stream of earlier transfers' messages wait until another may be submitted."""
        self._transfers.make_room()

    def submit(
        self, sent: Tensor, transfer: Callable[[], Tensor], finish: Callable[[Tensor], None]
    ) -> None:
        """Run ``transfer``, which reads ``sent``, and then ``finish`` with what it returned.

        Args:
            sent: Held until the transfer is done.
            transfer: Returns memory of its own, which is held until ``finish`` is done.
            finish: Reads that.
        """

        def stage() -> None:
            self._received.make_room()
            received = transfer()
            self._received.submit(received, lambda: finish(received))

        self._transfers.submit(sent, stage)

    def join(self) -> None:
        """Let the current stream wait for everything submitted, and hold nothing any more."""
        self._transfers.join()
        self._received.join()
