"""Grids and tiles of the Triton kernels."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
from torch import Tensor

MAX_GRID_Y = 65535
# Bits of 2**23 as fp32; or-ed with a small integer, the bits of their sum. Kernels that decode take
# it as an argument.
INT_TO_FLOAT = 0x4B000000
# Up to this many messages are summed by unrolled code, compiled for their number; more in a loop
# unrolled by it, compiled once. On an H200, int8, 256 MB: 8 messages take 197 us unrolled and 250
# in a loop unrolled by 4; 32 take 609 in a loop unrolled by 8, 765 by 4, and 596 if not unrolled.
UNROLLED_MESSAGES = 8
# In the incomplete tile at the end of a row, which is compiled separately: a smaller number keeps
# compilation for any number of messages within three seconds.
UNROLLED_IN_TAIL = 4
_HERE = nullcontext()


class Tile(NamedTuple):
    """Work of one program; changes the speed, not the bits.

    Attributes:
        block: consecutive elements of a row, a power of two, a multiple of every group size.
        run: consecutive elements that one thread owns, a power of two from 8.
        warps: threads of a program, in units of 32.
        tiles: blocks that one program works on, one after the other.
    """

    block: int
    run: int
    warps: int
    tiles: int = 1


def choose_tile(kind: str, group_size: int, numel: int, device: torch.device) -> Tile:
    """Return the tile of a launch for ``numel`` values of all rows together.

    ``kind`` is a key of ``TILES``; ``group_size`` the larger one of the formats involved, since a
    tile to quantize holds whole groups.
    """
    if device.type != "cuda":
        return Tile(max(group_size, 1024), 32, 4, 2)
    tile = Tile(*TILES[kind][bisect_right(SIZES, numel)])
    if tile.block >= group_size:
        return tile
    factor = group_size // tile.block
    return Tile(group_size, tile.run, tile.warps * factor, max(1, tile.tiles // factor))


def row_stride(rows: Tensor, dim: int) -> int:
    """Return the stride of ``dim``, or 0 where it is never used (0 keeps the fast variant)."""
    return rows.stride(dim) if rows.shape[dim] > 1 else 0


def row_grid(rows: int, numel: int, tile: Tile) -> tuple[int, int, int]:
    """Return a grid for which ``triton_blocks.for_each_tile`` covers all rows."""
    return (
        triton.cdiv(numel, tile.block * tile.tiles),
        min(rows, MAX_GRID_Y),
        triton.cdiv(rows, MAX_GRID_Y),
    )


class RowSteps(NamedTuple):
    """Path of a grid through the rows of several matrices.

    Rows ``[R, N]`` may also be ``[P, Q, N]`` of any two strides, numbered in that order: for
    example one per rank, ordered by node in one tensor and by local rank in another.

    Attributes:
        rows: number of rows.
        across: rows along the second axis of the grid.
        strides: for each matrix the distance of rows along the second axis of the grid (stride),
            and that of rows along the third less ``across`` strides (jump).
    """

    rows: int
    across: int
    strides: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, *matrices: Tensor) -> RowSteps:
        """Find the steps through the rows of the first matrix, ``[R, N]`` or ``[P, Q, N]``.

        The others have the same last dimensions, and may have more rows.

        Raises:
            ValueError: rows of two strides are too many for a grid.
        """
        first = matrices[0]
        if first.dim() == 3 and first.shape[0] > 1 and first.shape[1] > 1:
            across = first.shape[1]
            if max(first.shape[:2]) > MAX_GRID_Y:
                raise ValueError(
                    f"rows of two strides in the shape {tuple(first.shape)} exceed the grid of a "
                    f"GPU, {MAX_GRID_Y} along each dimension: give them in smaller parts."
                )
            steps = ((m.stride(-2), m.stride(-3) - across * m.stride(-2)) for m in matrices)
            return cls(first.shape[0] * across, across, tuple(steps))
        dim = -3 if first.dim() == 3 and first.shape[1] == 1 else -2
        strides = tuple((row_stride(matrix, dim), 0) for matrix in matrices)
        return cls(first.shape[:-1].numel(), MAX_GRID_Y, strides)

    def grid(self, numel: int, tile: Tile) -> tuple[int, int, int]:
        """Return the grid for rows of ``numel`` elements."""
        return (
            triton.cdiv(numel, tile.block * tile.tiles),
            min(self.rows, self.across),
            triton.cdiv(self.rows, self.across),
        )


def on_device(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context in which kernels run on the device of ``tensor``."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _HERE


# Values of all rows together from which on an operator's second and third tile are used.
SIZES = (1 << 21, 1 << 26)

# Block, run, warps and tiles by kind; the number in a kind is the bits of a value read or written.
TILES: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "activation backward": ((1024, 16, 2, 1), (1024, 32, 1, 1), (1024, 32, 1, 1)),
    "activation backward hadamard": ((1024, 16, 2, 1), (1024, 32, 1, 1), (1024, 32, 1, 1)),
    "activation dequantize": ((1024, 16, 2, 1), (1024, 32, 1, 1), (1024, 32, 1, 1)),
    "activation dequantize hadamard": ((1024, 16, 2, 1), (1024, 32, 1, 1), (1024, 32, 1, 1)),
    "activation quantize": ((1024, 16, 2, 1), (1024, 32, 1, 1), (1024, 32, 1, 1)),
    "activation quantize hadamard": ((1024, 16, 2, 1), (1024, 32, 1, 1), (1024, 32, 1, 1)),
    "dequantize 16": ((1024, 16, 2, 1), (2048, 32, 1, 1), (1024, 16, 1, 1)),
    "dequantize 16 add": ((1024, 8, 4, 1), (1024, 8, 4, 1), (1024, 8, 4, 1)),
    "dequantize 16 hadamard": ((1024, 16, 2, 1), (2048, 32, 1, 1), (2048, 32, 1, 1)),
    "dequantize 32": ((1024, 8, 4, 1), (1024, 16, 2, 1), (1024, 8, 4, 1)),
    "dequantize 32 add": ((1024, 8, 4, 1), (1024, 8, 4, 1), (1024, 8, 4, 1)),
    "dequantize 32 hadamard": ((512, 16, 1, 1), (2048, 32, 2, 1), (1024, 8, 4, 1)),
    "difference 16": ((2048, 16, 4, 1), (2048, 16, 4, 1), (2048, 16, 4, 1)),
    "difference 16 hadamard": ((1024, 16, 2, 1), (1024, 16, 2, 1), (2048, 32, 2, 1)),
    "difference 32": ((2048, 16, 4, 1), (2048, 8, 8, 1), (2048, 8, 8, 1)),
    "difference 32 hadamard": ((256, 8, 1, 1), (1024, 16, 2, 1), (1024, 8, 4, 2)),
    "quantize 16": ((2048, 16, 4, 1), (2048, 16, 2, 1), (2048, 32, 1, 1)),
    "quantize 16 hadamard": ((2048, 16, 4, 1), (2048, 32, 2, 2), (1024, 32, 1, 4)),
    "quantize 32": ((2048, 16, 4, 1), (2048, 16, 4, 1), (2048, 16, 2, 1)),
    "quantize 32 hadamard": ((1024, 8, 4, 1), (1024, 16, 2, 1), (1024, 16, 2, 1)),
    "reduce 16": ((256, 8, 1, 1), (1024, 32, 1, 2), (2048, 32, 1, 1)),
    "reduce 32": ((512, 16, 1, 1), (1024, 32, 1, 1), (1024, 32, 1, 1)),
    "requantize": ((256, 8, 1, 1), (1024, 32, 1, 2), (2048, 32, 2, 4)),
    "requantize many": ((256, 8, 1, 1), (2048, 32, 1, 2), (2048, 32, 1, 1)),
}
