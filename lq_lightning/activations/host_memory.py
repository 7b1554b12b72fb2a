"""Host memory that saved activations are moved to: what is free, and a pool of pinned buffers."""

from __future__ import annotations

import bisect
import resource
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 512
_LEFT_FREE = 0.1  # of what is free, for everything else on the machine
_CGROUP = Path("/sys/fs/cgroup")
_CGROUPS = (  # limit and use: version 2, version 1
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def gib(nbytes: float) -> str:
    """Lay out an amount of memory."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 26 else f"{nbytes / 2**10:.1f} KiB"


def free_host_memory(ranks: int) -> tuple[int, str]:
    """Return the bytes that one of this node's ranks may take, and how they are counted."""
    free, where = 1 << 62, "no limit is known"
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free, where = int(line.split()[1]) << 10, "MemAvailable"
    except OSError:
        pass  # another system: what cannot be pinned is named when it is
    for limit, used in _CGROUPS:
        try:
            left = int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text())
        except (OSError, ValueError):  # no such control group, or "max"
            continue
        if left < free:
            free, where = max(0, left), f"the control group's {Path(limit).name}"
    share = int(free * (1 - _LEFT_FREE)) // max(1, ranks)
    return share, f"{gib(free)} by {where}, less a tenth, for {ranks} rank(s) on this node"


class Extent(NamedTuple):
    """Bytes ``start`` to ``stop`` of a slab."""

    slab: int
    start: int
    stop: int


class HostPool:
    """Pinned buffers, made once and reused; a buffer is one or more extents of slabs.

    torch's own allocator rounds pinned memory up to powers of two and keeps each size apart. Slabs
    are powers of two, and extents that are given back next to each other become one, so that
    batches of other lengths need no more than the largest of them. ``may_grow`` is called with the
    bytes of a further slab, and raises if there is no room.
    """

    def __init__(self, *, pin: bool, may_grow: Callable[[int], None], slab_nbytes: int) -> None:
        self._pin, self._may_grow, self._slab_nbytes = pin, may_grow, slab_nbytes
        self._slabs: list[Tensor] = []
        self._free: list[Extent] = []  # sorted; no two touch
        # Given back, but a copy may still read or write them until the event.
        self._cooling: deque[tuple[tuple[Extent, ...], Any]] = deque()
        self.used_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return len(self._slabs) * self._slab_nbytes

    def take(self, nbytes: int, wait: Callable[[Any], None]) -> tuple[Extent, ...]:
        """Take a buffer; ``wait`` gets each event that whoever writes it must wait for."""
        need = _rounded(nbytes)
        while sum(map(_length, self._free)) < need:
            if self._cooling:
                extents, event = self._cooling.popleft()
                if event is not None:
                    wait(event)
                self._merge(extents)
            else:
                self._grow()
        taken = []
        while need:
            fitting = [e for e in self._free if _length(e) >= need]
            chosen = min(fitting or [max(self._free, key=_length)], key=_length)
            part = chosen._replace(stop=min(chosen.stop, chosen.start + need))
            self._free.remove(chosen)
            if part.stop < chosen.stop:
                bisect.insort(self._free, chosen._replace(start=part.stop))
            taken.append(part)
            need -= _length(part)
        self.used_nbytes += _rounded(nbytes)
        return tuple(taken)

    def give(self, extents: tuple[Extent, ...], event: Any) -> None:
        """Give a buffer back; copies from and to it are done at ``event``."""
        self.used_nbytes -= sum(map(_length, extents))
        self._cooling.append((extents, event))

    def release(self) -> None:
        """Let go of all memory, unless some buffer of it is in use."""
        if not self.used_nbytes:
            self._slabs.clear()
            self._free.clear()
            self._cooling.clear()

    def parts(self, extents: tuple[Extent, ...], nbytes: int) -> list[Tensor]:
        """Return a buffer's memory as uint8 tensors, ``nbytes`` in all."""
        parts = [self._slabs[e.slab][e.start : e.stop] for e in extents]
        return [*parts[:-1], parts[-1][: parts[-1].numel() - (_rounded(nbytes) - nbytes)]]

    def _grow(self) -> None:
        self._may_grow(self._slab_nbytes)
        try:
            slab = host_memory(self._slab_nbytes, pin=self._pin)
        except RuntimeError as error:
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            raise RuntimeError(
                f"Pinning {gib(self._slab_nbytes)} of host memory beside {gib(self.nbytes)} for "
                "offloaded activations failed. Limit it (`offload='20GiB'`), or raise what this "
                f"process may pin: RLIMIT_MEMLOCK is {'unlimited' if soft < 0 else gib(soft)} "
                "(`ulimit -l`), which not every driver asks for."
            ) from error
        self._slabs.append(slab)
        self._merge((Extent(len(self._slabs) - 1, 0, self._slab_nbytes),))

    def _merge(self, extents: tuple[Extent, ...]) -> None:
        for extent in extents:
            index = bisect.bisect(self._free, extent)
            if index < len(self._free) and self._free[index][:2] == (extent.slab, extent.stop):
                extent = extent._replace(stop=self._free.pop(index).stop)
            if index and (self._free[index - 1].slab, self._free[index - 1].stop) == extent[:2]:
                extent = extent._replace(start=self._free.pop(index - 1).start)
            bisect.insort(self._free, extent)


def _length(extent: Extent) -> int:
    return extent.stop - extent.start


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def host_memory(nbytes: int, *, pin: bool) -> Tensor:
    """Allocate bytes of host memory."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pin)  # whatever default
