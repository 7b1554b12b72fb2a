"""When and on which CUDA streams the weight differences of all units are exchanged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lq_lightning.data_parallel.weight_difference import WeightDifferenceAllGather
from lq_lightning.foundation import streams
from lq_lightning.foundation.streams import CommPipeline

__all__ = ["ExchangeSchedule"]


class ExchangeSchedule:
    """Exchanges weight differences right after an optimizer step.

    On CUDA everything runs on three streams of its own (see [Note: streams]), so that the network
    works from the end of the optimizer step on, whatever forward computes; a gather waits for its
    own unit only. While one stack of units is on the network, the one before it is decoded and the
    next one encoded.
    On a CPU the exchanges are complete when :meth:`run` returns.

    Args:
        device: Where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: torch.cuda.Stream | None = None
        self._later = CommPipeline()

    def run(self, stacks: Iterable[Sequence[WeightDifferenceAllGather]]) -> None:
        """Exchange the differences of units, in this order. Every rank must call this.

        Args:
            stacks: Units that are exchanged together, see ``exchanges_alike``.
        """
        if not streams.has_streams(self._device):
            for first, *others in stacks:
                exchange = first.start_exchange(others)
                if exchange is not None:
                    first.finish_exchange(exchange, first.send_exchange(exchange))
            return
        if self._first is None:
            self._first = streams.new_stream()
        self._first.wait_stream(streams.current_stream())
        try:
            with streams.on_stream(self._first):
                try:
                    for first, *others in stacks:
                        self._run_one(first, others)
                finally:
                    self._later.join()
        except BaseException:  # what is under way still writes to replicas that are refreshed next
            self.join()
            raise

    def _run_one(
        self, first: WeightDifferenceAllGather, others: Sequence[WeightDifferenceAllGather]
    ) -> None:
        self._later.make_room()
        exchange = first.start_exchange(others)
        if exchange is not None:
            self._later.submit(
                exchange.messages,
                lambda: first.send_exchange(exchange),
                lambda received: first.finish_exchange(exchange, received),
            )

    def join(self) -> None:
        """Let the current stream wait until all exchanges are done.

        The first stream has waited for the others, also after an error.
        """
        if self._first is not None:
            streams.current_stream().wait_stream(self._first)
