"""Triton kernels of the norm operators that write the output."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.launch import INT_TO_FLOAT, row_stride
from lq_lightning.kernels.message.launch_cache import Launch, launch_nothing
from lq_lightning.kernels.message.triton_blocks import hadamard, load_run, round_output
from lq_lightning.kernels.message.triton_rounding import largest_magnitude
from lq_lightning.kernels.message.triton_rows import (
    decode_tile,
    encode_tile,
    encoded_columns,
    raise_to,
)
from lq_lightning.kernels.norm.triton_tiles import normalize

from .tiles import choose_schedule, constants, parts_of_rows, whole_rows
from .triton_tiles import (
    load_columns,
    spread,
    store_of_rows,
    store_tile,
    sum_rows,
    tile_count,
    tile_rows,
)

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def _centre(
    x,
    count,
    numel,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    FULL: tl.constexpr,
):
    """``reference.centre`` of a tile; zero beyond its rows.

    Divides as IEEE does, once per row: the mean of a constant row is then that constant, if its sum
    is exact, and the codes are those of the reference wherever sums are exact.
    """
    if KIND == "layer":
        x = x - spread(tl.div_rn(sum_rows(x, ROWS), tl.cast(numel, tl.float32)), BLOCK, ROWS)
        if not FULL:
            x = tl.where(tl.arange(0, BLOCK) < count, x, 0.0)
    return x


@triton.jit
def _widen(largest, y, count, BLOCK: tl.constexpr, RUN: tl.constexpr, FULL: tl.constexpr):
    """Largest magnitudes so far, ``[BLOCK // RUN]`` int32 of ``largest_magnitude``."""
    if not FULL:
        y = tl.where(tl.arange(0, BLOCK) < count, y, 0.0)
    return tl.maximum(largest, largest_magnitude(tl.reshape(y, (BLOCK // RUN, RUN))))


@triton.jit
def _store_largest(amax_ptr, largest, DTYPE: tl.constexpr):
    # Rounding keeps the order: the largest rounded value is the largest value, rounded.
    value = tl.max(largest, axis=0).to(tl.float32, bitcast=True)
    key = round_output(value, DTYPE).to(tl.float32).to(tl.int32, bitcast=True)
    raise_to(amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True), key)


@triton.jit(do_not_specialize=["rows", "share", "eps"])
def norm_quantize_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    rstd_ptr,
    message_ptr,
    amax_ptr,
    x_stride,
    message_stride,
    rows,
    numel,
    share,
    eps,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    AMAX: tl.constexpr,
    FULL: tl.constexpr,
    FLAT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Read tiles of whole rows once: centre, output, Hadamard -> scale -> round -> pack."""
    VECTOR: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    weight = tl.cast(0.0, tl.float32)
    bias = weight
    if WEIGHT:
        weight = load_columns(weight_ptr, numel, BLOCK, ROWS, RUN, FULL or ROWS > 1)
    if BIAS:
        bias = load_columns(bias_ptr, numel, BLOCK, ROWS, RUN, FULL or ROWS > 1)
    largest = tl.zeros((BLOCK // RUN,), tl.int32)
    tiles = tl.cdiv(rows, ROWS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * ROWS
        count = tile_count(row, rows, numel, ROWS)
        x = load_run(x_ptr + row * x_stride, count, BLOCK, VECTOR, RUN, FULL).to(tl.float32)
        centred = _centre(x, count, numel, BLOCK, ROWS, KIND, FULL)
        # Divisions and square roots by the rules of IEEE cost an instruction per element, and the
        # order of the sum decides the last bits anyway. share is 1 / N.
        rstd = tl.rsqrt(sum_rows(centred * centred, ROWS) * share + eps)
        store_of_rows(rstd_ptr, rstd, row, rows, ROWS)
        rstd = spread(rstd, BLOCK, ROWS)
        y = normalize(
            *(centred, rstd, weight, bias, KIND, WEIGHT, BIAS, x_ptr.dtype.element_ty),
        )
        result = round_output(y, y_ptr.dtype.element_ty)
        store_tile(y_ptr + row * numel, result, count, BLOCK, FULL)
        if AMAX:
            largest = _widen(largest, y, count, BLOCK, RUN, FULL)
        values = hadamard(centred, BLOCK, FORMAT.hadamard_size, RUN)
        row_ptr, first, length = encoded_columns(
            message_ptr, message_stride, row, rows, numel, FLAT, FORMAT.group_size
        )
        encode_tile(
            *(values, row_ptr, message_ptr, row, first, first + count, length, 0, 0),
            *(BLOCK, FORMAT, FORMAT.forward_norm, FULL),
        )
    if AMAX:
        _store_largest(amax_ptr, largest, y_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["rows", "int_to_float"])
def norm_dequantize_kernel(
    message_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    message_stride,
    rows,
    numel,
    int_to_float,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    X_DTYPE: tl.constexpr,
    FULL: tl.constexpr,
    FLAT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Unpack -> scale -> inverse Hadamard -> normalise, for the same columns of many rows."""
    start = tl.program_id(0) * BLOCK
    weight = tl.cast(0.0, tl.float32)
    bias = weight
    if WEIGHT:
        weight_ptr += start
        weight = load_columns(weight_ptr, numel - start, BLOCK, ROWS, RUN, FULL or ROWS > 1)
    if BIAS:
        bias_ptr += start
        bias = load_columns(bias_ptr, numel - start, BLOCK, ROWS, RUN, FULL or ROWS > 1)
    tiles = tl.cdiv(rows, ROWS)
    for tile in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * ROWS
        count = tile_count(row, rows, numel, ROWS)
        row_ptr, first, length = encoded_columns(
            message_ptr, message_stride, row, rows, numel, FLAT, FORMAT.group_size
        )
        values = decode_tile(
            *(row_ptr, first + start, first + count, length, int_to_float),
            *(BLOCK, RUN, FORMAT, FULL),
        )
        # beyond the last row of a matrix, any will do
        index = tl.minimum(tile_rows(row, ROWS), rows - 1)
        rstd = spread(tl.load(rstd_ptr + index), BLOCK, ROWS)
        centred = hadamard(values, BLOCK, FORMAT.hadamard_size, RUN) * FORMAT.inverse_norm
        y = normalize(centred, rstd, weight, bias, KIND, WEIGHT, BIAS, X_DTYPE)
        result = round_output(y, y_ptr.dtype.element_ty)
        store_tile(y_ptr + row * numel + start, result, count - start, BLOCK, FULL)


def launch_norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    fmt: MessageFormat,
    y: Tensor,
    rstd: Tensor,
    message: Tensor,
    amax: Tensor,
) -> Callable[..., None]:
    """Launch the kernel; arguments and results as for ``op.norm_quantize``.

    ``amax`` is ``[0]`` or a zero. Returns what does the same with other tensors alike.
    """
    rows, numel = x.shape
    if rows == 0:
        return launch_nothing
    tile = whole_rows(fmt, rows, numel, x)
    chosen = choose_schedule("forward", tile.block, x.device)
    launch = Launch(
        norm_quantize_kernel,
        (min(chosen.programs, triton.cdiv(rows, tile.rows)),),
        (row_stride(x, 0), row_stride(message, 0), rows, numel, 1.0 / numel, eps),
        constants(tile, chosen, fmt, kind)
        | {"WEIGHT": weight is not None, "BIAS": bias is not None, "AMAX": amax.numel() > 0},
    )
    launch(x, weight, bias, y, rstd, message, amax)
    return launch


def launch_norm_dequantize(
    message: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    fmt: MessageFormat,
    x_dtype: torch.dtype,
    y: Tensor,
) -> Callable[..., None]:
    """Launch the kernel; arguments as for ``op.norm_dequantize``, the result is ``y``.

    Returns what does the same with other tensors alike.
    """
    rows, numel = y.shape
    if rows == 0:
        return launch_nothing
    tile = parts_of_rows(fmt, rows, numel)
    chosen = choose_schedule("rebuild", tile.block, y.device)
    columns = triton.cdiv(numel, tile.block) if tile.rows == 1 else 1
    programs = min(triton.cdiv(chosen.programs, columns), triton.cdiv(rows, tile.rows), 65535)
    used = {"WEIGHT": weight is not None, "BIAS": bias is not None}
    launch = Launch(
        norm_dequantize_kernel,
        (columns, programs),
        (row_stride(message, 0), rows, numel, INT_TO_FLOAT),
        constants(tile, chosen, fmt, kind) | used | {"X_DTYPE": TRITON_DTYPES[x_dtype]},
    )
    launch(message, rstd, weight, bias, y)
    return launch
