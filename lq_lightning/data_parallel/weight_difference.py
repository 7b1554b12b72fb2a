"""Quantized all-gather of weight differences (SDP4Bit's qWD) and the replicas it keeps."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning._compat.fsdp2 import pack_shards, write_fingerprint
from lq_lightning._compat.tensors import to_sharded_dtensor
from lq_lightning._compat.torch import all_gather_flat
from lq_lightning.data_parallel.all_gather import WeightAllGather
from lq_lightning.data_parallel.config import WeightQuantization
from lq_lightning.data_parallel.layout import MessageLayout
from lq_lightning.data_parallel.unit import UnitDescription
from lq_lightning.foundation import streams

__all__ = ["Exchange", "ReplicaRead", "WeightDifferenceAllGather"]


class ReplicaRead(enum.Enum):
    """What a gather has to do before the replica can be read."""

    READ = "read"
    RESTORE = "restore"
    FULL = "full"


class Exchange(NamedTuple):
    """An exchange on its way.

    Attributes:
        layout: Layout of the messages.
        messages: ``[N, nbytes]`` uint8: of the ranks with this local rank, one for each node.
        exact: This rank's main slot ``[n]``, if errors are measured.
    """

    layout: MessageLayout
    messages: Tensor
    exact: Tensor | None


class WeightDifferenceAllGather(WeightAllGather):
    """All-gather of quantized weight differences (SDP4Bit §3.1, Algorithm 2).

    Every rank keeps a replica of the weights it computes with. After each optimizer step, each rank
    encodes the difference between its main shard and its slot of the replica; all ranks, the owner
    included, add the decoded differences (:meth:`start_exchange`, :meth:`finish_exchange`). Main
    weights stay exact, so the next difference contains what this one lost. The gathers that FSDP2
    asks for in forward and backward only read the replica.

    A gather refreshes the replica in full precision the first time, after :meth:`invalidate`, and
    when the shards were written by anything but an optimizer step (seen by storage address and
    version counters; a write through ``.data`` is not seen: call :meth:`invalidate` after one).
    These decisions rest on what every rank does alike, as all FSDP2 collectives do.

    Deviations from the reference implementation: rounds to nearest by default; the difference is
    formed and added in fp32 and rounded once to the replica's dtype; it is sent right after the
    optimizer step and not when the next forward asks for it.
    """

    _skip_frozen = True

    def __init__(self, config: WeightQuantization, unit: UnitDescription) -> None:
        super().__init__(config, unit)
        self._replica: Tensor | None = None  # full: [world * n]; node: [nodes * n]
        self._own: Tensor | None = None  # [n], this rank's slot: a view of the replica
        self._restored: Tensor | None = None
        self._dirty = False
        self._fingerprint: tuple[tuple[int, int, int], ...] | None = None
        self._written: torch.cuda.Event | None = None

    @property
    def shared_by_node(self) -> bool:
        """Whether the ranks of a node share one replica."""
        return self._config.replica == "node"

    def holds_any(self, param_ids: set[int] | None) -> bool:
        """Whether one of these parameters (``id``; None: any) is in the unit."""
        if param_ids is None:
            return True
        return any(id(p.sharded_param) in param_ids for p in self._params())

    # --- state ------------------------------------------------------------------------------

    def invalidate(self) -> None:
        """Make the next gather a full-precision one."""
        self._dirty = True

    def replica_slots(self) -> dict[str, Any]:
        """This rank's slot of the replica as DTensors sharded like the parameters, by name."""
        if self._own is None or self._own.dtype == torch.uint8:
            return {}
        self._wait_for_writes()
        slots, start = {}, 0
        for param, name in zip(self._params(), self.names, strict=True):
            flat = self._own[start : start + param.padded_shard_numel]
            slots[name] = to_sharded_dtensor(flat.clone(), param.sharded_param)
            start += param.padded_shard_numel
        return slots

    def restore(self, slots: dict[str, Tensor]) -> None:
        """Let the next gather start from saved replica slots instead of the main weights.

        Args:
            slots: This rank's valid local part of the replica by parameter name.
        """
        params = self._params()
        total = sum(p.padded_shard_numel for p in params)
        first = slots[self.names[0]]
        restored = first.new_zeros(total)
        start = 0
        for param, name in zip(params, self.names, strict=True):
            local = slots[name].reshape(-1)
            restored[start : start + local.numel()].copy_(local)
            start += param.padded_shard_numel
        self._restored = restored
        self._dirty = False
        self._replica = self._own = None
        self._fingerprint = write_fingerprint(params)

    def checksum(self) -> Tensor | None:
        """Order-sensitive 64-bit checksum of the replica, ``[1]`` int64; None before a gather."""
        if self._replica is None:
            return None
        self._wait_for_writes()
        return _checksum(self._replica)

    def _wait_for_writes(self) -> None:
        """Let the current stream wait until the last write to the replica is done."""
        if self._written is not None:
            streams.current_stream().wait_event(self._written)

    def _note_write(self, replica: Tensor) -> None:
        if streams.has_streams(replica.device):
            self._written = streams.current_stream().record_event()

    # --- the exchange after an optimizer step -----------------------------------------------

    def start_exchange(self) -> Exchange | None:
        """Encode how this rank's shard changed and send it to the other nodes.

        Call on every rank after an optimizer step, then :meth:`finish_exchange`, possibly on
        another CUDA stream. The parameters must not be written before the former is done.

        Returns:
            What :meth:`finish_exchange` needs; None if the next gather refreshes the replica anyway
            (it is the first one, the replica is invalid, or a frozen parameter was written).
        """
        if self._restored is not None:
            self._dirty = True
        own = self._own
        if own is None or self._dirty:
            return None
        params = self._params()
        fingerprint, before = write_fingerprint(params), self._fingerprint or ()
        self._fingerprint = fingerprint
        written = [p for p, a, b in zip(params, fingerprint, before, strict=True) if a != b]
        if not all(p.requires_grad for p in written):  # frozen parameters are not in the message
            self._context.on_outside_write(self.name)
            self._dirty = True
            return None
        self._wait_for_writes()
        layout = self._current_layout(own.dtype)
        main = pack_shards(params, own)
        measured = self._context.measure_errors and own.is_floating_point()
        exact = main.clone() if measured else None
        messages = self._gather_between_nodes(self._encode(layout, main, reference=own))
        return Exchange(layout, messages, exact)

    def finish_exchange(self, exchange: Exchange) -> None:
        """Pass the messages on inside the node and add the differences to the replica."""
        replica, own = self._replica, self._own
        if replica is None or own is None:
            raise AssertionError("start_exchange() found a replica, but there is none")
        slots = replica.view(-1, own.numel())
        messages = exchange.messages
        if self.shared_by_node:
            self._decode(exchange.layout, messages, slots, add=True)
        else:
            every = self._gather_within_node(messages)
            self._decode_by_node(exchange.layout, every, slots, add=True)
        if exchange.exact is not None:
            streams.record_use(exchange.exact)
            for run in exchange.layout.runs:
                part = slice(run.start, run.stop)
                self._context.weight_errors.add(own[part], exchange.exact[part])
        self._note_write(replica)

    # --- the collective ---------------------------------------------------------------------

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Let ``output_tensor`` (``[world * n]``) hold the replica, refreshed first if needed.

        With ``replica="full"`` the output is made to share the replica's memory. It must not be its
        memory from the start: FSDP2 writes this rank's main slot into the output first.
        """
        topology = self._context.topology
        expected = input_tensor.numel() * topology.world_size == self._expected_numel(
            input_tensor.dtype
        )
        if group.size() != topology.world_size or not expected:
            all_gather_flat(output_tensor, input_tensor, group)
            return
        self._count_baseline(input_tensor)
        self._wait_for_writes()
        decision = self._decide(input_tensor)
        if decision is not ReplicaRead.READ:
            self._refresh(input_tensor, decision, group)
        replica = self._replica
        if replica is None:
            raise AssertionError("a refreshed replica must exist")
        if self.shared_by_node:
            self._gather_node(output_tensor, replica)
        else:
            output_tensor.set_(replica)  # type: ignore[call-overload]

    def _expected_numel(self, dtype: torch.dtype) -> int:
        params = self._params()
        world = self._context.topology.world_size
        if dtype == torch.uint8:
            return world * sum(p.padded_shard_numel * p.gather_dtype.itemsize for p in params)
        return world * sum(p.padded_shard_numel for p in params)

    def _decide(self, slot: Tensor) -> ReplicaRead:
        """What this gather has to do; every rank must come to the same answer."""
        fingerprint = write_fingerprint(self._params())
        outside = fingerprint != self._fingerprint
        self._fingerprint = fingerprint
        if self._restored is not None and not self._dirty:
            return ReplicaRead.FULL if outside else ReplicaRead.RESTORE
        if self._own is None or self._dirty or self._own.dtype != slot.dtype:
            return ReplicaRead.FULL
        if outside:
            self._context.on_outside_write(self.name)
            return ReplicaRead.FULL
        return ReplicaRead.READ

    def _refresh(self, slot: Tensor, decision: ReplicaRead, group: dist.ProcessGroup) -> None:
        """Gather the main weights, or restored ones, into the replica in full precision."""
        topology = self._context.topology
        index, group = (
            (topology.node, self._context.inter_group)
            if self.shared_by_node
            else (topology.rank, group)
        )
        replica, own = self._replica, self._own
        if replica is None or own is None or own.dtype != slot.dtype:
            with torch.inference_mode(False):
                replica = slot.new_empty(group.size() * slot.numel())
                own = replica.view(group.size(), -1)[index]
            self._replica, self._own = replica, own
        if decision is ReplicaRead.RESTORE and self._restored is not None:
            own.copy_(self._restored)
        else:
            own.copy_(slot)
            streams.record_use(slot)  # FSDP2 allocated it on another stream
        self._restored = None
        self._dirty = False
        all_gather_flat(replica, own, group)
        self._context.traffic.full_precision_gathers += 1
        self._count_sent(own.numel() * own.itemsize, group)
        self._note_write(replica)

    def _gather_node(self, output: Tensor, replica: Tensor) -> None:
        """Gather the node's slots of the replica to ``[nodes * node_size * n]``."""
        topology, context = self._context.topology, self._context
        slots = replica.view(topology.num_nodes, -1)
        nodes = output.view(topology.num_nodes, -1)
        for node in range(topology.num_nodes):
            all_gather_flat(nodes[node], slots[node], context.intra_group)
        self._count_sent(replica.numel() * replica.itemsize, context.intra_group)


def _checksum(values: Tensor, chunk: int = 1 << 16) -> Tensor:
    """Position-weighted sum of the raw bits: differs between ranks if any chunk's sum differs."""
    words = values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.itemsize])
    full = words.numel() // chunk * chunk
    sums = [words[:full].view(-1, chunk).sum(dim=1, dtype=torch.int64)]
    sums.append(words[full:].sum(dtype=torch.int64).view(1))
    total = torch.cat(sums)
    weights = torch.arange(1, total.numel() + 1, dtype=torch.int64, device=values.device)
    mixed = weights * 0x5851F42D4C957F2D + 0x14057B7EF767814F  # wraps, which is wanted
    return (total * (mixed | 1)).sum().view(1)
