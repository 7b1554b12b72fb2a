"""PyTorch's caching allocator for CUDA, as far as it decides how much memory is taken.

Sizes and rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (2.11 to 2.13) with the default
settings. Left out is what happens when the device is full:
cached segments are then given back, so a run fits where its reserved bytes are a little too many.

A block that another stream was noted to use (``Tensor.record_stream``) comes back when the device
is past that use, which the host sees at some later allocation. Assumed is the first point at which
the host, or the stream that owns the block, is ordered behind the other stream's work of before the
block was freed: by an event, also through further streams. A real device may be earlier.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

from lq_lightning.planning.trace import HOST, Allocate, Event, Free, Record, Storage, Wait

MIB = 1 << 20
_MIN_BLOCK = 512
_SMALL = MIB  # requests up to here are served from the small pool
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_MIN_LARGE = 10 * MIB  # requests from here on get a segment of their own
_ROUND_LARGE = 2 * MIB

_Pool = tuple[int, bool]


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment: ``nbytes`` count as allocated; ``before`` and ``after`` are its
    neighbours.

    ``pool`` is its stream, and whether it is of small blocks.
    """

    address: int
    nbytes: int
    pool: _Pool
    free: bool = False
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """Hands out blocks as PyTorch's allocator does.

    Attributes:
        allocated: Bytes in use now, as ``torch.cuda.memory_allocated`` returns.
        reserved: Bytes taken from the device, as ``torch.cuda.memory_reserved`` returns.
        max_allocated: The most that :attr:`allocated` was.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = self.max_allocated = 0
        self._free: dict[_Pool, list[tuple[int, int, Block]]] = defaultdict(list)
        self._next_address = 0
        self._blocks: dict[Storage, Block] = {}
        self._waiting: list[tuple[Block, set[int], int]] = []
        # until when each stream, and the host, is known to be behind the work of others
        self._behind: dict[int, dict[int, int]] = defaultdict(dict)
        self._records: dict[int, dict[int, int]] = {}
        self._time = 0

    def apply(self, event: Event) -> Block | None:
        """Do what an event of a trace does to memory; return the block that it allocates."""
        self._time += 1
        if isinstance(event, Allocate):
            storage = event.storage
            self._blocks[storage] = block = self.allocate(storage.nbytes, storage.stream)
            return block
        if isinstance(event, Free):
            block = self._blocks.pop(event.storage)
            users = set(event.storage.used_on) - {event.storage.stream}
            self.free(block, users)
        elif isinstance(event, Record):
            self._records[event.event] = {**self._behind[event.stream], event.stream: self._time}
        elif isinstance(event, Wait):
            self._wait(event)
        return None

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Return a block of at least ``nbytes`` for ``stream``."""
        size = max(1, -(-nbytes // _MIN_BLOCK)) * _MIN_BLOCK
        pool = stream, size <= _SMALL
        free = self._free[pool]
        # the smallest free block that is large enough, of equal ones the first in memory
        place = bisect_left(free, (size, -1))
        block = free.pop(place)[2] if place < len(free) else self._new_segment(pool, size)
        rest = block.nbytes - size
        if rest >= _MIN_BLOCK if pool[1] else rest > _SMALL:
            self._split(block, size)
        block.free = False
        self.allocated += block.nbytes
        self.max_allocated = max(self.max_allocated, self.allocated)
        return block

    def free(self, block: Block, users: set[int] | None = None) -> None:
        """Take a block back, at once or when the streams that use it are past this point."""
        self.allocated -= block.nbytes
        if users:
            self._waiting.append((block, users, self._time))
        else:
            self._give_back(block)

    def _wait(self, wait: Wait) -> None:
        """Order a stream behind an event, and take blocks back whose uses lie before that."""
        behind = self._behind[wait.stream]
        for stream, time in self._records.get(wait.event, {}).items():
            behind[stream] = max(time, behind.get(stream, -1))
        still = []
        for block, users, freed in self._waiting:
            if wait.stream in (HOST, block.pool[0]):
                users = {user for user in users if behind.get(user, -1) < freed}
            if users:
                still.append((block, users, freed))
            else:
                self._give_back(block)
        self._waiting = still

    def _new_segment(self, pool: _Pool, size: int) -> Block:
        if size <= _SMALL:
            nbytes = _SMALL_SEGMENT
        elif size < _MIN_LARGE:
            nbytes = _LARGE_SEGMENT
        else:
            nbytes = -(-size // _ROUND_LARGE) * _ROUND_LARGE
        block = Block(self._next_address, nbytes, pool)
        self._next_address += nbytes
        self.reserved += nbytes
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(
            block.address + size, block.nbytes - size, block.pool, True, block, block.after
        )
        if block.after is not None:
            block.after.before = rest
        block.after, block.nbytes = rest, size
        insort(self._free[block.pool], _place(rest))

    def _give_back(self, block: Block) -> None:
        """Put a block back into its pool, as one with its free neighbours."""
        if block.before is not None and block.before.free:
            self._free[block.pool].remove(_place(block.before))
            block = self._join(block.before, block)
        if block.after is not None and block.after.free:
            self._free[block.pool].remove(_place(block.after))
            self._join(block, block.after)
        block.free = True
        insort(self._free[block.pool], _place(block))

    def _join(self, left: Block, right: Block) -> Block:
        left.nbytes += right.nbytes
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        return left


def _place(block: Block) -> tuple[int, int, Block]:
    return block.nbytes, block.address, block
