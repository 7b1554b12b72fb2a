"""A load planner for torch.distributed.checkpoint that obeys ``weights_only``."""

from __future__ import annotations

import io

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

__all__ = ["SafeLoadPlanner"]


class SafeLoadPlanner(DefaultLoadPlanner):
    """Fills a flat state dict; its leaves that are no tensors are unpickled with ``weights_only``.

    Args:
        weights_only: As in ``torch.load``.
    """

    def __init__(self, weights_only: bool) -> None:
        """Make a planner for a flat state dict."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle one leaf."""
        leaf = torch.load(value, map_location="cpu", weights_only=self._weights_only)
        self.state_dict[read_item.dest_index.fqn] = leaf
