"""Quantized reduce-scatter of FSDP2 units: two-level gradient quantization (SDP4Bit §3.2).

One object serves one FSDP2 unit. Gradients arrive as one slot per rank. Within a node every rank
sends each slot's codes to the local rank that collects them; that rank decodes, sums in fp32 and
encodes again for the matching ranks of the other nodes, which decode and sum once more. Between the
two levels values stay in the Hadamard domain: the transform is linear, so one inverse at the end is
enough (SDP4Bit §3.3).

Deviation: the paper's kernels also encode what a node contributes to its own slots. That part never
leaves the node, so here it stays as it is: of N nodes, N - 1 add quantization noise to a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning._compat.fsdp2 import Reduced, ReduceScatter
from lq_lightning._compat.torch import backward_id, reduce_scatter_flat
from lq_lightning.codecs import (
    CodecSpec,
    decode_reduce,
    decode_reduce_encode,
    derive_seed,
    encode,
)
from lq_lightning.data_parallel.config import GradientQuantization
from lq_lightning.data_parallel.error_feedback import GradientResidual
from lq_lightning.data_parallel.layout import (
    MessageLayout,
    Segment,
    absorb_small_runs,
    segment_runs,
)
from lq_lightning.data_parallel.unit import (
    UnitCollective,
    full_precision_reason,
    keep_small_runs_exact,
    part_seed,
)
from lq_lightning.foundation.topology import Level
from lq_lightning.foundation.traffic import ring_bytes

__all__ = ["TwoLevelReduceScatter"]

_SEED_INTRA, _SEED_INTER = 2, 3


class TwoLevelReduceScatter(UnitCollective, ReduceScatter):
    """Reduce-scatter that sends INT8 codes within a node and INT4 codes between nodes.

    With one node, or one rank per node, only the level that exists is used. Sums are formed in fp32
    in a fixed order, so the result does not depend on timing: first what this node contributes,
    then the other nodes, by number. A result in bf16 is rounded after each of the two. With error
    feedback, what the messages between nodes leave out is added to those of the next call. A
    non-finite gradient is NaN or Inf on the rank that owns it, and where it was encoded so is its
    whole group, so the gradient norm of every rank sees it.

    Args:
        config: Codecs and method.
        unit: Arguments of :class:`UnitCollective`.
    """

    def __init__(self, config: GradientQuantization, **unit: Any) -> None:
        super().__init__(**unit)
        self._config = config
        separates = config.separates_vocabulary(self._context.topology.levels)
        self._vocabulary = self._context.vocabulary if separates else frozenset()
        self._packed: tuple[int, ...] | None = None
        self._read_in_backward = True
        self._layouts: dict[tuple[Any, ...], tuple[MessageLayout, MessageLayout]] = {}
        self._calls = 0
        self._calls_step = -1
        feeds_back = config.error_feedback and self._context.topology.num_nodes > 1
        self.residual = GradientResidual() if feeds_back else None

    # --- layout -----------------------------------------------------------------------------

    def record_packed(self, reduced: Reduced) -> None:
        """Remember which parameters the next call packs (those with a gradient), in its order."""
        index_of = {id(p.fsdp_param): i for i, p in enumerate(self._params())}
        self._packed = tuple(index_of[id(p)] for p in reduced.fsdp_params)
        self._read_in_backward = reduced.read_in_backward

    def segments(self, packed: Sequence[int] | None = None, itemsize: int = 4) -> list[Segment]:
        """How the gradients of the given parameters (all trained ones by default) travel.

        Args:
            packed: Indices of the parameters in a slot.
            itemsize: Bytes of one element of the reduction dtype.
        """
        params = self._params()
        if packed is None:
            packed = [i for i, p in enumerate(params) if p.requires_grad]
        segments, start = [], 0
        for i in packed:
            param = params[i]
            reason = full_precision_reason(
                param.ndim, param.numel, torch.float32, self._min_quantized_numel
            )
            travel = "full" if reason else "quantized"
            codec = int(self.names[i] in self._vocabulary)
            segments.append(
                Segment(self.names[i], start, param.padded_shard_numel, travel, reason, codec)  # type: ignore[arg-type]
            )
            start += param.padded_shard_numel
        first_level = self._context.topology.levels[0]
        return keep_small_runs_exact(segments, self._specs(first_level), itemsize)

    def _specs(self, level: Level) -> list[CodecSpec]:
        """Codecs of a level: of most gradients, and of those of the vocabulary."""
        return [self._config.codec(level, vocabulary=vocabulary) for vocabulary in (False, True)]

    def _layouts_for(self, numel: int, dtype: torch.dtype) -> tuple[MessageLayout, MessageLayout]:
        """Message layouts within the node and between nodes for a slot of ``numel`` elements."""
        key = (numel, dtype, self._packed)
        if key not in self._layouts:
            segments = self.segments(self._packed, dtype.itemsize)
            total = sum(s.numel for s in segments)
            if total != numel:
                raise AssertionError(
                    f"unit `{self.name}`: FSDP2 packed {numel} elements per rank, but the "
                    f"parameters with gradients hold {total}"
                )
            runs = absorb_small_runs(segment_runs(segments))
            intra = MessageLayout.of(runs, self._specs("intra"), dtype)
            two_levels = self._context.topology.node_size > 1
            raw = torch.float32 if two_levels else dtype
            inter = MessageLayout.of(runs, self._specs("inter"), raw)
            self._layouts[key] = (intra, inter)
        return self._layouts[key]

    def _seed(self, level: int) -> int | None:
        """Seed of this call's stochastic rounding: differs by step, call, rank, unit and level."""
        if self._config.rounding != "stochastic":
            return None
        context = self._context
        return derive_seed(
            context.seed, level, context.step, self._calls, context.topology.rank, self._index
        )

    # --- the collective ---------------------------------------------------------------------

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate an input or output buffer, ``size`` elements of ``dtype`` on ``device``."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor`` (``[world * n]``) to this rank's slot in ``output_tensor``.

        Args:
            output_tensor: ``[n]`` in the reduction dtype.
            input_tensor: ``[world * n]`` in the reduction dtype. Full-precision values between
                quantized ones are overwritten with zeros.
            group: All ranks of the topology.
            op: Sum or average.
            async_op: Not used. The result is complete on the current stream, or, if only the
                optimizer reads it, on the stream that called backward when backward ends.

        Raises:
            NotImplementedError: ``op`` is neither a sum nor an average.
        """
        topology = self._context.topology
        if group.size() != topology.world_size:
            raise NotImplementedError(
                f"unit `{self.name}` reduces over {group.size()} ranks, but its topology has "
                f"{topology.world_size}: quantized reduction needs one flat mesh over all ranks."
            )
        scale = _scale_of(op, topology.world_size)
        self._start_call(output_tensor)
        intra, inter = self._layouts_for(output_tensor.numel(), input_tensor.dtype)
        exact = self._exact(output_tensor, input_tensor, group, scale)
        deferred = (
            input_tensor.is_cuda
            and exact is None
            and not self._read_in_backward
            and op == dist.ReduceOp.AVG  # of a sum, FSDP2 divides the result itself
            and backward_id() != -1
        )
        if deferred:
            self._context.reductions.make_room()
        elif input_tensor.is_cuda:
            self._context.reductions.join()  # FSDP2 may add this result to one of them
        slots = input_tensor.view(topology.world_size, -1)
        messages = self._first_level(slots, intra, inter, output_tensor, scale)

        def last_level() -> None:
            if topology.num_nodes == 1:
                received = self._exchange_within_node(messages)[:, 0]
                self._finish(received, intra, output_tensor, scale)
            else:
                received = self._exchange_between_nodes(messages)
                self._finish(received, inter, output_tensor, scale, add=True)

        self._count_messages(messages, inter)
        if deferred:
            self._context.reductions.submit(messages, last_level)
        else:
            last_level()
        if exact is not None:
            self._context.gradient_errors.add(output_tensor, exact)

    def _first_level(
        self,
        slots: Tensor,
        intra: MessageLayout,
        inter: MessageLayout,
        output: Tensor,
        scale: float,
    ) -> Tensor:
        """Do all before the slowest exchange, and write what this node contributes to ``output``.

        Args:
            slots: ``[world, n]``.
            intra: Layout of messages within the node.
            inter: Layout of messages between nodes.
            output: ``[n]``; with one node nothing is written yet.
            scale: Factor of the sum.

        Returns:
            The messages of the slowest exchange, uint8: ``[nodes - 1, nbytes]``, or of one node
            ``[node_size, 1, nbytes]``.
        """
        topology = self._context.topology
        if topology.node_size == 1:
            messages = self._encode_for_nodes(slots, intra, inter)
            torch.mul(slots[topology.node], scale, out=output)  # not moved: no message is for it
            return messages
        messages = self._encode_for_node(slots, intra)
        if topology.num_nodes == 1:
            return messages
        received = self._exchange_within_node(messages)
        messages = self._reduce_and_encode(received, intra, inter)
        self._finish(received[:, topology.node], intra, output, scale)
        return messages

    def _start_call(self, output: Tensor) -> None:
        context = self._context
        if self._calls_step != context.step:
            self._calls_step, self._calls = context.step, 0
        self._calls += 1
        intra, inter = ring_bytes(output.numel() * output.itemsize, context.topology)
        context.traffic.baseline_gradients += intra + inter
        context.traffic.baseline_inter += inter
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

    def _other_nodes(self) -> Iterator[tuple[slice, slice]]:
        """Yield runs of the other nodes: their slots, and their messages, which leave no gap."""
        node, nodes = self._context.topology.node, self._context.topology.num_nodes
        if node > 0:
            yield slice(0, node), slice(0, node)
        if node < nodes - 1:
            yield slice(node + 1, nodes), slice(node, nodes - 1)

    def _encode_for_nodes(
        self, slots: Tensor, intra: MessageLayout, inter: MessageLayout
    ) -> Tensor:
        """Encode ``[nodes, n]`` slots for the other nodes, to ``[nodes - 1, nbytes]``."""
        messages = inter.allocate(len(slots) - 1, device=slots.device)
        seed = self._seed(_SEED_INTER)
        if self.residual is not None:
            self.residual.prepare(len(messages), intra, slots.device, self._packed)
        for part, (source, target) in enumerate(self._other_nodes()):
            encode_run = None
            if self.residual is not None:
                encode_run = partial(self.residual.encode, rows=target)
            values, encoded = slots[source], messages[target]
            inter.move_exact(values, encoded)
            self._encode_into(encoded, values, inter, part_seed(seed, part), encode_run)
        return messages

    @staticmethod
    def _encode_into(
        messages: Tensor,
        slots: Tensor,
        layout: MessageLayout,
        seed: int | None,
        encode_run: Callable[..., None] | None = None,
    ) -> None:
        """Encode runs of ``[R, n]`` to ``[R, nbytes]``; with error feedback by ``encode_run``."""
        for index, run in layout.quantized:
            part = layout.part(messages, index)
            values = slots[:, run.start : run.stop]
            spec, run_seed = layout.spec_of(run), part_seed(seed, index)
            if encode_run is not None:
                encode_run(index, values, spec, seed=run_seed, out=part)
            else:
                encode(spec, values, seed=run_seed, out=part)

    def _encode_for_node(self, slots: Tensor, layout: MessageLayout) -> Tensor:
        """Encode all slots, ordered by the local rank that collects them.

        Args:
            slots: ``[nodes * node_size, n]``, slot ``m * node_size + l`` for rank ``l`` of node
                ``m``.

        Returns:
            ``[node_size, nodes, nbytes]`` uint8.
        """
        topology = self._context.topology
        nodes, local = topology.num_nodes, topology.node_size
        messages = layout.allocate(local, nodes, device=slots.device)
        seed = self._seed(_SEED_INTRA)
        by_node = slots.view(nodes, local, -1)
        layout.move_exact(by_node, messages.transpose(0, 1))
        for i in range(min(nodes, local)):
            if nodes < local:
                self._encode_into(messages[:, i], by_node[i], layout, part_seed(seed, i))
            else:
                self._encode_into(messages[i], by_node[:, i], layout, part_seed(seed, i))
        return messages

    def _exchange_within_node(self, messages: Tensor) -> Tensor:
        """All-to-all of ``[node_size, ...]``: row ``i`` goes to local rank ``i``.

        Returns:
            ``[node_size, ...]``: row ``j`` comes from local rank ``j``.
        """
        ranks, received = messages.shape[0], torch.empty_like(messages)
        if messages.shape[-1]:
            dist.all_to_all_single(
                received.view(-1), messages.view(-1), group=self._context.intra_group
            )
        self._context.traffic.gradients_intra += messages.numel() // ranks * (ranks - 1)
        return received

    def _exchange_between_nodes(self, messages: Tensor) -> Tensor:
        """All-to-all of ``[nodes - 1, nbytes]``, one row for and from each other node."""
        topology = self._context.topology
        received = torch.empty_like(messages)
        splits = [messages.shape[1]] * topology.num_nodes
        splits[topology.node] = 0
        if messages.shape[1]:
            dist.all_to_all_single(
                received.view(-1),
                messages.view(-1),
                output_split_sizes=splits,
                input_split_sizes=splits,
                group=self._context.inter_group,
            )
        self._context.traffic.gradients_inter += messages.numel()
        return received

    def _reduce_and_encode(
        self, received: Tensor, intra: MessageLayout, inter: MessageLayout
    ) -> Tensor:
        """Sum ``[node_size, nodes, nbytes]`` over the node and encode for the other nodes.

        Returns:
            ``[nodes - 1, nbytes]`` uint8.
        """
        messages = inter.allocate(received.shape[1] - 1, device=received.device)
        seed = self._seed(_SEED_INTER)
        if self.residual is not None:
            self.residual.prepare(len(messages), intra, received.device, self._packed)
        for part, (rows, target) in enumerate(self._other_nodes()):
            source, encoded = received[:, rows], messages[target]
            if intra.exact_runs:
                torch.sum(intra.exact(source), dim=0, dtype=torch.float32, out=inter.exact(encoded))
            for index, run in intra.quantized:
                codes, out = intra.part(source, index), inter.part(encoded, index)
                run_seed = part_seed(part_seed(seed, part), index)
                spec = inter.spec_of(run)
                if self.residual is not None:
                    self.residual.encode(index, codes, spec, seed=run_seed, out=out, rows=target)
                else:
                    decode_reduce_encode(
                        intra.spec_of(run), codes, run.numel, spec, seed=run_seed, out=out
                    )
        return messages

    def _finish(
        self,
        received: Tensor,
        layout: MessageLayout,
        output: Tensor,
        scale: float,
        *,
        add: bool = False,
    ) -> None:
        """Sum ``[K, nbytes]`` messages over ``K`` and write or add ``scale`` times that."""
        exact = None
        if layout.exact_runs:
            exact = layout.exact(received).sum(dim=0, dtype=torch.float32).mul_(scale)
            if add:  # read before decoding adds the noise of its neighbours to what is absorbed
                exact.add_(layout.exact_of(output))
        for index, run in layout.quantized:
            decode_reduce(
                layout.spec_of(run),
                layout.part(received, index).unsqueeze(1),
                run.numel,
                scale=scale,
                out=output[run.start : run.stop].view(1, -1),
                add=add,
            )
        if exact is not None:
            layout.put_exact(exact, output)

    def _count_messages(self, messages: Tensor, layout: MessageLayout) -> None:
        """Count the payload of the slowest level that this topology has."""
        traffic = self._context.traffic
        traffic.gradients_messages += messages.numel()
        traffic.gradients_elements += layout.numel * len(messages)


def _scale_of(op: Any, world_size: int) -> float:
    if op == dist.ReduceOp.AVG:
        return 1.0 / world_size
    if op == dist.ReduceOp.SUM:
        return 1.0
    raise NotImplementedError(
        f"quantized reduction supports sums and averages, not {op}. With a gradient divide factor, "
        "call `module.set_force_sum_reduction_for_comms(True)` on the FSDP2 modules."
    )
