"""Triton kernels that decide which units are INT3, and where in the message a unit lies.

A unit's place is its index among the INT4 units, or ``-1 - index`` among the INT3 units, int32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lq_lightning.kernels.message.triton_blocks import HAS_PTX

_FP32_MAX = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)
_LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _log2(x):
    """Logarithm of normal numbers: one instruction instead of a polynomial, within 2**-22."""
    if HAS_PTX:
        asm: tl.constexpr = "lg2.approx.ftz.f32 $0, $1;"
        y = tl.inline_asm_elementwise(asm, "=f,f", [x], tl.float32, True, 1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def tah_entropy_kernel(
    x_ptr,
    entropy_ptr,
    units,
    unit_numel,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SMALLEST: tl.constexpr,
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
        products += magnitude * _log2(tl.maximum(magnitude, SMALLEST))
    total = tl.sum(totals, axis=1)
    entropy = (_log2(total) - tl.sum(products, axis=1) / total) * _LOG_2
    # also where it is NaN
    entropy = tl.where((entropy > 0.0) & (entropy <= _FP32_MAX), entropy, 0.0)
    tl.store(entropy_ptr + unit, entropy, unit < units)


@triton.jit
def _load_keys(entropy_ptr, start, units, BLOCK: tl.constexpr):
    """Bits of entropies, whose order as int32 is theirs; the largest int32 beyond the sequence."""
    index = start + tl.arange(0, BLOCK)
    source = entropy_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.load(source + index, index < units, 0x7FFFFFFF)


@triton.jit
def _threshold(entropy_ptr, units, low_units, BLOCK: tl.constexpr):
    """Key of rank ``low_units`` (from 1), bit by bit, and how many keys are below it."""
    threshold = low_units * 0
    for step in range(31):
        candidate = threshold | (1 << (30 - step))
        below = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, units, BLOCK):
            below += (_load_keys(entropy_ptr, start, units, BLOCK) < candidate).to(tl.int32)
        threshold = tl.where(tl.sum(below, axis=0) < low_units, candidate, threshold)
    below = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, units, BLOCK):
        below += (_load_keys(entropy_ptr, start, units, BLOCK) < threshold).to(tl.int32)
    return threshold, tl.sum(below, axis=0)


@triton.jit(do_not_specialize=["low_units"])
def tah_place_kernel(
    entropy_ptr,
    message_ptr,
    place_ptr,
    units,
    low_units,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
):
    """Places of the units of one sequence.

    With ``RANK``, the ``low_units`` lowest entropies are INT3, of equal ones the first
    (``reference.lowest``); else what the bits at ``message_ptr`` say.
    """
    sequence = tl.program_id(0).to(tl.int64)
    entropy_ptr += sequence * units
    threshold, missing = low_units * 0, low_units * 0
    if RANK:
        threshold, below = _threshold(entropy_ptr, units, low_units, BLOCK)
        missing = low_units - below
    first_low = sequence.to(tl.int32) * low_units
    first_high = sequence.to(tl.int32) * (units - low_units)
    equal_before, low_before = low_units * 0, low_units * 0
    for start in range(0, units, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < units
        if RANK:
            keys = _load_keys(entropy_ptr, start, units, BLOCK)
            equal = ((keys == threshold) & inside).to(tl.int32)
            chosen = (equal > 0) & (equal_before + tl.cumsum(equal, axis=0) <= missing)
            low = ((keys < threshold) | chosen).to(tl.int32)
            equal_before += tl.sum(equal, axis=0)
        else:
            unit = sequence * units + index
            bits = tl.load(message_ptr + unit // 8, inside, 255).to(tl.int32)
            low = ((bits >> (unit % 8).to(tl.int32)) & 1) ^ 1
        low_until = low_before + tl.cumsum(low, axis=0)
        high_index = first_high + index - low_until
        place = tl.where(low > 0, -first_low - low_until, high_index)
        tl.store(place_ptr + sequence * units + index, place, inside)
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
    tl.store(message_ptr.to(tl.pointer_type(tl.int8), bitcast=True) + byte, packed, byte < end)
