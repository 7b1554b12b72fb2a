"""What is measured before a message is encoded, in plain torch: entropies, ranks and outliers.

Shape legend: U tokens, T tiles, G values of a tile, C tiles that may have an outlier.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lq_lightning.kernels.message.format import FP32_MAX

from .format import OUTLIER_RATIO, TAHFormat

# The logarithm of anything smaller is that of this: magnitude times logarithm is 0 either way.
SMALLEST = 2.0**-126


class Statistics(NamedTuple):
    """Of some values.

    Attributes:
        entropies: ``[U]`` fp32.
        outliers: ``[T]`` bool, tiles that are transformed.
        pivots: ``[T]`` uint8, index of the outlier within its tile; 0 for other tiles.
    """

    entropies: Tensor
    outliers: Tensor
    pivots: Tensor


def measure(x: Tensor, fmt: TAHFormat, ranked: bool, scratch: tuple[Tensor, ...]) -> Statistics:
    """Return the statistics of tokens.

    Args:
        x: ``[tokens, N]`` floating point, contiguous.
        fmt: the format.
        ranked: whether entropies are needed; they are zeros otherwise.
        scratch: two fp32 of at least as many values, overwritten: new memory for every part would
            cost more than the arithmetic.
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

    Never negative; 0 where values are all zero, not finite, or have a sum that is not.

    Args:
        total: ``[U]`` sums of a.
        weighted: ``[U]`` sums of a * log(a).
    """
    entropy = total.log() - weighted / total
    return entropy.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).clamp_(min=0.0)


def lowest(entropy: Tensor, count: int) -> Tensor:
    """Mark the ``count`` lowest entropies of every sequence; of equal ones the first.

    Args:
        entropy: ``[B, U / B]`` fp32, not negative.
        count: of a sequence.

    Returns:
        ``[B, U / B]`` bool.
    """
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
    """Find tiles whose largest magnitude is more than twice the second largest.

    Tiles of zeros have no outlier, nor have those whose transform could overflow or that are not
    finite.

    Args:
        magnitude: ``[T, G]`` fp32.

    Returns:
        Indices of the tiles, and of the outlier in each, int64.
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
