"""TAH-Quant in plain torch: the truth that the Triton kernels must match, and fast on a CPU.

Values are read twice: once for entropies and outliers, and, once it is known which tokens are INT3,
in the order of the message. Work is done in parts that stay in a core's cache.

Shape legend: B sequences, S tokens, N channels, T tiles, G values of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message import reference as blocks
from lq_lightning.kernels.message.format import FP32_MAX
from lq_lightning.kernels.tah.format import OUTLIER_RATIO, TAHFormat, TAHLayout

# The logarithm of anything smaller is that of this: magnitude times logarithm is 0 either way.
SMALLEST = 2.0**-126


class Statistics(NamedTuple):
    """Entropies of tokens, fp32; of tiles which are transformed, bool, and their pivots, uint8.

    A pivot is the index of the outlier within its tile; 0 for other tiles.
    """

    entropies: Tensor
    outliers: Tensor
    pivots: Tensor


def measure(x: Tensor, fmt: TAHFormat, ranked: bool, scratch: tuple[Tensor, ...]) -> Statistics:
    """Return the statistics of ``[tokens, N]`` values; entropies are zeros unless ``ranked``.

    ``scratch`` is two fp32 tensors of at least as many values, overwritten: new memory for every
    part would cost more than the arithmetic.
    """
    tokens, channels = x.shape
    magnitude, weighted = (memory[: x.numel()].view(tokens, channels) for memory in scratch)
    magnitude.copy_(x).abs_()
    tiles = magnitude.view(-1, fmt.tile)
    outliers = torch.zeros(tiles.shape[0], dtype=torch.bool)
    pivots = torch.zeros(tiles.shape[0], dtype=torch.uint8)
    if fmt.hadamard:
        found, pivot = find_outliers(tiles)
        outliers[found], pivots[found] = True, pivot.to(torch.uint8)
    per_token = channels // fmt.tile
    if not ranked:
        zeros = torch.zeros(tiles.shape[0] // per_token, dtype=torch.float32)
        return Statistics(zeros, outliers, pivots)
    total = tiles.sum(-1).view(-1, per_token).sum(-1)
    torch.clamp(magnitude, min=SMALLEST, out=weighted).log_().mul_(magnitude)
    products = weighted.view_as(tiles).sum(-1).view(-1, per_token).sum(-1)
    return Statistics(entropies(total, products), outliers, pivots)


def entropies(total: Tensor, weighted: Tensor) -> Tensor:
    """Entropy of magnitudes a that sum to 1 once divided by their sum; -sum(p * log(p)).

    ``total`` has sums of a, ``weighted`` sums of a * log(a). Never negative; 0 where values are all
    zero, not finite, or have a sum that is not.
    """
    entropy = total.log() - weighted / total
    return entropy.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).clamp_(min=0.0)


def lowest(entropy: Tensor, count: int) -> Tensor:
    """Mark the ``count`` lowest of ``[B, U / B]`` entropies by row; of equal ones the first."""
    if count in (0, entropy.shape[1]):
        return torch.full_like(entropy, count > 0, dtype=torch.bool)
    if entropy.is_cuda:  # where kthvalue is not deterministic
        threshold = entropy.sort(dim=1).values[:, count - 1 : count]
    else:
        threshold = entropy.kthvalue(count, dim=1, keepdim=True).values
    below, equal = entropy < threshold, entropy == threshold
    missing = count - below.sum(1, keepdim=True)
    return below | (equal & (equal.cumsum(1) <= missing))


def find_outliers(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tiles whose largest magnitude is over twice the second largest, and its place.

    Of ``[T, G]`` fp32 magnitudes. Tiles of zeros have no outlier, nor have those whose transform
    could overflow or that are not finite.
    """
    size = magnitude.shape[1]
    # The largest of the other half is at most the second largest: few candidates are left.
    halves = magnitude.view(-1, 2, size // 2).amax(-1)
    a, b = halves.unbind(1)
    found = _stands_out(torch.maximum(a, b), torch.minimum(a, b), size).nonzero().view(-1)
    candidates = magnitude.index_select(0, found)
    first, pivot = candidates.max(-1)
    others = candidates.scatter_(1, pivot.unsqueeze(1), 0.0).amax(-1)
    kept = _stands_out(first, others, size)
    return found[kept], pivot[kept]


def _stands_out(first: Tensor, second: Tensor, size: int) -> Tensor:
    return (first > OUTLIER_RATIO * second) & (first <= FP32_MAX / size)


# Values that are worked on at once.
_PART_NUMEL = 1 << 18


def quantize(x: Tensor, fmt: TAHFormat, out: Tensor) -> None:
    """Encode ``[B, S, N]`` values, contiguous, to ``[nbytes]`` uint8."""
    layout = fmt.layout(*x.shape)
    out.zero_()
    if x.numel() == 0:
        return
    found = statistics_of(x, fmt)
    low = lowest(found.entropies.view(x.shape[0], -1), layout.low_per_sequence).view(-1)
    if layout.adaptive:
        store_bits(low.logical_not(), out, 0)
    encode_tokens(x, low, found.outliers, found.pivots, fmt, out)


def statistics_of(x: Tensor, fmt: TAHFormat) -> Statistics:
    """Return the statistics of ``[B, S, N]`` values, contiguous."""
    rows = x.view(-1, x.shape[-1])
    step = min(rows.shape[0], max(1, _PART_NUMEL // rows.shape[1]))
    ranked = fmt.layout(*x.shape).adaptive
    size = 2, step * rows.shape[1]
    scratch = torch.empty(size, dtype=torch.float32).unbind()
    parts = [measure(part, fmt, ranked, scratch) for part in torch.split(rows, step)]
    return Statistics(*(torch.cat(fields) for fields in zip(*parts, strict=True)))


def encode_tokens(
    x: Tensor, low: Tensor, outliers: Tensor, pivots: Tensor, fmt: TAHFormat, out: Tensor
) -> None:
    """Write all sections but the first to ``out``, which is zero where nothing is written.

    ``low`` says which tokens are INT3; ``outliers`` and ``pivots`` are ``[T]`` bool and uint8.
    """
    layout = fmt.layout(*x.shape)
    tokens = x.view(layout.tokens, layout.channels)
    per_token = layout.channels // fmt.tile
    rows = out.unsqueeze(0)
    scales = torch.empty(layout.tokens, per_token, dtype=torch.float32)
    minima = torch.empty_like(scales)
    marked, places = outliers.view_as(scales), pivots.view_as(scales)
    # New memory for every part would cost more than the arithmetic.
    part_numel = min(x.numel(), max(_PART_NUMEL, layout.channels))
    scratch = torch.empty(part_numel, dtype=torch.float32)
    for codes_format, planes, index, first in _parts(low, layout, fmt):
        tiles = _take(tokens, index, scratch).view(-1, fmt.tile)
        if fmt.hadamard:
            transform_(tiles, marked[index].reshape(-1), places[index].reshape(-1), fmt)
        groups = tiles.unsqueeze(0)
        extremes = blocks.group_range(groups, tiles.numel(), codes_format)
        scaling = blocks.scaling_of(extremes, 1.0, codes_format)
        if scaling.minimum is None:
            raise AssertionError(f"{codes_format} has no minimum")
        scales[index] = scaling.scale.view(-1, per_token)
        minima[index] = scaling.minimum.view(-1, per_token)
        codes = blocks.quantize_groups(groups, scaling, None, codes_format).view(1, -1)
        blocks.store_codes(codes, rows, first * layout.channels, codes_format.planes, planes)
    codes_format = fmt.codes(fmt.bits)
    blocks.store_scales(scales.view(1, -1), rows, layout.scale_offset, codes_format)
    blocks.store_scales(minima.view(1, -1), rows, layout.minimum_offset, codes_format)
    if fmt.hadamard:
        store_bits(outliers, out, layout.outlier_offset)
    blocks.store_codes(pivots.view(1, -1), rows, 0, fmt.pivot_widths, layout.pivot_planes)


def transform_(tiles: Tensor, outliers: Tensor, pivots: Tensor, fmt: TAHFormat) -> None:
    """Swap the outlier of marked ``[T, G]`` tiles with their first value, and transform them."""
    index = outliers.nonzero().view(-1)
    if index.numel():
        chosen = tiles[index]
        _swap_(chosen, pivots[index])
        tiles[index] = blocks.hadamard_(chosen, fmt.tile).mul_(fmt.forward_norm)


def restore_(tiles: Tensor, outliers: Tensor, pivots: Tensor, fmt: TAHFormat) -> None:
    """Undo ``transform_``; arguments as there."""
    index = outliers.nonzero().view(-1)
    if index.numel():
        chosen = blocks.hadamard_(tiles[index], fmt.tile).mul_(fmt.inverse_norm)
        _swap_(chosen, pivots[index])
        tiles[index] = chosen


def _swap_(tiles: Tensor, pivots: Tensor) -> None:
    place = pivots.to(torch.int64).unsqueeze(1)
    at_pivot = tiles.gather(1, place)
    tiles.scatter_(1, place, tiles[:, :1].clone())
    tiles[:, :1] = at_pivot


def dequantize(message: Tensor, fmt: TAHFormat, out: Tensor) -> None:
    """Decode values to ``[B, S, N]``, contiguous."""
    layout = fmt.layout(*out.shape)
    if out.numel() == 0:
        return
    tokens = out.view(layout.tokens, layout.channels)
    per_token = layout.channels // fmt.tile
    low = torch.zeros(layout.tokens, dtype=torch.bool)
    if layout.adaptive:
        low = ~load_bits(message, layout.tokens, 0)
    rows, codes_format = message.unsqueeze(0), fmt.codes(fmt.bits)
    scales = blocks.load_scales(rows, layout.scale_offset, layout.tiles, codes_format)
    minima = blocks.load_scales(rows, layout.minimum_offset, layout.tiles, codes_format)
    scales, minima = scales.view(-1, per_token), minima.view(-1, per_token)
    outliers, pivots = load_outliers(message, layout, fmt)
    marked, places = outliers.view_as(scales), pivots.view_as(scales)
    for codes_format, planes, index, first in _parts(low, layout, fmt):
        scale = scales[index].reshape(-1, 1)
        start, count = first * layout.channels, scale.numel() * fmt.tile
        codes = blocks.load_codes(rows, start, count, codes_format.planes, planes)
        tiles = codes.to(torch.float32).view(-1, fmt.tile)
        tiles.mul_(scale).add_(minima[index].reshape(-1, 1))
        if fmt.hadamard:
            restore_(tiles, marked[index].reshape(-1), places[index].reshape(-1), fmt)
        tokens[index] = tiles.view(-1, layout.channels).to(out.dtype)


def load_outliers(message: Tensor, layout: TAHLayout, fmt: TAHFormat) -> tuple[Tensor, Tensor]:
    """Read which tiles were transformed and their pivots: ``[T]`` bool and ``[T]`` uint8."""
    places = (0, layout.tiles, fmt.pivot_widths, layout.pivot_planes)
    pivots = blocks.load_codes(message.unsqueeze(0), *places).view(-1)
    if not fmt.hadamard:
        return torch.zeros(layout.tiles, dtype=torch.bool), pivots
    return load_bits(message, layout.tiles, layout.outlier_offset), pivots


def _parts(
    low: Tensor, layout: TAHLayout, fmt: TAHFormat
) -> Iterator[tuple[MessageFormat, tuple[int, ...], Tensor | slice, int]]:
    """Yield the format of codes, their planes, an index of tokens, and how many come before."""
    step = max(1, _PART_NUMEL // layout.channels)
    for bits, planes, members, count in (
        (3, layout.low_planes, low, layout.low_tokens),
        (fmt.bits, layout.high_planes, ~low, layout.high_tokens),
    ):
        chosen = members.nonzero().view(-1) if layout.adaptive else None
        for first in range(0, count, step):
            end = min(first + step, count)
            index = slice(first, end) if chosen is None else chosen[first:end]
            yield fmt.codes(bits), planes, index, first


def _take(tokens: Tensor, index: Tensor | slice, scratch: Tensor) -> Tensor:
    """Copy tokens to scratch memory, as fp32."""
    if isinstance(index, slice):
        chosen = tokens[index]
    elif tokens.dtype == torch.float32:
        taken = scratch[: index.numel() * tokens.shape[1]].view(-1, tokens.shape[1])
        return torch.index_select(tokens, 0, index, out=taken)
    else:
        chosen = tokens.index_select(0, index)
    return scratch[: chosen.numel()].view(chosen.shape).copy_(chosen)


def store_bits(marks: Tensor, out: Tensor, offset: int) -> None:
    """Write ``[count]`` bool as bits from byte ``offset`` on."""
    blocks.store_codes(marks.to(torch.uint8).view(1, -1), out.unsqueeze(0), 0, (1,), (offset,))


def load_bits(message: Tensor, count: int, offset: int) -> Tensor:
    """Undo ``store_bits``."""
    return blocks.load_codes(message.unsqueeze(0), 0, count, (1,), (offset,)).view(-1) != 0
