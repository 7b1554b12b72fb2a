"""Quantized all-gather of the weights themselves: the ablation that must lose."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from lq_lightning._compat.torch import all_gather_flat
from lq_lightning.data_parallel.all_gather import QuantizedAllGather

__all__ = ["WeightAllGather"]


class WeightAllGather(QuantizedAllGather):
    """All-gather of the quantized weights themselves (SDP4Bit's ablation qW).

    Every gather sends codes, and every rank, the owner included, computes with the decoded weights.
    Rounding is keyed by the optimizer step, so that forward and backward see the same weights.
    """

    skips_frozen = False

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor`` (``[world * n]``) from each rank's ``input_tensor`` (``[n]``)."""
        if group.size() != self._context.topology.world_size:
            all_gather_flat(output_tensor, input_tensor, group)
            return
        self._count_baseline(input_tensor)
        layout = self._current_layout(input_tensor.dtype)
        message = self._encode(layout, input_tensor.view(1, -1), reference=None)
        messages = self._gather_within_node(self._gather_between_nodes(message))
        self._decode(layout, messages, output_tensor.view(1, group.size(), -1), add=False)
