"""CUDA streams: the only place that makes, names and switches them, and pipelines of work on them.

[Note: streams]

*Which work runs where.* The host issues everything in one order, the same on every rank. On a GPU
that order is spread over streams:

==================== ==============================================================================
stream               work
==================== ==============================================================================
computing            forward, backward, optimizer steps: the stream current where users call us.
                     FSDP2 copies weights out of full replicas here
FSDP2's all-gather   copy-in of shards, then our gather: it refreshes the replica, or gathers it
                     within a node
FSDP2's reduce       our reduce-scatter up to the last level; for a bucket of units, at its last
                     unit, or on the computing stream when backward ends
exchange, first      after an optimizer step: difference, encode
exchange, second     the all-gather between nodes; with one node, within it
exchange, third      the all-gather within the node, decode, add to the replica
reductions, second   the last exchange of gradient reductions
reductions, third    decode its messages and add them to the result
offload, out and in  copies of saved activations to pinned host memory, and back; on the first, also
                     whether any was written to, which the host waits for before a step
outer steps          messages of a fragment between nodes that train alone, which the computing
                     stream has encoded, and decodes some steps later
votes                the reduction of a few bytes by which ranks agree, which may wait for the
                     checksums of shards on the computing or FSDP2's all-gather stream
==================== ==============================================================================

*Nothing but transfers on the network's streams.* If a stream decoded one unit before it sent the
next, the network would idle meanwhile, once per unit. So transfers over the slowest network follow
each other on a stream of their own and wait only for their inputs (:class:`CommPipeline`).

*Events.* A stage that hands something over records an event; a stage that reads it, or writes over
it, waits for that event first:

- A gather waits for the last write to its replica (exchange or refresh), not for other units; for a
  full replica FSDP2 waits for that event alone.
- The next exchange of a unit waits for the same event, and the first stream as a whole for the
  computing one, which reads what the gathers copied out.
- An optimizer step waits for all exchanges, because it changes the main weights that they read.
- The caller of backward waits for all deferred reductions when backward ends.

*Lifetimes.* The caching allocator gives freed memory to the next tensor of the stream it was
allocated on, at once. So a tensor that another stream still uses is either held until its own
stream has waited for that use (:class:`StreamStage`), or the allocator is told of the use
(:func:`record_use`) before the last reference goes. Gradients in a bucket are in memory of the
computing stream; their use is recorded where they are read. The replica lives as long as its unit;
where it is replaced, the replacing stream has waited for all writes to it, and its use is recorded.
Memory that units share comes from the stream of the first one that is gathered; streams of the
others wait for that point, before which the same memory may have been in other use.

*Order of collectives.* Collectives of one process group run in the order of the host's calls,
whatever streams they are issued on. Whether one is issued may depend only on facts that all ranks
share: the course of the program, and explicit agreements (such as votes on external updates), never
on what one rank sees in its own shards.

*Errors.* The host may raise between any two of these steps. The object being written is marked as
unusable before the first step, not after the last, and every waiter ends up waiting for all
streams, also those on which nothing was completed.

Tests replace :func:`has_streams`, :func:`new_stream`, :func:`current_stream`, :func:`on_stream` and
:func:`record_use` here, so call them through this module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor


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
    """Let the allocator keep ``tensor``'s memory until the current stream has reached this point.

    Call it for a tensor allocated on another stream before the last reference to it goes. Nothing
    happens on a device without streams.
    """
    if has_streams(tensor.device):
        tensor.record_stream(current_stream())


class StreamStage:
    """A stage of work on a CUDA stream of its own (see [Note: streams]).

    The stage before it runs on whatever stream is current: it calls :meth:`make_room`, prepares
    tensors, and hands them to :meth:`submit`. They were allocated on its stream, so they are held
    until that stream has waited for this stage; only then may their memory be reused.

    Args:
        depth: Hand-overs that are held at the same time; the stage before waits for the oldest
            beyond that, which bounds the memory.
    """

    def __init__(self, depth: int = 2) -> None:
        self._depth = depth
        self._stream: torch.cuda.Stream | None = None
        self._held: deque[tuple[Tensor, torch.cuda.Stream, torch.cuda.Event]] = deque()

    def make_room(self) -> None:
        """Let streams that handed over wait until fewer than ``depth`` hand-overs are in use.

        Not the current stream, which may be another one: memory goes back to where it came from.
        """
        while len(self._held) >= self._depth:
            _, first, done = self._held.popleft()
            first.wait_event(done)

    def submit(self, handed_over: Tensor, work: Callable[[], object]) -> None:
        """Run ``work``, which reads ``handed_over``, after the current stream's work so far.

        If ``work`` raises, ``handed_over`` is held all the same: part of the work may be under way.
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


