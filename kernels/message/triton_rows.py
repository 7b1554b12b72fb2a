"""Tiles of encoded rows as Triton device functions: where the sections lie, scales, codes."""

from __future__ import annotations

import triton
import triton.language as tl

from lq_lightning.kernels.message.triton_blocks import select_bytes
from lq_lightning.kernels.message.triton_codes import (
    levels_of_pairs,
    load_levels,
    pair_up,
    same_in_groups,
    store_codes,
)
from lq_lightning.kernels.message.triton_rounding import fixed_point, group_range, mixed_noise


@triton.jit
def _section(numel, BITS: tl.constexpr):
    """Bytes of a section with ``numel`` fields of ``BITS``, a power of two; ``format._layout``."""
    nbytes = numel * (BITS // 8) if BITS >= 8 else numel // (8 // BITS)
    return (nbytes + 15) // 16 * 16


@triton.jit
def row_sections(numel, FORMAT: tl.constexpr):
    """Where the sections of a row lie; ``MessageFormat.layout``.

    Derived here, since a handful of scalar operations costs less than arguments of the launch.

    Returns ``padded_numel``, ``num_groups``, the offsets of planes 1 and 2, of the scales and of
    the minima; all int64.
    """
    MULTIPLE: tl.constexpr = 8 if FORMAT.hadamard_size < 8 else FORMAT.hadamard_size
    padded_numel = (tl.cast(numel, tl.int64) + (MULTIPLE - 1)) // MULTIPLE * MULTIPLE
    num_groups = (padded_numel + (FORMAT.group_size - 1)) // FORMAT.group_size
    BITS: tl.constexpr = FORMAT.bits
    FIRST: tl.constexpr = BITS if BITS == 8 else (2 if BITS <= 3 else 4)
    SECOND: tl.constexpr = 2 if BITS == 6 or BITS == 7 else 1
    plane_1 = _section(padded_numel, FIRST)
    plane_2 = plane_1
    if BITS != FIRST:
        plane_2 += _section(padded_numel, SECOND)
    scales = plane_2
    if BITS == 7:
        scales += _section(padded_numel, 1)
    minima = scales + _section(num_groups, FORMAT.scale_nbytes * 8)
    return padded_numel, num_groups, plane_1, plane_2, scales, minima


@triton.jit
def store_scales(
    values, row_ptr, offset, first, num_groups, GROUPS: tl.constexpr, FORMAT: tl.constexpr
):
    """Write ``[GROUPS]`` values of the scale dtype; the tile of the last group ends the section.

    NaN is written as one fixed bit pattern, whatever the hardware makes of it.
    """
    index = tl.arange(0, GROUPS)
    inside = index < num_groups - first
    number = values == values
    if FORMAT.scale_dtype == "float32":
        target = (row_ptr + offset).to(tl.pointer_type(tl.int32), bitcast=True)
        bits = tl.where(number, values.to(tl.int32, bitcast=True), 0x7FC00000)
        tl.store(target + first + index, bits, inside)
        per_section: tl.constexpr = 4
        zeros = tl.zeros((per_section,), tl.int32)
    else:
        target = (row_ptr + offset).to(tl.pointer_type(tl.int16), bitcast=True)
        if FORMAT.scale_dtype == "bfloat16":
            wide = tl.where(number, values.to(tl.int32, bitcast=True), 0x7FC00000) >> 16
            bits = wide.to(tl.int16)
        else:
            half = values.to(tl.float16).to(tl.int16, bitcast=True)
            bits = tl.where(number, half, 0x7E00).to(tl.int16)
        tl.store(target + first + index, bits, inside)
        per_section: tl.constexpr = 8
        zeros = tl.zeros((per_section,), tl.int16)
    if first + GROUPS >= num_groups:
        beyond = num_groups + tl.arange(0, per_section)
        end = (num_groups + per_section - 1) // per_section * per_section
        tl.store(target + beyond, zeros, beyond < end)


@triton.jit
def load_scales(row_ptr, offset, first, num_groups, GROUPS: tl.constexpr, FORMAT: tl.constexpr):
    """Read ``[GROUPS]`` values of the scale dtype as fp32; ``reference.load_scales``."""
    index = tl.arange(0, GROUPS)
    inside = index < num_groups - first
    if FORMAT.scale_dtype == "float32":
        source = (row_ptr + offset).to(tl.pointer_type(tl.float32), bitcast=True)
        return tl.load(source + first + index, inside, 0.0)
    source = (row_ptr + offset).to(tl.pointer_type(tl.int16), bitcast=True)
    bits = tl.load(source + first + index, inside, 0)
    if FORMAT.scale_dtype == "bfloat16":
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def store_tile(
    x,
    row_ptr,
    row,
    tile,
    numel,
    seed_a,
    seed_b,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    NORM: tl.constexpr,
    FULL: tl.constexpr,
):
    """Quantize a transformed ``[BLOCK]`` tile and write it; ``quantize.reference.store_block``.

    Returns the scales of its groups and the pairs of its codes, for ``left_out``.
    """
    sections = row_sections(numel, FORMAT)
    padded_numel, num_groups = sections[0], sections[1]
    GROUP: tl.constexpr = FORMAT.group_size
    GROUPS: tl.constexpr = BLOCK // GROUP
    start = tl.cast(tile, tl.int64) * BLOCK
    values = tl.reshape(x, (GROUPS, GROUP))
    valid = padded_numel - start if FORMAT.hadamard_size > 0 else numel - start
    scale, minimum = group_range(values, valid, FORMAT, GROUPS, NORM, FULL)
    fixed = fixed_point(values, scale, minimum, FORMAT, NORM, FULL)
    a, b, c, d = pair_up(tl.reshape(fixed, (BLOCK,)), BLOCK)
    if FORMAT.stochastic:
        # Below a unit, so it cannot carry into the other half.
        MASK: tl.constexpr = FORMAT.noise_mask
        noise = mixed_noise(seed_a, seed_b, row, start, BLOCK, 0)
        a += noise & MASK
        b += select_bytes(noise, noise, 0x0321) & MASK
        noise = mixed_noise(seed_a, seed_b, row, start, BLOCK, 1)
        c += noise & MASK
        d += select_bytes(noise, noise, 0x0321) & MASK
    keep = same_in_groups(tl.where(scale == scale, -1, 0), BLOCK, GROUP)
    store_codes(a, b, c, d, keep, row_ptr, start, sections, BLOCK, FORMAT, FULL)
    first = start // GROUP
    store_scales(scale, row_ptr, sections[4], first, num_groups, GROUPS, FORMAT)
    if not FORMAT.symmetric:
        store_scales(minimum, row_ptr, sections[5], first, num_groups, GROUPS, FORMAT)
    return scale, a, b, c, d


@triton.jit
def left_out(x, stored, magic, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """What a tile that ``store_tile`` wrote with ``NORM`` 1 leaves out of ``x``.

    Zero in groups that are not finite; for symmetric integer formats.
    """
    scale, a, b, c, d = stored
    GROUP: tl.constexpr = FORMAT.group_size
    GROUPS: tl.constexpr = BLOCK // GROUP
    levels = tl.reshape(levels_of_pairs(a, b, c, d, magic, BLOCK, FORMAT), (GROUPS, GROUP))
    rest = tl.reshape(x, (GROUPS, GROUP)) - levels * scale[:, None]
    rest = tl.where((scale == scale)[:, None], rest, 0.0)
    return tl.reshape(rest, (BLOCK,))


@triton.jit
def load_tile(
    row_ptr,
    tile,
    numel,
    magic,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """Decode a ``[BLOCK]`` tile, still transformed; ``dequantize.reference.dequantize_block``.

    ``magic`` is ``launch.FLOAT_MAGIC_BITS``: known to the compiler, it would be moved to a register
    for every code again.
    """
    sections = row_sections(numel, FORMAT)
    num_groups = sections[1]
    # A tile is either several groups or a part of one.
    GROUP: tl.constexpr = FORMAT.group_size if FORMAT.group_size < BLOCK else BLOCK
    GROUPS: tl.constexpr = BLOCK // GROUP
    start = tl.cast(tile, tl.int64) * BLOCK
    first = start // FORMAT.group_size
    levels = load_levels(row_ptr, start, sections, magic, BLOCK, RUN, FORMAT, FULL)
    levels = tl.reshape(levels, (GROUPS, GROUP))
    scale = load_scales(row_ptr, sections[4], first, num_groups, GROUPS, FORMAT)
    values = levels * scale[:, None]
    if not FORMAT.symmetric:
        minimum = load_scales(row_ptr, sections[5], first, num_groups, GROUPS, FORMAT)
        values = values + minimum[:, None]
    return tl.reshape(values, (BLOCK,))
