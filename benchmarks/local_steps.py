"""Steps that nodes take alone, brought together in 4 bits every so many: a prototype."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lq_lightning.data_parallel import GradientQuantization, QuantizedAllReduce

_BUCKET_NUMEL = 32 << 20


class LocalSteps:
    """Brings weights together that ranks have trained alone (DiLoCo, Douillard et al., 2023).

    What a rank sends is how far it went since the last exchange, in codes of 4 bits behind a
    Hadamard transform; an outer SGD with Nesterov's momentum takes a step against the mean. All
    ranks decode the same bytes, so they leave an exchange with equal bits.

    Args:
        parameters: Equal on all ranks now.
        every: Steps between two exchanges.
        node_size: Ranks of one node.
        lr: Of the outer SGD.
        momentum: Of the outer SGD.
        late: Steps that ranks go on with while messages travel, fewer than ``every``; what they
            learn on the way stays.

    Raises:
        ValueError: Nodes have several ranks, whose gradients nothing here averages, or an exchange
            would arrive after the next one.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        every: int,
        node_size: int,
        *,
        lr: float = 0.7,
        momentum: float = 0.6,
        late: int = 0,
    ) -> None:
        if node_size != 1:
            raise ValueError(
                f"local steps with node_size={node_size}: this prototype takes nodes of one rank"
            )
        if not 0 <= late < every:
            raise ValueError(f"late={late}: give 0 to {every - 1} steps, fewer than every={every}")
        self._every, self._late, self._lr, self._momentum = every, late, lr, momentum
        codec = GradientQuantization().codec("inter")
        self._reduce = QuantizedAllReduce(codec=codec, min_nbytes=0, node_size=node_size)
        self._buckets: list[list[nn.Parameter]] = []
        room = 0
        for parameter in parameters:
            if room < parameter.numel():
                self._buckets.append([])
                room = _BUCKET_NUMEL
            self._buckets[-1].append(parameter)
            room -= parameter.numel()
        self._anchors = [_flat(bucket) for bucket in self._buckets]
        self._velocities = [torch.zeros_like(anchor) for anchor in self._anchors]

        self._sent: list[tuple[Tensor, torch.futures.Future[Tensor]]] = []

    @torch.no_grad()
    def after(self, steps: int) -> None:
        """Send and receive if it is time to; collective.

        Args:
            steps: That the optimizer has taken.
        """
        behind = steps % self._every
        if behind == 0:
            for bucket, anchor in zip(self._buckets, self._anchors, strict=True):
                then = _flat(bucket)
                shapes = [parameter.shape for parameter in bucket]
                self._sent.append((then, self._reduce.average_async(anchor - then, shapes)))
        if behind == self._late and self._sent:
            self._arrive()

    @torch.no_grad()
    def finish(self) -> None:
        """Receive what is on its way, so that ranks end with equal weights."""
        if self._sent:
            self._arrive()

    def _arrive(self) -> None:
        kept = zip(self._buckets, self._anchors, self._velocities, self._sent, strict=True)
        for bucket, anchor, velocity, (then, mean) in kept:
            moved = mean.wait()  # on CUDA the stream waits, not the host
            velocity.mul_(self._momentum).add_(moved)
            anchor.add_(moved.add_(velocity, alpha=self._momentum), alpha=-self._lr)
            # What was learned since then; zero, exactly, where nothing is late.
            now = _flat(bucket).sub_(then).add_(anchor)
            sizes = [parameter.numel() for parameter in bucket]
            for parameter, part in zip(bucket, now.split(sizes), strict=True):
                parameter.copy_(part.view_as(parameter))
        self._sent.clear()


def _flat(bucket: list[nn.Parameter]) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in bucket])
