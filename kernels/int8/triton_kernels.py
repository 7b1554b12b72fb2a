"""Triton kernels of ``int8_quantize`` and ``int8_matmul``.

Products have scales in the epilogue, which cuBLASLt has for FP8 only. A result is ``[M, N]``, of
sums over K16 values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lq_lightning.kernels.float8.triton_kernels import split_four
from lq_lightning.kernels.int8.reference import FINER, FIRST, LEVELS, MIN_LARGEST, step_norm
from lq_lightning.kernels.message.launch import MAX_GRID_Y, on_device, row_stride
from lq_lightning.kernels.message.launch_cache import Launch
from lq_lightning.kernels.message.triton_blocks import (
    hadamard,
    load_run,
    round_output,
    select_bytes,
)

_LEVELS, _FINER = tl.constexpr(LEVELS), tl.constexpr(FINER)
_FIRST, _TO_FIRST = tl.constexpr(FIRST), tl.constexpr(1.0 / FINER)
_MIN_LARGEST = tl.constexpr(MIN_LARGEST)
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
    tensors: tuple[Tensor, ...], hadamard_size: int, length: int, *, block: int = MAX_BLOCK
) -> Callable[..., None]:
    """Launch the kernel on the tensors and results of the operator.

    ``block`` limits the values of a row kept in registers, for tests. Returns a launch on other
    tensors alike.
    """
    x, q, _, second, largest = tensors
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

    def launch(*tensors: Tensor) -> None:
        tensors[-1].zero_()
        if rows:
            launch_rows(*tensors)

    launch(*tensors)
    return launch


class ProductTile(NamedTuple):
    """Work of one program.

    Attributes:
        rows: rows of the result, a power of two from 16.
        columns: columns of the result, a power of two from 16.
        depth: values of both operands that are multiplied at a time.
        warps: threads of a program, in units of 32.
        stages: tiles of operands in shared memory.
        specialized: whether other warps load than multiply.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    specialized: bool = False


_SMALL = ProductTile(128, 128, 128, 8, 4)
_TALL = ProductTile(256, 128, 128, 8, 3)
_WIDE = ProductTile(128, 256, 128, 8, 3, True)

# For GPUs without TMA, which was not measured.
POINTER_TILE = ProductTile(128, 128, 128, 8, 3)
# Of second terms: few rows, so that it takes as long as to read the other operand.
SECOND_TILE = ProductTile(16, 32, 256, 4, 4)


def choose_product_tile(rows: int, columns: int, length: int, processors: int) -> ProductTile:
    """Return the tile of a product ``[rows, columns]`` of sums over ``length`` on Hopper.

    Measured on an H100 with so many ``processors`` (``benchmarks/int8_products.py`` in commit
    ac819df).
    """
    tiles = -(-rows // 256) * -(-columns // 128)
    if tiles < processors:
        return _SMALL
    return _TALL if max(columns, length) > 2 * min(columns, length) else _WIDE


# Tiles of so many rows in a row of tiles follow each other, to find operands in the L2 cache.
_GROUP = 8


@triton.jit
def descriptor_kernel(
    q_desc,
    w_desc,
    out_desc,
    scale_ptr,
    w_scale_ptr,
    M,
    N,
    K16,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):
    """Multiply by TMA and wgmma: as many programs as the GPU has processors share the tiles.

    What TMA loads beyond an operand is zero, what it stores beyond the result is dropped.
    """
    across, down = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K16, BLOCK_K)
    per_group = GROUP * down
    for tile in tl.range(
        tl.program_id(0), across * down, PROGRAMS, flatten=True, warp_specialize=SPECIALIZED
    ):
        first = tile // per_group * GROUP
        size = min(across - first, GROUP)
        m = (first + tile % size) * BLOCK_M
        n = (tile % per_group) // size * BLOCK_N
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
        for step in range(steps):
            q = q_desc.load([m, step * BLOCK_K])
            w = w_desc.load([n, step * BLOCK_K])
            sums = tl.dot(q, w.T, sums, out_dtype=tl.int32)
        rows, columns = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
        scale = tl.load(scale_ptr + rows, rows < M, 0.0)
        w_scale = tl.load(w_scale_ptr + columns, columns < N, 0.0)
        y = sums.to(tl.float32) * scale[:, None] * w_scale[None, :]
        out_desc.store([m, n], y.to(out_desc.dtype))


