"""The table of tiles."""

from __future__ import annotations

import itertools

import pytest
import torch

from lq_lightning.kernels.message.launch import SIZES, TILES, Tile, choose_tile, row_grid

NUMELS = (1, SIZES[0], SIZES[-1])


def test_tiles_hold_groups_and_fill_threads() -> None:
    for kind, group_size, numel in itertools.product(TILES, (1, 16, 2048, 4096), NUMELS):
        tile = choose_tile(kind, group_size, numel, torch.device("cuda"))
        per_thread = tile.block // (32 * tile.warps)
        assert tile.block % group_size == 0
        assert tile.run >= 8
        assert per_thread % tile.run == 0
        assert tile.tiles >= 1


def test_each_size_class_has_its_tile() -> None:
    for kind, choices in TILES.items():
        chosen = [choose_tile(kind, 1, numel, torch.device("cuda")) for numel in NUMELS]
        assert chosen == [Tile(*choice) for choice in choices]


@pytest.mark.parametrize("rows", [1, 65535, 65536, 200_000])
def test_the_grid_covers_every_row_and_tile(rows: int) -> None:
    tile = Tile(1024, 32, 1, 3)
    for numel in (1, 1024, 3072, 3073, 10**6):
        x, y, z = row_grid(rows, numel, tile)
        assert (x - 1) * 3 * 1024 < numel <= x * 3 * 1024
        assert y <= 65535
        assert (z - 1) * 65535 < rows <= y + (z - 1) * 65535
