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

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning._compat.fsdp2 import PackedGradients, ReduceScatter
from lq_lightning._compat.torch import backward_id, reduce_scatter_flat
from lq_lightning.codecs import decode_reduce, decode_reduce_encode, derive_seed, encode
from lq_lightning.data_parallel.config import GradientQuantization
from lq_lightning.data_parallel.gradient_layouts import GradientLayouts, LevelLayouts
from lq_lightning.data_parallel.layout import MessageLayout
from lq_lightning.data_parallel.unit import UnitCollective, UnitDescription, part_seed
from lq_lightning.foundation import streams
from lq_lightning.foundation.traffic import ring_bytes

__all__ = ["TwoLevelReduceScatter"]

_SEED_INTRA, _SEED_INTER = 2, 3


class TwoLevelReduceScatter(UnitCollective, ReduceScatter):
    """Reduce-scatter that sends INT8 codes within a node and INT4 codes between nodes.

    With one node, or one rank per node, only the level that exists is used. Sums are formed in fp32
    in a fixed order, so the result does not depend on timing: first what this node contributes,
    then the other nodes, by number. A result in bf16 is rounded after each of the two. A non-finite
    gradient is NaN or Inf on the rank that owns it, and where it was encoded so is its whole group,
    so the gradient norm of every rank sees it.

    Args:
        config: Codecs and method.
        unit: The unit.
    """

    def __init__(self, config: GradientQuantization, unit: UnitDescription) -> None:
        super().__init__(unit)
        self._config = config
        self.layouts = GradientLayouts(config, unit)
        self._expected: PackedGradients | None = None
        self._calls = 0
        self._calls_step = -1

    # --- what the next call gets ------------------------------------------------------------

    def expect(self, packed: PackedGradients) -> None:
        """Say what the next call reduces; an earlier word of a call that never came is forgotten.

        FSDP2 hands the call nothing but a flat buffer.
        """
        self._expected = packed

    def _take_expected(self) -> PackedGradients:
        packed, self._expected = self._expected, None
        if packed is None:
            raise AssertionError(
                f"unit `{self.name}` is reduced, but nothing said which gradients are packed"
            )
        return packed

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
        packed = self._take_expected()
        try:
            self._start_call(output_tensor)
            exact = self._exact(output_tensor, input_tensor, group, scale)
            in_backward = packed.read_in_backward or exact is not None
            # of a sum, FSDP2 divides the result itself
            may_defer = not in_backward and op == dist.ReduceOp.AVG
            layouts = self.layouts.of(packed.indices, output_tensor.numel(), input_tensor.dtype)
            self._reduce(output_tensor, input_tensor, layouts, scale, may_defer)
        except BaseException:  # out of memory, for example, after which a user may go on
            self.recover()
            raise
        if exact is not None:
            self._context.gradient_errors.add(output_tensor, exact)

    def recover(self) -> None:
        """Leave nothing of a backward that failed, whose gradients nobody will use."""
        self._expected = None
        self._context.reductions.join()

    def _reduce(
        self,
        output: Tensor,
        slots: Tensor,
        layouts: LevelLayouts,
        scale: float,
        may_defer: bool,
    ) -> None:
        topology, reductions = self._context.topology, self._context.reductions
        deferred = may_defer and streams.has_streams(slots.device) and backward_id() != -1
        if deferred:
            reductions.make_room()
        else:
            reductions.join()  # FSDP2 may add this result to one of them
        messages = self._first_level(slots.view(topology.world_size, -1), layouts, output, scale)

        def exchange() -> Tensor:
            if topology.num_nodes == 1:
                return self._exchange_within_node(messages)[:, 0]
            return self._exchange_between_nodes(messages)

        def finish(received: Tensor) -> None:
            several = topology.num_nodes > 1
            layout = layouts.inter if several else layouts.intra
            self._finish(received, layout, output, scale, add=several)

        self._count_messages(messages, layouts.inter)
        if deferred:
            reductions.submit(messages, exchange, finish)
        else:
            finish(exchange())

    def _first_level(
        self, slots: Tensor, layouts: LevelLayouts, output: Tensor, scale: float
    ) -> Tensor:
        """Do all before the slowest exchange, and write what this node contributes to ``output``.

        Args:
            slots: ``[world, n]``.
            layouts: Of the messages.
            output: ``[n]``; with one node nothing is written yet.
            scale: Factor of the sum.

        Returns:
            The messages of the slowest exchange, uint8: ``[nodes - 1, nbytes]``, or of one node
            ``[node_size, 1, nbytes]``.
        """
        topology = self._context.topology
        if topology.node_size == 1:
            # not moved: no message is for it
            torch.mul(slots[topology.node], scale, out=output)
            return self._encode_for_nodes(slots, layouts)  # which writes zeros over gaps
        messages = self._encode_for_node(slots, layouts.intra)
        if topology.num_nodes == 1:
            return messages
        received = self._exchange_within_node(messages)
        messages = self._reduce_and_encode(received, layouts)
        self._finish(received[:, topology.node], layouts.intra, output, scale)
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

    def _encode_for_nodes(self, slots: Tensor, layouts: LevelLayouts) -> Tensor:
        """Encode ``[nodes, n]`` slots for the other nodes, to ``[nodes - 1, nbytes]``.

        Gaps become zeros in all slots, that of this node included.
        """
        inter, node = layouts.inter, self._context.topology.node
        messages = inter.allocate(len(slots) - 1, device=slots.device)
        inter.exact_to_messages(slots, messages, skip=node)
        seed = part_seed(self._seed(_SEED_INTER), 0)
        for index, run in inter.quantized:
            values, out = slots[:, run.start : run.stop], inter.part(messages, index)
            encode(inter.spec_of(run), values, seed=part_seed(seed, index), out=out, skip=node)
        return messages

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
        by_node, for_node = slots.view(nodes, local, -1), messages.transpose(0, 1)
        layout.exact_to_messages(by_node, for_node)
        seed = part_seed(self._seed(_SEED_INTRA), 0)
        for index, run in layout.quantized:
            values, out = by_node[..., run.start : run.stop], layout.part(for_node, index)
            encode(layout.spec_of(run), values, seed=part_seed(seed, index), out=out)
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

    def _reduce_and_encode(self, received: Tensor, layouts: LevelLayouts) -> Tensor:
        """Sum ``[node_size, nodes, nbytes]`` over the node and encode for the other nodes.

        Returns:
            ``[nodes - 1, nbytes]`` uint8.
        """
        intra, inter = layouts
        node = self._context.topology.node
        messages = inter.allocate(received.shape[1] - 1, device=received.device)
        if intra.exact_runs:
            sums = torch.sum(intra.exact(received), dim=0, dtype=torch.float32)
            torch.cat((sums[:node], sums[node + 1 :]), out=inter.exact(messages))
        seed = part_seed(self._seed(_SEED_INTER), 0)
        for index, run in intra.quantized:
            codes, out = intra.part(received, index), inter.part(messages, index)
            decode_reduce_encode(
                *(intra.spec_of(run), codes, run.numel, inter.spec_of(run)),
                seed=part_seed(seed, index),
                out=out,
                skip=node,
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
            if add:  # read before decoding adds the noise of its neighbours to gaps
                exact.add_(layout.read_exact(output))
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
            layout.write_exact(exact, output)

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