@triton.jit
def pointer_kernel(
    q_ptr,
    scale_ptr,
    w_ptr,
    w_scale_ptr,
    out_ptr,
    M,
    N,
    K16,
    length,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Multiply on any GPU; with ``SECOND``, add the products of second terms to their rows.

    ``length`` is that of sequences then, and M is P.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lines = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    q_rows = q_ptr + lines.to(tl.int64)[:, None] * K16
    w_rows = w_ptr + columns.to(tl.int64)[None, :] * K16
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for start in range(0, K16, BLOCK_K):
        along = start + tl.arange(0, BLOCK_K)
        q = tl.load(q_rows + along[None, :], (lines < M)[:, None] & (along < K16)[None, :], 0)
        w = tl.load(w_rows + along[:, None], (columns < N)[None, :] & (along < K16)[:, None], 0)
        sums = tl.dot(q, w, sums, out_dtype=tl.int32)
    rows = lines
    exist = lines < M
    if SECOND:
        rows = lines // _FIRST * length + lines % _FIRST
        exist = exist & (lines % _FIRST < length)
    scale = tl.load(scale_ptr + rows, exist, 0.0)
    if SECOND:
        scale *= _TO_FIRST
    w_scale = tl.load(w_scale_ptr + columns, columns < N, 0.0)
    y = sums.to(tl.float32) * scale[:, None] * w_scale[None, :]
    target = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    inside = exist[:, None] & (columns < N)[None, :]
    if SECOND:
        y += tl.load(target, inside, 0.0).to(tl.float32)
    tl.store(target, round_output(y, out_ptr.dtype.element_ty), inside)


@cache
def _processors(device: torch.device) -> int:
    """Number of processors of a GPU of compute capability 9, Hopper; 0 of others.

    Elsewhere the kernel by descriptors was not tried.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_products(
    tensors: tuple[Tensor, ...], length: int, *, tile: ProductTile | None = None
) -> Callable[..., None]:
    """Launch the kernels on the operator's tensors and result; ``tile`` overrides the table.

    Returns a launch on other tensors alike.
    """
    q, _, w, _, second, out = tensors
    (M, K16), N = q.shape, w.shape[0]
    processors = _processors(q.device)
    # what TMA demands
    aligned = K16 > 0 and N * out.element_size() % 16 == 0
    aligned = aligned and not any(part.data_ptr() % 16 for part in (q, w, out))
    pointers = _pointer_launch(M, N, K16, 0, tile or POINTER_TILE)
    seconds = _pointer_launch(second.shape[0], N, K16, length, SECOND_TILE)
    chosen = tile or choose_product_tile(M, N, K16, processors)

    def launch(q: Tensor, *others: Tensor) -> None:
        scale, w, w_scale, second, out = others
        if out.numel() == 0:
            return
        if processors and aligned:
            launch_descriptors(q, scale, w, w_scale, out, chosen, processors)
        else:
            pointers(q, scale, w, w_scale, out)
        if second.shape[0]:
            seconds(second, scale, w, w_scale, out)

    launch(*tensors)
    return launch


def _pointer_launch(M: int, N: int, K16: int, length: int, tile: ProductTile) -> Launch:
    return Launch(
        pointer_kernel,
        (triton.cdiv(N, tile.columns), triton.cdiv(M, tile.rows)),
        (M, N, K16, length),
        {
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
            "BLOCK_K": tile.depth,
            "SECOND": length > 0,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            "enable_fp_fusion": False,
        },
    )


def launch_descriptors(
    q: Tensor,
    scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    out: Tensor,
    tile: ProductTile,
    processors: int,
) -> None:
    """Launch the kernel by descriptors, with so many programs; ``out`` has rows of 16 bytes."""
    blocks = (
        (q, [tile.rows, tile.depth]),
        (w, [tile.columns, tile.depth]),
        (out, [tile.rows, tile.columns]),
    )
    descriptors = [TensorDescriptor.from_tensor(tensor, block) for tensor, block in blocks]
    with on_device(q):
        descriptor_kernel[(processors,)](
            *(*descriptors, scale, w_scale, q.shape[0], w.shape[0], q.shape[1]),
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            GROUP=_GROUP,
            PROGRAMS=processors,
            SPECIALIZED=tile.specialized,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
