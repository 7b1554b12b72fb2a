"""Checksums of this rank's shards, which show writes that no version counter sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lq_lightning._compat.fsdp2 import GroupParam, shard_memory
from lq_lightning.foundation import streams
from lq_lightning.kernels.checksum import checksums

__all__ = ["ShardContents"]

_MAX_MASKS = 16


class ShardContents:
    """Sees whatever changes a shard, by reading all of them.

    Version counters miss what ``torch._foreach_*`` and fused optimizers do to a DTensor, writes
    through ``.data`` and NumPy, and kernels of other libraries. On a GPU nothing here waits for the
    device; what is returned belongs to the current stream.
    """

    def __init__(self) -> None:
        self._units: list[Callable[[], list[GroupParam]]] = []
        self._known: Tensor | None = None  # [parameters] int64
        self._masks: dict[tuple[bool, ...], Tensor] = {}
        self._index: Tensor | None = None  # [parameters]: the unit of each

    def add(self, params: Callable[[], list[GroupParam]]) -> None:
        """Look at the shards of this unit too."""
        self._units.append(params)
        self._known = self._index = None

    def take(self) -> Tensor:
        """Return which units have changed since the last call, and take them as known.

        Returns:
            ``[units]`` uint8, 0 or 1.
        """
        known, now = self._known, self._sums()
        self._known = now
        if known is None:
            return now.new_zeros(len(self._units), dtype=torch.uint8)
        streams.record_use(known)
        if self._index is None:
            sizes = torch.tensor([len(params()) for params in self._units], device="cpu")
            index = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)
            self._index = index.to(now.device)
        changed = now.new_zeros(len(self._units)).index_add_(0, self._index, (now != known).long())
        return changed.clamp_(max=1).to(torch.uint8)

    def note(self) -> None:
        """Take all shards as they are now for known."""
        self._known = self._sums()

    def note_trained(self, stepped: Sequence[bool]) -> None:
        """Take the trained parameters of these units as they are now for known.

        Args:
            stepped: For each unit, in the order of :meth:`add`.
        """
        known = self._known
        if known is None:
            return
        units = zip(self._units, stepped, strict=True)
        key = tuple([s and p.requires_grad for params, s in units for p in params()])
        if key not in self._masks:
            if len(self._masks) == _MAX_MASKS:
                self._masks.clear()
            self._masks[key] = torch.tensor(key, device="cpu").to(known.device)
        streams.record_use(known)
        self._known = torch.where(self._masks[key], self._sums(), known)

    def _sums(self) -> Tensor:
        return checksums([m for params in self._units for m in shard_memory(params())])
