"""The model of PyTorch's caching allocator, against sizes that its documentation gives."""

import random

import pytest
import torch

from lq_lightning.planning.allocator import MIB, CachingAllocator
from lq_lightning.planning.trace import Allocate, Free, Record, Storage, Wait


def _storage(nbytes, stream=0, used_on=()):
    return Storage(
        nbytes, stream, "forward", "aten.empty", "", (nbytes,), torch.uint8, used_on=used_on
    )


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (0, 512, 2 * MIB),
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB is not split off
        (33 * MIB - 512, 33 * MIB - 512, 34 * MIB),
    ],
)
def test_sizes(nbytes, allocated, reserved):
    allocator = CachingAllocator()
    allocator.allocate(nbytes)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_free_neighbours_become_one_block():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for index in (0, 2, 1):
        allocator.free(blocks[index])
    assert allocator.allocate(15 * MIB).address == blocks[0].address
    assert allocator.reserved == allocator.allocated == 20 * MIB


def test_smallest_fitting_block_is_taken():
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(30 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(12 * MIB).address == small.address
    assert allocator.allocate(12 * MIB).address == small.address + 12 * MIB
    assert allocator.reserved == 70 * MIB


def test_streams_share_nothing():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(64 * MIB, stream=0))
    allocator.allocate(64 * MIB, stream=1)
    assert (allocator.allocated, allocator.reserved) == (64 * MIB, 128 * MIB)
    assert allocator.max_allocated == 64 * MIB


def test_used_block_comes_back_after_a_wait():
    allocator = CachingAllocator()
    used = _storage(64 * MIB, used_on=(1,))
    allocator.apply(Allocate(used))
    allocator.apply(Record(1, 7))
    allocator.apply(Free(used))
    assert allocator.allocated == 0
    allocator.apply(Wait(0, 7))  # recorded before the block was freed: says nothing
    allocator.apply(Record(1, 8))
    allocator.apply(Wait(2, 8))  # not the block's stream
    early = allocator.apply(Allocate(_storage(64 * MIB)))
    allocator.apply(Wait(0, 8))
    late = allocator.apply(Allocate(_storage(64 * MIB)))
    assert (early.address, late.address) == (64 * MIB, 0)
    assert allocator.reserved == 128 * MIB


def test_blocks_never_overlap():
    random.seed(0)
    allocator = CachingAllocator()
    live = []
    for _ in range(3000):
        if live and random.random() < 0.5:
            allocator.free(live.pop(random.randrange(len(live))))
        else:
            nbytes = int(2 ** random.uniform(0, 26))
            live.append(allocator.allocate(nbytes, stream=random.randrange(2)))
            assert live[-1].nbytes >= nbytes
        assert allocator.allocated == sum(block.nbytes for block in live) <= allocator.reserved
    spans = sorted((block.address, block.address + block.nbytes) for block in live)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    for block in live:
        allocator.free(block)
    assert allocator.allocated == 0
    # everything is one free block per segment again
    free = [block for pool in allocator._free.values() for *_, block in pool]
    assert sum(block.nbytes for block in free) == allocator.reserved
    assert all(block.before is block.after is None for block in free)


def test_a_use_is_over_behind_a_third_stream() -> None:
    allocator = CachingAllocator()
    block = Storage(8 * MIB, 1, "forward", "", "", (1,), torch.float32, used_on=(2,))
    again = Storage(8 * MIB, 1, "forward", "", "", (1,), torch.float32)
    for event in (Allocate(block), Free(block), Record(2, 0), Wait(0, 0), Record(0, 1)):
        allocator.apply(event)
    reserved = allocator.reserved
    allocator.apply(Wait(1, 1))  # behind stream 0, and so behind stream 2
    allocator.apply(Allocate(again))
    assert allocator.reserved == reserved
