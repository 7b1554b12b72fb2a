"""Checksums of many tensors at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference as cpu


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return a number for the bits of each tensor: another one if they change.

    Reads them once; on a GPU in one launch for each size of elements, without waiting for it.

    Args:
        tensors: Contiguous, on one device, of any dtype and shape.

    Returns:
        ``[len(tensors)]`` int64, on their device.
    """
    if not tensors:
        return torch.empty(0, dtype=torch.int64)
    if tensors[0].is_cuda:
        from .triton_kernels import launch_checksums

        return launch_checksums(tensors)
    return torch.stack([cpu.checksum(tensor) for tensor in tensors])
