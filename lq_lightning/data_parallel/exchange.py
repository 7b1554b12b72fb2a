"""When and on which CUDA streams the weight differences of all units are exchanged."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from lq_lightning.data_parallel.weight_difference import Exchange, WeightDifferenceAllGather

__all__ = ["ExchangeSchedule"]

# Units whose messages are held at the same time: one crosses the slow network while the other is
# passed on inside the node and decoded.
_IN_FLIGHT = 2


class ExchangeSchedule:
    """Exchanges weight differences right after an optimizer step.

    On CUDA everything runs on two streams of its own, so that the network works from the end of the
    optimizer step on, whatever forward computes; a gather waits for its own unit only. Encoding and
    the gather between nodes are on the first stream, the gather inside the node and decoding on the
    second: while one unit is decoded, the next one is on the network. On a CPU the exchanges are
    complete when :meth:`run` returns.

    Args:
        device: Where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outer: torch.cuda.Stream | None = None
        self._inner: torch.cuda.Stream | None = None

    def run(self, gathers: Iterable[WeightDifferenceAllGather]) -> None:
        """Exchange the differences of these units, in this order. Every rank must call this."""
        if self._device.type != "cuda":
            for gather in gathers:
                exchange = gather.start_exchange()
                if exchange is not None:
                    gather.finish_exchange(exchange)
            return
        outer, inner = self._streams()
        outer.wait_stream(torch.cuda.current_stream())
        # Messages are made on one stream and read on the other: hold them until the first stream
        # has waited for the second, then their memory can be used for later messages.
        in_flight: deque[tuple[Exchange, torch.cuda.Event]] = deque()
        for gather in gathers:
            if len(in_flight) == _IN_FLIGHT:
                outer.wait_event(in_flight[0][1])
                in_flight.popleft()
            with torch.cuda.stream(outer):
                exchange = gather.start_exchange()
            if exchange is None:
                continue
            inner.wait_stream(outer)
            with torch.cuda.stream(inner):
                gather.finish_exchange(exchange)
            in_flight.append((exchange, inner.record_event()))
        outer.wait_stream(inner)

    def join(self) -> None:
        """Let the current stream wait until all exchanges are done."""
        if self._inner is not None and self._outer is not None:
            current = torch.cuda.current_stream()
            current.wait_stream(self._outer)
            current.wait_stream(self._inner)

    def _streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if self._outer is None or self._inner is None:
            # High priority, as FSDP2's own: small kernels must not queue behind a matrix product.
            self._outer = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
            self._inner = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        return self._outer, self._inner
