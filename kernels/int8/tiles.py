"""Tiles of the kernels of INT8 products: they change the speed, not the bits."""

from __future__ import annotations

from typing import NamedTuple


class ProductTile(NamedTuple):
    """What one program works on.

    Attributes:
        rows: of the result, a power of two from 16.
        columns: of the result, a power of two from 16.
        depth: values of both operands that are multiplied at a time.
        warps: threads of a program, in units of 32.
        stages: tiles of operands in shared memory.
        specialized: whether other warps load than multiply.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    specialized: bool = False


_SMALL = ProductTile(128, 128, 128, 8, 4)
_TALL = ProductTile(256, 128, 128, 8, 3)
_WIDE = ProductTile(128, 256, 128, 8, 3, True)

# For GPUs without TMA, which was not measured.
POINTER_TILE = ProductTile(128, 128, 128, 8, 3)
# Of second terms: few rows, so that it takes as long as to read the other operand.
SECOND_TILE = ProductTile(16, 32, 256, 4, 4)


def choose_product_tile(rows: int, columns: int, length: int, processors: int) -> ProductTile:
    """Return the tile of a product on Hopper (H100: ``benchmarks/int8_products.py``).

    Args:
        rows: of the result.
        columns: of the result.
        length: of the sums.
        processors: of the GPU.
    """
    tiles = -(-rows // 256) * -(-columns // 128)
    if tiles < processors:
        return _SMALL
    return _TALL if max(columns, length) > 2 * min(columns, length) else _WIDE
