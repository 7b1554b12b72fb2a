"""Triton kernels that encode and decode tiles, bit-identical to ``reference.py``.

A program works on ``BLOCK`` values, whole tiles in the order of memory. ``sections`` are offsets in
bytes, see ``section_offsets``. Where all tiles have the same bits, the planes of codes are those of
an encoded row. Compile with ``enable_fp_fusion=False``.

A unit is a token. Its place in the message is its index among the INT4 units, or ``-1 - index``
among the INT3 units, int32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.activation.triton_arithmetic import log2
from lq_lightning.kernels.message.format import FP32_MAX
from lq_lightning.kernels.message.launch import INT_TO_FLOAT, Tile, on_device
from lq_lightning.kernels.message.triton_blocks import hadamard, load_run, round_output
from lq_lightning.kernels.message.triton_codes import (
    add_plane,
    levels_of_words,
    load_codes,
    pair_up,
    pairs_of_word,
    plane_of_pairs,
    same_in_groups,
    store_codes,
)
from lq_lightning.kernels.message.triton_rounding import (
    asymmetric_scaling,
    fixed_point,
    group_range,
    ordered,
    scaled,
    scaling_of,
)
from lq_lightning.kernels.message.triton_rows import (
    code_span,
    load_scales,
    row_sections,
    store_scales,
)
from lq_lightning.kernels.mixed_width.triton_rounding import end_section, section
from lq_lightning.kernels.tah.format import OUTLIER_RATIO, TAHFormat, TAHLayout
from lq_lightning.kernels.tah.reference import SMALLEST, lowest

_FP32_MAX = tl.constexpr(FP32_MAX)
_RATIO, _SMALLEST = tl.constexpr(OUTLIER_RATIO), tl.constexpr(SMALLEST)
_LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tah_entropy_kernel(
    x_ptr, entropy_ptr, units, unit_numel, UNITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Entropies of ``UNITS`` units, read ``BLOCK`` columns at a time; ``reference.entropies``."""
    unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    column = tl.arange(0, BLOCK)
    totals = tl.zeros((UNITS, BLOCK), tl.float32)
    products = tl.zeros((UNITS, BLOCK), tl.float32)
    source = x_ptr + unit[:, None] * unit_numel + column[None, :]
    for start in range(0, unit_numel, BLOCK):
        inside = (unit < units)[:, None] & (start + column < unit_numel)[None, :]
        magnitude = tl.abs(tl.load(source + start, inside, 0.0).to(tl.float32))
        totals += magnitude
        products += magnitude * log2(tl.maximum(magnitude, _SMALLEST))
    total = tl.sum(totals, axis=1)
    entropy = (log2(total) - tl.sum(products, axis=1) / total) * _LOG_2
    # also where it is NaN
    entropy = tl.where((entropy > 0.0) & (entropy <= _FP32_MAX), entropy, 0.0)
    tl.store(entropy_ptr + unit, entropy, unit < units)


@triton.jit(do_not_specialize=["low_units"])
def tah_rank_kernel(
    entropy_ptr, place_ptr, units, low_units, OWN: tl.constexpr, BLOCK: tl.constexpr
):
    """Mark by 1 which of ``OWN`` units are among the ``low_units`` lowest of their sequence.

    Of equal entropies the first are; ``reference.lowest``. Every unit is compared with all of its
    sequence: many programs do so sooner than one finds the threshold between the two kinds.
    """
    programs = tl.cdiv(units, OWN)
    sequence = tl.program_id(0) // programs
    first = (tl.program_id(0) - sequence * programs) * OWN
    unit = first + tl.arange(0, OWN)
    start_of_sequence = tl.cast(sequence, tl.int64) * units
    # the bits of entropies, whose order as int32 is theirs
    source = section(entropy_ptr, 0, tl.int32) + start_of_sequence
    key = tl.load(source + unit, unit < units, 0)
    below = tl.zeros((OWN, BLOCK), tl.int32)
    for start in range(0, units, BLOCK):
        index = start + tl.arange(0, BLOCK)
        others = tl.load(source + index, index < units, 0x7FFFFFFF)
        # Equal ones in an earlier block count: those are less than one more.
        bound = key + (start + BLOCK <= first).to(tl.int32)
        below += (others[None, :] < bound[:, None]).to(tl.int32)
    index = first // BLOCK * BLOCK + tl.arange(0, BLOCK)
    equal = tl.load(source + index, index < units, 0x7FFFFFFF)[None, :] == key[:, None]
    below += (equal & (index[None, :] < unit[:, None])).to(tl.int32)
    low = (tl.sum(below, axis=1) < low_units).to(tl.int32)
    tl.store(place_ptr + start_of_sequence + unit, low, unit < units)


