"""What the launchers of the Triton kernels share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .format import RowLayout


def tile_sizes(group_size: int, preferred: int, device: torch.device) -> tuple[int, int]:
    """Return elements and warps of a program; a thread holds 32 elements. The bits do not change.

    Args:
        group_size: the larger one of the formats involved; a tile holds whole groups.
        preferred: elements of a tile, a power of two from 1024.
        device: where the kernel runs. Triton's interpreter takes as long for any tile.
    """
    block = max(group_size, preferred if device.type == "cuda" else 4096)
    return block, block // 1024


def row_stride(rows: Tensor, dim: int) -> int:
    """Return the stride of ``dim``, or 0 where it is never used (0 keeps the fast variant)."""
    return rows.stride(dim) if rows.shape[dim] > 1 else 0


def layout_arguments(layout: RowLayout) -> tuple[int, ...]:
    """Return the layout as the integers that kernels take, in their order."""
    planes = (*layout.plane_offsets, 0, 0)
    return (
        layout.padded_numel,
        layout.num_groups,
        planes[1],
        planes[2],
        layout.scale_offset,
        layout.minimum_offset,
    )


def on_device(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context in which kernels run on the device of ``tensor``."""
    if tensor.is_cuda:
        return torch.cuda.device(tensor.device)
    return nullcontext()
