"""Means over nodes: the messages of an outer step, what rounding takes from them, their transfer.

Shape legend: N nodes, n elements of which one node sums the messages, B bytes of such a message.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning._compat.torch import all_gather_flat, serves
from lq_lightning.codecs import CodecSpec, decode, decode_reduce, decode_reduce_encode, encode
from lq_lightning.foundation import streams
from lq_lightning.foundation.streams import StreamStage

# Of errors of rounding between two messages. They are a fraction of the values that were sent.
ERRORS = CodecSpec(code="int8", group_size=128)

Collectives = Generator[dist.Work | None, None, Tensor]


class Transfer:
    """Messages under way: collectives that follow each other, and a tensor that has arrived."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._work: dist.Work | None = None
        self._arrived: Tensor | None = None

    def advance(self) -> None:
        """Wait for the collective under way, on CUDA in the current stream; start the next one."""
        if self._arrived is not None:
            return
        if self._work is not None:
            self._work.wait()
        try:
            self._work = next(self._collectives)
        except StopIteration as stop:
            self._arrived = stop.value

    def finish(self) -> Tensor:
        """Run what is left, and return what has arrived."""
        while self._arrived is None:
            self.advance()
        return self._arrived


class NodeMean:
    """Takes means over nodes of flat fp32 tensors, encoded or not.

    With ``feedback``, what a message has lost by rounding is kept in 8 bits and added to the values
    of the next one with the same ``key``, in sums that are encoded again, too. ``group`` has one
    rank of each node. The mean is over ``count`` of them, all by default: messages of the others
    are zero.
    """

    def __init__(
        self, num_nodes: int, group: dist.ProcessGroup, *, feedback: bool, count: int | None = None
    ) -> None:
        self.sent_nbytes = 0.0  # by this rank
        self.num_nodes, self.count = num_nodes, count or num_nodes
        self._group, self._feedback = group, feedback
        self._errors: dict[Hashable, Tensor] = {}

    def forget_errors(self) -> None:
        """Forget what rounding has taken from earlier messages."""
        self._errors.clear()

    def begin(
        self, flat: Tensor, codec: CodecSpec | None, key: Hashable, stage: StreamStage | None = None
    ) -> Transfer:
        """Send ``flat``, whose number of elements N divides; it is overwritten.

        All of it runs on ``stage`` if there is one; else the first collective is started.
        """
        if codec is None:
            sent = flat.div_(self.count)
            transfer = Transfer(self._sum_exactly(sent))
        else:
            rows = flat.view(self.num_nodes, -1)
            sent = self._encode(rows, codec, key)
            transfer = Transfer(self._exchange(sent, codec, rows.shape[1], key))
        if stage is None:
            transfer.advance()
        else:
            stage.submit(sent, transfer.finish)
        return transfer

    def read(self, transfer: Transfer, codec: CodecSpec | None, out: Tensor) -> None:
        """Wait for a transfer, and write the mean to ``out``, of the size that was sent.

        The current stream has waited for the transfer's stage, if it had one.
        """
        arrived = transfer.finish()
        streams.record_use(arrived)
        read_mean(arrived, codec, out, self.num_nodes, self.count)

    def _sum_exactly(self, flat: Tensor) -> Collectives:
        nodes = self.num_nodes
        self.sent_nbytes += 2 * (nodes - 1) / nodes * flat.numel() * flat.itemsize
        yield from self._run(dist.all_reduce, flat)
        return flat

    def _exchange(
        self, messages: Tensor, codec: CodecSpec, numel: int, key: Hashable
    ) -> Collectives:
        """Return messages ``[K, N, B]`` to sum, of which each node has made those of its row.

        Two nodes exchange everything instead: as many bytes, and nothing is rounded twice.
        """
        nodes = self.num_nodes
        if nodes > 2:
            received = torch.empty_like(messages)
            self.sent_nbytes += (nodes - 1) * messages.shape[1]
            yield from self._run(dist.all_to_all_single, received, messages)
            if self._feedback:
                sums = decode_reduce(codec, received.unsqueeze(1), numel)
                messages = self._encode(sums, codec, ("sum", key))
            else:
                messages = decode_reduce_encode(codec, received.unsqueeze(1), numel, codec)
        every = messages.new_empty(nodes, *messages.shape)
        self.sent_nbytes += (nodes - 1) * messages.numel()
        yield from self._run(all_gather_flat, every.view(-1), messages.view(-1))
        return every.transpose(0, 1) if nodes > 2 else every

    def _run(
        self, collective: Callable[..., dist.Work | None], out: Tensor, *inputs: Tensor
    ) -> Iterator[dist.Work | None]:
        """Start a collective that writes ``out``, or run it on the host if the group is there."""
        if out.device.type == "cpu" or serves(self._group, out.device):
            yield collective(out, *inputs, group=self._group, async_op=True)
            return
        on_host = out.cpu()
        collective(on_host, *(tensor.cpu() for tensor in inputs), group=self._group)
        out.copy_(on_host)

    def _encode(self, rows: Tensor, codec: CodecSpec, key: Hashable) -> Tensor:
        """Encode rows, which become what the codes do not hold of them with ``feedback``."""
        if not self._feedback:
            return encode(codec, rows)
        numel, error = rows.shape[1], self._errors.get(key)
        if error is not None:
            streams.record_use(error)
            decode(ERRORS, error, numel, out=rows, add=True)
        messages = encode(codec, rows)
        decode(codec, messages, numel, scale=-1.0, out=rows, add=True)
        self._errors[key] = encode(ERRORS, rows)
        return messages


def read_mean(
    arrived: Tensor, codec: CodecSpec | None, out: Tensor, num_nodes: int, count: int
) -> None:
    """Write the mean over ``count`` nodes of what has arrived from ``num_nodes`` to ``out``."""
    if codec is not None:
        rows = out.view(num_nodes, -1)
        decode_reduce(codec, arrived, rows.shape[1], scale=1 / count, out=rows)
    elif arrived.data_ptr() != out.data_ptr():
        out.copy_(arrived)
