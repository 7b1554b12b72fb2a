"""Two-stage work on CUDA streams, with what the stages hand over kept alive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["SecondStage"]


class SecondStage:
    """The second stage of a pipeline, on a CUDA stream of its own.

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
        """Let the current stream wait until less than ``depth`` hand-overs are in use."""
        while len(self._held) >= self._depth:
            _, _, done = self._held.popleft()
            torch.cuda.current_stream().wait_event(done)

    def submit(self, handed_over: Tensor, work: Callable[[], None]) -> None:
        """Run ``work``, which reads ``handed_over``, after what the current stream has so far."""
        if self._stream is None:
            # High priority, as FSDP2's own: small kernels must not queue behind a matrix product.
            self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        first = torch.cuda.current_stream()
        self._stream.wait_stream(first)
        with torch.cuda.stream(self._stream):
            work()
            done = self._stream.record_event()
        self._held.append((handed_over, first, done))

    def join(self) -> None:
        """Let the current stream wait for everything submitted, and hold nothing any more."""
        while self._held:
            _, first, done = self._held.popleft()
            first.wait_event(done)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
