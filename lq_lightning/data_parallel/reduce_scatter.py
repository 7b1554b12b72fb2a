"""Quantized reduce-scatter of FSDP2 units: two-level gradient quantization (SDP4Bit §3.2).

One object serves one FSDP2 unit. Gradients arrive as one slot per rank. Within a node every rank
sends each slot's codes to the local rank that collects them; that rank decodes, sums in fp32 and
encodes again for the matching ranks of the other nodes, which decode and sum once more. Between the
two levels values stay in the Hadamard domain: the transform is linear, so one inverse at the end is
enough (SDP4Bit §3.3).

Deviation: the paper's kernels also encode what a node contributes to its own slots. That part never
leaves the node, so here it stays as it is: of N nodes, N - 1 add quantization noise to a gradient.

Shape legend: U units that are reduced together, W ranks, N nodes of L ranks, K messages to sum, n
values of a slot. Slots are ``[U, W, n]``, slot ``m * L + l`` for rank ``l`` of node ``m``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning._compat.fsdp2 import PackedGradients, ReduceScatter
from lq_lightning._compat.torch import backward_id, copy_all, reduce_scatter_flat
from lq_lightning.codecs import CodecSpec, decode_reduce, decode_reduce_encode, derive_seed
from lq_lightning.data_parallel.config import GradientQuantization
from lq_lightning.data_parallel.unit import (
    MessageLayout,
    Segment,
    Unit,
    WireFormat,
    full_precision_reason,
    keep_small_runs_exact,
    merge_over_small_gaps,
    part_seed,
    segment_runs,
)
from lq_lightning.foundation import streams
from lq_lightning.foundation.topology import Level

MAX_LAYOUTS = 64
_SEED_INTRA, _SEED_INTER = 2, 3


class LevelLayouts(NamedTuple):
    """Layouts of the messages of one slot, within a node and between nodes."""

    intra: MessageLayout
    inter: MessageLayout


class GradientBucket:
    """Memory in which backward packs gradients of ``units`` units of one shape, one per row.

    Their reduction then costs the host little more than that of one unit. The price is this memory,
    and that the first unit waits for the last.
    """

    def __init__(self, units: int) -> None:
        self._units = units
        self._slots: Tensor | None = None
        self._layouts: LevelLayouts | None = None
        self._outputs: list[Tensor] = []

    def row(
        self, layouts: LevelLayouts, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """Return the next unit's memory, ``[numel]``; None if it is unlike those before.

        It remains the next one until :meth:`add`.
        """
        if not self._outputs:
            self._slots = torch.empty(self._units, numel, dtype=dtype, device=device)
            self._layouts = layouts
        slots = self._slots
        alike = (numel, dtype, layouts)
        if slots is None or (slots.shape[1], slots.dtype, self._layouts) != alike:
            return None
        return slots[len(self._outputs)]

    def add(self, output: Tensor) -> bool:
        """Let the last row be reduced to ``output``; return whether the bucket is full."""
        self._outputs.append(output)
        return len(self._outputs) == self._units

    def take(self) -> tuple[Tensor, list[Tensor], LevelLayouts]:
        """Return slots ``[units, world * n]``, as many outputs, and their layouts; start anew.

        Streams: rows come from the stream of backward, so the allocator is told of the one that
        reads them, the current one.
        """
        slots, outputs, layouts = self._slots, self._outputs, self._layouts
        if slots is None or layouts is None:
            raise AssertionError("nothing was added")
        self.forget()
        streams.record_use(slots)
        return slots[: len(outputs)], outputs, layouts

    def forget(self) -> None:
        """Start anew; rows that were handed out stay valid."""
        self._slots = self._layouts = None
        self._outputs = []


class TwoLevelReduceScatter(ReduceScatter):
    """Reduce-scatter that sends INT8 codes within a node and INT4 codes between nodes.

    With one node, or one rank per node, only the level that exists is used. Sums are formed in fp32
    in a fixed order, so the result does not depend on timing: first what this node contributes,
    then the other nodes, by number. A result in bf16 is rounded after each of the two. A non-finite
    gradient is NaN or Inf on the rank that owns it, and where it was encoded so is its whole group,
    so the gradient norm of every rank sees it. Units of one ``bucket`` may be reduced together.
    """

    def __init__(
        self, config: GradientQuantization, unit: Unit, bucket: GradientBucket | None = None
    ) -> None:
        self.unit = unit
        self.bucket = bucket
        self._config = config
        self._context = unit.context
        topology = unit.context.topology
        self._nodes, self._node = topology.num_nodes, topology.node
        self._node_size, self._levels = topology.node_size, topology.levels
        separates = config.separates_vocabulary(self._levels)
        self._vocabulary = unit.context.vocabulary if separates else frozenset()
        self._layouts: dict[tuple[int, torch.dtype, tuple[int, ...]], LevelLayouts] = {}
        self._expected: PackedGradients | None = None
        self._packs_into: GradientBucket | None = None
        self._allocations = 0
        self._calls = 0
        self._calls_step = -1

    # --- layouts ----------------------------------------------------------------------------

    def segments(self, packed: Sequence[int] | None = None, itemsize: int = 4) -> list[Segment]:
        """Wire format of the gradients of ``packed`` parameters (by default all trained ones).

        ``itemsize`` belongs to the reduction dtype.
        """
        if packed is None:
            packed = [i for i, p in enumerate(self.unit.params()) if p.requires_grad]
        segments, least = [], self._context.min_quantized_numel
        for name, param, start in self.unit.places(packed):
            reason = full_precision_reason(param.ndim, param.numel, torch.float32, least)
            wire_format: WireFormat = "full" if reason else "quantized"
            codec, numel = int(name in self._vocabulary), param.padded_shard_numel
            segments.append(Segment(name, start, numel, wire_format, reason, codec))
        return keep_small_runs_exact(segments, self._specs(self._levels[0]), itemsize)

    def _specs(self, level: Level) -> list[CodecSpec]:
        """Codecs of a level: of most gradients, and of embeddings and heads."""
        return [self._config.codec(level, vocabulary=vocabulary) for vocabulary in (False, True)]

    def layouts_of(self, packed: tuple[int, ...], numel: int, dtype: torch.dtype) -> LevelLayouts:
        """Layouts for a slot of ``numel`` elements of these parameters, in the reduction dtype.

        FSDP2 packs only parameters that got a gradient. Where that depends on the data (experts
        that see no token) there may be as many combinations as steps, so only the ``MAX_LAYOUTS``
        most recently used layouts are kept.
        """
        key = (numel, dtype, packed)
        layouts = self._layouts.pop(key, None) or self._make_layouts(packed, numel, dtype)
        self._layouts[key] = layouts  # at the end, as the most recently used one
        if len(self._layouts) > MAX_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return layouts

    def _make_layouts(
        self, packed: tuple[int, ...], numel: int, dtype: torch.dtype
    ) -> LevelLayouts:
        segments = self.segments(packed, dtype.itemsize)
        total = sum(s.numel for s in segments)
        if total != numel:
            raise AssertionError(
                f"unit `{self.unit.name}`: FSDP2 packed {numel} elements per rank, but the "
                f"parameters with gradients hold {total}"
            )
        runs = merge_over_small_gaps(segment_runs(segments))
        # after sums within a node, exact values are fp32
        raw = torch.float32 if self._node_size > 1 else dtype
        return LevelLayouts(
            MessageLayout(runs, self._specs("intra"), dtype),
            MessageLayout(runs, self._specs("inter"), raw),
        )

    # --- levels -----------------------------------------------------------------------------

    def _seed(self, level: int) -> int | None:
        """Seed of this call's stochastic rounding: differs by step, call, rank, unit and level."""
        if self._config.rounding != "stochastic":
            return None
        context, rank = self._context, self._context.topology.rank
        seed = derive_seed(context.seed, level, context.step, self._calls, rank, self.unit.index)
        return part_seed(seed, 0)

    def _start(self, slots: Tensor, layouts: LevelLayouts, output: Tensor, scale: float) -> Tensor:
        """Do everything before the slowest exchange, and write this node's part to ``output``.

        Gaps of ``[U, W, n]`` slots are overwritten with zeros; with one node nothing is written to
        ``[U, n]`` output yet. Returns the messages of the slowest exchange, uint8:
        ``[N - 1, U, nbytes]``, or with one node ``[L, U, 1, nbytes]``.
        """
        if self._node_size == 1:
            # before zeros are written over gaps; no message contains this node's own slot
            torch.mul(slots[:, self._node], scale, out=output)
            return self.encode_for_nodes(slots, layouts.inter)
        messages = self.encode_for_node(slots, layouts.intra)
        if self._nodes == 1:
            return messages
        received = self._exchange_within_node(messages)
        messages = self.reduce_and_encode(received, layouts)
        _sum(received[:, :, self._node], layouts.intra, output, scale)
        return messages

    def _exchange(self, messages: Tensor) -> Tensor:
        """Send the messages of :meth:`_start` over the slowest network; ``[K, U, nbytes]``."""
        if self._nodes == 1:
            return self._exchange_within_node(messages)[:, :, 0]
        return self._exchange_between_nodes(messages)

    def encode_for_nodes(self, slots: Tensor, inter: MessageLayout) -> Tensor:
        """Encode ``[U, N, n]`` slots for the other nodes, to ``[N - 1, U, nbytes]``.

        Gaps become zeros in all slots that are read.
        """
        units, nodes, _ = slots.shape
        node = self._node
        messages = inter.allocate(nodes - 1, units, device=slots.device)
        seed = self._seed(_SEED_INTER)
        if nodes == 2 and units > 1:  # one call for all of them
            inter.encode(slots[:, 1 - node], messages[0], seed=seed)
            return messages
        for unit, own in enumerate(slots):
            inter.encode(own, messages[:, unit], seed=seed, skip=node)
        return messages

    def encode_for_node(self, slots: Tensor, layout: MessageLayout) -> Tensor:
        """Encode all slots, ordered by the local rank that collects them: ``[L, U, N, nbytes]``."""
        nodes, local, units = self._nodes, self._node_size, len(slots)
        messages = layout.allocate(local, units, nodes, device=slots.device)
        seed = self._seed(_SEED_INTRA)
        if nodes == 1:  # one call for all units
            layout.encode(slots, messages[:, :, 0].transpose(0, 1), seed=seed)
            return messages
        for unit, own in enumerate(slots):
            by_node, for_node = own.view(nodes, local, -1), messages[:, unit].transpose(0, 1)
            layout.encode(by_node, for_node, seed=seed)
        return messages

    def reduce_and_encode(self, received: Tensor, layouts: LevelLayouts) -> Tensor:
        """Sum ``[L, U, N, nbytes]`` over the node, encode for other nodes: ``[N - 1, U, nbytes]``.

        Both are uint8.
        """
        intra, inter = layouts
        node, (_, units, nodes, _) = self._node, received.shape
        messages = inter.allocate(nodes - 1, units, device=received.device)
        seed = self._seed(_SEED_INTER)
        for unit in range(units):
            of_unit, for_unit = received[:, unit], messages[:, unit]
            if intra.exact_runs:
                sums = torch.sum(intra.exact(of_unit), dim=0, dtype=torch.float32)
                torch.cat((sums[:node], sums[node + 1 :]), out=inter.exact(for_unit))
            for index, run in intra.quantized:
                codes, out = intra.part(of_unit, index), inter.part(for_unit, index)
                decode_reduce_encode(
                    *(intra.spec_of(run), codes, run.numel, inter.spec_of(run)),
                    seed=part_seed(seed, index),
                    out=out,
                    skip=node,
                )
        return messages

    def _exchange_within_node(self, messages: Tensor) -> Tensor:
        """All-to-all of ``[L, ...]``: row ``i`` goes to local rank ``i`` and comes from it."""
        ranks, received = messages.shape[0], torch.empty_like(messages)
        if messages.shape[-1]:
            group = self._context.groups.intra
            dist.all_to_all_single(received.view(-1), messages.view(-1), group=group)
        self._context.traffic.gradients_intra += messages.numel() // ranks * (ranks - 1)
        return received

    def _exchange_between_nodes(self, messages: Tensor) -> Tensor:
        """All-to-all of ``[N - 1, U, nbytes]``, one row for and from each other node."""
        received = torch.empty_like(messages)
        splits = [messages.shape[1] * messages.shape[2]] * self._nodes
        splits[self._node] = 0
        if messages.shape[-1]:
            dist.all_to_all_single(
                received.view(-1),
                messages.view(-1),
                output_split_sizes=splits,
                input_split_sizes=splits,
                group=self._context.groups.inter,
            )
        self._context.traffic.gradients_inter += messages.numel()
        return received

    # --- the collective ---------------------------------------------------------------------

    def expect(self, packed: PackedGradients) -> None:
        """Announce what the next call reduces; replaces the announcement of a call that never came.

        FSDP2 hands the call nothing but a flat buffer.
        """
        self._expected, self._packs_into, self._allocations = packed, None, 0

    def _take_expected(self) -> PackedGradients:
        packed, self._expected = self._expected, None
        if packed is None:
            raise AssertionError(
                f"unit `{self.unit.name}` is reduced, but nothing said which gradients are packed"
            )
        return packed

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate an input or output buffer, ``size`` elements of ``dtype`` on ``device``.

        FSDP2 allocates the input first. A bucketed unit's input is a row of the shared bucket;
        outputs are separate, because FSDP2 assumes that each owns its storage.
        """
        self._allocations += 1
        if self._expected is not None and self._allocations == 1 and len(size) == 1:
            row = self._row(self._expected, int(size[0]), dtype, device)
            if row is not None:
                return row
        return torch.empty(*size, dtype=dtype, device=device)

    def _row(
        self, packed: PackedGradients, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """Row of the bucket for what is packed now, ``[numel]``; None if it is reduced alone."""
        context, bucket = self._context, self.bucket
        if bucket is None or packed.read_in_backward or context.measure_errors:
            return None
        if not _may_be_deferred(device):
            return None
        context.reductions.begin()
        layouts = self.layouts_of(packed.indices, numel // context.topology.world_size, dtype)
        row = bucket.row(layouts, numel, dtype, device)
        self._packs_into = None if row is None else bucket
        return row

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor`` (``[world * n]``) to this rank's ``output_tensor`` (``[n]``).

        Gaps of the input are overwritten with zeros. The result is complete on the current stream,
        or, if only the optimizer reads it, on the stream that called backward when backward ends.

        Raises:
            NotImplementedError: ``op`` is neither a sum nor an average.
        """
        topology = self._context.topology
        if group.size() != topology.world_size:
            raise NotImplementedError(
                f"unit `{self.unit.name}` reduces over {group.size()} ranks, but its topology has "
                f"{topology.world_size}: quantized reduction needs one flat mesh over all ranks."
            )
        scale = _scale_of(op, topology.world_size)
        packed = self._take_expected()
        try:
            self._start_call(output_tensor)
            exact = self._exact(output_tensor, input_tensor, group, scale)
            in_backward = packed.read_in_backward or exact is not None
            # FSDP2 divides a sum itself
            may_defer = not in_backward and op == dist.ReduceOp.AVG
            bucket, self._packs_into = self._packs_into, None
            if bucket is not None and may_defer:
                self._reduce_with_others(bucket, output_tensor, scale)
            else:
                numel, dtype = output_tensor.numel(), input_tensor.dtype
                layouts = self.layouts_of(packed.indices, numel, dtype)
                deferred = may_defer and _may_be_deferred(input_tensor.device)
                self._reduce(input_tensor.view(1, -1), [output_tensor], layouts, scale, deferred)
                if bucket is not None:  # FSDP2 keeps the row until it is read
                    bucket.forget()
                    self.bucket = None
        except BaseException:  # out of memory, for example, after which a user may go on
            self.recover()
            raise
        if exact is not None:
            self._context.gradient_errors.add(output_tensor, exact)

    def recover(self) -> None:
        """Drop pending reductions of a backward that failed; nobody will use its gradients."""
        self._expected = self._packs_into = None
        self._context.reductions.drop()
        if self.bucket is not None:
            self.bucket.forget()
        self._context.reductions.join()

    def _reduce(
        self,
        slots: Tensor,
        outputs: list[Tensor],
        layouts: LevelLayouts,
        scale: float,
        deferred: bool,
    ) -> None:
        """Reduce ``[U, W * n]`` gradients of one unit, or of a bucket, to as many ``[n]``."""
        reductions = self._context.reductions
        if deferred:
            reductions.make_room()
        else:
            reductions.join()  # FSDP2 may add this result to one of them
        if len(outputs) == 1:
            sums = outputs[0].view(1, -1)
        else:
            sums = outputs[0].new_empty(len(outputs), outputs[0].numel())
        slots = slots.view(len(outputs), self._context.topology.world_size, -1)
        messages = self._start(slots, layouts, sums, scale)

        def finish(received: Tensor) -> None:
            several = self._nodes > 1  # whose messages add to this node's own part
            _sum(received, layouts.inter if several else layouts.intra, sums, scale, add=several)
            if len(outputs) > 1:
                copy_all(tuple(outputs), sums.unbind())
                streams.record_use(sums)  # allocated on the stream of the first level

        # the payload of the slowest level that this topology has
        traffic = self._context.traffic
        traffic.gradients_messages += messages.numel()
        traffic.gradients_elements += layouts.inter.numel * messages.shape[0] * messages.shape[1]
        if deferred:
            reductions.submit(messages, lambda: self._exchange(messages), finish)
        else:
            finish(self._exchange(messages))

    def _reduce_with_others(self, bucket: GradientBucket, output: Tensor, scale: float) -> None:
        """Add gradients that are packed in a row of the bucket to its reduction."""

        def reduce() -> None:
            self._reduce(*bucket.take(), scale, deferred=True)

        self._context.reductions.wait_for_more(bucket, reduce)
        if bucket.add(output):
            self._context.reductions.make_room()

    def _start_call(self, output: Tensor) -> None:
        context = self._context
        if self._calls_step != context.step:
            self._calls_step, self._calls = context.step, 0
        self._calls += 1
        nbytes = context.count_baseline(output.numel() * output.itemsize)
        context.traffic.baseline_gradients += nbytes
        context.traffic.reductions += 1

    def _exact(
        self, output: Tensor, slots: Tensor, group: dist.ProcessGroup, scale: float
    ) -> Tensor | None:
        """The full-precision result, when errors are measured."""
        if not self._context.measure_errors:
            return None
        exact = torch.empty(output.shape, dtype=torch.float32, device=output.device)
        reduce_scatter_flat(exact, slots.float(), group)
        return exact * scale


