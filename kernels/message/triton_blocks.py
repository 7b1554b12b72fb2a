"""Loads, stores and the transform as Triton device functions, bit-identical to ``reference.py``.

Compile kernels that use them with ``enable_fp_fusion=False``: a fused multiply-add would round
once where the reference rounds twice.

Arguments in capitals are constants of the compiler. A tile is ``BLOCK`` consecutive elements of one
row from column ``start`` on, a power of two. ``limit`` is the column where it ends, if not after
``BLOCK``: the end of the row, or any multiple of the group, the transform and 8. ``FULL`` says that
the tile is complete, so that nothing needs a mask. ``start`` may be any multiple of the group, the
transform and 16; a tile never crosses a multiple of ``2**34`` columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Instructions that the compiler does not find by itself; the same is also written out in Triton.
HAS_PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)


@triton.constexpr_function
def integer_type(bits: int) -> tl.dtype:
    """Signed integers of so many bits."""
    return {8: tl.int8, 16: tl.int16, 32: tl.int32}[bits]


@triton.jit
def select_bytes(a, b, SELECTOR):
    """int32 whose byte i is byte ``SELECTOR >> 4 * i & 7`` of ``a`` (0 to 3) and ``b`` (4 to 7)."""
    if HAS_PTX:
        asm: tl.constexpr = "prmt.b32 $0, $1, $2, $3;"
        word = tl.inline_asm_elementwise(asm, "=r,r,r,r", [a, b, SELECTOR], tl.int32, True, 1)
    else:
        word = a & 0
        for index in tl.static_range(4):
            place = (SELECTOR >> (4 * index)) & 7
            source = a if place < 4 else b
            word |= ((source >> (8 * (place % 4))) & 0xFF) << (8 * index)
    return word


@triton.jit
def and_or(a, MASK, bits):
    """``a & MASK | bits`` of int32."""
    if HAS_PTX:
        asm: tl.constexpr = "lop3.b32 $0, $1, $2, $3, 0xEA;"
        word = tl.inline_asm_elementwise(asm, "=r,r,r,r", [a, MASK, bits], tl.int32, True, 1)
    else:
        word = (a & MASK) | bits
    return word


@triton.jit
def round_output(x, DTYPE):
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
def interleave(low, high, SIZE, RUN):
    """Merge two ``[SIZE]`` tensors by alternating runs of ``RUN`` elements."""
    pairs = tl.reshape(tl.join(low, high), (SIZE // RUN, RUN, 2))
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), (2 * SIZE,))


@triton.jit
def load_run(source_ptr, count, BLOCK, VECTOR, RUN, FULL, SIZE=0, FIRST=0):
    """Load ``[BLOCK]`` elements so that each thread owns ``RUN`` consecutive ones.

    A plain load gives a thread ``VECTOR`` elements (16 bytes) and leaves the transform, the group
    maximum and the packing to shuffles between threads. Loading the parts of every run apart and
    joining them keeps that work inside a thread; the parts of a run share cache lines. ``SIZE`` and
    ``FIRST`` are for the recursion. Zero from element ``count`` on unless ``FULL``.
    """
    PART: tl.constexpr = SIZE if SIZE > 0 else RUN
    if PART <= VECTOR:
        offsets = tl.arange(0, BLOCK // RUN * PART)
        if PART < RUN:
            offsets = offsets // PART * RUN + offsets % PART + FIRST
        if FULL:
            values = tl.load(source_ptr + offsets)
        else:
            values = tl.load(source_ptr + offsets, offsets < count, 0)
    else:
        HALF: tl.constexpr = PART // 2
        low = load_run(source_ptr, count, BLOCK, VECTOR, RUN, FULL, HALF, FIRST)
        high = load_run(source_ptr, count, BLOCK, VECTOR, RUN, FULL, HALF, FIRST + HALF)
        values = interleave(low, high, BLOCK // RUN * HALF, HALF)
    return values


@triton.jit
def _butterfly_within(x, BLOCK, DISTANCE):
    """Sums and differences of elements ``DISTANCE`` apart that one thread owns."""
    pairs = tl.permute(tl.reshape(x, (BLOCK // (2 * DISTANCE), 2, DISTANCE)), (0, 2, 1))
    low, high = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (BLOCK,))


@triton.jit
def _butterfly_across(x, BLOCK, DISTANCE):
    """Sums and differences of elements ``DISTANCE`` apart that two threads own.

    Splitting pairs as above would change the layout of the whole tile. The exclusive or over a
    pair, applied to one's own bits, is the partner: one shuffle, same layout.
    """
    values = tl.reshape(x, (BLOCK // (2 * DISTANCE), 2, DISTANCE))
    bits = values.to(tl.int32, bitcast=True)
    partner = bits ^ tl.xor_sum(bits, axis=1, keep_dims=True)
    sign = (1 - 2 * tl.arange(0, 2)).to(tl.float32)[None, :, None]
    # one instruction, and rounded once, since the product is exact
    y = tl.fma(values, tl.broadcast_to(sign, values.shape), partner.to(tl.float32, bitcast=True))
    return tl.reshape(y, (BLOCK,))


@triton.jit
def hadamard(x, BLOCK, SIZE, RUN, DISTANCE=1):
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
def program_row(across=65535):
    """Row of this program in the grid of ``launch.row_grid``, int64; ``across`` are its columns."""
    return tl.program_id(1).to(tl.int64) + tl.program_id(2).to(tl.int64) * across


@triton.jit
def row_offset(row, stride, jump):
    """Offset of the row of this program, int64; ``stride`` and ``jump`` of ``launch.RowSteps``."""
    return row * stride + tl.program_id(2).to(tl.int64) * jump


@triton.jit
def program_tiles(numel, tiles, BLOCK):
    """Tiles of this program in the grid of ``launch.row_grid``.

    Returns:
        The first one; the end of those that lie wholly inside the row; whether the tile at that end
        is the incomplete one at the end of the row, and of this program.
    """
    first = tl.program_id(0) * tiles
    complete = (tl.cast(numel, tl.int64) // BLOCK).to(tl.int32)
    end = tl.maximum(first, tl.minimum(first + tiles, complete))
    last = (end == complete) & (end < first + tiles) & (tl.cast(numel, tl.int64) % BLOCK != 0)
    return first, end, last


@triton.jit
def for_each_tile(
    TILE, rows, tiles, numel, BLOCK, pointers, scalars, constants, WHOLE=False, across=65535
):
    """Call ``TILE`` for every tile of this program.

    As ``TILE(row, start, numel, BLOCK, FULL, *pointers, *scalars, *constants)``. ``row`` and
    ``start``, its first column, are int64; the row ends at column ``numel``. ``FULL`` is a
    constant, True but for the incomplete tile at the end of a row: the function is compiled twice,
    and what runs in the loop has no masks. The three tuples are written in the call: in a variable,
    constants would become tensors. ``across`` is that of ``program_row``.
    """
    row = program_row(across)
    if row < rows:
        first, end, last = program_tiles(numel, tiles, BLOCK)
        for tile in range(first, end):
            start = tl.cast(tile, tl.int64) * BLOCK
            TILE(row, start, numel, BLOCK, True, *pointers, *scalars, *constants)
        if not WHOLE:  # noqa: SIM102 (a constant, so that nothing below is compiled)
            if last:
                start = tl.cast(end, tl.int64) * BLOCK
                TILE(row, start, numel, BLOCK, False, *pointers, *scalars, *constants)