@triton.jit(do_not_specialize=["low_units"])
def tah_place_kernel(
    message_ptr, place_ptr, units, low_units, BLOCK: tl.constexpr, RANKED: tl.constexpr
):
    """Places of the units of one sequence.

    INT3 are those that are marked at ``place_ptr`` with ``RANKED``, else what the bits at
    ``message_ptr`` say.
    """
    sequence = tl.program_id(0).to(tl.int64)
    first_low = sequence.to(tl.int32) * low_units
    first_high = sequence.to(tl.int32) * (units - low_units)
    low_before = low_units * 0
    for start in range(0, units, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < units
        unit = sequence * units + index
        if RANKED:
            low = tl.load(place_ptr + unit, inside, 0)
        else:
            bits = tl.load(message_ptr + unit // 8, inside, 255).to(tl.int32)
            low = ((bits >> (unit % 8).to(tl.int32)) & 1) ^ 1
        low_until = low_before + tl.cumsum(low, axis=0)
        high_index = first_high + index - low_until
        place = tl.where(low > 0, -first_low - low_until, high_index)
        tl.store(place_ptr + unit, place, inside)
        low_before += tl.sum(low, axis=0)


@triton.jit
def pack_bits(values, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Pack ``[COUNT]`` int32 below ``2**WIDTH`` to bytes, low bits first; ``pack_plane``."""
    PER_BYTE: tl.constexpr = 8 // WIDTH
    shifts = (tl.arange(0, PER_BYTE) * WIDTH)[None, :]
    return tl.sum(tl.reshape(values, (COUNT // PER_BYTE, PER_BYTE)) << shifts, axis=1).to(tl.int8)


@triton.jit
def tah_bits_kernel(place_ptr, message_ptr, units, BLOCK: tl.constexpr):
    """Write a bit per unit, 1 for INT4, and the zeros that end the section."""
    first = tl.program_id(0) * BLOCK
    unit = first + tl.arange(0, BLOCK)
    place = tl.load(place_ptr + unit, unit < units, -1)
    packed = pack_bits((place >= 0).to(tl.int32), BLOCK, 1)
    byte = first // 8 + tl.arange(0, BLOCK // 8)
    end = (units + 127) // 128 * 16
    tl.store(section(message_ptr, 0, tl.int8) + byte, packed, byte < end)


@triton.jit
def _stands_out(first, second, TILE: tl.constexpr):
    """``reference._stands_out`` of bits of magnitudes; False for NaN."""
    largest = first.to(tl.float32, bitcast=True)
    outlier = largest > second.to(tl.float32, bitcast=True) * _RATIO
    return outlier & (largest <= _FP32_MAX / TILE)


@triton.jit
def _range_and_candidates(values, GROUPS: tl.constexpr, FORMAT: tl.constexpr, HIGH: tl.constexpr):
    """Ranges of ``[GROUPS, TILE]`` tiles as keys, and which tiles may have an outlier.

    The extremes of halves, which are needed anyway, tell that there is none in nearly all tiles.
    """
    TILE: tl.constexpr = FORMAT.tile
    halves = tl.reshape(values, (GROUPS * 2, TILE // 2))
    low, high = group_range(halves, GROUPS * TILE, HIGH, True)
    largest = tl.maximum(ordered(low) & 0x7FFFFFFF, ordered(high) & 0x7FFFFFFF)
    a, b = tl.split(tl.reshape(largest, (GROUPS, 2)))
    candidates = _stands_out(tl.maximum(a, b), tl.minimum(a, b), TILE)
    a, b = tl.split(tl.reshape(low, (GROUPS, 2)))
    c, d = tl.split(tl.reshape(high, (GROUPS, 2)))
    return tl.minimum(a, b), tl.maximum(c, d), candidates


@triton.jit
def _find_outliers(values, TILE: tl.constexpr):
    """Tiles of ``[GROUPS, TILE]`` that have an outlier, and its place; ``find_outliers``."""
    column = tl.arange(0, TILE)[None, :]
    # as integers, where NaN is larger than all, also for the interpreter
    keys = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    first = tl.max(keys, axis=1)
    pivot = tl.min(tl.where(keys == first[:, None], column, TILE), axis=1)
    second = tl.max(tl.where(column == pivot[:, None], 0, keys), axis=1)
    return _stands_out(first, second, TILE), pivot


@triton.jit
def _swap(values, pivot, TILE: tl.constexpr):
    """Exchange the first value of each tile with that at its pivot."""
    column = tl.arange(0, TILE)[None, :]
    at_pivot = column == pivot[:, None]
    bits = values.to(tl.int32, bitcast=True)
    # sums of one number and zeros
    first = tl.sum(tl.where(column == 0, bits, 0), axis=1)
    other = tl.sum(tl.where(at_pivot, bits, 0), axis=1)
    bits = tl.where(at_pivot, first[:, None], bits)
    return tl.where(column == 0, other[:, None], bits).to(tl.float32, bitcast=True)


@triton.jit
def _any(flags):
    return tl.max(flags.to(tl.int32), axis=0) > 0


@triton.jit
def _hadamard(values, NORM: tl.constexpr, RUN: tl.constexpr):
    """Transform of ``[GROUPS, TILE]`` tiles."""
    SIZE: tl.constexpr = values.shape[0] * values.shape[1]
    flat = hadamard(tl.reshape(values, (SIZE,)), SIZE, values.shape[1], RUN)
    return tl.reshape(flat * NORM, values.shape)


@triton.jit
def _transform(values, outlier, pivot, FORMAT: tl.constexpr, RUN: tl.constexpr):
    changed = _hadamard(_swap(values, pivot, FORMAT.tile), FORMAT.forward_norm, RUN)
    return tl.where(outlier[:, None], changed, values)


@triton.jit
def _restore(values, outlier, pivot, FORMAT: tl.constexpr, RUN: tl.constexpr):
    changed = _swap(_hadamard(values, FORMAT.inverse_norm, RUN), pivot, FORMAT.tile)
    return tl.where(outlier[:, None], changed, values)


@triton.jit
def _places(place_ptr, tile, tiles, unit_numel, TILE: tl.constexpr):
    """Whether each of ``[GROUPS]`` tiles is INT3, and the first word of eight codes of each."""
    per_unit = unit_numel // TILE
    unit = tile // per_unit
    place = tl.load(place_ptr + unit, tile < tiles, 0)
    low = place < 0
    index = tl.where(low, -1 - place, place)
    return low, (index * per_unit + (tile - unit * per_unit)) * (TILE // 8)


@triton.jit
def _word_places(low, first, inside, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """The same for words: whether a word is of INT3, of INT4, and its place."""
    BLOCK: tl.constexpr = GROUPS * TILE
    # -1 beyond the last tile
    kind = tl.where(inside, low.to(tl.int32), -1)
    kinds = same_in_groups(kind, BLOCK, TILE)
    place = same_in_groups(first, BLOCK, TILE) + tl.arange(0, BLOCK // 8) % (TILE // 8)
    # Told that neighbours stay neighbours, the compiler lets every thread load and store its own.
    WORDS: tl.constexpr = TILE // 8
    place = tl.max_contiguous(tl.multiple_of(place, [WORDS]), [WORDS])
    kinds = tl.max_constancy(kinds, [WORDS])
    return kinds == 1, kinds == 0, place


@triton.jit
def _store_mixed(
    pairs, message_ptr, places, inside, sizes, sections, GROUPS: tl.constexpr, TILE: tl.constexpr
):
    """Write INT3 and INT4 codes to the places that ``_places`` returned."""
    a, b, c, d = pairs
    is_low, is_high, place = _word_places(places[0], places[1], inside, GROUPS, TILE)
    target = section(message_ptr, sections[2], tl.int32)
    tl.store(target + place, plane_of_pairs(a, b, c, d, 0, 4), is_high)
    target = section(message_ptr, sections[0], tl.int16)
    tl.store(target + place, plane_of_pairs(a, b, c, d, 0, 2), is_low)
    target = section(message_ptr, sections[1], tl.int8)
    tl.store(target + place, plane_of_pairs(a, b, c, d, 2, 1), is_low)
    if tl.program_id(0) == 0:
        units, unit_numel, low_units = sizes
        low_words = tl.cast(low_units, tl.int64) * (unit_numel // 8)
        high_words = tl.cast(units - low_units, tl.int64) * (unit_numel // 8)
        end_section(message_ptr, sections[0] + low_words * 2)
        end_section(message_ptr, sections[1] + low_words)
        end_section(message_ptr, sections[2] + high_words * 4)


@triton.jit
def _load_mixed(message_ptr, places, inside, sections, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """Words of eight codes of 4 bits, whatever they were stored as."""
    is_low, is_high, place = _word_places(places[0], places[1], inside, GROUPS, TILE)
    source = section(message_ptr, sections[2], tl.int32)
    words = tl.load(source + place, is_high, 0)
    source = section(message_ptr, sections[0], tl.int16)
    pairs = pairs_of_word(tl.load(source + place, is_low, 0), 2)
    source = section(message_ptr, sections[1], tl.int8)
    a, b, c, d = add_plane(pairs, tl.load(source + place, is_low, 0), 1, 2)
    # zeros where the words above are, and the other way round
    return words | plane_of_pairs(a, b, c, d, 0, 4)


@triton.jit(do_not_specialize=["low_units"])
def tah_quantize_kernel(
    x_ptr,
    place_ptr,
    message_ptr,
    tiles,
    units,
    unit_numel,
    low_units,
    sections,
    GROUPS: tl.constexpr,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    FULL: tl.constexpr,
):
    """Outlier test -> swap -> Hadamard -> scale -> round -> pack."""
    TILE: tl.constexpr = FORMAT.tile
    BLOCK: tl.constexpr = GROUPS * TILE
    VECTOR: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    first_tile = tl.program_id(0) * GROUPS
    tile = first_tile + tl.arange(0, GROUPS)
    start = tl.cast(first_tile, tl.int64) * TILE
    count = (tiles - first_tile) * TILE
    x = load_run(x_ptr + start, count, BLOCK, VECTOR, RUN, FULL).to(tl.float32)
    values = tl.reshape(x, (GROUPS, TILE))
    _, _, _, scales, minima, outliers, pivots = sections
    smallest, largest, candidate = _range_and_candidates(values, GROUPS, FORMAT, HIGH)
    if FORMAT.hadamard:
        outlier = tl.zeros((GROUPS,), tl.int1)
        pivot = tl.zeros((GROUPS,), tl.int32)
        if _any(candidate):
            outlier, pivot = _find_outliers(values, TILE)
            values = _transform(values, outlier, pivot, FORMAT, RUN)
            smallest, largest = group_range(values, count, HIGH, True)
        _store_fields(message_ptr + outliers, outlier.to(tl.int32), first_tile, tiles, GROUPS, 1)
        pivot = tl.where(outlier, pivot, 0)
        _store_pivots(message_ptr, pivot, pivots, first_tile, tiles, GROUPS, FORMAT)
    if ADAPTIVE:
        places = _places(place_ptr, tile, tiles, unit_numel, TILE)
        max_level = tl.where(places[0], LOW.max_level, HIGH.max_level)
        max_width = tl.where(places[0], LOW.max_width, HIGH.max_width)
        scaling = asymmetric_scaling(smallest, largest, max_level, max_width, HIGH, 1.0)
    else:
        scaling = scaling_of(smallest, largest, HIGH, 1.0)
    scale, minimum, _, _ = scaling
    fixed = fixed_point(scaled(values, scaling, HIGH, True), HIGH)
    a, b, c, d = pair_up(tl.reshape(fixed, (BLOCK,)), BLOCK)
    keep = same_in_groups(tl.where(scale == scale, -1, 0), BLOCK, TILE)
    if ADAPTIVE:
        pairs = (a & keep, b & keep, c & keep, d & keep)
        sizes = (units, unit_numel, low_units)
        _store_mixed(pairs, message_ptr, places, tile < tiles, sizes, sections, GROUPS, TILE)
    else:
        numel = tl.cast(tiles, tl.int64) * TILE
        row = row_sections(numel, HIGH)
        span = code_span(numel, numel, row)
        store_codes(a, b, c, d, keep, message_ptr, start, span, row, BLOCK, HIGH, FULL)
    groups = (first_tile, tl.minimum(first_tile + GROUPS, tiles))
    store_scales(scale, message_ptr, scales, groups, tiles, GROUPS, HIGH)
    store_scales(minimum, message_ptr, minima, groups, tiles, GROUPS, HIGH)


@triton.jit
def _store_pivots(
    message_ptr, pivot, offsets, first, tiles, GROUPS: tl.constexpr, FORMAT: tl.constexpr
):
    """Write the pivots of ``[GROUPS]`` tiles."""
    WIDTHS: tl.constexpr = FORMAT.pivot_widths
    for index in tl.static_range(len(WIDTHS)):
        fields = pivot & ((1 << WIDTHS[index]) - 1)
        _store_fields(message_ptr + offsets[index], fields, first, tiles, GROUPS, WIDTHS[index])
        pivot = pivot >> WIDTHS[index]


@triton.jit
def _load_pivots(message_ptr, offsets, tile, tiles, FORMAT: tl.constexpr):
    """Undo ``_store_pivots``."""
    WIDTHS: tl.constexpr = FORMAT.pivot_widths
    pivot = tile * 0
    shift = 0
    for index in tl.static_range(len(WIDTHS)):
        fields = _load_fields(message_ptr + offsets[index], tile, tiles, WIDTHS[index])
        pivot |= fields << shift
        shift += WIDTHS[index]
    return pivot


@triton.jit
def _store_fields(section_ptr, fields, first, tiles, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    packed = pack_bits(fields, GROUPS, WIDTH)
    COUNT: tl.constexpr = GROUPS * WIDTH // 8
    byte = first // 8 * WIDTH + tl.arange(0, COUNT)
    used = (tiles + 7) // 8 * WIDTH
    tl.store(section(section_ptr, 0, tl.int8) + byte, packed, byte < used)
    if first + GROUPS >= tiles:
        end_section(section_ptr, used)


@triton.jit
def _load_fields(section_ptr, tile, tiles, WIDTH: tl.constexpr):
    bit = tile * WIDTH
    bits = tl.load(section(section_ptr, 0, tl.int8) + bit // 8, tile < tiles, 0).to(tl.int32)
    return (bits >> (bit % 8)) & ((1 << WIDTH) - 1)


@triton.jit(do_not_specialize=["int_to_float"])
def tah_dequantize_kernel(
    message_ptr,
    place_ptr,
    out_ptr,
    tiles,
    unit_numel,
    int_to_float,
    sections,
    GROUPS: tl.constexpr,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    HIGH: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    FULL: tl.constexpr,
):
    """Unpack -> scale -> inverse Hadamard -> swap."""
    TILE: tl.constexpr = FORMAT.tile
    BLOCK: tl.constexpr = GROUPS * TILE
    first_tile = tl.program_id(0) * GROUPS
    tile = first_tile + tl.arange(0, GROUPS)
    _, _, _, scales, minima, outliers, pivots = sections
    if ADAPTIVE:
        places = _places(place_ptr, tile, tiles, unit_numel, TILE)
        words = _load_mixed(message_ptr, places, tile < tiles, sections, GROUPS, TILE)
        second = words
        third = words
    else:
        numel = tl.cast(tiles, tl.int64) * TILE
        row = row_sections(numel, HIGH)
        span = code_span(numel, numel, row)
        start = tl.cast(first_tile, tl.int64) * TILE
        words, second, third = load_codes(message_ptr, start, span, row, BLOCK, RUN, HIGH, FULL)
    first_group = tl.cast(first_tile, tl.int64)
    scale = load_scales(message_ptr, scales, first_group, tiles, GROUPS, HIGH)
    minimum = load_scales(message_ptr, minima, first_group, tiles, GROUPS, HIGH)
    levels = levels_of_words(words, second, third, int_to_float, BLOCK, HIGH)
    levels = tl.reshape(levels, (GROUPS, TILE))
    # rounded once either way: products of codes and 8 or 11 bits are exact
    factor = tl.broadcast_to(scale[:, None], levels.shape)
    values = tl.fma(levels, factor, tl.broadcast_to(minimum[:, None], levels.shape))
    if FORMAT.hadamard:
        outlier = _load_fields(message_ptr + outliers, tile, tiles, 1) > 0
        if _any(outlier):
            pivot = _load_pivots(message_ptr, pivots, tile, tiles, FORMAT)
            values = _restore(values, outlier, pivot, FORMAT, RUN)
    result = round_output(tl.reshape(values, (BLOCK,)), out_ptr.dtype.element_ty)
    offsets = tl.arange(0, BLOCK)
    target = out_ptr + first_group * TILE + offsets
    if FULL:
        tl.store(target, result)
    else:
        tl.store(target, result, offsets < (tiles - first_tile) * TILE)


# Values that a program reads at once for entropies.
_ENTROPY_BLOCK = 2048
# Units that a program ranks, those that it compares them with at once, and its warps.
_RANKED_UNITS, _RANK_BLOCK, _RANK_WARPS = 8, 1024, 8
# Units that get their place at once.
_PLACE_BLOCK = 4096
# Of a sequence. More, as tiles often are, take one program longer than the operators of torch.
_MANY_UNITS = 8192


# By counts of instructions for sm_90: 24 per value to encode and 19 to decode, without a transform.
QUANTIZE_TILE = Tile(2048, 32, 2)
DEQUANTIZE_TILE = Tile(2048, 16, 4)


def section_offsets(layout: TAHLayout) -> tuple[int | tuple[int, ...], ...]:
    """Return where INT3 planes, other codes, scales, minima, outliers and pivots begin."""
    codes = (*layout.low_planes, layout.high_planes[0])
    scales = (layout.scale_offset, layout.minimum_offset)
    return (*codes, *scales, layout.outlier_offset, layout.pivot_planes)


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
    """Return ``[units]`` fp32; ``reference.measure``, but for the order of sums."""
    layout = fmt.layout(*x.shape)
    entropies = torch.empty(layout.tokens, dtype=torch.float32, device=x.device)
    width = min(triton.next_power_of_2(layout.channels), _ENTROPY_BLOCK)
    count = _ENTROPY_BLOCK // width
    tah_entropy_kernel[(triton.cdiv(layout.tokens, count),)](
        *(x, entropies, layout.tokens, layout.channels),
        UNITS=count,
        BLOCK=width,
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
    size = triton.next_power_of_2(units)
    if rank:
        tah_rank_kernel[(sequences * triton.cdiv(units, _RANKED_UNITS),)](
            *(entropies, places, units, layout.low_per_sequence),
            OWN=_RANKED_UNITS,
            BLOCK=max(_RANKED_UNITS, min(size, _RANK_BLOCK)),
            num_warps=_RANK_WARPS,
        )
    block = min(size, _PLACE_BLOCK)
    tah_place_kernel[(sequences,)](
        *(message, places, units, layout.low_per_sequence),
        BLOCK=block,
        RANKED=rank,
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
        *(x, places, out, layout.tiles, layout.tokens, layout.channels, layout.low_tokens),
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
            *(message, places, out, layout.tiles, layout.channels, INT_TO_FLOAT),
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
