"""Triton kernels of the accumulate operators."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.accumulate.reference import (
    FINE_BELOW,
    GROUP_SIZE,
    MAX_CODE,
    MAX_SCALE,
    MIN_SCALE,
    buffer_layout,
)
from lq_lightning.kernels.message.launch import on_device
from lq_lightning.kernels.message.triton_blocks import round_output

_GROUP = tl.constexpr(GROUP_SIZE)
_PAIRS = tl.constexpr(GROUP_SIZE // 2)
_MAX_CODE = tl.constexpr(float(MAX_CODE))
_FINE_BELOW = tl.constexpr(FINE_BELOW)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_MAX_SCALE = tl.constexpr(MAX_SCALE)
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
# 1.5 * 2**23: adding it rounds an fp32 of small magnitude to an integer, half to even.
_ROUNDER = tl.constexpr(12582912.0)
_ROUNDER_BITS = tl.constexpr(0x4B400000)

_BLOCK = 2048


@triton.jit
def _load_sum(buffer_ptr, start, padded_numel, scale_offset, BLOCK: tl.constexpr):
    """Decode a ``[BLOCK / 32, 16, 2]`` tile; zero beyond the padded sum."""
    GROUPS: tl.constexpr = BLOCK // _GROUP
    index = start + tl.arange(0, BLOCK)
    codes = tl.load(buffer_ptr + index, index < padded_numel, 0).to(tl.int8, bitcast=True)
    levels = tl.reshape(codes.to(tl.float32), (GROUPS, _PAIRS, 2))
    packed_index = start // 16 + tl.arange(0, BLOCK // 16)
    packed = tl.load(buffer_ptr + padded_numel + packed_index, packed_index * 16 < padded_numel, 0)
    fine = (packed.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1
    fine = tl.reshape(fine, (GROUPS, _PAIRS, 1))
    levels = tl.where(fine == 1, levels * 0.5, levels)
    group = start // _GROUP + tl.arange(0, GROUPS)
    scale_ptr = (buffer_ptr + scale_offset).to(tl.pointer_type(tl.int16), bitcast=True)
    bits = tl.load(scale_ptr + group, group * _GROUP < padded_numel, 0)
    scale = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return levels * scale[:, None, None]


@triton.jit
def _store_sum(x, buffer_ptr, start, padded_numel, scale_offset, nbytes, BLOCK: tl.constexpr):
    """Encode a ``[BLOCK / 32, 16, 2]`` tile; the last one also writes the zeros between sections.

    Magnitudes are compared as integers: the order is the same, and NaN is the largest.
    """
    GROUPS: tl.constexpr = BLOCK // _GROUP
    magnitude = x.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS
    largest = tl.max(tl.max(magnitude, axis=2), axis=1).to(tl.float32, bitcast=True)
    raw = tl.div_rn(largest, _MAX_CODE)
    finite = raw <= _MAX_SCALE
    bits = raw.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    bits = tl.where(raw < _MIN_SCALE, 0, bits)
    scale = (bits << 16).to(tl.float32, bitcast=True)
    group = start // _GROUP + tl.arange(0, GROUPS)
    num_groups = padded_numel // _GROUP
    scale_ptr = (buffer_ptr + scale_offset).to(tl.pointer_type(tl.int16), bitcast=True)
    stored = tl.where(group < num_groups, tl.where(finite, bits, 0x7FC0), 0).to(tl.int16)
    tl.store(scale_ptr + group, stored, group * 2 < nbytes - scale_offset)

    inverse = tl.where(finite & (bits > 0), tl.div_rn(1.0, scale), 0.0)
    y = x * inverse[:, None, None]
    y = tl.where(y == y, y, 0.0)
    largest_of_pair = tl.max(y.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS, axis=2, keep_dims=True)
    fine = largest_of_pair.to(tl.float32, bitcast=True) < _FINE_BELOW
    y = tl.where(fine, y * 2.0, y)
    codes = (y + _ROUNDER).to(tl.int32, bitcast=True) - _ROUNDER_BITS
    index = start + tl.arange(0, BLOCK)
    codes = tl.reshape(codes, (BLOCK,)).to(tl.uint8)
    tl.store(buffer_ptr + index, codes, index < padded_numel)

    flags = tl.reshape(fine.to(tl.int32), (BLOCK // 16, 8))
    packed = tl.sum(flags << tl.arange(0, 8)[None, :], axis=1)
    packed_index = start // 16 + tl.arange(0, BLOCK // 16)
    packed = tl.where(packed_index * 16 < padded_numel, packed, 0).to(tl.uint8)
    inside = packed_index < scale_offset - padded_numel
    tl.store(buffer_ptr + padded_numel + packed_index, packed, inside)


@triton.jit(do_not_specialize=["numel"])
def accumulate_kernel(
    buffer_ptr,
    values_ptr,
    numel,
    padded_numel,
    scale_offset,
    nbytes,
    EMPTY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add one tile of values to the sum: unpack -> add -> scale -> pack."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)
    if start + BLOCK <= numel:  # without a mask, loads are as wide as they can be
        values = tl.load(values_ptr + index)
    else:
        values = tl.load(values_ptr + index, index < numel, 0.0)
    x = tl.reshape(values.to(tl.float32), (BLOCK // _GROUP, _PAIRS, 2))
    if not EMPTY:
        x = x + _load_sum(buffer_ptr, start, padded_numel, scale_offset, BLOCK)
    _store_sum(x, buffer_ptr, start, padded_numel, scale_offset, nbytes, BLOCK)


@triton.jit(do_not_specialize=["numel"])
def read_accumulated_kernel(
    buffer_ptr,
    out_ptr,
    numel,
    padded_numel,
    scale_offset,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write or add one tile of the sum."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    x = tl.reshape(_load_sum(buffer_ptr, start, padded_numel, scale_offset, BLOCK), (BLOCK,))
    target = out_ptr + start + tl.arange(0, BLOCK)
    if start + BLOCK <= numel:
        if ADD:
            x = x + tl.load(target).to(tl.float32)
        tl.store(target, round_output(x, out_ptr.dtype.element_ty))
    else:
        inside = start + tl.arange(0, BLOCK) < numel
        if ADD:
            x = x + tl.load(target, inside, 0.0).to(tl.float32)
        tl.store(target, round_output(x, out_ptr.dtype.element_ty), inside)


def launch_accumulate(buffer: Tensor, values: Tensor, empty: bool) -> None:
    """Launch the kernel; arguments as for ``reference.accumulate_``."""
    numel = values.numel()
    if numel == 0:
        return
    layout = buffer_layout(numel)
    with on_device(buffer):
        accumulate_kernel[(triton.cdiv(layout.padded_numel, _BLOCK),)](
            buffer,
            values,
            numel,
            layout.padded_numel,
            layout.scale_offset,
            layout.nbytes,
            EMPTY=empty,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )


def launch_read_accumulated(buffer: Tensor, out: Tensor, add: bool) -> None:
    """Launch the kernel; arguments as for ``reference.read_accumulated_``."""
    numel = out.numel()
    if numel == 0:
        return
    layout = buffer_layout(numel)
    with on_device(buffer):
        read_accumulated_kernel[(triton.cdiv(layout.padded_numel, _BLOCK),)](
            buffer,
            out,
            numel,
            layout.padded_numel,
            layout.scale_offset,
            ADD=add,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
