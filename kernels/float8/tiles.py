"""Tiles of the kernels of FP8 operands, as ``benchmarks/tune_float8.py`` chooses them.

They change the speed, not the bits.
"""

from __future__ import annotations

from typing import NamedTuple

from lq_lightning.kernels.message import MessageFormat

from .reference import transforms_levels


class CastTile(NamedTuple):
    """What one program of the cast works on.

    Attributes:
        rows: a power of two from 16.
        columns: a power of two from 16.
        warps: threads of a program, in units of 32.
    """

    rows: int
    columns: int
    warps: int


class RebuildTile(NamedTuple):
    """What one program of a rebuild works on.

    Attributes:
        rows: tokens, a power of two from 64.
        columns: a power of two from 128, the longest transform.
        run: consecutive values of a row that one thread owns, a power of two from 8.
        warps: threads of a program, in units of 32.
    """

    rows: int
    columns: int
    run: int
    warps: int


CAST_TILE = CastTile(128, 128, 8)

# By source and transform. A thread that owns all of a transform of levels moves nothing.
REBUILD_TILES: dict[str, RebuildTile] = {
    "activation": RebuildTile(128, 128, 32, 4),
    "activation levels": RebuildTile(256, 128, 128, 2),
    "activation values": RebuildTile(128, 128, 32, 4),
    "codes": RebuildTile(128, 128, 32, 4),
    "codes levels": RebuildTile(256, 128, 128, 2),
    "codes values": RebuildTile(128, 128, 32, 4),
    "norm": RebuildTile(128, 128, 32, 4),
    "norm levels": RebuildTile(256, 128, 128, 2),
    "norm values": RebuildTile(128, 128, 32, 4),
}


def rebuild_kind(source: str, fmt: MessageFormat) -> str:
    """Return the key of ``REBUILD_TILES`` for "codes", "norm" or "activation" and a format."""
    if not fmt.hadamard_size:
        return source
    return f"{source} {'levels' if transforms_levels(fmt) else 'values'}"
