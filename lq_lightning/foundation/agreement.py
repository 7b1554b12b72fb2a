"""Numbers that ranks agree on while they go on with other work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning.foundation import streams

__all__ = ["MaxReduction"]


class MaxReduction:
    """Starts reductions of a few small numbers to their maxima, which are waited for later.

    Neither the host nor the computing stream waits when a reduction is started and the one before
    has been read. On a GPU it runs on a stream of its own (see [Note: streams]). Unless values are
    computed there, it is done as soon as all ranks have started it.

    Args:
        device: Where the ranks of the groups to be used keep their tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def start(
        self, values: Sequence[int], group: dist.ProcessGroup, more: Tensor | None = None
    ) -> Callable[[], list[int]]:
        """Start the reduction of ``values`` (in 0..255, equally many on every rank) over ``group``.

        Args:
            values: Known to the host.
            group: Process group.
            more: Further values, uint8 on the device, of the current stream. The host does not wait
                for them; the reduction does.

        Returns:
            A function that waits for the maxima and returns them, the same on every rank.
        """
        if not streams.has_streams(self._device):
            flags = torch.tensor(values, dtype=torch.uint8)
            if more is not None:
                flags = torch.cat([flags, more])
            work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=group, async_op=True)

            def wait() -> list[int]:
                if work is not None:
                    work.wait()
                return flags.tolist()

            return wait
        stream = self._stream = self._stream or streams.new_stream()
        if more is not None:
            stream.wait_stream(streams.current_stream())
        # Both copies go through pinned memory: others would let the host wait for the device.
        pinned = self._device.type == "cuda"
        with streams.on_stream(stream):
            mine = torch.tensor(values, dtype=torch.uint8, pin_memory=pinned)
            reduced = mine.to(self._device, non_blocking=True)
            if more is not None:
                streams.record_use(more)
                reduced = torch.cat([reduced, more])
            result = torch.empty(reduced.shape, dtype=torch.uint8, pin_memory=pinned)
            dist.all_reduce(reduced, dist.ReduceOp.MAX, group=group)
            result.copy_(reduced, non_blocking=True)
            done = stream.record_event()

        def read() -> list[int]:
            done.synchronize()
            return result.tolist()

        return read
