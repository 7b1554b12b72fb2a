"""What every quantized all-gather of weights shares: layouts, messages and how they travel.

One object serves one FSDP2 unit. FSDP2 calls ``allocate`` for the output, copies this rank's shard
(already cast to the gather dtype) into its slot of the output, and calls the object with the output
and that slot, which is a *view* of it: writing the output destroys the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning._compat.fsdp2 import AllGather, GroupParam
from lq_lightning._compat.torch import all_gather_flat
from lq_lightning.codecs import decode, derive_seed, encode
from lq_lightning.data_parallel.config import WeightQuantization
from lq_lightning.data_parallel.layout import (
    MessageLayout,
    Segment,
    merge_over_small_gaps,
    segment_runs,
)
from lq_lightning.data_parallel.unit import (
    UnitCollective,
    UnitDescription,
    keep_small_runs_exact,
    part_seed,
    weight_segments,
)
from lq_lightning.foundation.traffic import ring_bytes

__all__ = ["QuantizedAllGather"]


class QuantizedAllGather(UnitCollective, AllGather):
    """An all-gather of one unit's weights, of which some travel as codes.

    Args:
        config: Codec and method.
        unit: The unit.
    """

    skips_frozen: ClassVar[bool]
    """Whether parameters that are not trained are left out of messages."""

    def __init__(self, config: WeightQuantization, unit: UnitDescription) -> None:
        super().__init__(unit)
        self._config = config
        self._layout: MessageLayout | None = None
        self._layout_key: tuple[Any, ...] | None = None

    def segments(self) -> list[Segment]:
        """How each parameter travels, given the parameters as they are now."""
        params = self._params()
        segments = weight_segments(params, self.names, self._min_quantized_numel, self.skips_frozen)
        itemsizes = {p.gather_dtype for p in params}
        if len(itemsizes) > 1:
            reason = "mixed dtypes in one unit"
            return [
                s if s.travel == "skipped" else s._replace(travel="full", reason=s.reason or reason)
                for s in segments
            ]
        itemsize = next(iter(itemsizes)).itemsize
        return keep_small_runs_exact(segments, [self._config.codec()], itemsize)

    def _current_layout(self, dtype: torch.dtype) -> MessageLayout:
        params = self._params()
        key = (dtype, *(p.requires_grad for p in params))
        if self._layout is None or key != self._layout_key:
            if dtype == torch.uint8:  # mixed dtypes: FSDP2 packs bytes
                segments = _byte_segments(self.segments(), params)
            else:
                segments = self.segments()
            runs = merge_over_small_gaps(segment_runs(segments))
            self._layout = MessageLayout.of(runs, [self._config.codec()], dtype)
            self._layout_key = key
        return self._layout

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate the gather's output, ``size`` elements of ``dtype`` on ``device``."""
        return torch.empty(*size, dtype=dtype, device=device)

    # --- messages ---------------------------------------------------------------------------

    def _count_baseline(self, slot: Tensor) -> None:
        topology, traffic = self._context.topology, self._context.traffic
        intra, inter = ring_bytes(slot.numel() * slot.itemsize, topology)
        traffic.baseline_weights += intra + inter
        traffic.baseline_inter += inter

    def _seed(self) -> int | None:
        if self._config.rounding != "stochastic":
            return None
        context = self._context
        return derive_seed(context.seed, 1, context.step, context.topology.rank, self._index)

    def _encode(self, layout: MessageLayout, slots: Tensor, reference: Tensor | None) -> Tensor:
        """Encode slots of units (minus ``reference``) into messages ``[units, nbytes]`` uint8.

        Args:
            layout: Of the messages.
            slots: ``[units, n]``; gaps are overwritten with zeros.
            reference: ``[units, n]``; its gaps hold zeros until a message is decoded.
        """
        messages = layout.allocate(len(slots), device=slots.device)
        layout.exact_to_messages(slots, messages, reference)
        seed = self._seed()
        for index, run in layout.quantized:
            part = slice(run.start, run.stop)
            encode(
                layout.spec_of(run),
                slots[:, part],
                seed=part_seed(seed, index),
                reference=None if reference is None else reference[:, part],
                out=layout.part(messages, index),
            )
        traffic = self._context.traffic
        traffic.exchanges += len(slots)
        traffic.weights_messages += len(slots) * layout.nbytes
        traffic.weights_elements += len(slots) * layout.numel
        return messages

    def _gather_between_nodes(self, messages: Tensor) -> Tensor:
        """Gather ``[units, nbytes]`` messages of this local rank to ``[units, N, nbytes]``."""
        return self._gather_messages(messages, self._context.inter_group).transpose(0, 1)

    def _gather_within_node(self, by_node: Tensor) -> Tensor:
        """Gather ``[units, N, nbytes]`` of the local ranks to ``[L, units, N, nbytes]``.

        With several nodes of several ranks, messages cross the slow network once per node and are
        passed on inside it, which a flat ring over all ranks does not do.
        """
        return self._gather_messages(by_node, self._context.intra_group)

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
        traffic, topology = self._context.traffic, self._context.topology
        if group is self._context.intra_group:
            traffic.weights_intra += (group.size() - 1) * nbytes
        elif group is self._context.inter_group:
            traffic.weights_inter += (group.size() - 1) * nbytes
        else:
            intra, inter = ring_bytes(nbytes, topology)
            traffic.weights_intra += intra
            traffic.weights_inter += inter

    @staticmethod
    def _decode(layout: MessageLayout, messages: Tensor, slots: Tensor, *, add: bool) -> None:
        """Decode ``[L, units, N, nbytes]`` messages into (or onto) ``[units, N * L, n]`` slots.

        Args:
            layout: Of the messages.
            messages: Those of several local ranks are contiguous.
            slots: In rank order, contiguous.
            add: Onto them.
        """
        if len(messages) == 1:
            messages = messages[0]
        else:  # nodes of all units have one stride, so that one call goes through all messages
            messages = messages.flatten(1, 2).transpose(0, 1)
            slots = slots.view(*messages.shape[:2], -1)
        for index, run in layout.quantized:
            part, target = layout.part(messages, index), slots[..., run.start : run.stop]
            decode(layout.spec_of(run), part, run.numel, out=target, add=add)
        layout.exact_to_slots(messages, slots)


def _byte_segments(segments: list[Segment], params: list[GroupParam]) -> list[Segment]:
    scaled, start = [], 0
    for segment, param in zip(segments, params, strict=True):
        nbytes = segment.numel * param.gather_dtype.itemsize
        scaled.append(segment._replace(start=start, numel=nbytes))
        start += nbytes
    return scaled
