"""Outer steps of nodes that train alone, without nodes: one process computes every message.

For S independent trainings at once, of N nodes each, whose weights are rows of one tensor. With two
nodes of one rank, weights are those of ``lq_lightning.data_parallel.OuterOptimizer``, bit for bit;
with more, the sums that it encodes again have their groups elsewhere.

Shape legend: S trainings, N nodes, n elements of a parameter, B bytes of a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lq_lightning.codecs import CodecSpec, decode, decode_reduce, decode_reduce_encode, encode
from lq_lightning.data_parallel import LocalSteps
from lq_lightning.data_parallel.local_steps import deal_out
from lq_lightning.data_parallel.node_mean import ERRORS
from lq_lightning.data_parallel.unit import full_precision_reason

Tensors = dict[str, Tensor]


def bits_per_step(local: LocalSteps) -> float:
    """Return the bits on the wire per parameter and step."""
    spec = local.codec()
    return (32 if spec is None else 8 * spec.nbytes(1 << 20) / (1 << 20)) / local.every


class _Flight(NamedTuple):
    landing: int
    means: Tensors  # [S, *shape]
    sent: Tensors  # weights when they were sent, [S * N, *shape]


class EmulatedNodes:
    """Anchors of S trainings, and the outer steps of their nodes.

    Args:
        local: Options of the library.
        nodes: N.
        masters: fp32 weights ``[S * N, *shape]``, alike in the nodes of a training.
        units: Names of the parameters of each unit.
        min_quantized_numel: As in the library.
    """

    def __init__(
        self,
        local: LocalSteps,
        nodes: int,
        masters: Mapping[str, Tensor],
        units: Mapping[str, Sequence[str]],
        min_quantized_numel: int = 4096,
    ) -> None:
        self.local, self.nodes, self.steps = local, nodes, 0
        self.anchors = {n: w.detach()[::nodes].clone() for n, w in masters.items()}
        self._velocities = {n: torch.zeros_like(w) for n, w in self.anchors.items()}
        self._errors: Tensors = {}
        self._trained: set[str] = set()
        self._least, self._flight = min_quantized_numel, None
        names = {
            nn.Parameter(torch.empty(w.shape[1:], device="meta")): n
            for n, w in sorted(masters.items())
        }
        parts = [unit for unit in units if unit != "root"]
        count = min(local.fragments, len(parts))  # of small models
        dealt = deal_out(names, parts, count)
        self._fragments = [[names[p] for p in part] for part in dealt]

    @torch.no_grad()
    def after_step(self, masters: Tensors) -> None:
        """Send and merge what is due; masters are those of before, in the same memory."""
        self.steps += 1
        self._trained.update(masters)
        config = self.local
        if self._flight is not None and self._flight.landing == self.steps:
            self._land(masters)
        for index, names in enumerate(self._fragments):
            due = config.every * (index + 1) // len(self._fragments)
            if (self.steps - due) % config.every == 0:
                self._send(names, masters)
                if config.delay == 0:
                    self._land(masters)

    @torch.no_grad()
    def meet(self, masters: Tensors) -> None:
        """Bring nodes together at once, and begin a new cycle."""
        self._land(masters)
        self._send([name for name in self.anchors if name in self._trained], masters)
        self._land(masters)
        self.steps = 0

    def _send(self, names: Sequence[str], masters: Tensors) -> None:
        flight = _Flight(self.steps + self.local.delay, {}, {})
        for name in names:
            moved = self.anchors[name].repeat_interleave(self.nodes, dim=0) - masters[name]
            mean = self._mean(name, moved.flatten(1))
            flight.means[name] = mean.reshape(self.anchors[name].shape)
            flight.sent[name] = masters[name].detach().clone()
        self._trained.difference_update(names)
        self._flight = flight

    def _land(self, masters: Tensors) -> None:
        if self._flight is None:
            return
        lr, momentum = self.local.outer_lr, self.local.outer_momentum
        for name, mean in self._flight.means.items():
            velocity, anchor = self._velocities[name], self.anchors[name]
            velocity.mul_(momentum).add_(mean)
            anchor.sub_(mean.add(velocity, alpha=momentum), alpha=lr)
            everywhere = anchor.repeat_interleave(self.nodes, dim=0)
            masters[name].copy_((masters[name] - self._flight.sent[name]).add_(everywhere))
        self._flight = None

    def _mean(self, name: str, rows: Tensor) -> Tensor:
        """Return the mean ``[S, n]`` of rows ``[S * N, n]`` as nodes get it."""
        spec, shape = self.local.codec(), self.anchors[name].shape[1:]
        exact = full_precision_reason(len(shape), rows.shape[1], torch.float32, self._least)
        if spec is None or exact:
            return _in_order(rows / self.nodes, self.nodes)
        length = rows.shape[1]  # zeros after it belong to the last group
        rows = torch.nn.functional.pad(rows, (0, -length % spec.block_multiple))
        numel = rows.shape[1]
        if self.local.error_feedback:
            self._add_error(name, rows)
        messages = encode(spec, rows)
        if self.local.error_feedback:
            self._errors[name] = encode(ERRORS, rows - decode(spec, messages, numel))
        by_node = messages.unflatten(0, (-1, self.nodes)).transpose(0, 1)  # [N, S, B]
        return self._decoded_mean(name, by_node.contiguous(), numel, spec)[:, :length]

    def _add_error(self, name: str, rows: Tensor) -> None:
        error = self._errors.get(name)
        if error is not None:
            decode(ERRORS, error, rows.shape[1], out=rows, add=True)

    def _decoded_mean(self, name: str, messages_NSB: Tensor, numel: int, spec: CodecSpec) -> Tensor:
        share = 1 / self.nodes
        if self.nodes == 2:
            return decode_reduce(spec, messages_NSB, numel, scale=share)
        if not self.local.error_feedback:
            summed = decode_reduce_encode(spec, messages_NSB, numel, spec)
            return decode(spec, summed, numel, scale=share)
        sums, key = decode_reduce(spec, messages_NSB, numel), f"sum of {name}"
        self._add_error(key, sums)
        summed = encode(spec, sums)
        self._errors[key] = encode(ERRORS, sums - decode(spec, summed, numel))
        return decode(spec, summed, numel, scale=share)


def _in_order(rows: Tensor, nodes: int) -> Tensor:
    """Return sums of nodes ``[S, n]`` of ``[S * N, n]``, added in their order."""
    first, *others = rows.unflatten(0, (-1, nodes)).unbind(1)
    total = first.clone()
    for other in others:
        total += other
    return total
