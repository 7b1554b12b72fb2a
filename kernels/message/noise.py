"""Seeds and the random bits of stochastic rounding, in plain torch.

Shape legend: R rows, N elements.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

_MASK_32 = 0xFFFFFFFF
_HASH_A = 0x7FEB352D
_HASH_B = 0x846CA68B
_ROW_HIGH_FACTOR = 0x85EBCA6B
_QUAD_HIGH_FACTOR = 0xC2B2AE35

_Word = TypeVar("_Word", int, Tensor)  # 32 bits, in an int64 tensor many of them


def _int32(value: int) -> int:
    """Return the two's complement reading of the low 32 bits."""
    value &= _MASK_32
    return value - (1 << 32) if value >> 31 else value


def _shift_right(x: Tensor, amount: int) -> Tensor:
    """Logical right shift of int32."""
    return (x >> amount).bitwise_and_((1 << (32 - amount)) - 1)


def _mix(x: _Word) -> _Word:
    """Mix 32 bits (two multiply-xorshift rounds; constants of the ``lowbias32`` hash)."""
    x ^= x >> 16
    x = x * _HASH_A & _MASK_32
    x ^= x >> 15
    x = x * _HASH_B & _MASK_32
    return x ^ (x >> 16)


def _mix_words(low: _Word, high: _Word) -> tuple[_Word, _Word]:
    first = _mix(_mix(low ^ 0x9E3779B9) ^ high)
    second = _mix(_mix(high ^ 0x7F4A7C15) ^ low)
    return first, second


def seed_words(seed: int) -> tuple[int, int]:
    """Turn a seed of up to 64 bits into two signed 32-bit words, each depending on all bits."""
    first, second = _mix_words(seed & _MASK_32, seed >> 32 & _MASK_32)
    return _int32(first), _int32(second)


def packed_seed_words(seeds: Tensor) -> Tensor:
    """``seed_words`` of many seeds at once.

    Args:
        seeds: ``[N]`` int64.

    Returns:
        ``[N]`` int64 with the first word in the low 32 bits and the second in the high ones.
    """
    first, second = _mix_words(seeds & _MASK_32, (seeds >> 32) & _MASK_32)
    return (second << 32) | first


def _stream_keys(words: tuple[int, int], row: int, quad_high: int) -> tuple[int, int]:
    first = _mix(words[0] + row & _MASK_32)
    extra = (row >> 32) * _ROW_HIGH_FACTOR + quad_high * _QUAD_HIGH_FACTOR
    second = _mix((words[1] ^ first ^ extra) & _MASK_32)
    return _int32(first), _int32(second)


def rounding_noise(
    seed: int, row: int, num_rows: int, start: int, count: int, noise_bits: int
) -> Tensor:
    """Return the random bits that stochastic rounding adds below the unit before truncating.

    Of every eight columns, 0, 1, 4 and 5 share one 32-bit hash of (column, row, seed), and 2, 3, 6
    and 7 the next; each takes ``noise_bits`` of it from another byte on, cyclically. Beyond 8 bits
    the fine bits of one are the coarse bits of another: their correlation is ``2**-8``. The noise
    depends on the position only, not on who computes it.

    The noise is a multiple of ``u = 2**-noise_bits``. A value that is a multiple of ``u`` is
    rounded without bias; others are first rounded to the nearest multiple, so the expectation is
    off by at most ``u / 2`` of the distance between codes, with a sign that depends on the value.

    Args:
        seed: 64-bit seed.
        row: index of the first row.
        num_rows: number of rows R.
        start: index of the first column, a multiple of 16.
        count: number of columns N, a multiple of 8.
        noise_bits: bits per element, at most 16.

    Returns:
        ``[R, N]`` int32, uniform on ``[0, 2**noise_bits)``.
    """
    words = seed_words(seed)
    noise = torch.empty(num_rows, count // 4, dtype=torch.int32)
    first_quad = start // 4
    segment_start = 0
    while segment_start < count // 4:
        low = (first_quad + segment_start) & _MASK_32
        length = min(count // 4 - segment_start, (1 << 32) - low)
        quads = torch.arange(low, low + length, dtype=torch.int64).to(torch.int32)
        for index in range(num_rows):
            quad_high = (first_quad + segment_start) >> 32
            key_a, key_b = _stream_keys(words, row + index, quad_high)
            x = quads + key_a
            x ^= _shift_right(x, 16)
            x.mul_(_int32(_HASH_A)).add_(key_b)
            x ^= _shift_right(x, 15)
            x.mul_(_int32(_HASH_B))
            x ^= _shift_right(x, 16)
            noise[index, segment_start : segment_start + length] = x
        segment_start += length
    rotated = _shift_right(noise, 8) | noise << 24
    # [.., which hash, rotated or not, which half of it] -> [.., half, hash, rotated]
    each = torch.stack([noise, rotated], dim=-1).view(torch.int16).view(num_rows, -1, 2, 2, 2)
    each = each.permute(0, 1, 4, 2, 3).to(torch.int32)
    return each.bitwise_and_((1 << noise_bits) - 1).reshape(num_rows, count)