def _sum(
    received: Tensor, layout: MessageLayout, output: Tensor, scale: float, *, add: bool = False
) -> None:
    """Sum ``[K, U, nbytes]`` messages over ``K``, and write or add ``scale`` times it to output."""
    exact = None
    if layout.exact_runs:
        exact = layout.exact(received).sum(dim=0, dtype=torch.float32).mul_(scale)
        if add:  # read before decoding adds the noise of its neighbours to gaps
            exact.add_(layout.read_exact(output))
    for index, run in layout.quantized:
        part, target = layout.part(received, index), output[:, run.start : run.stop]
        decode_reduce(layout.spec_of(run), part, run.numel, scale=scale, out=target, add=add)
    if exact is not None:
        layout.write_exact(exact, output)


def _may_be_deferred(device: torch.device) -> bool:
    return streams.has_streams(device) and backward_id() != -1


def _scale_of(op: Any, world_size: int) -> float:
    if op == dist.ReduceOp.AVG:
        return 1.0 / world_size
    if op == dist.ReduceOp.SUM:
        return 1.0
    raise NotImplementedError(
        f"quantized reduction supports sums and averages, not {op}. With a gradient divide factor, "
        "call `module.set_force_sum_reduction_for_comms(True)` on the FSDP2 modules."
    )
