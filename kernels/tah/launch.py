"""Launchers of the Triton kernels of TAH-Quant."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lq_lightning.kernels.message.launch import INT_TO_FLOAT, on_device

from .format import TAHFormat, TAHLayout
from .statistics import SMALLEST, lowest
from .triton_kernels import tah_dequantize_kernel, tah_quantize_kernel
from .triton_ranks import tah_bits_kernel, tah_entropy_kernel, tah_place_kernel

# Values that a program reads at once for entropies, and units that it ranks at once.
_ENTROPY_BLOCK = 2048
_RANK_BLOCK = 4096
# Of a sequence. More, as tiles often are, take one program longer than the operators of torch.
_MANY_UNITS = 8192


class Tile(NamedTuple):
    """What one program works on; it changes the speed, not the bits.

    Attributes:
        block: values, at least eight tiles.
        run: consecutive values that one thread owns.
        warps: threads of a program, in units of 32.
    """

    block: int
    run: int
    warps: int


# By counts of instructions for sm_90: 24 per value to encode and 19 to decode, without a transform.
QUANTIZE_TILE = Tile(2048, 32, 2)
DEQUANTIZE_TILE = Tile(2048, 16, 4)


def section_offsets(layout: TAHLayout) -> tuple[int | tuple[int, ...], ...]:
    """Return where INT3 planes, other codes, scales, minima, outliers and pivots begin."""
    return (
        *layout.low_planes,
        layout.high_planes[0],
        layout.scale_offset,
        layout.minimum_offset,
        layout.outlier_offset,
        layout.pivot_planes,
    )


def launch_tah_quantize(x: Tensor, fmt: TAHFormat, out: Tensor, tile: Tile | None = None) -> None:
    """Encode; arguments as for ``reference.quantize``. ``tile`` overrides the choice."""
    layout = fmt.layout(*x.shape)
    if x.numel() == 0:
        return
    with on_device(x):
        places = out
        if layout.adaptive:
            entropies = launch_entropies(x, fmt)
            places = launch_places(entropies, out, layout, x.shape[0], rank=True)
            launch_bits(places, out)
        launch_encode(x, places, fmt, out, tile)


def launch_entropies(x: Tensor, fmt: TAHFormat) -> Tensor:
    """Return ``[units]`` fp32; ``statistics.measure``, but for the order of sums."""
    layout = fmt.layout(*x.shape)
    entropies = torch.empty(layout.tokens, dtype=torch.float32, device=x.device)
    width = min(triton.next_power_of_2(layout.channels), _ENTROPY_BLOCK)
    count = _ENTROPY_BLOCK // width
    tah_entropy_kernel[(triton.cdiv(layout.tokens, count),)](
        x,
        entropies,
        layout.tokens,
        layout.channels,
        UNITS=count,
        BLOCK=width,
        SMALLEST=SMALLEST,
        num_warps=4,
    )
    return entropies


def launch_places(
    entropies: Tensor, message: Tensor, layout: TAHLayout, sequences: int, rank: bool
) -> Tensor:
    """Return ``[units]`` int32 places, from entropies or from what the message says."""
    if layout.tokens > _MANY_UNITS * sequences:
        return _places_of_many(entropies, message, layout, sequences, rank)
    places = torch.empty(layout.tokens, dtype=torch.int32, device=message.device)
    units = layout.tokens // sequences
    block = min(triton.next_power_of_2(units), _RANK_BLOCK)
    tah_place_kernel[(sequences,)](
        entropies,
        message,
        places,
        units,
        layout.low_per_sequence,
        BLOCK=block,
        RANK=rank,
        num_warps=max(1, min(16, block // 256)),
    )
    return places


def _places_of_many(
    entropies: Tensor, message: Tensor, layout: TAHLayout, sequences: int, rank: bool
) -> Tensor:
    if rank:
        low = lowest(entropies.view(sequences, -1), layout.low_per_sequence).view(-1)
    else:
        first = message[: layout.used[0]].unsqueeze(1)
        bits = (first >> torch.arange(8, dtype=torch.uint8, device=message.device)) & 1
        low = bits.view(-1)[: layout.tokens] == 0
    low_places = low.cumsum(0, dtype=torch.int32).neg_()
    high_places = low.logical_not().cumsum(0, dtype=torch.int32).sub_(1)
    return torch.where(low, low_places, high_places)


def launch_bits(places: Tensor, message: Tensor) -> None:
    """Write the first section: a bit per unit."""
    units = places.numel()
    tah_bits_kernel[(triton.cdiv(units, 1024),)](places, message, units, BLOCK=1024, num_warps=1)


def launch_encode(
    x: Tensor, places: Tensor, fmt: TAHFormat, out: Tensor, tile: Tile | None = None
) -> None:
    """Write all sections but the first; ``reference.encode_tokens``."""
    layout = fmt.layout(*x.shape)
    tile = tile or QUANTIZE_TILE
    groups = tile.block // fmt.tile
    tah_quantize_kernel[(triton.cdiv(layout.tiles, groups),)](
        x,
        places,
        out,
        layout.tiles,
        layout.tokens,
        layout.channels,
        layout.low_tokens,
        section_offsets(layout),
        GROUPS=groups,
        RUN=tile.run,
        FORMAT=fmt,
        LOW=fmt.codes(3),
        HIGH=fmt.codes(fmt.bits),
        ADAPTIVE=layout.adaptive,
        FULL=layout.tiles % groups == 0,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )


def launch_tah_dequantize(
    message: Tensor, fmt: TAHFormat, out: Tensor, tile: Tile | None = None
) -> None:
    """Decode; arguments as for ``reference.dequantize``. ``tile`` overrides the choice."""
    layout = fmt.layout(*out.shape)
    if out.numel() == 0:
        return
    tile = tile or DEQUANTIZE_TILE
    groups = tile.block // fmt.tile
    with on_device(message):
        places = message
        if layout.adaptive:
            places = launch_places(message, message, layout, out.shape[0], rank=False)
        tah_dequantize_kernel[(triton.cdiv(layout.tiles, groups),)](
            message,
            places,
            out,
            layout.tiles,
            layout.channels,
            INT_TO_FLOAT,
            section_offsets(layout),
            GROUPS=groups,
            RUN=tile.run,
            FORMAT=fmt,
            HIGH=fmt.codes(fmt.bits),
            ADAPTIVE=layout.adaptive,
            FULL=layout.tiles % groups == 0,
            num_warps=tile.warps,
            enable_fp_fusion=False,
        )
