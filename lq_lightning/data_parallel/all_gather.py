"""Quantized all-gather of a unit's weight differences (SDP4Bit's qWD).

One object serves one FSDP2 unit. FSDP2 calls ``allocate`` for the output, copies this rank's shard
(already cast to the gather dtype) into its slot of the output, and calls the object with the output
and that slot, which is a *view* of it: writing the output destroys the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning._compat.fsdp2 import AllGather, GatheredWeights, GroupParam, pack_shards
from lq_lightning._compat.tensors import to_sharded_dtensor
from lq_lightning._compat.torch import all_gather_flat, all_gather_parts, backward_id
from lq_lightning.codecs import decode
from lq_lightning.data_parallel.config import WeightQuantization
from lq_lightning.data_parallel.replica import (
    Freshness,
    Replica,
    ReplicaMemory,
    ShardWatch,
    StaleReplicaConsensus,
)
from lq_lightning.data_parallel.unit import (
    MessageLayout,
    Segment,
    Unit,
    WireFormat,
    full_precision_reason,
    keep_small_runs_exact,
    merge_over_small_gaps,
    ring_bytes,
    segment_runs,
)
from lq_lightning.foundation import streams

# Up to so many nodes' slots are gathered to their places in the output at once, in parts. Each part
# costs the host a launch; slots of more nodes are gathered in one piece and copied, which costs
# memory.
MAX_GATHERED_PARTS = 8


class Exchange(NamedTuple):
    """An exchange of weight differences in progress."""

    replicas: tuple[Replica, ...]
    slots: Tensor  # [units, slots, n], values of the replicas
    own: Tensor  # [units, n], this rank's slots of them
    layout: MessageLayout
    messages: Tensor  # [units, nbytes] uint8, of this rank
    exact: Tensor | None  # [units, n], this rank's main weights, if errors are measured


class WeightDifferenceAllGather(AllGather):
    """All-gather of quantized weight differences (SDP4Bit §3.1, Algorithm 2).

    Every rank keeps a replica of the weights it computes with. After each optimizer step, each rank
    encodes the difference between its main shard and its slot of the replica (``start_exchange``),
    sends it (``send_exchange``), and all ranks, the owner included, add the decoded differences
    (``finish_exchange``). Main weights stay exact, so the next difference contains the error of
    this one. The gathers that FSDP2 asks for in forward and backward only read the replica
    (:meth:`read`).

    A gather refreshes the replica in full precision where it is not fresh: the first time, after
    :meth:`Replica.invalidate`, after an exchange that failed, and when ranks have agreed that
    something other than an optimizer step has written to the shards
    (:class:`StaleReplicaConsensus`).

    A parameter that becomes frozen keeps its replica, with the error of its last difference; no
    message contains it until it is trained again.

    Deviations from the reference implementation: rounds to nearest by default; the difference is
    formed and added in fp32 and rounded once to the replica's dtype; it is sent right after the
    optimizer step and not when the next forward asks for it.

    The values of ``replica`` are ``[world * n]``, or ``[nodes * n]`` if a node shares them: row
    ``index`` of the memory of units of one shape.
    """

    def __init__(
        self,
        config: WeightQuantization,
        unit: Unit,
        consensus: StaleReplicaConsensus,
        memory: ReplicaMemory,
        index: int,
    ) -> None:
        self.unit = unit
        self._config = config
        self._context = unit.context
        self._num_nodes = unit.context.topology.num_nodes
        self._layout: MessageLayout | None = None
        self._layout_key: tuple[Any, ...] | None = None
        self.memory = memory
        self.replica = Replica(memory, index)
        self.shared_by_node = config.replica == "node"
        self._watch = ShardWatch(unit.names, unit.params)
        self._consensus = consensus
        self._voted = False  # for the gather that comes now
        consensus.add(unit.name, self.replica, self._watch)

    def holds_any(self, param_ids: set[int] | None) -> bool:
        """Whether one of these parameters (``id``; None: any) is in the unit."""
        if param_ids is None:
            return True
        return any(id(p.sharded_param) in param_ids for p in self.unit.params())

    def trained(self) -> list[bool]:
        """Whether each parameter of the unit is trained now."""
        return [p.requires_grad for p in self.unit.params()]

    def segments(self) -> list[Segment]:
        """Wire format of each parameter, given the parameters as they are now."""
        dtypes = {p.gather_dtype for p in self.unit.params()}
        segments, least = [], self._context.min_quantized_numel
        for name, param, start in self.unit.places():
            reason = full_precision_reason(param.ndim, param.numel, param.gather_dtype, least)
            if len(dtypes) > 1:
                reason = reason or "mixed dtypes in one unit"
            wire_format: WireFormat = "full" if reason else "quantized"
            if not param.requires_grad:
                wire_format, reason = "skipped", "frozen: gathered once in full precision"
            segments.append(Segment(name, start, param.padded_shard_numel, wire_format, reason))
        if len(dtypes) > 1:
            return segments
        return keep_small_runs_exact(segments, [self._config.codec()], dtypes.pop().itemsize)

    def _current_layout(self, dtype: torch.dtype) -> MessageLayout:
        params = self.unit.params()
        key = (dtype, *(p.requires_grad for p in params))
        if self._layout is None or key != self._layout_key:
            segments = self.segments()
            if dtype == torch.uint8:  # mixed dtypes: FSDP2 packs bytes
                segments = _byte_segments(segments, params)
            runs = merge_over_small_gaps(segment_runs(segments))
            self._layout = MessageLayout(runs, [self._config.codec()], dtype)
            self._layout_key = key
        return self._layout

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate the gather's output, ``size`` elements of ``dtype`` on ``device``."""
        return torch.empty(*size, dtype=dtype, device=device)

    # --- messages ---------------------------------------------------------------------------

    def _count_baseline(self, slot: Tensor) -> None:
        nbytes = self._context.count_baseline(slot.numel() * slot.itemsize)
        self._context.traffic.baseline_weights += nbytes

    def _encode(self, layout: MessageLayout, slots: Tensor, reference: Tensor) -> Tensor:
        """Encode ``[units, n]`` slots minus ``reference`` into ``[units, nbytes]`` uint8.

        Gaps of slots are overwritten with zeros; those of ``reference`` hold zeros until a message
        is decoded.
        """
        context = self._context
        messages = layout.allocate(len(slots), device=slots.device)
        layout.encode(slots, messages, reference=reference)
        context.traffic.exchanges += len(slots)
        context.traffic.weights_messages += len(slots) * layout.nbytes
        context.traffic.weights_elements += len(slots) * layout.numel
        return messages

    def _gather_between_nodes(self, messages: Tensor) -> Tensor:
        """Gather ``[units, nbytes]`` messages of this local rank to ``[units, N, nbytes]``."""
        return self._gather_messages(messages, self._context.groups.inter).transpose(0, 1)

    def _gather_within_node(self, by_node: Tensor) -> Tensor:
        """Gather ``[units, N, nbytes]`` of the local ranks to ``[L, units, N, nbytes]``.

        With several nodes of several ranks, messages cross the slow network once per node and are
        passed on inside it, which a flat ring over all ranks does not do.
        """
        return self._gather_messages(by_node, self._context.groups.intra)

    def _gather_messages(self, messages: Tensor, group: dist.ProcessGroup) -> Tensor:
        """All-gather ``[...]`` messages over ``group`` to ``[ranks, ...]``."""
        if group.size() == 1:
            return messages.unsqueeze(0)
        messages = messages.contiguous()
        every = messages.new_empty(group.size(), *messages.shape)
        all_gather_flat(every.view(-1), messages.view(-1), group)
        self._count_sent(messages.numel(), group)
        return every

    def _count_sent(self, nbytes: int, group: dist.ProcessGroup) -> None:
        """Count a gather of ``nbytes`` per rank over ``group``."""
        traffic, groups = self._context.traffic, self._context.groups
        if group is groups.intra:
            traffic.weights_intra += (group.size() - 1) * nbytes
        elif group is groups.inter:
            traffic.weights_inter += (group.size() - 1) * nbytes
        else:
            intra, inter = ring_bytes(nbytes, self._context.topology)
            traffic.weights_intra += intra
            traffic.weights_inter += inter

    @staticmethod
    def _decode(layout: MessageLayout, messages: Tensor, slots: Tensor) -> None:
        """Decode ``[L, units, N, nbytes]`` messages and add them to slots.

        Messages of several local ranks are contiguous, as are slots, ``[units, N * L, n]`` in rank
        order.
        """
        if len(messages) == 1:
            messages = messages[0]
        else:  # nodes of all units have one stride, so that one call goes through all messages
            messages = messages.flatten(1, 2).transpose(0, 1)
            slots = slots.view(*messages.shape[:2], -1)
        for index, run in layout.quantized:
            part, target = layout.part(messages, index), slots[..., run.start : run.stop]
            decode(layout.spec_of(run), part, run.numel, out=target, add=True)
        layout.exact_to_slots(messages, slots)

    # --- saved state ------------------------------------------------------------------------

    def replica_slots(self) -> dict[str, Any]:
        """This rank's slot of the replica as DTensors sharded like the parameters, by name.

        Empty while the replica is stale: the next gather takes the main weights anyway.
        """
        own = self.replica.slot
        if own is None or own.dtype == torch.uint8:
            return {}
        self.replica.wait()
        return {
            name: to_sharded_dtensor(
                own[start : start + param.padded_shard_numel].clone(), param.sharded_param
            )
            for name, param, start in self.unit.places()
        }

    def restore(self, slots: dict[str, Tensor]) -> None:
        """Let the next gather start from saved slots (valid local parts, by parameter name)."""
        numel = sum(p.padded_shard_numel for p in self.unit.params())
        saved = slots[self.unit.names[0]].new_zeros(numel)
        for name, _, start in self.unit.places():
            local = slots[name].reshape(-1)
            saved[start : start + local.numel()].copy_(local)
        self.replica.restore(saved)
        self._watch.note()

    # --- the exchange after an optimizer step -----------------------------------------------

    def exchanges_alike(self, others: Sequence[WeightDifferenceAllGather]) -> bool:
        """Whether :meth:`start_exchange` may take these units together with this one.

        They must be all that share their memory with it, and have fresh replicas.
        """
        every, trained = (self, *others), self.trained()
        return (
            self.memory.holds([gather.replica for gather in every])
            and all(gather.replica.state is Freshness.FRESH for gather in every)
            and all(gather.trained() == trained for gather in others)
        )

    def begin_exchange(self) -> bool:
        """Note that the main weights were updated; return whether to send the difference."""
        if not self.replica.begin_exchange() or self.replica.own is None:
            return False
        self._watch.note_step()
        self.replica.wait()
        return True

    def start_exchange(self, others: Sequence[WeightDifferenceAllGather] = ()) -> Exchange | None:
        """Encode how this rank's shards changed; None if there is nothing to send.

        Call on every rank after an optimizer step, then :meth:`send_exchange` and
        :meth:`finish_exchange`, possibly on other CUDA streams. The parameters must not be written
        before this is done. Nothing is sent where all parameters are frozen, or where the next
        gather refreshes the replica anyway.

        ``others`` are further units, for which :meth:`exchanges_alike`: their messages are the same
        as in exchanges of their own, but need one launch of a kernel and one collective.
        """
        gathers = (self, *others)
        if not any(p.requires_grad and p.padded_shard_numel for p in self.unit.params()):
            return None
        begun = [gather.begin_exchange() for gather in gathers]
        values, own = self.replica.values, self.replica.own
        if not all(begun) or values is None or own is None:
            return None
        rows = self.memory.rows if others else values.view(1, -1)
        if rows is None:
            raise AssertionError("replicas that share memory must have some")
        slots = rows.view(len(gathers), -1, own.numel())
        reference = slots[:, self.replica.own_index]
        layout = self._current_layout(own.dtype)
        main = own.new_empty(len(gathers), own.numel())
        pack_shards([param for gather in gathers for param in gather.unit.params()], main)
        measured = self._context.measure_errors and own.is_floating_point()
        exact = main.clone() if measured else None
        messages = self._encode(layout, main, reference)
        replicas = tuple(gather.replica for gather in gathers)
        return Exchange(replicas, slots, reference, layout, messages, exact)

    def send_exchange(self, exchange: Exchange) -> Tensor:
        """Send the messages over the slowest network that there is, and nothing else.

        Returns those of all nodes, ``[units, N, nbytes]`` uint8, or with one node those of its
        ranks, ``[L, units, 1, nbytes]``, in memory of their own. (FSDP2 gathers nothing on a single
        rank, which has no replica to add differences to.)
        """
        if self._num_nodes > 1:
            return self._gather_between_nodes(exchange.messages)
        own = exchange.messages.unsqueeze(1)
        return own.clone() if self.shared_by_node else self._gather_within_node(own)

    def finish_exchange(self, exchange: Exchange, received: Tensor) -> None:
        """Pass the messages on inside the node and add the differences to the replicas."""
        if self.shared_by_node:
            received = received.unsqueeze(0)
        elif self._num_nodes > 1:
            received = self._gather_within_node(received)
        self._decode(exchange.layout, received, exchange.slots)
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
        replica, world_size = self.replica, self._context.topology.world_size
        # FSDP2 copies all gathers to memory of the first one's sizes and dtypes: one look will do.
        dtype, numel = input_tensor.dtype, input_tensor.numel()
        expected = replica.own is not None or numel == self._expected_numel(dtype)
        if group.size() != world_size or not expected:
            all_gather_flat(output_tensor, input_tensor, group)
            return
        if not self._voted:
            self._vote()
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
        """Return the replica in place of a gather's result; None where a gather is needed."""
        replica = self.replica
        if replica.state is not Freshness.FRESH or self.shared_by_node:
            return None
        self._vote()
        if replica.state is not Freshness.FRESH or replica.values is None or replica.own is None:
            self._voted = True
            return None
        self._count_baseline(replica.own)
        return GatheredWeights(replica.values, replica.written)

    def _vote(self) -> None:
        if backward_id() == -1:  # a backward uses the weights of its forward
            self._consensus.before_gather(self._context.step)

    def _expected_numel(self, dtype: torch.dtype) -> int:
        """Elements of this rank's slot in a gather of all parameters.

        Tensor subclasses may have other tensors gathered (``fsdp_pre_all_gather``).
        """
        in_bytes = dtype == torch.uint8
        return sum(
            p.padded_shard_numel * (p.gather_dtype.itemsize if in_bytes else 1)
            for p in self.unit.params()
        )

    def _refresh(self, slot: Tensor, group: dist.ProcessGroup) -> None:
        """Gather the main weights, or restored ones, into the replica in full precision."""
        topology, index = self._context.topology, self._context.topology.rank
        if self.shared_by_node:
            index, group = topology.node, self._context.groups.inter
        if self.replica.state is Freshness.STALE:
            self._watch.note()  # FSDP2 has just read them: what is written from now on is new
        values, own = self.replica.begin_refresh(slot, group.size(), index)
        all_gather_flat(values, own, group)
        self._context.traffic.full_precision_gathers += 1
        self._count_sent(own.numel() * own.itemsize, group)
        self.replica.complete()

    def _gather_node(self, output: Tensor, values: Tensor) -> None:
        """Gather the node's slots of the replica to ``[nodes * node_size * n]``."""
        context, num_nodes = self._context, self._num_nodes
        nodes, slots = output.view(num_nodes, -1), values.view(num_nodes, -1)
        if num_nodes <= MAX_GATHERED_PARTS:
            all_gather_parts(nodes.unbind(), slots.unbind(), context.groups.intra)
        else:
            every = values.new_empty(context.topology.node_size, num_nodes, slots.shape[1])
            all_gather_flat(every.view(-1), values, context.groups.intra)
            nodes.view_as(every.transpose(0, 1)).copy_(every.transpose(0, 1))
        self._count_sent(values.numel() * values.itemsize, context.groups.intra)


def _byte_segments(segments: list[Segment], params: list[GroupParam]) -> list[Segment]:
    scaled, start = [], 0
    for segment, param in zip(segments, params, strict=True):
        nbytes = segment.numel * param.gather_dtype.itemsize
        scaled.append(segment._replace(start=start, numel=nbytes))
        start += nbytes
    return scaled
