"""What a quantized reduction of gradients does on each level: within a node and between nodes.

Shape legend: U units that are reduced together, W ranks, N nodes of L ranks, K messages to sum, n
values of a slot. Slots are ``[U, W, n]``, slot ``m * L + l`` for rank ``l`` of node ``m``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning.codecs import decode_reduce, decode_reduce_encode, encode
from lq_lightning.data_parallel.gradient_layouts import LevelLayouts
from lq_lightning.data_parallel.layout import MessageLayout
from lq_lightning.data_parallel.unit import UnitContext, part_seed

__all__ = ["ReductionLevels"]

_SEED_INTRA, _SEED_INTER = 2, 3


class ReductionLevels:
    """The levels of a reduction.

    Args:
        context: Ranks and counters.
        seed: Function that gives the seed of a level's stochastic rounding, None where it rounds to
            nearest.
    """

    def __init__(self, context: UnitContext, seed: Callable[[int], int | None]) -> None:
        self._context = context
        self._seed = seed

    def start(self, slots: Tensor, layouts: LevelLayouts, output: Tensor, scale: float) -> Tensor:
        """Do all before the slowest exchange, and write what this node contributes to ``output``.

        Args:
            slots: ``[U, W, n]``. Full-precision values between quantized ones are overwritten with
                zeros.
            layouts: Of the messages.
            output: ``[U, n]``; with one node nothing is written yet.
            scale: Factor of the sum.

        Returns:
            The messages of the slowest exchange, uint8: ``[N - 1, U, nbytes]``, or of one node
            ``[L, U, 1, nbytes]``.
        """
        topology = self._context.topology
        if topology.node_size == 1:
            # not moved: no message is for it
            torch.mul(slots[:, topology.node], scale, out=output)
            return self.encode_for_nodes(slots, layouts.inter)  # which writes zeros over gaps
        messages = self.encode_for_node(slots, layouts.intra)
        if topology.num_nodes == 1:
            return messages
        received = self._exchange_within_node(messages)
        messages = self.reduce_and_encode(received, layouts)
        self._sum(received[:, :, topology.node], layouts.intra, output, scale)
        return messages

    def exchange(self, messages: Tensor) -> Tensor:
        """Send what :meth:`start` returned over the slowest network; ``[K, U, nbytes]``."""
        if self._context.topology.num_nodes == 1:
            return self._exchange_within_node(messages)[:, :, 0]
        return self._exchange_between_nodes(messages)

    def finish(self, received: Tensor, layouts: LevelLayouts, output: Tensor, scale: float) -> None:
        """Sum what :meth:`exchange` returned, on several nodes onto ``output``, ``[U, n]``."""
        several = self._context.topology.num_nodes > 1
        layout = layouts.inter if several else layouts.intra
        self._sum(received, layout, output, scale, add=several)

    # --- encoding ---------------------------------------------------------------------------

    def encode_for_nodes(self, slots: Tensor, inter: MessageLayout) -> Tensor:
        """Encode ``[U, N, n]`` slots for the other nodes, to ``[N - 1, U, nbytes]``.

        Gaps become zeros in all slots that are read.
        """
        units, nodes, _ = slots.shape
        node = self._context.topology.node
        messages = inter.allocate(nodes - 1, units, device=slots.device)
        seed = part_seed(self._seed(_SEED_INTER), 0)
        if nodes == 2 and units > 1:  # one call for all of them
            self._encode(inter, slots[:, 1 - node], messages[0], seed)
            return messages
        for unit, own in enumerate(slots):
            for_unit = messages[:, unit]
            inter.exact_to_messages(own, for_unit, skip=node)
            for index, run in inter.quantized:
                values, out = own[:, run.start : run.stop], inter.part(for_unit, index)
                encode(inter.spec_of(run), values, seed=part_seed(seed, index), out=out, skip=node)
        return messages

    def encode_for_node(self, slots: Tensor, layout: MessageLayout) -> Tensor:
        """Encode all slots, ordered by the local rank that collects them.

        Returns:
            ``[L, U, N, nbytes]`` uint8.
        """
        topology = self._context.topology
        nodes, local, units = topology.num_nodes, topology.node_size, len(slots)
        messages = layout.allocate(local, units, nodes, device=slots.device)
        seed = part_seed(self._seed(_SEED_INTRA), 0)
        if nodes == 1:  # one call for all units
            self._encode(layout, slots, messages[:, :, 0].transpose(0, 1), seed)
            return messages
        for unit, own in enumerate(slots):
            by_node, for_node = own.view(nodes, local, -1), messages[:, unit].transpose(0, 1)
            self._encode(layout, by_node, for_node, seed)
        return messages

    @staticmethod
    def _encode(layout: MessageLayout, slots: Tensor, messages: Tensor, seed: int | None) -> None:
        layout.exact_to_messages(slots, messages)
        for index, run in layout.quantized:
            values, out = slots[..., run.start : run.stop], layout.part(messages, index)
            encode(layout.spec_of(run), values, seed=part_seed(seed, index), out=out)

    def reduce_and_encode(self, received: Tensor, layouts: LevelLayouts) -> Tensor:
        """Sum ``[L, U, N, nbytes]`` over the node and encode for the other nodes.

        Returns:
            ``[N - 1, U, nbytes]`` uint8.
        """
        intra, inter = layouts
        node, (_, units, nodes, _) = self._context.topology.node, received.shape
        messages = inter.allocate(nodes - 1, units, device=received.device)
        seed = part_seed(self._seed(_SEED_INTER), 0)
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

    # --- exchanges --------------------------------------------------------------------------

    def _exchange_within_node(self, messages: Tensor) -> Tensor:
        """All-to-all of ``[L, ...]``: row ``i`` goes to local rank ``i``.

        Returns:
            ``[L, ...]``: row ``j`` comes from local rank ``j``.
        """
        ranks, received = messages.shape[0], torch.empty_like(messages)
        if messages.shape[-1]:
            dist.all_to_all_single(
                received.view(-1), messages.view(-1), group=self._context.intra_group
            )
        self._context.traffic.gradients_intra += messages.numel() // ranks * (ranks - 1)
        return received

    def _exchange_between_nodes(self, messages: Tensor) -> Tensor:
        """All-to-all of ``[N - 1, U, nbytes]``, one row for and from each other node."""
        topology = self._context.topology
        received = torch.empty_like(messages)
        splits = [messages.shape[1] * messages.shape[2]] * topology.num_nodes
        splits[topology.node] = 0
        if messages.shape[-1]:
            dist.all_to_all_single(
                received.view(-1),
                messages.view(-1),
                output_split_sizes=splits,
                input_split_sizes=splits,
                group=self._context.inter_group,
            )
        self._context.traffic.gradients_inter += messages.numel()
        return received

    # --- sums -------------------------------------------------------------------------------

    @staticmethod
    def _sum(
        received: Tensor,
        layout: MessageLayout,
        output: Tensor,
        scale: float,
        *,
        add: bool = False,
    ) -> None:
        """Sum ``[K, U, nbytes]`` messages over ``K`` and write or add ``scale`` times that."""
        exact = None
        if layout.exact_runs:
            exact = layout.exact(received).sum(dim=0, dtype=torch.float32).mul_(scale)
            if add:  # read before decoding adds the noise of its neighbours to gaps
                exact.add_(layout.read_exact(output))
        for index, run in layout.quantized:
            decode_reduce(
                layout.spec_of(run),
                layout.part(received, index),
                run.numel,
                scale=scale,
                out=output[:, run.start : run.stop],
                add=add,
            )
        if exact is not None:
            layout.write_exact(exact, output)
