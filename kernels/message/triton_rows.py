"""Tiles of encoded rows as Triton device functions: where the sections lie, scales, codes."""

from __future__ import annotations

import triton
import triton.language as tl

from lq_lightning.kernels.message.triton_blocks import integer_type, select_bytes
from lq_lightning.kernels.message.triton_codes import (
    float8_words,
    has_float8_instructions,
    levels_of_words,
    load_codes,
    pair_up,
    same_in_groups,
    store_codes,
    store_words,
)
from lq_lightning.kernels.message.triton_rounding import (
    bits_of_scales,
    fixed_point,
    group_range,
    mixed_noise,
    scaled,
    scales_of_bits,
    scaling_of,
)


@triton.jit
def _section(numel, BITS):
    """Bytes of a section with ``numel`` fields of ``BITS``, a power of two; ``format._layout``."""
    nbytes = numel * (BITS // 8) if BITS >= 8 else numel // (8 // BITS)
    return (nbytes + 15) // 16 * 16


@triton.jit
def row_sections(numel, FORMAT):
    """Offsets of the sections of a row; ``MessageFormat.layout``.

    Derived here, since a handful of scalar operations costs less than arguments of the launch.

    Returns ``padded_numel``, ``num_groups``, the offsets of planes 1 and 2, of the scales and of
    the minima; all int64.
    """
    MULTIPLE: tl.constexpr = 8 if FORMAT.hadamard_size < 8 else FORMAT.hadamard_size
    padded_numel = (tl.cast(numel, tl.int64) + (MULTIPLE - 1)) // MULTIPLE * MULTIPLE
    num_groups = tl.cast(1, tl.int64)
    if FORMAT.group_size > 0:
        num_groups = (padded_numel + (FORMAT.group_size - 1)) // FORMAT.group_size
    PLANES: tl.constexpr = FORMAT.planes
    plane_1 = _section(padded_numel, PLANES[0])
    plane_2 = plane_1
    if len(PLANES) > 1:
        plane_2 += _section(padded_numel, PLANES[1])
    scales = plane_2
    if len(PLANES) > 2:
        scales += _section(padded_numel, PLANES[2])
    minima = scales + _section(num_groups, FORMAT.scale_nbytes * 8)
    return padded_numel, num_groups, plane_1, plane_2, scales, minima


@triton.jit
def code_span(limit, numel, sections):
    """Column where a tile's codes end, if not after ``BLOCK``, and whether the row ends there."""
    last = limit >= numel
    return tl.where(last, sections[0], limit), last


@triton.jit
def _group_span(start, span, sections, FORMAT):
    """First and end of the groups whose scales a tile writes."""
    if FORMAT.group_size > 0:
        GROUP: tl.constexpr = FORMAT.group_size
        first = start // GROUP
        end = tl.where(span[1], sections[1], span[0] // GROUP)
    else:  # the first tile of the row
        first = tl.minimum(start, 1)
        end = sections[1]
    return first, end


@triton.jit
def store_scales(values, row_ptr, offset, groups, num_groups, GROUPS, FORMAT):
    """Write ``[GROUPS]`` values of the scale dtype; the tile of the last group ends the section.

    ``groups`` is that of ``_group_span``. NaN is written as one fixed bit pattern, whatever the
    hardware makes of it.
    """
    first, end = groups
    index = tl.arange(0, GROUPS)
    inside = index < end - first
    DTYPE: tl.constexpr = integer_type(FORMAT.scale_nbytes * 8)
    target = (row_ptr + offset).to(tl.pointer_type(DTYPE), bitcast=True)
    tl.store(target + first + index, bits_of_scales(values, FORMAT), inside)
    per_section: tl.constexpr = 16 // FORMAT.scale_nbytes
    zeros = tl.zeros((per_section,), DTYPE)
    if (end == num_groups) & (first < end) & (first + GROUPS >= end):
        beyond = num_groups + tl.arange(0, per_section)
        aligned = (num_groups + per_section - 1) // per_section * per_section
        tl.store(target + beyond, zeros, beyond < aligned)


@triton.jit
def load_scales(row_ptr, offset, first, num_groups, GROUPS, FORMAT):
    """Read ``[GROUPS]`` values of the scale dtype as fp32; ``reference.load_scales``."""
    index = tl.arange(0, GROUPS)
    inside = index < num_groups - first
    DTYPE: tl.constexpr = integer_type(FORMAT.scale_nbytes * 8)
    source = (row_ptr + offset).to(tl.pointer_type(DTYPE), bitcast=True)
    return scales_of_bits(tl.load(source + first + index, inside, 0), FORMAT)


@triton.jit
def raise_to(target, key):
    """Make the int32 at ``target`` at least ``key``, whatever other programs do."""
    # Most tiles of a long row change nothing: reading first, even a stale value, saves atomics.
    if key > tl.load(target):
        tl.atomic_max(target, key, sem="relaxed")


@triton.jit
def encode_tile(
    x,
    row_ptr,
    range_ptr,
    row,
    start,
    limit,
    numel,
    seed_a,
    seed_b,
    BLOCK,
    FORMAT,
    NORM,
    FULL,
    WIDEN=False,
):
    """Quantize a transformed ``[BLOCK]`` tile and write it; ``reference.encode_block``.

    Formats with one scale per row take two passes; see ``launch_cache.encoding_launch``. The first,
    with ``WIDEN``, makes the range of the row, two int32 keys at ``range_ptr``, hold that of the
    tile. The smaller key is negated, so that both begin with the smallest int32 and grow.
    """
    sections = row_sections(numel, FORMAT)
    span = code_span(limit, numel, sections)
    GROUP: tl.constexpr = FORMAT.group_size if FORMAT.group_size > 0 else BLOCK
    values = tl.reshape(x, (BLOCK // GROUP, GROUP))
    end = span[0] if FORMAT.hadamard_size > 0 else limit
    low, high = group_range(values, end - start, FORMAT, FULL)
    if WIDEN:
        raise_to(range_ptr + 2 * row, tl.max(high, 0))
        if not FORMAT.symmetric:
            raise_to(range_ptr + 2 * row + 1, ~tl.min(low, 0))
    else:
        if FORMAT.group_size == 0:
            keys = range_ptr + 2 * row + tl.arange(0, 1)
            high = tl.load(keys)
            low = high
            if not FORMAT.symmetric:
                low = ~tl.load(keys + 1)
        scaling = scaling_of(low, high, FORMAT, NORM)
        scale, minimum, _, _ = scaling
        y = scaled(values, scaling, FORMAT, FULL)
        keep = tl.where(scale == scale, -1, 0)
        if has_float8_instructions(FORMAT, True):
            a = float8_words(y, keep)
            store_words(a, row_ptr, start, span, BLOCK, 8, FULL)
        else:
            a, b, c, d = pair_up(tl.reshape(fixed_point(y, FORMAT), (BLOCK,)), BLOCK)
            if FORMAT.stochastic:
                # Below a unit, so it cannot carry into the other half.
                MASK: tl.constexpr = FORMAT.noise_mask
                noise = mixed_noise(seed_a, seed_b, row, start, BLOCK, 0)
                a += noise & MASK
                b += select_bytes(noise, noise, 0x0321) & MASK
                noise = mixed_noise(seed_a, seed_b, row, start, BLOCK, 1)
                c += noise & MASK
                d += select_bytes(noise, noise, 0x0321) & MASK
            keep = same_in_groups(keep, BLOCK, values.shape[1])
            store_codes(a, b, c, d, keep, row_ptr, start, span, sections, BLOCK, FORMAT, FULL)
        GROUPS: tl.constexpr = values.shape[0]
        groups = _group_span(start, span, sections, FORMAT)
        store_scales(scale, row_ptr, sections[4], groups, sections[1], GROUPS, FORMAT)
        if not FORMAT.symmetric:
            store_scales(minimum, row_ptr, sections[5], groups, sections[1], GROUPS, FORMAT)


@triton.jit
def load_encoded(row_ptr, start, limit, numel, BLOCK, RUN, FORMAT, FULL):
    """Read the encoded ``[BLOCK]`` tile for ``decode_loaded``.

    Returns the words of three planes, scales and minima; the values of those that the format lacks
    mean nothing.
    """
    sections = row_sections(numel, FORMAT)
    span = code_span(limit, numel, sections)
    # A tile is either several groups or a part of one.
    WHOLE: tl.constexpr = FORMAT.group_size > 0 and FORMAT.group_size < BLOCK
    GROUPS: tl.constexpr = BLOCK // FORMAT.group_size if WHOLE else 1
    first = tl.cast(0, tl.int64)
    if FORMAT.group_size > 0:
        first = start // FORMAT.group_size
    words, second, third = load_codes(row_ptr, start, span, sections, BLOCK, RUN, FORMAT, FULL)
    scale = load_scales(row_ptr, sections[4], first, sections[1], GROUPS, FORMAT)
    minimum = scale
    if not FORMAT.symmetric:
        minimum = load_scales(row_ptr, sections[5], first, sections[1], GROUPS, FORMAT)
    return words, second, third, scale, minimum


@triton.jit
def decode_loaded(loaded, int_to_float, BLOCK, FORMAT):
    """Decode what ``load_encoded`` returned, still transformed; ``reference.decode_block``.

    ``int_to_float`` is ``launch.INT_TO_FLOAT``: as a constant, the compiler would move it to a
    register again for every code.
    """
    words, second, third, scale, minimum = loaded
    GROUPS: tl.constexpr = scale.shape[0]
    levels = levels_of_words(words, second, third, int_to_float, BLOCK, FORMAT)
    levels = tl.reshape(levels, (GROUPS, BLOCK // GROUPS))
    if FORMAT.symmetric:
        values = levels * scale[:, None]
    elif FORMAT.scale.significand_bits > 16:
        values = levels * scale[:, None] + minimum[:, None]
    else:  # rounded once either way: products of codes and so few bits are exact
        factor = tl.broadcast_to(scale[:, None], levels.shape)
        values = tl.fma(levels, factor, tl.broadcast_to(minimum[:, None], levels.shape))
    return tl.reshape(values, (BLOCK,))


@triton.jit
def decode_tile(row_ptr, start, limit, numel, int_to_float, BLOCK, RUN, FORMAT, FULL):
    """Decode a ``[BLOCK]`` tile, still transformed; ``reference.decode_block``.

    ``int_to_float`` is that of ``decode_loaded``.
    """
    loaded = load_encoded(row_ptr, start, limit, numel, BLOCK, RUN, FORMAT, FULL)
    return decode_loaded(loaded, int_to_float, BLOCK, FORMAT)


@triton.jit
def encoded_columns(message_ptr, message_stride, row, rows, numel, FLAT, MULTIPLE=16):
    """Place of row ``row`` (int64) of a ``[rows, numel]`` matrix in its message.

    ``FLAT`` is ``matrix.is_flat``. For ``encode_tile`` and ``decode_tile``, which take columns of
    an encoded row. ``MULTIPLE`` is the group size, of which flat rows have a multiple.

    Returns:
        The address of the encoded row, its column where the row of the matrix begins, and how many
        values the encoded row has; int64.
    """
    row_ptr = message_ptr
    first = tl.cast(0, tl.int64)
    length = tl.cast(numel, tl.int64)
    if FLAT:
        # for the compiler, which takes larger words where it knows that they are aligned
        first = tl.multiple_of(row * numel, MULTIPLE)
        length = length * rows
    else:
        row_ptr += row * message_stride
    return row_ptr, first, length
