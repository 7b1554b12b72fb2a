"""The copy of a unit's weights that differences refer to, and whether it may be used."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from lq_lightning.foundation import streams

__all__ = ["Freshness", "Replica", "ReplicaMemory"]


class Freshness(enum.Enum):
    """What the next gather has to do with a replica."""

    STALE = "refresh it from the main weights"
    RESTORED = "refresh it from what was saved of it"
    FRESH = "read it"


class ReplicaMemory:
    """Memory for the replicas of units of one shape, in which what they share is one operator.

    Args:
        units: How many.

    Attributes:
        rows: ``[units, slots * n]``; None before the first refresh.
    """

    def __init__(self, units: int) -> None:
        self._units = units
        self.rows: Tensor | None = None
        self._allocated: torch.cuda.Event | None = None  # None on a device without streams

    def row(self, index: int, numel: int, like: Tensor) -> Tensor:
        """Return the memory of one unit: ``numel`` elements of the dtype and device of ``like``.

        Units that were given memory for another dtype keep it.
        """
        rows = self.rows
        if rows is None or rows.dtype != like.dtype:
            self.rows = rows = like.new_empty(self._units, numel)
            if streams.has_streams(rows.device):
                self._allocated = streams.current_stream().record_event()
        elif self._allocated is not None:  # before that, it may hold what its stream still reads
            streams.current_stream().wait_event(self._allocated)
        return rows[index]

    def holds(self, replicas: Sequence[Replica]) -> bool:
        """Whether the rows are what these replicas use, one after another."""
        if self.rows is None or len(replicas) != len(self.rows):
            return False
        return all(r.values is not None and r.rows is self.rows for r in replicas)


class Replica:
    """The weights that a unit is computed with, on all ranks alike.

    Its state says what may be done with it:

    ================== ========== ========== ==========
    event              STALE      RESTORED   FRESH
    ================== ========== ========== ==========
    invalidate         STALE      STALE      STALE
    restore            RESTORED   RESTORED   RESTORED
    begin_refresh      STALE      STALE
    begin_exchange     STALE      STALE      STALE
    complete           FRESH
    ================== ========== ========== ==========

    It starts as STALE, without memory. A refresh or an exchange makes it STALE before anything is
    written and FRESH when everything is: an error in between costs a refresh and never leaves
    weights that are half old. Every rank has to cause the same events in the same order, because
    what a gather does, and with it the order of collectives, follows from the state alone.

    Args:
        memory: Of units of one shape; by default its own.
        index: Of this unit in it.

    Attributes:
        state: What the next gather has to do.
        values: ``[slots * n]``, a slot for each rank or for each node; None before a refresh.
        own: ``[n]``, this rank's slot: a view of ``values``.
        own_index: Which slot that is.
        rows: What ``values`` is a row of.
        written: When the last complete write is done; None on a device without streams.
    """

    def __init__(self, memory: ReplicaMemory | None = None, index: int = 0) -> None:
        self._memory, self._row = memory or ReplicaMemory(1), index
        self.rows: Tensor | None = None
        self.state = Freshness.STALE
        self.values: Tensor | None = None
        self.own: Tensor | None = None
        self.own_index = 0
        self._saved: Tensor | None = None  # [n], iff RESTORED
        self.written: torch.cuda.Event | None = None

    @property
    def slot(self) -> Tensor | None:
        """This rank's slot as it is or will be restored, ``[n]``; None if it is not to be used."""
        if self.state is Freshness.RESTORED:
            return self._saved
        return self.own if self.state is Freshness.FRESH else None

    def invalidate(self) -> None:
        """Let the next gather refresh the replica from the main weights."""
        self.state = Freshness.STALE
        self._saved = None

    def restore(self, saved: Tensor) -> None:
        """Let the next gather refresh the replica from saved slots.

        The memory stays: exchanges on other streams may still use it.

        Args:
            saved: This rank's slot, ``[n]``.
        """
        self.state = Freshness.RESTORED
        self._saved = saved

    def begin_refresh(self, slot: Tensor, num_slots: int, index: int) -> tuple[Tensor, Tensor]:
        """Write this rank's own slot, for a gather of all slots that :meth:`complete` follows.

        Args:
            slot: This rank's main weights, ``[n]``, in the gather's dtype, which stays the same.
            num_slots: Slots of the replica.
            index: This rank's.

        Returns:
            ``(values, own)``, of which only the latter is written.
        """
        source = slot if self._saved is None else self._saved
        self.invalidate()
        self.wait()
        if self.values is None or self.own is None:
            self.values = self._memory.row(self._row, num_slots * slot.numel(), slot)
            self.rows = self._memory.rows
            self.own, self.own_index = self.values.view(num_slots, -1)[index], index
        self.own.copy_(source)
        streams.record_use(source)  # allocated on another stream: by FSDP2, or by who restored it
        return self.values, self.own

    def begin_exchange(self) -> bool:
        """Say that the main weights were updated.

        Returns:
            Whether the difference can be added to the replica, which is STALE until
            :meth:`complete` is called; otherwise the next gather refreshes it.
        """
        exchanges = self.state is Freshness.FRESH
        self.invalidate()
        return exchanges

    def complete(self) -> None:
        """Say that the current stream has been given all writes of a refresh or an exchange."""
        if self.values is None:
            raise AssertionError("there is no replica to complete")
        if streams.has_streams(self.values.device):
            self.written = streams.current_stream().record_event()
        self.state = Freshness.FRESH

    def complete_with(self, other: Replica) -> None:
        """Do as :meth:`complete` of another replica did just before."""
        self.written, self.state = other.written, Freshness.FRESH

    def wait(self) -> None:
        """Let the current stream wait until the last complete write is done."""
        if self.written is not None:
            streams.current_stream().wait_event(self.written)

    def checksum(self) -> Tensor | None:
        """Order-sensitive 64-bit checksum, ``[1]`` int64; None if the replica is not in use."""
        if self.values is None or self.state is not Freshness.FRESH:
            return None
        self.wait()
        return checksum(self.values)


def checksum(values: Tensor, chunk: int = 1 << 16) -> Tensor:
    """Position-weighted sum of the raw bits, ``[1]`` int64.

    Sums within a chunk, weighted over chunks. ``torch.hash_tensor`` would be no substitute: the XOR
    of a chunk does not change when an even number of equal elements become another value, as of a
    LayerNorm whose ones are updated on one rank only.

    Args:
        values: ``[n]``, contiguous.
        chunk: Elements of a chunk.
    """
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = values.view(integers[values.itemsize])
    full = words.numel() // chunk * chunk
    sums = [words[:full].view(-1, chunk).sum(dim=1, dtype=torch.int64)]
    sums.append(words[full:].sum(dtype=torch.int64).view(1))
    total = torch.cat(sums)
    weights = torch.arange(1, total.numel() + 1, dtype=torch.int64, device=values.device)
    mixed = weights * 0x5851F42D4C957F2D + 0x14057B7EF767814F  # wraps, which is wanted
    return (total * (mixed | 1)).sum().view(1)
