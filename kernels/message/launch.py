"""What the launchers of the Triton kernels share."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .format import MessageFormat
from .tiles import SIZES, TILES

MAX_GRID_Y = 65535
# Bits of 2**23 as fp32: with those of a small integer they are the sum of both. An argument of
# kernels that decode.
INT_TO_FLOAT = 0x4B000000
# As many messages are summed by unrolled code, compiled for their number. More are summed in a loop
# of which as many iterations are unrolled, compiled once. On an H200, int8, 256 MB: 8 messages take
# 197 us unrolled and 250 in a loop unrolled by 4; 32 take 609 in a loop unrolled by 8, 765 in one
# unrolled by 4, and 596 in one that is not.
UNROLLED_MESSAGES = 8
_HERE = nullcontext()


class Tile(NamedTuple):
    """What one program works on; it changes the speed, not the bits.

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
    """Return the tile of a launch from the table in ``tiles.py``.

    Args:
        kind: a key of the table.
        group_size: the larger one of the formats involved; a tile to quantize holds whole groups.
        numel: values of all rows together.
        device: where the kernel runs. Triton's interpreter takes as long for any tile.
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
    """Return a grid for which ``triton_frame.for_each_tile`` covers all rows."""
    return (
        triton.cdiv(numel, tile.block * tile.tiles),
        min(rows, MAX_GRID_Y),
        triton.cdiv(rows, MAX_GRID_Y),
    )


def run_passes(fmt: MessageFormat, out: Tensor, launch: Callable[[Tensor, bool], None]) -> None:
    """Launch a kernel that encodes rows: once, or for formats with one scale per row twice.

    Args:
        fmt: the format that is encoded.
        out: ``[R, B]`` the encoded rows.
        launch: given ``range_ptr`` of ``encode_tile``, and whether to widen the range instead.
    """
    if fmt.group_size:
        launch(out, False)
        return
    ranges = torch.full((out.shape[0], 2), -(2**31), dtype=torch.int32, device=out.device)
    launch(ranges, True)
    launch(ranges, False)


def on_device(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context in which kernels run on the device of ``tensor``."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _HERE
