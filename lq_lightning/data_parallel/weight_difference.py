"""Quantized all-gather of weight differences (SDP4Bit's qWD)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning._compat.fsdp2 import GroupParam, pack_shards
from lq_lightning._compat.gathers import GatheredWeights
from lq_lightning._compat.tensors import to_sharded_dtensor
from lq_lightning._compat.torch import all_gather_flat, all_gather_parts
from lq_lightning.data_parallel.all_gather import QuantizedAllGather
from lq_lightning.data_parallel.config import WeightQuantization
from lq_lightning.data_parallel.layout import MessageLayout
from lq_lightning.data_parallel.outside_writes import WriteVotes, WriteWatch
from lq_lightning.data_parallel.replica import Freshness, Replica, ReplicaMemory
from lq_lightning.data_parallel.unit import UnitDescription
from lq_lightning.foundation import streams

__all__ = ["Exchange", "WeightDifferenceAllGather"]

# So many nodes' slots are gathered to their places in the output at once, in parts. Each part costs
# the host a launch; slots of more nodes are gathered in one piece and copied, which costs memory.
MAX_GATHERED_PARTS = 8


class Exchange(NamedTuple):
    """An exchange on its way.

    Attributes:
        replicas: Of the units.
        slots: Their values ``[units, slots, n]``.
        own: This rank's slots of them, ``[units, n]``.
        layout: Layout of the messages.
        messages: ``[units, nbytes]`` uint8, of this rank.
        exact: This rank's main slots ``[units, n]``, if errors are measured.
    """

    replicas: tuple[Replica, ...]
    slots: Tensor
    own: Tensor
    layout: MessageLayout
    messages: Tensor
    exact: Tensor | None


class WeightDifferenceAllGather(QuantizedAllGather):
    """All-gather of quantized weight differences (SDP4Bit §3.1, Algorithm 2).

    Every rank keeps a replica of the weights it computes with. After each optimizer step, each rank
    encodes the difference between its main shard and its slot of the replica (``start_exchange``),
    sends it (``send_exchange``), and all ranks, the owner included, add the decoded differences
    (``finish_exchange``). Main weights stay exact, so the next difference contains what this one
    lost. The gathers that FSDP2 asks for in forward and backward only read the replica
    (:meth:`read`).

    A gather refreshes the replica in full precision where it is not fresh: the first time, after
    :meth:`invalidate`, after an exchange that failed, and when ranks have agreed that something
    other than an optimizer step has written to the shards (``outside_writes.py``).

    A parameter that is frozen on the way keeps the replica it has, which lacks what its last
    difference lost; it is in no message until it is trained again.

    Deviations from the reference implementation: rounds to nearest by default; the difference is
    formed and added in fp32 and rounded once to the replica's dtype; it is sent right after the
    optimizer step and not when the next forward asks for it.

    Args:
        config: Codec and method.
        unit: The unit.
        votes: How ranks agree that something other than an optimizer step has written to weights.
        memory: Of the replicas of units of one shape; by default its own.
        index: Of the unit in it.

    Attributes:
        memory: See above.
        replica: Its values are ``[world * n]``, or ``[nodes * n]`` if a node shares them.
    """

    skips_frozen = True

    def __init__(
        self,
        config: WeightQuantization,
        unit: UnitDescription,
        votes: WriteVotes,
        memory: ReplicaMemory | None = None,
        index: int = 0,
    ) -> None:
        super().__init__(config, unit)
        self.memory = memory or ReplicaMemory(1)
        self.replica = Replica(self.memory, index)
        self._watch = WriteWatch(unit.names, unit.params)
        self._votes = votes
        self._voted = False  # for the gather that comes now
        votes.add(self.name, self.replica, self._watch)

    @property
    def shared_by_node(self) -> bool:
        """Whether the ranks of a node share one replica."""
        return self._config.replica == "node"

    def holds_any(self, param_ids: set[int] | None) -> bool:
        """Whether one of these parameters (``id``; None: any) is in the unit."""
        if param_ids is None:
            return True
        return any(id(p.sharded_param) in param_ids for p in self._params())

    def params(self) -> list[GroupParam]:
        """The unit's parameters as they are now."""
        return self._params()

    def trained(self) -> list[bool]:
        """Which of them are trained now."""
        return [p.requires_grad for p in self._params()]

    # --- saved state ------------------------------------------------------------------------

    def replica_slots(self) -> dict[str, Any]:
        """This rank's slot of the replica as DTensors sharded like the parameters, by name.

        Empty while the replica is not to be used: the next gather takes the main weights anyway.
        """
        own = self.replica.slot
        if own is None or own.dtype == torch.uint8:
            return {}
        self.replica.wait()
        slots, start = {}, 0
        for param, name in zip(self._params(), self.names, strict=True):
            flat = own[start : start + param.padded_shard_numel]
            slots[name] = to_sharded_dtensor(flat.clone(), param.sharded_param)
            start += param.padded_shard_numel
        return slots

    def restore(self, slots: dict[str, Tensor]) -> None:
        """Let the next gather start from saved replica slots instead of the main weights.

        Args:
            slots: This rank's valid local part of the replica by parameter name.
        """
        params = self._params()
        saved = slots[self.names[0]].new_zeros(sum(p.padded_shard_numel for p in params))
        start = 0
        for param, name in zip(params, self.names, strict=True):
            local = slots[name].reshape(-1)
            saved[start : start + local.numel()].copy_(local)
            start += param.padded_shard_numel
        self.replica.restore(saved)
        self._watch.note()

    # --- the exchange after an optimizer step -----------------------------------------------

    def exchanges_alike(self, others: Sequence[WeightDifferenceAllGather]) -> bool:
        """Whether :meth:`start_exchange` may take these units together with this one.

        They must be all that share their memory with it, and have replicas to add differences to.
        """
        every, trained = (self, *others), self.trained()
        return (
            self.memory.holds([unit.replica for unit in every])
            and all(unit.replica.state is Freshness.FRESH for unit in every)
            and all(unit.trained() == trained for unit in others)
        )

    def begin_exchange(self) -> bool:
        """Say that the main weights were updated; return whether the difference is to be sent."""
        if not self.replica.begin_exchange() or self.replica.own is None:
            return False
        self._watch.note_step()
        self.replica.wait()
        return True

    def start_exchange(self, others: Sequence[WeightDifferenceAllGather] = ()) -> Exchange | None:
        """Encode how this rank's shards changed.

        Call on every rank after an optimizer step, then :meth:`send_exchange` and
        :meth:`finish_exchange`, possibly on other CUDA streams. The parameters must not be written
        before this is done.

        Args:
            others: Further units, for which :meth:`exchanges_alike`; the messages are the same as
                in exchanges of their own, but need one launch of a kernel and one collective.

        Returns:
            What the others need; None if there is nothing to send: all parameters are frozen, or
            the next gather refreshes the replica anyway.
        """
        units = (self, *others)
        if not any(p.requires_grad and p.padded_shard_numel for p in self.params()):
            return None
        begun = [unit.begin_exchange() for unit in units]
        values, own = self.replica.values, self.replica.own
        if not all(begun) or values is None or own is None:
            return None
        rows = self.memory.rows if others else values.view(1, -1)
        if rows is None:
            raise AssertionError("replicas that share memory must have some")
        slots = rows.view(len(units), -1, own.numel())
        reference = slots[:, self.replica.own_index]
        layout = self._current_layout(own.dtype)
        main = own.new_empty(len(units), own.numel())
        pack_shards([param for unit in units for param in unit.params()], main)
        measured = self._context.measure_errors and own.is_floating_point()
        exact = main.clone() if measured else None
        messages = self._encode(layout, main, reference)
        replicas = tuple(unit.replica for unit in units)
        return Exchange(replicas, slots, reference, layout, messages, exact)

    def send_exchange(self, exchange: Exchange) -> Tensor:
        """Send the messages over the slowest network that there is, and nothing else.

        Returns:
            Those of all nodes, ``[units, N, nbytes]`` uint8, or of one node those of all its ranks,
            ``[L, units, 1, nbytes]``, in memory of their own: there are several ranks, since FSDP2
            gathers nothing on one, which then has no replica to add differences to.
        """
        if self._context.topology.num_nodes > 1:
            return self._gather_between_nodes(exchange.messages)
        own = exchange.messages.unsqueeze(1)
        return own.clone() if self.shared_by_node else self._gather_within_node(own)

    def finish_exchange(self, exchange: Exchange, received: Tensor) -> None:
        """Pass the messages on inside the node and add the differences to the replicas."""
        if self.shared_by_node:
            received = received.unsqueeze(0)
        elif self._context.topology.num_nodes > 1:
            received = self._gather_within_node(received)
        self._decode(exchange.layout, received, exchange.slots, add=True)
        if exchange.exact is not None:
            streams.record_use(exchange.exact)
            for run in exchange.layout.runs:
                part = slice(run.start, run.stop)
                self._context.weight_errors.add(exchange.own[:, part], exchange.exact[:, part])
        first, *others = exchange.replicas
        first.complete()
        for replica in others:
            replica.complete_with(first)

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
        topology, replica = self._context.topology, self.replica
        # FSDP2 copies all gathers to memory of the first one's sizes and dtypes: one look will do.
        dtype, numel = input_tensor.dtype, input_tensor.numel()
        expected = replica.own is not None or numel == self._expected_numel(dtype)
        if group.size() != topology.world_size or not expected:
            all_gather_flat(output_tensor, input_tensor, group)
            return
        if not self._voted:
            self._votes.before_gather(self._context.step)
        self._voted = False
        self._count_baseline(input_tensor)
        if replica.state is not Freshness.FRESH:
            self._refresh(input_tensor, group)
        replica.wait()
        if replica.values is None:
            raise AssertionError("a refreshed replica must exist")
        if self.shared_by_node:
            self._gather_node(output_tensor, replica.values)
        else:
            output_tensor.set_(replica.values)  # type: ignore[call-overload]

    def read(self) -> GatheredWeights | None:
        """Return the replica where it is all that a gather gives; None where one is needed."""
        replica = self.replica
        if replica.state is not Freshness.FRESH or self.shared_by_node:
            return None
        self._votes.before_gather(self._context.step)
        if replica.state is not Freshness.FRESH or replica.values is None or replica.own is None:
            self._voted = True
            return None
        self._count_baseline(replica.own)
        return GatheredWeights(replica.values, replica.written)

    def _expected_numel(self, dtype: torch.dtype) -> int:
        """Elements of this rank's slot in a gather of all parameters.

        Tensor subclasses may have other tensors gathered (``fsdp_pre_all_gather``).
        """
        params = self._params()
        if dtype == torch.uint8:
            return sum(p.padded_shard_numel * p.gather_dtype.itemsize for p in params)
        return sum(p.padded_shard_numel for p in params)

    def _refresh(self, slot: Tensor, group: dist.ProcessGroup) -> None:
        """Gather the main weights, or restored ones, into the replica in full precision."""
        topology, index = self._context.topology, self._context.topology.rank
        if self.shared_by_node:
            index, group = topology.node, self._context.inter_group
        if self.replica.state is Freshness.STALE:
            self._watch.note()  # FSDP2 has just read them: what is written from now on is new
        values, own = self.replica.begin_refresh(slot, group.size(), index)
        all_gather_flat(values, own, group)
        self._context.traffic.full_precision_gathers += 1
        self._count_sent(own.numel() * own.itemsize, group)
        self.replica.complete()

    def _gather_node(self, output: Tensor, values: Tensor) -> None:
        """Gather the node's slots of the replica to ``[nodes * node_size * n]``."""
        context, num_nodes = self._context, self._context.topology.num_nodes
        nodes, slots = output.view(num_nodes, -1), values.view(num_nodes, -1)
        if num_nodes <= MAX_GATHERED_PARTS:
            all_gather_parts(nodes.unbind(), slots.unbind(), context.intra_group)
        else:
            every = values.new_empty(context.topology.node_size, num_nodes, slots.shape[1])
            all_gather_flat(every.view(-1), values, context.intra_group)
            nodes.view_as(every.transpose(0, 1)).copy_(every.transpose(0, 1))
        self._count_sent(values.numel() * values.itemsize, context.intra_group)
