"""Building blocks of the codec in plain torch: the truth that the Triton kernels must match.

Every function works on contiguous tensors, does the same IEEE fp32 operations in the same order
as its Triton twin in ``triton_*.py``, and may overwrite its input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .noise import packed_seed_words, rounding_noise, seed_words
from .planes import (
    load_codes,
    load_scales,
    pack_plane,
    store_codes,
    store_scales,
    unpack_plane,
)
from .rounding import (
    GroupRange,
    Scaling,
    dequantize_codes,
    group_range,
    quantize_groups,
    round_minimum_down,
    round_scale_up,
    scaling_of,
)

__all__ = [
    "GroupRange",
    "Scaling",
    "dequantize_codes",
    "group_range",
    "hadamard_",
    "load_codes",
    "load_scales",
    "pack_plane",
    "packed_seed_words",
    "quantize_groups",
    "round_minimum_down",
    "round_scale_up",
    "rounding_noise",
    "scaling_of",
    "seed_words",
    "store_codes",
    "store_scales",
    "unpack_plane",
]


def hadamard_(x: Tensor, size: int) -> Tensor:
    """Apply the unnormalised Sylvester transform to every ``size`` consecutive elements.

    The butterfly runs over distances 1, 2, 4, ..., ``size / 2``; that order is part of the
    definition, since it decides the rounding.

    Args:
        x: fp32, contiguous, ``numel`` a multiple of ``size``. Overwritten.
        size: power of two.

    Returns:
        ``x``, transformed in place.
    """
    # Transposed, so that every butterfly is one vector operation over contiguous memory.
    current = x.view(-1, size).t().contiguous()
    other = torch.empty_like(current)
    distance = 1
    while distance < size:
        source = current.view(size // (2 * distance), 2, -1)
        target = other.view(size // (2 * distance), 2, -1)
        torch.add(source[:, 0], source[:, 1], out=target[:, 0])
        torch.sub(source[:, 0], source[:, 1], out=target[:, 1])
        current, other = other, current
        distance *= 2
    x.view(-1, size).copy_(current.t())
    return x
