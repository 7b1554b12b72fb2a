"""Quantized all-gather of weight differences (SDP4Bit's qWD) and the replicas it keeps."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning._compat import all_gather_flat, to_sharded_dtensor, write_fingerprint
from lq_lightning.data_parallel.all_gather import WeightAllGather
from lq_lightning.data_parallel.config import WeightQuantization

__all__ = ["ReplicaRead", "WeightDifferenceAllGather"]


class ReplicaRead(enum.Enum):
    """What a gather has to do before the replica can be read."""

    READ = "read"
    EXCHANGE = "exchange"
    RESTORE = "restore"
    FULL = "full"


class WeightDifferenceAllGather(WeightAllGather):
    """All-gather of quantized weight differences (SDP4Bit §3.1, Algorithm 2).

    Every rank keeps a replica of the weights it computes with. Once per optimizer step each rank
    encodes the difference between its main shard and its slot of the replica; all ranks, the owner
    included, add the decoded differences. Main weights stay exact, so the next difference contains
    what this one lost. Further gathers of the step only read the replica.

    A full-precision gather replaces the exchange for the first gather, after
    :meth:`invalidate`, and when the shards were written by anything but an optimizer step (seen by
    storage address and version counters; a write through ``.data`` is not seen: call
    :meth:`invalidate` after one).
    These decisions rest on what every rank does alike, as all FSDP2 collectives do.

    Deviations from the reference implementation: rounds to nearest by default; the difference is
    formed and added in fp32 and rounded once to the replica's dtype.
    """

    _skip_frozen = True

    def __init__(self, config: WeightQuantization, **unit: Any) -> None:
        super().__init__(config, **unit)
        self._replica: Tensor | None = None  # full: [world * n]; node: [nodes * n]
        self._own: Tensor | None = None  # [n], this rank's slot of the replica
        self._restored: Tensor | None = None
        self._dirty = False
        self._read_step = -1
        self._read_print: tuple[tuple[int, int, int], ...] | None = None
        self._step_print: tuple[tuple[int, int, int], ...] | None = None

    @property
    def shared_by_node(self) -> bool:
        """Whether the ranks of a node share one replica."""
        return self._config.replica == "node"

    # --- state ------------------------------------------------------------------------------

    def invalidate(self) -> None:
        """Make the next gather a full-precision one."""
        self._dirty = True

    def note_optimizer_step(self) -> None:
        """Remember the shards as the optimizer left them; any other write is an outside one."""
        self._step_print = write_fingerprint(self._params())

    @property
    def pending(self) -> bool:
        """Whether an optimizer step was taken since the last exchange."""
        return self._read_step != self._context.step

    def replica_slots(self) -> dict[str, Any]:
        """This rank's slot of the replica as DTensors sharded like the parameters, by name."""
        if self._own is None or self._own.dtype == torch.uint8:
            return {}
        slots, start = {}, 0
        for param, name in zip(self._params(), self.names, strict=True):
            flat = self._own[start : start + param.padded_shard_numel]
            slots[name] = to_sharded_dtensor(param, flat.clone())
            start += param.padded_shard_numel
        return slots

    def restore(self, slots: dict[str, Tensor], pending: bool) -> None:
        """Let the next gather start from saved replica slots instead of the main weights.

        Args:
            slots: This rank's valid local part of the replica by parameter name.
            pending: Whether an exchange was still due when the slots were saved.
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
        self._read_step = -1 if pending else self._context.step
        self._step_print = write_fingerprint(params)

    def checksum(self) -> Tensor | None:
        """Order-sensitive 64-bit checksum of the replica, ``[1]`` int64; None before a gather."""
        if self._replica is None:
            return None
        return _checksum(self._replica)

    # --- the collective ---------------------------------------------------------------------

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the persistent replica (``"full"``) or a transient buffer (``"node"``)."""
        if self.shared_by_node or size[0] != self._expected_numel(dtype):
            return torch.empty(*size, dtype=dtype, device=device)
        if self._replica is None or self._replica.dtype != dtype:
            with torch.inference_mode(False):
                self._replica = torch.empty(*size, dtype=dtype, device=device)
                self._own = None
        return self._replica

    def _expected_numel(self, dtype: torch.dtype) -> int:
        params = self._params()
        world = self._context.topology.world_size
        if dtype == torch.uint8:
            return world * sum(p.padded_shard_numel * p.gather_dtype.itemsize for p in params)
        return world * sum(p.padded_shard_numel for p in params)

    def _decide(self) -> ReplicaRead:
        """What this gather has to do; every rank must come to the same answer."""
        current = write_fingerprint(self._params())
        if self._restored is not None and not self._dirty:
            outside = current != self._step_print
            self._read_print = current
            return ReplicaRead.FULL if outside else ReplicaRead.RESTORE
        if self._own is None or self._dirty:
            decision = ReplicaRead.FULL
        elif self.pending:
            decision = ReplicaRead.EXCHANGE if current == self._step_print else ReplicaRead.FULL
            if decision is ReplicaRead.FULL:
                self._context.on_outside_write(self.name)
        elif current != self._read_print:
            decision = ReplicaRead.FULL
            self._context.on_outside_write(self.name)
        else:
            decision = ReplicaRead.READ
        self._read_print = current
        return decision

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor`` (``[world * n]``) with the replica, exchanging first if due."""
        topology = self._context.topology
        expected = input_tensor.numel() * topology.world_size == self._expected_numel(
            input_tensor.dtype
        )
        if group.size() != topology.world_size or not expected:
            all_gather_flat(output_tensor, input_tensor, group)
            return
        self._count_baseline(input_tensor)
        decision = self._decide()
        if self.shared_by_node:
            self._gather_node(output_tensor, input_tensor, decision)
        else:
            self._gather_full(input_tensor, group, decision)
        self._read_step = self._context.step

    def _gather_full(self, slot: Tensor, group: dist.ProcessGroup, decision: ReplicaRead) -> None:
        replica = self._replica
        if replica is None:
            raise AssertionError("allocate() was not called before the all-gather")
        slots = replica.view(group.size(), -1)
        own = self._own
        if decision is ReplicaRead.FULL or own is None:
            due = decision is ReplicaRead.RESTORE and self.pending
            main = slot.clone() if due else None
            own = self._start_replica(slot, decision)
            slot.copy_(own)
            self._gather_exact(replica, slot, group)
            if main is not None:
                self._exchange(main, own, slot, slots, group)
        elif decision is ReplicaRead.EXCHANGE:
            self._exchange(slot, own, slot, slots, group)
        else:
            slot.copy_(own)

    def _exchange(
        self, main: Tensor, own: Tensor, slot: Tensor, slots: Tensor, group: dist.ProcessGroup
    ) -> None:
        """Send ``main - own`` and add every rank's decoded difference to ``slots``.

        ``main`` may be ``slot`` itself: it is encoded before the slot is overwritten.
        """
        layout = self._current_layout(main.dtype)
        message = self._encode(layout, main, reference=own)
        measured = self._context.measure_errors and main.is_floating_point()
        exact = main.clone() if measured else None
        if slot is not own:
            slot.copy_(own)
        self._gather_and_decode(layout, message, slots, group, add=True)
        if slot is not own:
            own.copy_(slot)
        if exact is not None:
            for run in layout.runs:
                stop = run.start + run.numel
                self._context.weight_errors.add(own[run.start : stop], exact[run.start : stop])

    def _start_replica(self, slot: Tensor, decision: ReplicaRead) -> Tensor:
        """Set this rank's slot from the main weights, or from restored values."""
        if self._own is None or self._own.shape != slot.shape:
            with torch.inference_mode(False):
                self._own = torch.empty_like(slot)
        if decision is ReplicaRead.RESTORE and self._restored is not None:
            self._own.copy_(self._restored)
        else:
            self._own.copy_(slot)
        self._restored = None
        self._dirty = False
        return self._own

    def _gather_exact(self, output: Tensor, slot: Tensor, group: dist.ProcessGroup) -> None:
        """Gather slots in full precision; ``slot`` may be a view of ``output``."""
        all_gather_flat(output, slot, group)
        self._context.traffic.full_precision_gathers += 1
        self._count_sent(slot.numel() * slot.itemsize, group)

    def _gather_node(self, output: Tensor, slot: Tensor, decision: ReplicaRead) -> None:
        topology, context = self._context.topology, self._context
        if self._replica is None or self._own is None:
            with torch.inference_mode(False):
                self._replica = slot.new_empty(topology.num_nodes * slot.numel())
                self._own = self._replica.view(topology.num_nodes, -1)[topology.node]
            if decision is not ReplicaRead.RESTORE:
                decision = ReplicaRead.FULL
        slots = self._replica.view(topology.num_nodes, -1)
        if decision in (ReplicaRead.FULL, ReplicaRead.RESTORE):
            due = decision is ReplicaRead.RESTORE and self.pending
            own = self._start_replica(slot, decision)
            self._gather_exact(self._replica, own, context.inter_group)
            if due:
                self._exchange(slot, own, own, slots, context.inter_group)
        elif decision is ReplicaRead.EXCHANGE:
            self._exchange(slot, self._own, self._own, slots, context.inter_group)
        nodes = output.view(topology.num_nodes, -1)
        for node in range(topology.num_nodes):
            all_gather_flat(nodes[node], slots[node], context.intra_group)
        self._count_sent(self._replica.numel() * slot.itemsize, context.intra_group)


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
