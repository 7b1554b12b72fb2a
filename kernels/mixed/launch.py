"""Launchers of the Triton kernels for messages of mixed widths.

3 or 4 encode, another one rounds what was encoded, 1 decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lq_lightning.kernels.message.launch import INT_TO_FLOAT, on_device

from .format import SCALES, TOKENS_PER_WORD, MixedLayout, mixed_layout
from .triton_kernels import mixed_dequantize_kernel, mixed_quantize_kernel
from .triton_rounding import (
    mixed_moment_kernel,
    mixed_range_kernel,
    mixed_round_trip_kernel,
    mixed_scale_kernel,
)

# Parts of a line whose extremes are found apart, at most.
_MAX_PARTS = 32
# Tiles whose squares a thread adds up in 32 bits.
_EXACT_STEPS = 4096
# Programs from which on a GPU is busy; fewer take shorter parts of a line.
_ENOUGH_PROGRAMS = 1024


class Tile(NamedTuple):
    """What one program works on; it changes the speed, not the bits.

    Attributes:
        lines: neighbouring lines, a power of two.
        tokens: at once, a power of two from 8.
        warps: threads of a program, in units of 32.
    """

    lines: int
    tokens: int
    warps: int


RANGE_TILE = Tile(64, 64, 4)
MOMENT_TILE = Tile(64, 64, 4)
QUANTIZE_TILE = Tile(64, 128, 4)
DEQUANTIZE_TILE = Tile(64, 128, 4)
ROUND_TRIP_TILE = Tile(64, 64, 4)


def _grid(tile: Tile, tokens: int, lines: int, most: int) -> tuple[tuple[int, int], int]:
    """Return the grid of a launch, of at most ``most`` parts, and the tiles of each part."""
    across, tiles = triton.cdiv(lines, tile.lines), triton.cdiv(tokens, tile.tokens)
    parts = min(tiles, max(1, triton.cdiv(_ENOUGH_PROGRAMS, across)), most)
    steps = triton.cdiv(tiles, parts)
    return (across, triton.cdiv(tiles, steps)), steps


def sections(layout: MixedLayout) -> tuple[int, ...]:
    """Return where planes, scales and minima begin."""
    return (*layout.plane_offsets, layout.scale_offset, layout.minimum_offset)


def launch_scaling(
    x: Tensor, rows: Tensor, fitted: bool, out: Tensor, layout: MixedLayout | None
) -> Tensor:
    """Return ``[4, N]`` fp32 factors of lines; with a layout, write all but planes to ``out``."""
    tokens, lines = x.shape
    grid, steps = _grid(RANGE_TILE, tokens, lines, _MAX_PARTS)
    ranges = torch.empty(grid[1], 2, lines, dtype=torch.int32, device=x.device)
    mixed_range_kernel[grid](
        x,
        ranges,
        tokens,
        lines,
        x.stride(0),
        x.stride(1),
        steps,
        LINES=RANGE_TILE.lines,
        TOKENS=RANGE_TILE.tokens,
        num_warps=RANGE_TILE.warps,
    )
    # what is not there is not read
    moments, moment_parts = _launch_moments(x, ranges) if fitted else (ranges, 0)
    factors = torch.empty(4, lines, dtype=torch.float32, device=x.device)
    used = (0,) * 6 if layout is None else (*layout.plane_lines, layout.coded_lines)
    starts = (0,) * 7 if layout is None else sections(layout)
    mixed_scale_kernel[(triton.cdiv(lines, 32),)](
        ranges,
        moments,
        rows,
        factors,
        out,
        tokens,
        lines,
        grid[1],
        moment_parts,
        0 if layout is None else layout.padded_tokens // TOKENS_PER_WORD,
        *used,
        starts,
        LINES=32,
        PARTS=_MAX_PARTS,
        SCALES=SCALES,
        FITTED=fitted,
        STORE=layout is not None,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return factors


def _launch_moments(x: Tensor, ranges: Tensor) -> tuple[Tensor, int]:
    """Return ``[parts, 2, N]`` int64 sums of codes and of their squares, and the parts."""
    tokens, lines = x.shape
    grid, steps = _grid(MOMENT_TILE, tokens, lines, _MAX_PARTS)
    moments = torch.empty(grid[1], 2, lines, dtype=torch.int64, device=x.device)
    mixed_moment_kernel[grid](
        x,
        ranges,
        moments,
        tokens,
        lines,
        x.stride(0),
        x.stride(1),
        len(ranges),
        steps,
        LINES=MOMENT_TILE.lines,
        TOKENS=MOMENT_TILE.tokens,
        PARTS=_MAX_PARTS,
        EXACT_STEPS=_EXACT_STEPS,
        SCALES=SCALES,
        num_warps=MOMENT_TILE.warps,
        enable_fp_fusion=False,
    )
    return moments, grid[1]


def launch_mixed_quantize(
    x: Tensor,
    rows: Tensor,
    counts: Sequence[int],
    fitted: bool,
    out: Tensor,
    rounded: Tensor | None = None,
    tile: Tile = QUANTIZE_TILE,
) -> None:
    """Encode; arguments as for ``reference.quantize``."""
    tokens = x.shape[0]
    if tokens == 0:
        return
    layout = mixed_layout(counts, tokens)
    with on_device(x):
        factors = launch_scaling(x, rows, fitted, out, layout)
        launch_pack(x, rows, factors, layout, fitted, out, tile)
        if rounded is not None:
            _launch_round(x, rows, factors, fitted, rounded)


def launch_pack(
    x: Tensor,
    rows: Tensor,
    factors: Tensor,
    layout: MixedLayout,
    fitted: bool,
    out: Tensor,
    tile: Tile,
) -> None:
    """Write the planes, all that ``launch_scaling`` leaves of a message."""
    tokens, lines = x.shape
    grid, steps = _grid(tile, tokens, lines, tokens)
    mixed_quantize_kernel[grid](
        x,
        rows,
        factors,
        out,
        tokens,
        layout.padded_tokens // TOKENS_PER_WORD,
        lines,
        x.stride(0),
        x.stride(1),
        steps,
        sections(layout),
        LINES=tile.lines,
        WORDS=tile.tokens // TOKENS_PER_WORD,
        SCALES=SCALES,
        FITTED=fitted,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )


def launch_mixed_dequantize(
    message: Tensor, rows: Tensor, counts: Sequence[int], out: Tensor, tile: Tile = DEQUANTIZE_TILE
) -> None:
    """Decode; arguments as for ``reference.dequantize``."""
    tokens, lines = out.shape
    if tokens == 0:
        return
    layout = mixed_layout(counts, tokens)
    grid, steps = _grid(tile, tokens, lines, tokens)
    with on_device(message):
        mixed_dequantize_kernel[grid](
            message,
            rows,
            out,
            tokens,
            layout.padded_tokens // TOKENS_PER_WORD,
            lines,
            steps,
            INT_TO_FLOAT,
            sections(layout),
            LINES=tile.lines,
            WORDS=tile.tokens // TOKENS_PER_WORD,
            SCALES=SCALES,
            num_warps=tile.warps,
            enable_fp_fusion=False,
        )


def launch_mixed_round_trip(x: Tensor, rows: Tensor, fitted: bool, out: Tensor) -> None:
    """Round values as a message does; arguments as for ``reference.round_trip``."""
    if x.shape[0] == 0:
        return
    with on_device(x):
        factors = launch_scaling(x, rows, fitted, rows, None)
        _launch_round(x, rows, factors, fitted, out)


def _launch_round(x: Tensor, rows: Tensor, factors: Tensor, fitted: bool, out: Tensor) -> None:
    """Write what arrives of values that ``launch_scaling`` has the factors of."""
    tokens, lines = x.shape
    tile = ROUND_TRIP_TILE
    grid = triton.cdiv(lines, tile.lines), triton.cdiv(tokens, tile.tokens)
    mixed_round_trip_kernel[grid](
        x,
        rows,
        factors,
        out,
        tokens,
        lines,
        x.stride(0),
        x.stride(1),
        INT_TO_FLOAT,
        LINES=tile.lines,
        TOKENS=tile.tokens,
        SCALES=SCALES,
        FITTED=fitted,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )
