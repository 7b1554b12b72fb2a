"""Triton kernels that scale lines and round values, for messages of mixed widths.

Bit-identical to ``reference.py``. ``rows_ptr`` is that of ``format.width_rows``; the rows of
``factors_ptr`` are scale, minimum, norm and inverse, fp32 by line. Compile with
``enable_fp_fusion=False``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lq_lightning.kernels.message.triton_blocks import round_output, select_bytes
from lq_lightning.kernels.message.triton_rounding import (
    asymmetric_scaling,
    bits_of_scales,
    fixed_point,
    ordered,
)

from .format import FITTED_ERRORS, FULL_ERRORS, HALF_RANGES, MOMENT_CENTER, MOMENT_LEVELS

_INT_MIN = tl.constexpr(-(2**31))
_INT_MAX = tl.constexpr(2**31 - 1)
_TWO_TO_23 = tl.constexpr(8388608.0)  # `launch.INT_TO_FLOAT` as a number
_LEVELS = tl.constexpr(float(MOMENT_LEVELS))
_CENTER = tl.constexpr(MOMENT_CENTER)
_HALF_RANGES = tl.constexpr(HALF_RANGES)
_FITTED_ERRORS = tl.constexpr(FITTED_ERRORS)
_FULL_ERRORS = tl.constexpr(FULL_ERRORS)
# Rows of `format.width_rows`.
WIDTH_ROW = tl.constexpr(1)
PLACE_ROW = tl.constexpr(2)


@triton.jit
def section(message_ptr, offset, DTYPE: tl.constexpr):
    """Pointer to a section of the message as words."""
    return (message_ptr + offset).to(tl.pointer_type(DTYPE), bitcast=True)


@triton.jit
def line_row(rows_ptr, ROW: tl.constexpr, line, lines):
    """A row of ``[lines]`` values, as ``[LINES, 1]``; 0 beyond."""
    return tl.load(rows_ptr + ROW * lines + line, line < lines, 0)[:, None]


@triton.jit
def _keys(x_ptr, token, tokens, inside, stride_token):
    """Values ``[LINES, TOKENS]`` as int32 of the same order; beyond the last token again that."""
    token = tl.minimum(token, tokens - 1).to(tl.int64)
    x = tl.load(x_ptr + token[None, :] * stride_token, inside, 0.0)
    return ordered(x.to(tl.float32).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["tokens", "steps"])
def mixed_range_kernel(
    x_ptr,
    range_ptr,
    tokens,
    lines,
    stride_token,
    stride_line,
    steps,
    LINES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Extremes of a part of every line, to ``[parts, 2, lines]`` int32: the low and high keys."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = (line < lines)[:, None]
    x_ptr += line[:, None].to(tl.int64) * stride_line
    first = tl.program_id(1) * steps * TOKENS
    low = tl.full((LINES, TOKENS), _INT_MAX, tl.int32)
    high = tl.full((LINES, TOKENS), _INT_MIN, tl.int32)
    for step in range(steps):
        token = first + step * TOKENS + tl.arange(0, TOKENS)
        keys = _keys(x_ptr, token, tokens, inside, stride_token)
        low = tl.minimum(low, keys)
        high = tl.maximum(high, keys)
    range_ptr += tl.program_id(1) * 2 * lines
    tl.store(range_ptr + line, tl.min(low, axis=1), line < lines)
    tl.store(range_ptr + lines + line, tl.max(high, axis=1), line < lines)


@triton.jit
def _parts_of_lines(source_ptr, line, lines, parts, PARTS: tl.constexpr):
    """Where the first number of every part of ``[LINES]`` lines lies, and which parts exist."""
    part = tl.arange(0, PARTS)[None, :]
    source = source_ptr + part * 2 * lines + line[:, None]
    return source, (line < lines)[:, None] & (part < parts)


@triton.jit
def _extremes(range_ptr, line, lines, parts, PARTS: tl.constexpr):
    """Low and high keys ``[LINES]`` of all parts."""
    source, found = _parts_of_lines(range_ptr, line, lines, parts, PARTS)
    low = tl.min(tl.load(source, found, _INT_MAX), axis=1)
    high = tl.max(tl.load(source + lines, found, _INT_MIN), axis=1)
    return low, high


@triton.jit(do_not_specialize=["tokens", "parts", "steps"])
def mixed_moment_kernel(
    x_ptr,
    range_ptr,
    moment_ptr,
    tokens,
    lines,
    stride_token,
    stride_line,
    parts,
    steps,
    LINES: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    EXACT_STEPS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Sums of codes and squares of a part of every line; ``reference._moments``.

    To ``[parts, 2, lines]`` int64. Each thread adds up ``EXACT_STEPS`` squares of 2**18 in int32.
    """
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = (line < lines)[:, None]
    low, high = _extremes(range_ptr, line, lines, parts, PARTS)
    _, minimum, norm, inverse = asymmetric_scaling(
        low, high, _LEVELS, SCALES.max_width, SCALES, 1.0
    )
    factors = (minimum[:, None], norm[:, None], inverse[:, None])
    x_ptr += line[:, None].to(tl.int64) * stride_line
    first = tl.program_id(1) * steps * TOKENS
    total = tl.zeros((LINES,), tl.int64)
    total_squares = tl.zeros((LINES,), tl.int64)
    for start in range(0, steps, EXACT_STEPS):
        sums = tl.zeros((LINES, TOKENS), tl.int32)
        squares = tl.zeros((LINES, TOKENS), tl.int32)
        for step in range(start, tl.minimum(start + EXACT_STEPS, steps)):
            token = (first + step * TOKENS + tl.arange(0, TOKENS))[None, :]
            there = inside & (token < tokens)
            x = tl.load(x_ptr + token.to(tl.int64) * stride_token, there, 0.0).to(tl.float32)
            level = (code_bits(x, factors, SCALES) & 0xFFFF) - _CENTER
            level = tl.where(there, level, 0)
            sums += level
            squares += level * level
        total += tl.sum(sums.to(tl.int64), axis=1)
        total_squares += tl.sum(squares.to(tl.int64), axis=1)
    moment_ptr += tl.program_id(1) * 2 * lines
    tl.store(moment_ptr + line, total, line < lines)
    tl.store(moment_ptr + lines + line, total_squares, line < lines)


@triton.jit
def _by_width(width, VALUES: tl.constexpr):
    """One of eight numbers by width; wider lines as those of 8 bits."""
    chosen = tl.full(width.shape, VALUES[7], tl.float32)
    for index in tl.static_range(7):
        chosen = tl.where(width == index + 1, VALUES[index], chosen)
    return chosen


@triton.jit
def _fitted_end(end, fits, scale, minimum, norm, low, high, extreme):
    """A number of levels as the key of a value within the extremes."""
    value = tl.div_rn(end * scale + minimum, norm)
    value = tl.minimum(tl.maximum(value, low), high)
    return tl.where(fits, ordered(value.to(tl.int32, bitcast=True)), extreme)


@triton.jit
def _fitted_range(sums, squares, tokens, width, low, high, SCALES: tl.constexpr):
    """``reference.fitted_range``, of keys and fp64 sums."""
    count = tl.cast(tokens, tl.float64)
    mean = sums / count
    variance = tl.maximum(squares / count - mean * mean, 0.0).to(tl.float32)
    center = mean.to(tl.float32) + _CENTER
    reach = tl.sqrt_rn(variance) * _by_width(width, _HALF_RANGES)
    below = tl.maximum(center - reach, 0.0)
    above = tl.maximum(_LEVELS - (center + reach), 0.0)
    clipped = tl.div_rn(below * below + above * above, count.to(tl.float32))
    expected = variance * _by_width(width, _FITTED_ERRORS) + clipped
    scale, minimum, norm, _ = asymmetric_scaling(low, high, _LEVELS, SCALES.max_width, SCALES, 1.0)
    least = ordered(low).to(tl.float32, bitcast=True)
    most = ordered(high).to(tl.float32, bitcast=True)
    fits = (scale > 0.0) & (expected < _by_width(width, _FULL_ERRORS))
    first = _fitted_end(center - reach, fits, scale, minimum, norm, least, most, low)
    last = _fitted_end(center + reach, fits, scale, minimum, norm, least, most, high)
    return first, last


@triton.jit
def end_section(message_ptr, end):
    """Write the zeros between the end of a section and the next."""
    byte = end + tl.arange(0, 16)
    zeros = tl.zeros((16,), tl.int8)
    tl.store(section(message_ptr, 0, tl.int8) + byte, zeros, byte < (end + 15) // 16 * 16)


@triton.jit(
    do_not_specialize=[
        *("tokens", "parts", "moment_parts", "words"),
        *("raw", "bytes", "fours", "twos", "ones", "coded"),
    ]
)
def mixed_scale_kernel(
    range_ptr,
    moment_ptr,
    rows_ptr,
    factors_ptr,
    message_ptr,
    tokens,
    lines,
    parts,
    moment_parts,
    words,
    raw,
    bytes,
    fours,
    twos,
    ones,
    coded,
    sections,
    LINES: tl.constexpr,
    PARTS: tl.constexpr,
    SCALES: tl.constexpr,
    FITTED: tl.constexpr,
    STORE: tl.constexpr,
):
    """Extremes of lines to ``[4, lines]`` factors; to scales and minima, and the ends of sections.

    ``raw`` to ``ones`` lines have the five planes, and ``coded`` lines a scale.
    """
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = line < lines
    low, high = _extremes(range_ptr, line, lines, parts, PARTS)
    width = tl.load(rows_ptr + WIDTH_ROW * lines + line, inside, 1)
    if FITTED:
        source, found = _parts_of_lines(moment_ptr, line, lines, moment_parts, PARTS)
        sums = tl.sum(tl.load(source, found, 0), axis=1).to(tl.float64)
        squares = tl.sum(tl.load(source + lines, found, 0), axis=1).to(tl.float64)
        low, high = _fitted_range(sums, squares, tokens, width, low, high, SCALES)
    max_level = largest_code(width)
    scale, minimum, norm, inverse = asymmetric_scaling(
        low, high, max_level, SCALES.max_width, SCALES, 1.0
    )
    tl.store(factors_ptr + line, scale, inside)
    tl.store(factors_ptr + lines + line, minimum, inside)
    tl.store(factors_ptr + 2 * lines + line, norm, inside)
    tl.store(factors_ptr + 3 * lines + line, inverse, inside)
    if STORE:
        place = tl.load(rows_ptr + PLACE_ROW * lines + line, inside, 0)
        sent = inside & (width <= 8)
        target = section(message_ptr, sections[5], tl.int16) + place
        tl.store(target, bits_of_scales(scale, SCALES), sent)
        target = section(message_ptr, sections[6], tl.int16) + place
        tl.store(target, bits_of_scales(minimum, SCALES), sent)
        if tl.program_id(0) == 0:
            wide = tl.cast(words, tl.int64)
            end_section(message_ptr, sections[0] + raw * wide * 16)
            end_section(message_ptr, sections[1] + bytes * wide * 8)
            end_section(message_ptr, sections[2] + fours * wide * 4)
            end_section(message_ptr, sections[3] + twos * wide * 2)
            end_section(message_ptr, sections[4] + ones * wide)
            end_section(message_ptr, sections[5] + coded * 2)
            end_section(message_ptr, sections[6] + coded * 2)


@triton.jit
def largest_code(width):
    """Largest code of lines of a width, fp32; of wider ones that of 8 bits."""
    return ((1 << tl.minimum(width, 8)) - 1).to(tl.float32)


@triton.jit
def _level(x, minimum, norm, inverse):
    # one rounding, since the product with a power of two is exact
    y = tl.fma(x, tl.broadcast_to(norm, x.shape), tl.broadcast_to(-minimum, x.shape))
    return y * inverse


@triton.jit
def code_bits(x, factors, SCALES: tl.constexpr):
    """Codes in the low 16 bits of int32, those above being arbitrary; ``reference._levels``."""
    return fixed_point(_level(x, *factors), SCALES)


@triton.jit
def clipped_code_bits(x, factors, SCALES: tl.constexpr, FITTED: tl.constexpr):
    """``code_bits``; values outside a fitted range get the first or last code.

    ``factors`` are those of ``code_bits``, and the last code.
    """
    minimum, norm, inverse, most = factors
    y = _level(x, minimum, norm, inverse)
    if FITTED:
        y = tl.minimum(tl.maximum(y, 0.0), most)
    return fixed_point(y, SCALES)


@triton.jit
def bf16_bits(x):
    """Bits of fp32 rounded to bf16, NaN as one pattern, in the low half of int32."""
    bits = round_output(x, tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return tl.where(x == x, bits, 0x7FC0)


@triton.jit
def value_of_code(pairs, HIGH: tl.constexpr, int_to_float, scale, minimum):
    """Value of one of two codes of at most 8 bits; whatever lies above them does not count."""
    bits = select_bytes(pairs, int_to_float, 0x7542 if HIGH else 0x7540)
    level = bits.to(tl.float32, bitcast=True) - _TWO_TO_23
    # rounded once either way: products of codes and 8 bits are exact
    factor = tl.broadcast_to(scale, level.shape)
    return tl.fma(level, factor, tl.broadcast_to(minimum, level.shape))


@triton.jit(do_not_specialize=["tokens", "int_to_float"])
def mixed_round_trip_kernel(
    x_ptr,
    rows_ptr,
    factors_ptr,
    out_ptr,
    tokens,
    lines,
    stride_token,
    stride_line,
    int_to_float,
    LINES: tl.constexpr,
    TOKENS: tl.constexpr,
    SCALES: tl.constexpr,
    FITTED: tl.constexpr,
):
    """Scale -> round -> scale back."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS))[None, :].to(tl.int64)
    inside = (line < lines)[:, None] & (token < tokens)
    width = line_row(rows_ptr, WIDTH_ROW, line, lines)
    scale = line_row(factors_ptr, 0, line, lines)
    minimum = line_row(factors_ptr, 1, line, lines)
    norm = line_row(factors_ptr, 2, line, lines)
    inverse = line_row(factors_ptr, 3, line, lines)
    source = x_ptr + line[:, None].to(tl.int64) * stride_line + token * stride_token
    x = tl.load(source, inside, 0.0).to(tl.float32)
    factors = (minimum, norm, inverse, largest_code(width))
    codes = clipped_code_bits(x, factors, SCALES, FITTED)
    value = value_of_code(codes, False, int_to_float, scale, minimum)
    value = tl.where(width == 16, (bf16_bits(x) << 16).to(tl.float32, bitcast=True), value)
    result = round_output(value, out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * lines + line[:, None], result, inside)
