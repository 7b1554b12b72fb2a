"""Building blocks of the codec as Triton device functions, bit-identical to ``reference.py``.

Compile kernels that use them with ``enable_fp_fusion=False``: a fused multiply-add would round
once where the reference rounds twice.

Names: a tile is ``BLOCK`` consecutive elements of one row, a power of two and a multiple of
``GROUP``; ``FULL`` says that the whole tile lies inside the row, so that nothing needs a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

# 1.5 * 2**23: adding it rounds an fp32 of small magnitude to an integer (half to even) and leaves
# that integer in the low bits, without a conversion instruction.
_ROUND_MAGIC = tl.constexpr(12582912.0)
# 2**23: or-ing a small integer into its bit pattern gives 2**23 + that integer.
_FLOAT_MAGIC = tl.constexpr(8388608.0)
_FLOAT_MAGIC_BITS = tl.constexpr(0x4B000000)
_ROUND_MAGIC_BITS = tl.constexpr(0x4B400000)
_MIN_SCALE = tl.constexpr(2.0**-126)
_MAX_SCALE = tl.constexpr(2.0**120)
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def round_output(x, DTYPE: tl.constexpr):
    """Round fp32 to the dtype of an output, half to even."""
    if _INTERPRETED and DTYPE.is_bf16():
        # Triton's interpreter truncates here (seen with 3.9); a GPU rounds.
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        y = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def _interleave(low, high, SIZE: tl.constexpr, RUN: tl.constexpr):
    """Merge two ``[SIZE]`` tensors by alternating runs of ``RUN`` elements."""
    pairs = tl.reshape(tl.join(low, high), (SIZE // RUN, RUN, 2))
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), (2 * SIZE,))


@triton.jit
def load_run(
    source_ptr,
    limit,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    RUN: tl.constexpr,
    FULL: tl.constexpr,
    SIZE: tl.constexpr = 0,
    FIRST: tl.constexpr = 0,
):
    """Load ``[BLOCK]`` elements so that each thread owns ``RUN`` consecutive ones.

    A plain load gives a thread ``VECTOR`` elements (16 bytes) and leaves the transform, the group
    maximum and the packing to shuffles between threads. Loading the parts of every run apart and
    joining them keeps that work inside a thread; the parts of a run share cache lines. ``SIZE`` and
    ``FIRST`` are for the recursion. Zero beyond ``limit`` unless ``FULL``.
    """
    PART: tl.constexpr = SIZE if SIZE > 0 else RUN
    if PART <= VECTOR:
        index = tl.arange(0, BLOCK // RUN * PART)
        offsets = index // PART * RUN + index % PART + FIRST
        if FULL:
            values = tl.load(source_ptr + offsets)
        else:
            values = tl.load(source_ptr + offsets, offsets < limit, 0)
    else:
        HALF: tl.constexpr = PART // 2
        low = load_run(source_ptr, limit, BLOCK, VECTOR, RUN, FULL, HALF, FIRST)
        high = load_run(source_ptr, limit, BLOCK, VECTOR, RUN, FULL, HALF, FIRST + HALF)
        values = _interleave(low, high, BLOCK // RUN * HALF, HALF)
    return values


@triton.jit
def _butterfly_within(x, BLOCK: tl.constexpr, DISTANCE: tl.constexpr):
    """Sums and differences of elements ``DISTANCE`` apart that one thread owns."""
    pairs = tl.permute(tl.reshape(x, (BLOCK // (2 * DISTANCE), 2, DISTANCE)), (0, 2, 1))
    low, high = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (BLOCK,))


@triton.jit
def _butterfly_across(x, BLOCK: tl.constexpr, DISTANCE: tl.constexpr):
    """Sums and differences of elements ``DISTANCE`` apart that two threads own.

    Splitting pairs as above would change the layout of the whole tile. The exclusive or over a
    pair, applied to one's own bits, is the partner: one shuffle, same layout.
    """
    bits = tl.reshape(x.to(tl.int32, bitcast=True), (BLOCK // (2 * DISTANCE), 2, DISTANCE))
    partner = bits ^ tl.xor_sum(bits, axis=1, keep_dims=True)
    sign = (tl.arange(0, 2) << 31)[None, :, None]
    y = partner.to(tl.float32, bitcast=True) + (bits ^ sign).to(tl.float32, bitcast=True)
    return tl.reshape(y, (BLOCK,))


@triton.jit
def hadamard(
    x,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    RUN: tl.constexpr,
    DISTANCE: tl.constexpr = 1,
):
    """Unnormalised transform of every ``SIZE`` consecutive elements; ``SIZE`` 0 does nothing.

    ``RUN`` says how many consecutive elements a thread owns; ``DISTANCE`` is for the recursion.
    """
    if DISTANCE < SIZE:
        if DISTANCE < RUN:
            x = _butterfly_within(x, BLOCK, DISTANCE)
        else:
            x = _butterfly_across(x, BLOCK, DISTANCE)
        x = hadamard(x, BLOCK, SIZE, RUN, 2 * DISTANCE)
    return x


@triton.jit
def _mix(x):
    """Mix 32 bits; ``reference._mix``."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def rounding_noise(seed_a, seed_b, row, start, BLOCK: tl.constexpr, NOISE_BITS: tl.constexpr):
    """Random bits of a tile, ``[BLOCK]`` int32; ``reference.rounding_noise``."""
    first_pair = start // 2
    pair_high = (first_pair >> 32).to(tl.uint32)
    row_high = (row >> 32).to(tl.uint32)
    key_a = _mix(seed_a.to(tl.uint32) + row.to(tl.uint32))
    extra = row_high * 0x85EBCA6B + pair_high * 0xC2B2AE35
    key_b = _mix(seed_b.to(tl.uint32) ^ key_a ^ extra)
    # A tile is aligned to its own size, so the low word does not wrap inside it.
    x = (first_pair.to(tl.uint32) + tl.arange(0, BLOCK // 2).to(tl.uint32)) ^ key_a
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D + key_b
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    even = x & ((1 << NOISE_BITS) - 1)
    odd = x >> (32 - NOISE_BITS)
    return tl.reshape(tl.join(even, odd), (BLOCK,)).to(tl.int32)


@triton.jit
def round_scale_up(scale, FORMAT: tl.constexpr):
    """Round non-negative fp32 up to the scale dtype; ``reference.round_scale_up``."""
    if FORMAT.scale_dtype == "bfloat16":
        bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
        scale = tl.where(scale == scale, bits.to(tl.float32, bitcast=True), scale)
    if FORMAT.scale_dtype == "float16":
        rounded = scale.to(tl.float16)
        bits = rounded.to(tl.int16, bitcast=True).to(tl.int32) + 1
        up = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        nearest = rounded.to(tl.float32)
        scale = tl.where(nearest < scale, up, nearest)
    return scale


@triton.jit
def round_minimum_down(minimum, FORMAT: tl.constexpr):
    """Round fp32 down to the scale dtype, -0 to +0; ``reference.round_minimum_down``."""
    minimum = tl.where(minimum == 0.0, 0.0, minimum)
    if FORMAT.scale_dtype == "bfloat16":
        bits = minimum.to(tl.int32, bitcast=True) + tl.where(minimum < 0.0, 0xFFFF, 0)
        down = (bits & -0x10000).to(tl.float32, bitcast=True)
        minimum = tl.where(minimum == minimum, down, minimum)
    if FORMAT.scale_dtype == "float16":
        rounded = minimum.to(tl.float16)
        nearest = rounded.to(tl.float32)
        bits = rounded.to(tl.int16, bitcast=True).to(tl.int32)
        bits = tl.where(nearest > 0.0, bits - 1, bits + 1)
        bits = tl.where(nearest == 0.0, -0x7FFF, bits)
        down = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        minimum = tl.where(nearest > minimum, down, nearest)
    return minimum


@triton.jit
def _ordered(bits):
    """Map fp32 bits to int32 of the same order (and back); NaN of either sign is extreme."""
    return bits ^ ((bits >> 31) & _MAGNITUDE_BITS)


@triton.jit
def _maximum_or_nan(a, b):
    """Larger of two values, NaN if one of them is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def group_range(
    x,
    valid,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    NORM: tl.constexpr,
    FULL: tl.constexpr,
):
    """Scale and minimum of each group of a ``[GROUPS, GROUP]`` tile; ``reference.group_range``."""
    if FORMAT.symmetric:
        if _INTERPRETED:  # runs any other reduction than its own element by element
            bits = x.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS
            largest = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
        else:
            largest = tl.reduce(tl.abs(x), 1, _maximum_or_nan)
        minimum = tl.zeros((GROUPS,), tl.float32)
        raw = tl.div_rn(largest * NORM, FORMAT.max_level)
    else:
        # Integer comparison of bit patterns: NaN beats everything, which a float minimum drops.
        keys = _ordered(x.to(tl.int32, bitcast=True))
        low_keys = keys
        high_keys = keys
        if not FULL:
            GROUP: tl.constexpr = FORMAT.group_size
            column = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            low_keys = tl.where(column < valid, keys, 0x7FFFFFFF)
            high_keys = tl.where(column < valid, keys, -0x7FFFFFFF)
        low = _ordered(tl.min(low_keys, axis=1)).to(tl.float32, bitcast=True) * NORM
        high = _ordered(tl.max(high_keys, axis=1)).to(tl.float32, bitcast=True) * NORM
        minimum = round_minimum_down(low, FORMAT)
        raw = tl.div_rn(high - minimum, FORMAT.max_level)
    scale = tl.where(raw < _MIN_SCALE, 0.0, round_scale_up(raw, FORMAT))
    finite = scale <= _MAX_SCALE
    scale = tl.where(finite, scale, float("nan"))
    minimum = tl.where(finite, minimum, 0.0)
    return scale, minimum


@triton.jit
def quantize_groups(x, scale, minimum, noise, FORMAT: tl.constexpr, NORM: tl.constexpr):
    """Stored int32 codes of a ``[GROUPS, GROUP]`` tile; ``reference.quantize_groups``."""
    inverse = tl.where(scale > 0.0, tl.div_rn(1.0, scale), 0.0)
    if FORMAT.symmetric:
        y = x * (inverse * NORM)[:, None]
    else:
        y = (x * NORM - minimum[:, None]) * inverse[:, None]
    # Turns NaN, which only occurs in groups whose scale is NaN, into the lowest level. Nothing else
    # can leave the code (see `MessageFormat.noise_bits`), except padding in asymmetric groups.
    y = tl.maximum(y, FORMAT.min_level)
    if not FORMAT.symmetric:
        y = tl.minimum(y, FORMAT.max_level)
    if FORMAT.mantissa_bits > 0:
        bits = y.to(tl.int32, bitcast=True)
        LOWEST: tl.constexpr = (127 + FORMAT.min_exponent) << 23
        exponent = tl.maximum(bits & 0x7F800000, LOWEST)
        # |y| in units of the last place of its own binade, so rounding is rounding to an integer.
        BIAS: tl.constexpr = ((254 + FORMAT.mantissa_bits) << 23) - (1 << 32)  # wraps back below
        unit = BIAS - exponent
        steps = _round(tl.abs(y) * unit.to(tl.float32, bitcast=True), noise, 0, FORMAT)
        # A carry out of the fraction moves into the exponent field by itself.
        codes = steps + ((exponent - LOWEST) >> (23 - FORMAT.mantissa_bits))
        codes = codes | ((bits >> 24) & 0x80)
    else:
        codes = _round(y, noise, FORMAT.zero_code, FORMAT)
    return codes


@triton.jit
def _round(y, noise, OFFSET: tl.constexpr, FORMAT: tl.constexpr):
    """Round to nearest even, or with the noise, and add ``OFFSET``; int32."""
    if FORMAT.stochastic:
        NOISE_BITS: tl.constexpr = FORMAT.noise_bits
        # One rounding, since the product with a power of two is exact.
        magic = tl.full(y.shape, _ROUND_MAGIC, tl.float32)
        scaled = tl.fma(y, tl.full(y.shape, 2.0**NOISE_BITS, tl.float32), magic)
        BASE: tl.constexpr = (OFFSET << NOISE_BITS) - _ROUND_MAGIC_BITS
        steps = (scaled.to(tl.int32, bitcast=True) + noise + BASE) >> NOISE_BITS
    else:
        steps = (y + _ROUND_MAGIC).to(tl.int32, bitcast=True) + (OFFSET - _ROUND_MAGIC_BITS)
    return steps


@triton.jit
def store_plane(
    codes,
    plane_ptr,
    start,
    padded_numel,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    FULL: tl.constexpr,
):
    """Pack ``[BLOCK]`` codes of ``WIDTH`` bits and write them, with the zeros that end the plane.

    ``codes`` must not have bits above ``WIDTH``.
    """
    PER_BYTE: tl.constexpr = 8 // WIDTH
    packed = codes
    if PER_BYTE >= 2:
        low, high = tl.split(tl.reshape(packed, (BLOCK // 2, 2)))
        packed = low | (high << WIDTH)
    if PER_BYTE >= 4:
        low, high = tl.split(tl.reshape(packed, (BLOCK // 4, 2)))
        packed = low | (high << (2 * WIDTH))
    if PER_BYTE >= 8:
        low, high = tl.split(tl.reshape(packed, (BLOCK // 8, 2)))
        packed = low | (high << (4 * WIDTH))
    offsets = tl.arange(0, BLOCK // PER_BYTE)
    target = plane_ptr + start // PER_BYTE + offsets
    packed = packed.to(tl.uint8)
    if FULL:
        tl.store(target, packed)
    else:
        limit = (padded_numel - start) // PER_BYTE
        aligned = (limit + 15) // 16 * 16
        tl.store(target, tl.where(offsets < limit, packed, 0).to(tl.uint8), offsets < aligned)


@triton.jit
def store_codes(
    codes,
    row_ptr,
    start,
    padded_numel,
    plane_1,
    plane_2,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """Write ``[BLOCK]`` int32 codes to their planes; ``reference.store_codes``."""
    if FORMAT.bits == 8:
        store_plane(codes, row_ptr, start, padded_numel, BLOCK, 8, FULL)
    elif FORMAT.bits == 4:
        store_plane(codes, row_ptr, start, padded_numel, BLOCK, 4, FULL)
    elif FORMAT.bits == 2:
        store_plane(codes, row_ptr, start, padded_numel, BLOCK, 2, FULL)
    elif FORMAT.bits == 3:
        store_plane(codes & 3, row_ptr, start, padded_numel, BLOCK, 2, FULL)
        store_plane(codes >> 2, row_ptr + plane_1, start, padded_numel, BLOCK, 1, FULL)
    else:
        store_plane(codes & 15, row_ptr, start, padded_numel, BLOCK, 4, FULL)
        if FORMAT.bits == 5:
            store_plane(codes >> 4, row_ptr + plane_1, start, padded_numel, BLOCK, 1, FULL)
        else:
            middle = (codes >> 4) & 3
            store_plane(middle, row_ptr + plane_1, start, padded_numel, BLOCK, 2, FULL)
        if FORMAT.bits == 7:
            store_plane(codes >> 6, row_ptr + plane_2, start, padded_numel, BLOCK, 1, FULL)


@triton.jit
def load_plane(
    plane_ptr,
    start,
    padded_numel,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    FULL: tl.constexpr,
):
    """Read ``[BLOCK]`` codes of ``WIDTH`` bits as int32; zero beyond the plane."""
    PER_BYTE: tl.constexpr = 8 // WIDTH
    source = plane_ptr + start // PER_BYTE
    limit = (padded_numel - start) // PER_BYTE
    if WIDTH == 8:
        packed = load_run(source, limit, BLOCK, 16, 32, FULL)
    else:
        offsets = tl.arange(0, BLOCK // PER_BYTE)
        if FULL:
            packed = tl.load(source + offsets)
        else:
            packed = tl.load(source + offsets, offsets < limit, 0)
    codes = packed.to(tl.int32)
    if PER_BYTE >= 8:
        codes = tl.reshape(tl.join(codes & 15, codes >> 4), (BLOCK // 4,))
    if PER_BYTE >= 4:
        low = codes & ((1 << (2 * WIDTH)) - 1)
        codes = tl.reshape(tl.join(low, codes >> (2 * WIDTH)), (BLOCK // 2,))
    if PER_BYTE >= 2:
        codes = tl.reshape(tl.join(codes & ((1 << WIDTH) - 1), codes >> WIDTH), (BLOCK,))
    return codes


@triton.jit
def load_codes(
    row_ptr,
    start,
    padded_numel,
    plane_1,
    plane_2,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """Read ``[BLOCK]`` int32 codes from their planes; ``reference.load_codes``."""
    if FORMAT.bits == 8:
        return load_plane(row_ptr, start, padded_numel, BLOCK, 8, FULL)
    if FORMAT.bits == 4:
        return load_plane(row_ptr, start, padded_numel, BLOCK, 4, FULL)
    if FORMAT.bits == 2:
        return load_plane(row_ptr, start, padded_numel, BLOCK, 2, FULL)
    if FORMAT.bits == 3:
        codes = load_plane(row_ptr, start, padded_numel, BLOCK, 2, FULL)
        high = load_plane(row_ptr + plane_1, start, padded_numel, BLOCK, 1, FULL)
        return codes | (high << 2)
    if FORMAT.bits == 5:
        codes = load_plane(row_ptr, start, padded_numel, BLOCK, 4, FULL)
        high = load_plane(row_ptr + plane_1, start, padded_numel, BLOCK, 1, FULL)
        return codes | (high << 4)
    codes = load_plane(row_ptr, start, padded_numel, BLOCK, 4, FULL)
    middle = load_plane(row_ptr + plane_1, start, padded_numel, BLOCK, 2, FULL)
    codes = codes | (middle << 4)
    if FORMAT.bits == 7:
        high = load_plane(row_ptr + plane_2, start, padded_numel, BLOCK, 1, FULL)
        codes = codes | (high << 6)
    return codes


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
def dequantize_codes(codes, FORMAT: tl.constexpr):
    """Levels of int32 codes in units of the scale; ``reference.dequantize_codes``."""
    if FORMAT.mantissa_bits > 0:
        bits = ((codes & 0x7F) << (23 - FORMAT.mantissa_bits)) | ((codes & 0x80) << 24)
        levels = bits.to(tl.float32, bitcast=True) * (2.0 ** (126 + FORMAT.min_exponent))
    else:
        wide = (codes | _FLOAT_MAGIC_BITS).to(tl.float32, bitcast=True)
        levels = wide - (_FLOAT_MAGIC + FORMAT.zero_code)
    return levels


@triton.jit
def store_tile(
    x,
    row_ptr,
    row,
    tile,
    numel,
    padded_numel,
    num_groups,
    plane_1,
    plane_2,
    scale_offset,
    minimum_offset,
    seed_a,
    seed_b,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    NORM: tl.constexpr,
    FULL: tl.constexpr,
):
    """Quantize a transformed ``[BLOCK]`` tile and write it; ``quantize.reference.store_block``."""
    GROUPS: tl.constexpr = BLOCK // FORMAT.group_size
    start = tile * BLOCK
    values = tl.reshape(x, (GROUPS, FORMAT.group_size))
    valid = padded_numel - start if FORMAT.hadamard_size > 0 else numel - start
    scale, minimum = group_range(values, valid, FORMAT, GROUPS, NORM, FULL)
    if FORMAT.stochastic:
        noise = rounding_noise(seed_a, seed_b, row, start, BLOCK, FORMAT.noise_bits)
        noise = tl.reshape(noise, (GROUPS, FORMAT.group_size))
    else:
        noise = 0
    codes = quantize_groups(values, scale, minimum, noise, FORMAT, NORM)
    codes = tl.reshape(codes, (BLOCK,))
    store_codes(codes, row_ptr, start, padded_numel, plane_1, plane_2, BLOCK, FORMAT, FULL)
    first = tile * GROUPS
    store_scales(scale, row_ptr, scale_offset, first, num_groups, GROUPS, FORMAT)
    if not FORMAT.symmetric:
        store_scales(minimum, row_ptr, minimum_offset, first, num_groups, GROUPS, FORMAT)


@triton.jit
def load_tile(
    row_ptr,
    tile,
    padded_numel,
    num_groups,
    plane_1,
    plane_2,
    scale_offset,
    minimum_offset,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """Decode a ``[BLOCK]`` tile, still transformed; ``dequantize.reference.dequantize_block``."""
    GROUPS: tl.constexpr = BLOCK // FORMAT.group_size
    start = tile * BLOCK
    first = tile * GROUPS
    codes = load_codes(row_ptr, start, padded_numel, plane_1, plane_2, BLOCK, FORMAT, FULL)
    levels = tl.reshape(dequantize_codes(codes, FORMAT), (GROUPS, FORMAT.group_size))
    scale = load_scales(row_ptr, scale_offset, first, num_groups, GROUPS, FORMAT)
    values = levels * scale[:, None]
    if not FORMAT.symmetric:
        minimum = load_scales(row_ptr, minimum_offset, first, num_groups, GROUPS, FORMAT)
        values = values + minimum[:, None]
    return tl.reshape(values, (BLOCK,))
