"""Triton kernels of the norm operators.

A tile is ``[R.block]`` with ``R.block = R.rows * WIDTH``, several short rows or one long one; see
``tiles.Geometry``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    decode_loaded,
    decode_tile,
    encode_tile,
    encoded_columns,
    load_encoded,
    raise_to,
)

from .tiles import choose_schedule, constants, parts_of_rows, whole_rows

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def factor_of(weight, KIND: tl.constexpr):
    """Factor of ``x_hat`` in fp32; ``reference.factor_of``."""
    factor = weight.to(tl.float32)
    if KIND == "rms_offset":
        factor = 1.0 + factor
    return factor


@triton.jit
def _normalize(centred, rstd, weight, bias, X_DTYPE: tl.constexpr, R: tl.constexpr):
    """Output of a norm in fp32, not rounded yet; ``reference.normalize``."""
    KIND: tl.constexpr = R.kind
    y = centred * rstd
    if R.kind == "rms_cast":
        y = round_output(y, X_DTYPE).to(tl.float32)
    if R.weight:
        y = y * factor_of(weight, KIND)
    if R.bias:
        y = y + bias.to(tl.float32)
    return y


@triton.jit
def _tile_count(row, rows, numel, R: tl.constexpr):
    """Elements of the tile that begins with row ``row``."""
    count = numel
    if R.rows > 1:
        count = tl.minimum(rows - row, R.rows).to(tl.int32) * numel
    return count


@triton.jit
def _load_columns(source_ptr, numel, R: tl.constexpr):
    """``[N]`` parameters as ``[BLOCK]``, the same for every row of a tile; not converted."""
    VECTOR: tl.constexpr = 128 // source_ptr.dtype.element_ty.primitive_bitwidth
    WIDTH: tl.constexpr = R.block // R.rows
    if R.rows == 1:
        values = load_run(source_ptr, numel, R.block, VECTOR, R.run, R.full)
    else:
        row = tl.load(source_ptr + tl.arange(0, WIDTH))
        values = tl.reshape(tl.broadcast_to(row[None, :], (R.rows, WIDTH)), (R.block,))
    return values


@triton.jit
def _load_parameters(weight_ptr, bias_ptr, start, numel, R: tl.constexpr):
    """Weight and bias of the columns from ``start`` on; a number that means nothing for None."""
    weight = tl.cast(0.0, tl.float32)
    bias = weight
    if R.weight:
        weight = _load_columns(weight_ptr + start, numel - start, R)
    if R.bias:
        bias = _load_columns(bias_ptr + start, numel - start, R)
    return weight, bias


@triton.jit
def _tile_rows(row, R: tl.constexpr):
    """Rows of a tile: a number, or ``[ROWS]``."""
    if R.rows > 1:
        row = row + tl.arange(0, R.rows)
    return row


@triton.jit
def _sum_rows(values, R: tl.constexpr):
    """Sum of each row: a number, or ``[ROWS]``."""
    if R.rows > 1:
        total = tl.sum(tl.reshape(values, (R.rows, values.shape[0] // R.rows)), axis=1)
    else:
        total = tl.sum(values, axis=0)
    return total


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sum_rows_of_two(first, second, R: tl.constexpr):
    """``_sum_rows`` of two tiles, with one exchange between the warps."""
    if R.rows > 1:
        WIDTH: tl.constexpr = first.shape[0] // R.rows
        pair = tl.reshape(first, (R.rows, WIDTH)), tl.reshape(second, (R.rows, WIDTH))
        sums = tl.reduce(pair, 1, _add_two)
    else:
        sums = tl.reduce((first, second), 0, _add_two)
    return sums


@triton.jit
def _spread(values, R: tl.constexpr):
    """Sums of ``_sum_rows`` for every element of the tile; a number stays one."""
    if R.rows > 1:
        wide = tl.broadcast_to(values[:, None], (R.rows, R.block // R.rows))
        values = tl.reshape(wide, (R.block,))
    return values


@triton.jit
def _store_tile(target_ptr, values, count, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """Write the first ``count`` elements."""
    offsets = tl.arange(0, BLOCK)
    if FULL:
        tl.store(target_ptr + offsets, values)
    else:
        tl.store(target_ptr + offsets, values, offsets < count)


# --- forward --------------------------------------------------------------------------------------


@triton.jit
def _centre(x, count, numel, R: tl.constexpr):
    """``reference.centre`` of a tile; zero beyond its rows.

    Divides as IEEE does, once per row: the mean of a constant row is then that constant, if its sum
    is exact, and the codes are those of the reference wherever sums are exact.
    """
    if R.kind == "layer":
        x = x - _spread(tl.div_rn(_sum_rows(x, R), tl.cast(numel, tl.float32)), R)
        if not R.full:
            x = tl.where(tl.arange(0, R.block) < count, x, 0.0)
    return x


@triton.jit
def _widen(largest, y, count, R: tl.constexpr):
    """Largest magnitudes so far, ``[BLOCK // RUN]`` int32 of ``largest_magnitude``."""
    if not R.full:
        y = tl.where(tl.arange(0, R.block) < count, y, 0.0)
    return tl.maximum(largest, largest_magnitude(tl.reshape(y, (R.block // R.run, R.run))))


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
    R: tl.constexpr,
):
    """Read tiles of whole rows once: centre, output, Hadamard -> scale -> round -> pack."""
    FORMAT: tl.constexpr = R.format
    VECTOR: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    weight, bias = _load_parameters(weight_ptr, bias_ptr, 0, numel, R)
    largest = tl.zeros((R.block // R.run,), tl.int32)
    tiles = tl.cdiv(rows, R.rows)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=R.stages):
        row = tl.cast(tile, tl.int64) * R.rows
        count = _tile_count(row, rows, numel, R)
        x = load_run(x_ptr + row * x_stride, count, R.block, VECTOR, R.run, R.full).to(tl.float32)
        centred = _centre(x, count, numel, R)
        # Divisions and square roots by the rules of IEEE cost an instruction per element, and the
        # order of the sum decides the last bits anyway. share is 1 / N.
        rstd = tl.rsqrt(_sum_rows(centred * centred, R) * share + eps)
        index = _tile_rows(row, R)
        if R.rows > 1:
            tl.store(rstd_ptr + index, rstd, index < rows)
        else:
            tl.store(rstd_ptr + index, rstd)
        y = _normalize(centred, _spread(rstd, R), weight, bias, x_ptr.dtype.element_ty, R)
        result = round_output(y, y_ptr.dtype.element_ty)
        _store_tile(y_ptr + row * numel, result, count, R.block, R.full)
        if R.amax:
            largest = _widen(largest, y, count, R)
        values = hadamard(centred, R.block, FORMAT.hadamard_size, R.run)
        row_ptr, first, length = encoded_columns(
            message_ptr, message_stride, row, rows, numel, R.flat, FORMAT.group_size
        )
        encode_tile(
            *(values, row_ptr, message_ptr, row, first, first + count, length, 0, 0),
            *(R.block, FORMAT, FORMAT.forward_norm, R.full),
        )
    if R.amax:
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
    R: tl.constexpr,
    X_DTYPE: tl.constexpr,
):
    """Unpack -> scale -> inverse Hadamard -> normalise, for the same columns of many rows."""
    FORMAT: tl.constexpr = R.format
    start = tl.program_id(0) * R.block
    weight, bias = _load_parameters(weight_ptr, bias_ptr, start, numel, R)
    tiles = tl.cdiv(rows, R.rows)
    for tile in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=R.stages):
        row = tl.cast(tile, tl.int64) * R.rows
        count = _tile_count(row, rows, numel, R)
        row_ptr, first, length = encoded_columns(
            message_ptr, message_stride, row, rows, numel, R.flat, FORMAT.group_size
        )
        values = decode_tile(
            *(row_ptr, first + start, first + count, length, int_to_float),
            *(R.block, R.run, FORMAT, R.full),
        )
        # beyond the last row of a matrix, any will do
        index = tl.minimum(_tile_rows(row, R), rows - 1)
        rstd = _spread(tl.load(rstd_ptr + index), R)
        centred = hadamard(values, R.block, FORMAT.hadamard_size, R.run) * FORMAT.inverse_norm
        y = _normalize(centred, rstd, weight, bias, X_DTYPE, R)
        result = round_output(y, y_ptr.dtype.element_ty)
        _store_tile(y_ptr + row * numel + start, result, count - start, R.block, R.full)


def launch_norm_quantize(
    tensors: tuple[Any, ...], eps: float, kind: str, fmt: MessageFormat
) -> Callable[..., None]:
    """Launch the kernel on its pointers; ``amax`` is ``[0]`` or a zero.

    Returns a launch on other tensors alike, as all launchers here.
    """
    x, weight, bias, _, _, message, amax = tensors
    rows, numel = x.shape
    if rows == 0:
        return launch_nothing
    tile = whole_rows(fmt, rows, numel, x)
    chosen = choose_schedule("forward", tile.block, x.device)
    launch = Launch(
        norm_quantize_kernel,
        (min(chosen.programs, triton.cdiv(rows, tile.rows)),),
        (row_stride(x, 0), row_stride(message, 0), rows, numel, 1.0 / numel, eps),
        constants(tile, chosen, fmt, kind, weight, bias, amax=amax.numel() > 0),
    )
    launch(*tensors)
    return launch


def launch_norm_dequantize(
    tensors: tuple[Any, ...], kind: str, fmt: MessageFormat, x_dtype: torch.dtype
) -> Callable[..., None]:
    """Launch the kernel on its pointers; ``x_dtype`` is what the input of the norm had."""
    message, _, weight, bias, y = tensors
    rows, numel = y.shape
    if rows == 0:
        return launch_nothing
    tile = parts_of_rows(fmt, rows, numel)
    chosen = choose_schedule("rebuild", tile.block, y.device)
    columns = triton.cdiv(numel, tile.block) if tile.rows == 1 else 1
    programs = min(triton.cdiv(chosen.programs, columns), triton.cdiv(rows, tile.rows), 65535)
    launch = Launch(
        norm_dequantize_kernel,
        (columns, programs),
        (row_stride(message, 0), rows, numel, INT_TO_FLOAT),
        constants(tile, chosen, fmt, kind, weight, bias) | {"X_DTYPE": TRITON_DTYPES[x_dtype]},
    )
    launch(*tensors)
    return launch


# --- backward -------------------------------------------------------------------------------------


@triton.jit
def _input_gradient(gradient, x_hat, rstd, share, R: tl.constexpr):
    """Gradient of the input from that of ``x_hat`` times the factor; ``reference``."""
    if R.kind == "layer":
        along, mean = _sum_rows_of_two(gradient * x_hat, gradient, R)
        gradient = gradient - _spread(mean * share, R)
    else:
        along = _sum_rows(gradient * x_hat, R)
    along = tl.broadcast_to(_spread(-along * share, R), (R.block,))
    return tl.fma(x_hat, along, gradient) * _spread(rstd, R)


@triton.jit
def _store_partial(partial_ptr, values, numel, R: tl.constexpr):
    """Sum a ``[BLOCK]`` tile over its rows to ``[N]``."""
    WIDTH: tl.constexpr = values.shape[0] // R.rows
    if R.rows > 1:
        values = tl.sum(tl.reshape(values, (R.rows, WIDTH)), axis=0)
    _store_tile(partial_ptr, values, numel, WIDTH, R.rows > 1)


@triton.jit
def _load_tile(pointers, message_stride, dy_stride, tile, rows, numel, R: tl.constexpr):
    """Read all that a tile needs: ``dy``, rstd of its rows, and ``load_encoded``."""
    FORMAT: tl.constexpr = R.format
    message_ptr, rstd_ptr, dy_ptr = pointers
    VECTOR: tl.constexpr = 128 // dy_ptr.dtype.element_ty.primitive_bitwidth
    row = tl.cast(tile, tl.int64) * R.rows
    count = _tile_count(row, rows, numel, R)
    dy = load_run(dy_ptr + row * dy_stride, count, R.block, VECTOR, R.run, R.full)
    row_ptr, first, length = encoded_columns(
        message_ptr, message_stride, row, rows, numel, R.flat, FORMAT.group_size
    )
    loaded = load_encoded(row_ptr, first, first + count, length, R.block, R.run, FORMAT, R.full)
    # beyond the last row of a matrix, any will do
    rstd = tl.load(rstd_ptr + tl.minimum(_tile_rows(row, R), rows - 1))
    return dy, rstd, loaded


@triton.jit(do_not_specialize=["rows", "share", "int_to_float"])
def norm_backward_kernel(
    message_ptr,
    rstd_ptr,
    dy_ptr,
    weight_ptr,
    dx_ptr,
    partial_ptr,
    message_stride,
    dy_stride,
    rows,
    numel,
    share,
    int_to_float,
    R: tl.constexpr,
):
    """Decode tiles of whole rows, write ``dx`` and this program's part of the parameters'.

    Partial sums are ``[programs, 2 or 1, N]``: of the weight and, for "layer", of the bias. With 2
    stages the next tile is on its way to registers while one is computed: the pipelines of the
    compiler go through shared memory, from where the codes come in an order that costs 13
    instructions per element with a transform.
    """
    FORMAT: tl.constexpr = R.format
    KIND: tl.constexpr = R.kind
    BLOCK: tl.constexpr = R.block
    if R.weight:
        weight = _load_columns(weight_ptr, numel, R)
    dweight = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    tiles = tl.cdiv(rows, R.rows)
    step = tl.num_programs(0)
    pointers = (message_ptr, rstd_ptr, dy_ptr)
    dy, rstd, loaded = _load_tile(
        pointers, message_stride, dy_stride, tl.program_id(0), rows, numel, R
    )
    for tile in range(tl.program_id(0), tiles, step):
        following = tl.minimum(tile + step, tiles - 1)  # the last one loads itself again
        if R.stages > 1:
            next_dy, next_rstd, next_loaded = _load_tile(
                pointers, message_stride, dy_stride, following, rows, numel, R
            )
        row = tl.cast(tile, tl.int64) * R.rows
        count = _tile_count(row, rows, numel, R)
        values = decode_loaded(loaded, int_to_float, R.block, FORMAT)
        centred = hadamard(values, R.block, FORMAT.hadamard_size, R.run) * FORMAT.inverse_norm
        x_hat = centred * _spread(rstd, R)
        if not R.full:  # what lies beyond the row may be scaled by anything
            x_hat = tl.where(tl.arange(0, R.block) < count, x_hat, 0.0)
        wide = dy.to(tl.float32)
        gradient = wide
        if R.weight:
            gradient = wide * factor_of(weight, KIND)
        dx = _input_gradient(gradient, x_hat, rstd, share, R)
        result = round_output(dx, dx_ptr.dtype.element_ty)
        _store_tile(dx_ptr + row * numel, result, count, R.block, R.full)
        if R.parameters:
            dweight = tl.fma(wide, x_hat, dweight)
            if R.kind == "layer":
                dbias += wide
        if R.stages > 1:
            dy, rstd, loaded = next_dy, next_rstd, next_loaded
        else:
            dy, rstd, loaded = _load_tile(
                pointers, message_stride, dy_stride, following, rows, numel, R
            )
    if R.parameters:
        KINDS: tl.constexpr = 2 if R.kind == "layer" else 1
        partial_ptr += tl.program_id(0).to(tl.int64) * numel * KINDS
        _store_partial(partial_ptr, dweight, numel, R)
        if R.kind == "layer":
            _store_partial(partial_ptr + numel, dbias, numel, R)


@triton.jit(do_not_specialize=["programs"])
def sum_partial_kernel(
    partial_ptr,
    dweight_ptr,
    dbias_ptr,
    programs,
    numel,
    KINDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum ``[programs, KINDS, N]`` over the programs, ``COLUMNS`` columns of one kind."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    partial_ptr += tl.program_id(1) * numel
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, programs, ROWS, loop_unroll_factor=4):
        row = first + tl.arange(0, ROWS)
        inside = (row < programs)[:, None] & (column < numel)[None, :]
        total += tl.load(partial_ptr + (row * (KINDS * numel))[:, None] + column, inside, 0.0)
    out_ptr = dweight_ptr
    if tl.program_id(1) > 0:
        out_ptr = dbias_ptr
    tl.store(out_ptr + column, tl.sum(total, axis=0), column < numel)


def _zero_sums(*tensors: Tensor) -> None:
    for total in tensors[-2:]:
        total.zero_()


def launch_norm_backward(
    tensors: tuple[Any, ...], kind: str, fmt: MessageFormat
) -> Callable[..., None]:
    """Launch the kernels on the tensors and results of ``op.norm_backward``.

    Gradients of parameters are ``[0]`` where not wanted.
    """
    message, _, dy, weight, _, dweight, dbias = tensors
    rows, numel = dy.shape
    if rows == 0:
        _zero_sums(dweight, dbias)
        return _zero_sums
    kinds = (dweight.numel() + dbias.numel()) // numel
    tile = whole_rows(fmt, rows, numel, dy)
    chosen = choose_schedule("backward", tile.block, dy.device)
    programs = min(chosen.programs, triton.cdiv(rows, tile.rows))
    gradients = Launch(
        norm_backward_kernel,
        (programs,),
        (row_stride(message, 0), row_stride(dy, 0), rows, numel, 1.0 / numel, INT_TO_FLOAT),
        constants(tile, chosen, fmt, kind, weight, parameters=kinds > 0),
    )
    sums = Launch(
        sum_partial_kernel,
        (triton.cdiv(numel, 32), kinds),
        (programs, numel),
        {"KINDS": kinds, "ROWS": 64, "COLUMNS": 32, "num_warps": 8},
    )

    def launch(*tensors: Any) -> None:
        *read, dx, dweight, dbias = tensors
        partial = dweight.new_empty(programs * kinds * numel)
        gradients(*read, dx, partial)
        if kinds:
            sums(partial, dweight, dbias)

    launch(*tensors)
    return launch
