"""How a program, which is one warp, holds groups of 128 elements; noise of their elements.

A tile is ``[32 // AT_ONCE, AT_ONCE, AT_ONCE, 4]``: lane, group, part of a group and element. So
many lanes share a group and own four consecutive elements of each of its parts. All tensors have
that layout, whatever their dtype: every load of a lane is a vector of four, and lanes of a group
are neighbours in memory. What is one number per group is ``[1, AT_ONCE, 1, 1]``: the more groups at
once, the fewer lanes compute it for themselves, and the more elements they use it for.

Triton spreads a tensor over the lanes of a warp dimension by dimension, after the one in which its
elements are consecutive: with lanes and groups first, that is what is meant above.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formats import GROUP_SIZE
from .reference_codes import STREAMS, STRIDE

_GROUP = tl.constexpr(GROUP_SIZE)
_WARP = tl.constexpr(32)
_STREAMS = tl.constexpr(STREAMS)
_STRIDE = tl.constexpr(STRIDE)


@triton.jit
def groups_of_lanes(AT_ONCE: tl.constexpr):
    """Group of each lane, ``[32 // AT_ONCE, AT_ONCE, 1, 1]``.

    Not ``arange`` along the dimension of groups: the compiler would see neighbours in memory, let
    one lane load or store what belongs to several groups, and move it from there.
    """
    return tl.reshape(tl.arange(0, _WARP) % AT_ONCE, (_WARP // AT_ONCE, AT_ONCE, 1, 1))


@triton.jit
def lane_columns(AT_ONCE: tl.constexpr):
    """Column in its group of the first element of each lane, as ``groups_of_lanes``."""
    return tl.reshape(tl.arange(0, _WARP) // AT_ONCE, (_WARP // AT_ONCE, AT_ONCE, 1, 1)) * 4


@triton.jit
def inner_columns(AT_ONCE: tl.constexpr):
    """Columns of the elements of a lane after its first one, ``[1, 1, AT_ONCE, 4]``."""
    part = tl.arange(0, AT_ONCE)[None, None, :, None]
    return part * (_GROUP // AT_ONCE) + tl.arange(0, 4)[None, None, None, :]


@triton.jit
def largest_of_groups(x):
    """Largest of each group, ``[1, AT_ONCE, 1, 1]``; first among the elements of a lane."""
    x = tl.max(tl.max(x, axis=3, keep_dims=True), axis=2, keep_dims=True)
    return tl.max(x, axis=0, keep_dims=True)


@triton.jit
def smallest_of_groups(x):
    """Smallest of each group, ``[1, AT_ONCE, 1, 1]``; first among the elements of a lane."""
    x = tl.min(tl.min(x, axis=3, keep_dims=True), axis=2, keep_dims=True)
    return tl.min(x, axis=0, keep_dims=True)


@triton.jit
def group_noise(seed_a, seed_b, group):
    """The random word of a group; ``reference_codes.rounding_noise``."""
    low = group.to(tl.uint32)
    high = (group >> 32).to(tl.uint32)
    x = low ^ seed_a.to(tl.uint32)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D + (high * 0xC2B2AE35 ^ seed_b.to(tl.uint32))
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def element_noise(word, STREAM: tl.constexpr, AT_ONCE: tl.constexpr):
    """32 random bits of each element of a tile, uint32."""
    # Products with constants apart from each other: one addition is left for each element.
    first = word * _STREAMS[STREAM] + lane_columns(AT_ONCE).to(tl.uint32) * _STRIDE
    return first + inner_columns(AT_ONCE).to(tl.uint32) * _STRIDE
