"""Checksums of many tensors at once.

The bits of an element, as a signed integer, times an odd number for its row of ``BLOCK`` elements,
times a number for its column; all of that added up modulo 2^64. A change of one element always
changes the sum, and others do unless they happen to cancel, which no scaling, change of signs,
shift or swap of parts does by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

BLOCK = 1024
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_SLAB = 64  # rows whose products fit a cache


@cache
def column_factors(device: torch.device) -> Tensor:
    """A positive number for each column, ``[BLOCK]`` int64, the same in every process."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(1, 1 << 31, (BLOCK,), generator=generator, device="cpu").to(device)


def checksum(tensor: Tensor) -> Tensor:
    """Return the checksum of one contiguous tensor, an int64 scalar."""
    bits = tensor.detach().view(-1).view(INTEGERS[tensor.itemsize])
    factors = column_factors(bits.device)
    full = bits.numel() // BLOCK
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, full, _SLAB):
        last = min(first + _SLAB, full)
        slab = bits[first * BLOCK : last * BLOCK].view(-1, BLOCK)
        rows = torch.arange(first, last, device=bits.device) * 2 + 1
        total += ((slab * factors).sum(dim=1) * rows).sum()
    rest = bits[full * BLOCK :]
    return total + (rest * factors[: rest.numel()]).sum() * (2 * full + 1)


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return a number for the bits of each tensor: another one if they change.

    Reads them once; on a GPU in one launch for each size of elements, without waiting for it.

    Args:
        tensors: Contiguous, of any dtype and shape, on one device and the CPU (offloaded shards).

    Returns:
        ``[len(tensors)]`` int64, on that device.
    """
    if not tensors:
        return torch.empty(0, dtype=torch.int64)
    first = next((tensor for tensor in tensors if tensor.is_cuda), None)
    if first is None:
        return torch.stack([checksum(tensor) for tensor in tensors])
    from lq_lightning.kernels.checksum.triton_kernels import launch_checksums

    sums = launch_checksums([t if t.is_cuda else first.new_empty(0) for t in tensors])
    for index, tensor in enumerate(tensors):
        if not tensor.is_cuda and tensor.numel():  # the kernel cannot read host memory
            sums[index] = checksum(tensor)
    return sums