class CommPipeline:
    """Two stages: a transfer, and work on the received messages.

    Each has a CUDA stream of its own: a transfer starts when the one before it is done and its
    input is there, even if the messages received before are still unprocessed.
    """

    def __init__(self) -> None:
        self._transfers, self._received = StreamStage(), StreamStage()

    def make_room(self) -> None:
        """Let the stream of earlier transfers' messages wait until another may be submitted."""
        self._transfers.make_room()

    def submit(
        self, sent: Tensor, transfer: Callable[[], Tensor], finish: Callable[[Tensor], None]
    ) -> None:
        """Run ``transfer``, which reads ``sent``, and then ``finish`` with its result.

        ``sent`` is held until the transfer is done, its result, which is memory of its own, until
        ``finish`` is done.
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


class MaxReduction:
    """Starts all-reduces of a few small numbers to their maxima, which are waited for later.

    Neither the host nor the computing stream waits when one is started and the one before has been
    read. On a GPU it runs on a stream of its own (see [Note: streams]). Unless values are computed
    there, it is done as soon as all ranks have started it.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.uint8) -> None:
        self._device, self._dtype = device, dtype
        self._stream: torch.cuda.Stream | None = None

    def start(
        self, values: Sequence[int], group: dist.ProcessGroup | None, more: Tensor | None = None
    ) -> Callable[[], list[int]]:
        """Start the reduction of ``values`` (of the dtype, equally many on every rank).

        ``more`` are further values of it, on the device, of the current stream. The host does not
        wait for them; the reduction does. Returns a function that waits for the maxima.
        """
        if not has_streams(self._device):
            flags = torch.tensor(values, dtype=self._dtype)
            if more is not None:
                flags = torch.cat([flags, more])
            work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=group, async_op=True)

            def wait() -> list[int]:
                if work is not None:
                    work.wait()
                return flags.tolist()

            return wait
        stream = self._stream = self._stream or new_stream()
        if more is not None:
            stream.wait_stream(current_stream())
        # Both copies go through pinned memory: others would let the host wait for the device.
        pinned = self._device.type == "cuda"
        with on_stream(stream):
            mine = torch.tensor(values, dtype=self._dtype, pin_memory=pinned)
            reduced = mine.to(self._device, non_blocking=True)
            if more is not None:
                record_use(more)
                reduced = torch.cat([reduced, more])
            result = torch.empty(reduced.shape, dtype=self._dtype, pin_memory=pinned)
            dist.all_reduce(reduced, dist.ReduceOp.MAX, group=group)
            result.copy_(reduced, non_blocking=True)
            done = stream.record_event()

        def read() -> list[int]:
            done.synchronize()
            return result.tolist()

        return read


def send_to(values: Tensor, device: torch.device) -> Tensor:
    """Return CPU values on a device, for its current stream; ``values`` itself on the CPU.

    A plain ``to`` would let the host wait until the device has done all work of the stream.
    """
    if device.type != "cuda":
        return values.to(device)
    # The allocator of pinned memory keeps it until the copy is done.
    return values.pin_memory().to(device, non_blocking=True)
