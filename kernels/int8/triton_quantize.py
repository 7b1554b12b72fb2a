"""Triton kernel of ``int8_quantize``."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.float8.triton_kernels import split_four
from lq_lightning.kernels.int8.reference import FINER, FIRST, LEVELS, MIN_LARGEST, step_norm
from lq_lightning.kernels.message.launch import MAX_GRID_Y, row_stride
from lq_lightning.kernels.message.launch_cache import Launch
from lq_lightning.kernels.message.triton_blocks import hadamard, load_run, select_bytes

_LEVELS, _FINER = tl.constexpr(LEVELS), tl.constexpr(FINER)
_FIRST, _MIN_LARGEST = tl.constexpr(FIRST), tl.constexpr(MIN_LARGEST)
# Added to a number of magnitude below 2**22, it rounds it to an integer, in the low bits.
_ROUNDER = tl.constexpr(1.5 * 2.0**23)
# Values of a row that are kept in registers between its largest magnitude and its codes.
MAX_BLOCK = 16384
# Consecutive values of a thread.
_RUN = 32


@triton.jit
def _magnitude_bits(x):
    """Bits of magnitudes, whose order is theirs, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _load(row_ptr, start, numel, BLOCK: tl.constexpr, RUN: tl.constexpr):
    VECTOR: tl.constexpr = 128 // row_ptr.dtype.element_ty.primitive_bitwidth
    return load_run(row_ptr + start, numel - start, BLOCK, VECTOR, RUN, False).to(tl.float32)


@triton.jit
def _store_levels(y, row_ptr, start, width, BLOCK: tl.constexpr):
    """Round values below ``2**22`` to int8, and write those before column ``width``."""
    a, b, c, d = split_four((y + _ROUNDER).to(tl.int32, bitcast=True), BLOCK)
    low, high = select_bytes(a, b, 0x5140), select_bytes(c, d, 0x5140)
    word = start // 4 + tl.arange(0, BLOCK // 4)
    target = row_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + word
    tl.store(target, select_bytes(low, high, 0x5410), word < width // 4)


@triton.jit
def quantize_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    second_ptr,
    largest_ptr,
    stride,
    rows,
    numel,
    width,
    length,
    step_norm,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    HADAMARD: tl.constexpr,
    RUN: tl.constexpr,
    AMAX: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Quantize a row of ``TILES`` times ``BLOCK`` values; if of one tile, it is read once.

    ``width`` is that of the results, ``length`` of sequences.
    """
    row = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    if row < rows:
        source = x_ptr + row * stride
        x = _load(source, 0, numel, BLOCK, RUN)
        values = hadamard(x, BLOCK, HADAMARD, RUN)
        largest = tl.max(_magnitude_bits(values), 0)
        largest_x = tl.max(_magnitude_bits(x), 0)
        for tile in tl.static_range(1, TILES):
            x = _load(source, tile * BLOCK, numel, BLOCK, RUN)
            values = hadamard(x, BLOCK, HADAMARD, RUN)
            largest = tl.maximum(largest, tl.max(_magnitude_bits(values), 0))
            largest_x = tl.maximum(largest_x, tl.max(_magnitude_bits(x), 0))
        if AMAX:
            most = largest_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
            # Most programs change nothing: a look, even at an old value, saves their atomics.
            if largest_x > tl.load(most):
                tl.atomic_max(most, largest_x, sem="relaxed")
        finite = largest < 0x7F800000
        size = tl.where(finite, largest, 0).to(tl.float32, bitcast=True)
        inverse = tl.div_rn(_LEVELS, tl.maximum(size, _MIN_LARGEST))
        scale = tl.maximum(size, _MIN_LARGEST) * step_norm
        tl.store(scale_ptr + row, tl.where(finite, scale, float("nan")))
        if SECOND:
            within = row % length
            target = second_ptr + (row // length * _FIRST + within) * width
        for tile in tl.static_range(TILES):
            if TILES > 1:
                x = _load(source, tile * BLOCK, numel, BLOCK, RUN)
                values = hadamard(x, BLOCK, HADAMARD, RUN)
            y = tl.where(finite, values * inverse, 0.0)
            _store_levels(y, q_ptr + row * width, tile * BLOCK, width, BLOCK)
            if SECOND:  # noqa: SIM102 - a constant, with which `within` exists
                if within < _FIRST:
                    rest = (y - ((y + _ROUNDER) - _ROUNDER)) * _FINER
                    _store_levels(rest, target, tile * BLOCK, width, BLOCK)


def launch_quantize(
    x: Tensor,
    hadamard_size: int,
    length: int,
    q: Tensor,
    scale: Tensor,
    second: Tensor,
    largest: Tensor,
    *,
    block: int = MAX_BLOCK,
) -> Callable[..., None]:
    """Launch the kernel with the operator's arguments and results.

    ``block`` limits the values of a row kept in registers, for tests. Returns what does the same
    with other tensors alike.
    """
    rows, numel = x.shape
    block = min(block, max(256, triton.next_power_of_2(numel)))
    launch_rows = Launch(
        quantize_kernel,
        (min(rows, MAX_GRID_Y), triton.cdiv(rows, MAX_GRID_Y)),
        (row_stride(x, 0), rows, numel, q.shape[1], length, step_norm(hadamard_size)),
        {
            "BLOCK": block,
            "TILES": max(1, triton.cdiv(numel, block)),
            "HADAMARD": hadamard_size,
            "RUN": _RUN,
            "AMAX": largest.numel() > 0,
            "SECOND": second.numel() > 0,
            "num_warps": max(1, block // (_RUN * 32)),
            "enable_fp_fusion": False,
        },
    )

    def launch(x: Tensor, q: Tensor, scale: Tensor, second: Tensor, largest: Tensor) -> None:
        largest.zero_()
        if x.shape[0]:
            launch_rows(x, q, scale, second, largest)

    launch(x, q, scale, second, largest)
    return launch
