"""Hidden states of samples, held equally on both ends of a boundary.

Which samples are held is decided when a message is announced, from the samples alone; values are
read and written when it is encoded or decoded. Both ends see the messages in one order, so both
decide alike, however many are announced before the first arrives.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Visit:
    """What a message does to the cache.

    Attributes:
        samples: identities, in the order of the message.
        slots: where the values of each sample lie, or will.
        known: whether a sample was held before the message; others are sent in full precision.
    """

    samples: tuple[int, ...]
    slots: tuple[int, ...]
    known: tuple[bool, ...]

    @property
    def known_at(self) -> list[int]:
        """Indices within the message of the samples that are held."""
        return [index for index, known in enumerate(self.known) if known]

    @property
    def new_at(self) -> list[int]:
        """Indices within the message of the other samples."""
        return [index for index, known in enumerate(self.known) if not known]


class SampleCache:
    """As many samples as fit, the least recently used one making room for a new one.

    The first ones lie in memory, the rest in a file that has no name any more, so that nothing is
    left of it however the process ends.

    Args:
        numel: values of a sample.
        dtype: that they are kept in.
        max_nbytes: of all values.
        memory_nbytes: of those in memory.
        folder: of the file.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, max_nbytes: int, memory_nbytes: int, folder: Path
    ) -> None:
        self.numel = numel
        self._dtype = dtype
        self._capacity = max_nbytes // (numel * dtype.itemsize)
        self._in_memory = min(self._capacity, memory_nbytes // (numel * dtype.itemsize))
        self._folder = folder
        self._slots: OrderedDict[int, int] = OrderedDict()  # least recently used first
        self._memory: dict[int, Tensor] = {}
        self._file: Tensor | None = None
        self._handle = -1  # of the same file
        self._rows_on_disk = 0

    def __len__(self) -> int:
        """Return the number of samples that are held."""
        return len(self._slots)

    def visit(self, samples: Sequence[int]) -> Visit:
        """Decide what the next message does; to be called once for each, in their order."""
        slots, known = [], []
        new: set[int] = set()  # their values are not there before the message is
        for sample in samples:
            known.append(sample in self._slots and sample not in new)
            if sample in self._slots:
                self._slots.move_to_end(sample)
            else:
                full = len(self._slots) == self._capacity
                slot = self._slots.popitem(last=False)[1] if full else len(self._slots)
                self._slots[sample] = slot
                new.add(sample)
            slots.append(self._slots[sample])
        return Visit(tuple(samples), tuple(slots), tuple(known))

    def load(self, slots: Sequence[int], device: torch.device) -> Tensor:
        """Return the values of slots, ``[len(slots), numel]``, new and on the device."""
        return torch.stack([self._row(slot) for slot in slots]).to(device)

    def store(self, slots: Sequence[int], values: Tensor) -> None:
        """Keep ``[len(slots), numel]`` values; of equal slots the last.

        What is not finite becomes 0, or the sample would never be finite again.

        Raises:
            OSError: There is no room for the file to grow.
        """
        kept = values.to(self._dtype).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        kept = kept.cpu()  # one transfer for all of them, as in `load`
        for slot, row in zip(slots, kept, strict=True):
            self._row(slot).copy_(row)

    def _row(self, slot: int) -> Tensor:
        if slot < self._in_memory:
            if slot not in self._memory:
                self._memory[slot] = torch.empty(self.numel, dtype=self._dtype)
            return self._memory[slot]
        if self._file is None:
            self._file = self._open((self._capacity - self._in_memory) * self.numel)
        row = slot - self._in_memory
        if row >= self._rows_on_disk:
            self._grow(row + 1)
        return self._file[row * self.numel : (row + 1) * self.numel]

    def _open(self, numel: int) -> Tensor:
        handle, path = tempfile.mkstemp(prefix="lq_lightning_", dir=self._folder)
        self._handle = handle
        weakref.finalize(self, os.close, handle)
        try:  # sparse: takes disk space as it grows
            return torch.from_file(path, shared=True, size=numel, dtype=self._dtype)
        finally:
            os.unlink(path)

    def _grow(self, rows: int) -> None:
        """Take disk space for the first rows: a full disk ends the process where they are written.

        (A page of a mapped file that gets no space raises SIGBUS, which no Python sees.)
        """
        nbytes = self.numel * self._dtype.itemsize
        start, end = self._rows_on_disk * nbytes, rows * nbytes
        try:
            os.posix_fallocate(self._handle, start, end - start)
        except OSError as error:
            free = shutil.disk_usage(self._folder).free
            raise OSError(
                error.errno,
                f"`AQSGDQuantization` keeps hidden states of samples in a file in "
                f"`{self._folder}`, which has to grow from {start} to {end} bytes, and up to "
                f"{(self._capacity - self._in_memory) * nbytes}, but there are {free} bytes free "
                f"({os.strerror(error.errno or 0)}). Free some, give a `folder` on a larger disk "
                "or more `memory_nbytes`, or hold fewer samples, by a smaller `cache_nbytes`, on "
                "all ranks.",
            ) from error
        self._rows_on_disk = rows
