"""Triton kernels of the norm's backward."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.launch import INT_TO_FLOAT, row_stride
from lq_lightning.kernels.message.launch_cache import Launch
from lq_lightning.kernels.message.triton_blocks import hadamard, load_run, round_output
from lq_lightning.kernels.message.triton_rows import decode_loaded, encoded_columns, load_encoded
from lq_lightning.kernels.norm.triton_tiles import factor_of

from .tiles import choose_schedule, constants, whole_rows
from .triton_tiles import (
    load_columns,
    spread,
    store_tile,
    sum_rows,
    sum_rows_of_two,
    tile_count,
    tile_rows,
)


@triton.jit
def _input_gradient(
    gradient, x_hat, rstd, share, BLOCK: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr
):
    """Gradient of the input from that of ``x_hat`` times the factor; ``reference``."""
    if KIND == "layer":
        along, mean = sum_rows_of_two(gradient * x_hat, gradient, ROWS)
        gradient = gradient - spread(mean * share, BLOCK, ROWS)
    else:
        along = sum_rows(gradient * x_hat, ROWS)
    along = tl.broadcast_to(spread(-along * share, BLOCK, ROWS), (BLOCK,))
    return tl.fma(x_hat, along, gradient) * spread(rstd, BLOCK, ROWS)


@triton.jit
def _store_partial(partial_ptr, values, numel, ROWS: tl.constexpr):
    """Sum a ``[BLOCK]`` tile over its rows to ``[N]``."""
    WIDTH: tl.constexpr = values.shape[0] // ROWS
    if ROWS > 1:
        values = tl.sum(tl.reshape(values, (ROWS, WIDTH)), axis=0)
    store_tile(partial_ptr, values, numel, WIDTH, ROWS > 1)


@triton.jit
def _load_tile(
    message_ptr,
    rstd_ptr,
    dy_ptr,
    message_stride,
    dy_stride,
    tile,
    rows,
    numel,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    FULL: tl.constexpr,
    FLAT: tl.constexpr,
):
    """Read all that a tile needs: ``dy``, rstd of its rows, and ``load_encoded``."""
    VECTOR: tl.constexpr = 128 // dy_ptr.dtype.element_ty.primitive_bitwidth
    row = tl.cast(tile, tl.int64) * ROWS
    count = tile_count(row, rows, numel, ROWS)
    dy = load_run(dy_ptr + row * dy_stride, count, BLOCK, VECTOR, RUN, FULL)
    row_ptr, first, length = encoded_columns(
        message_ptr, message_stride, row, rows, numel, FLAT, FORMAT.group_size
    )
    words, second, third, scale, minimum = load_encoded(
        row_ptr, first, first + count, length, BLOCK, RUN, FORMAT, FULL
    )
    # beyond the last row of a matrix, any will do
    rstd = tl.load(rstd_ptr + tl.minimum(tile_rows(row, ROWS), rows - 1))
    return dy, rstd, words, second, third, scale, minimum


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
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHT: tl.constexpr,
    PARAMETERS: tl.constexpr,
    FULL: tl.constexpr,
    FLAT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Decode tiles of whole rows, write ``dx`` and this program's part of the parameters'.

    Partial sums are ``[programs, 2 or 1, N]``: of the weight and, for "layer", of the bias. With 2
    ``STAGES`` the next tile is on its way to registers while one is computed: the pipelines of the
    compiler go through shared memory, from where the codes come in an order that costs 13
    instructions per element with a transform.
    """
    if WEIGHT:
        weight = load_columns(weight_ptr, numel, BLOCK, ROWS, RUN, FULL or ROWS > 1)
    dweight = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    tiles = tl.cdiv(rows, ROWS)
    step = tl.num_programs(0)
    dy, rstd, words, second, third, scale, minimum = _load_tile(
        *(message_ptr, rstd_ptr, dy_ptr, message_stride, dy_stride, tl.program_id(0), rows, numel),
        *(BLOCK, ROWS, RUN, FORMAT, FULL, FLAT),
    )
    for tile in range(tl.program_id(0), tiles, step):
        following = tl.minimum(tile + step, tiles - 1)  # the last one loads itself again
        if STAGES > 1:
            dy_2, rstd_2, words_2, second_2, third_2, scale_2, minimum_2 = _load_tile(
                *(message_ptr, rstd_ptr, dy_ptr, message_stride, dy_stride, following, rows),
                *(numel, BLOCK, ROWS, RUN, FORMAT, FULL, FLAT),
            )
        row = tl.cast(tile, tl.int64) * ROWS
        count = tile_count(row, rows, numel, ROWS)
        values = decode_loaded((words, second, third, scale, minimum), int_to_float, BLOCK, FORMAT)
        centred = hadamard(values, BLOCK, FORMAT.hadamard_size, RUN) * FORMAT.inverse_norm
        x_hat = centred * spread(rstd, BLOCK, ROWS)
        if not FULL:  # what lies beyond the row may be scaled by anything
            x_hat = tl.where(tl.arange(0, BLOCK) < count, x_hat, 0.0)
        wide = dy.to(tl.float32)
        gradient = wide
        if WEIGHT:
            gradient = wide * factor_of(weight, KIND)
        dx = _input_gradient(gradient, x_hat, rstd, share, BLOCK, ROWS, KIND)
        result = round_output(dx, dx_ptr.dtype.element_ty)
        store_tile(dx_ptr + row * numel, result, count, BLOCK, FULL)
        if PARAMETERS:
            dweight = tl.fma(wide, x_hat, dweight)
            if KIND == "layer":
                dbias += wide
        if STAGES > 1:
            dy, rstd = dy_2, rstd_2
            words, second, third, scale, minimum = words_2, second_2, third_2, scale_2, minimum_2
        else:
            dy, rstd, words, second, third, scale, minimum = _load_tile(
                *(message_ptr, rstd_ptr, dy_ptr, message_stride, dy_stride, following, rows),
                *(numel, BLOCK, ROWS, RUN, FORMAT, FULL, FLAT),
            )
    if PARAMETERS:
        KINDS: tl.constexpr = 2 if KIND == "layer" else 1
        partial_ptr += tl.program_id(0).to(tl.int64) * numel * KINDS
        _store_partial(partial_ptr, dweight, numel, ROWS)
        if KIND == "layer":
            _store_partial(partial_ptr + numel, dbias, numel, ROWS)


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


def _launch_on_no_rows(*tensors: Tensor | None) -> None:
    for total in tensors[-2:]:
        if total is not None:
            total.zero_()


def launch_norm_backward(
    message: Tensor,
    rstd: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    kind: str,
    fmt: MessageFormat,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor,
) -> Callable[..., None]:
    """Launch the kernels; arguments and results as for ``op.norm_backward``.

    ``dweight`` and ``dbias`` are ``[0]`` where not wanted. Returns what does the same with other
    tensors alike.
    """
    rows, numel = dy.shape
    if rows == 0:
        _launch_on_no_rows(message, rstd, dy, weight, dx, dweight, dbias)
        return _launch_on_no_rows
    kinds = (dweight.numel() + dbias.numel()) // numel
    tile = whole_rows(fmt, rows, numel, dy)
    chosen = choose_schedule("backward", tile.block, dy.device)
    programs = min(chosen.programs, triton.cdiv(rows, tile.rows))
    gradients = Launch(
        norm_backward_kernel,
        (programs,),
        (row_stride(message, 0), row_stride(dy, 0), rows, numel, 1.0 / numel, INT_TO_FLOAT),
        constants(tile, chosen, fmt, kind)
        | {"WEIGHT": weight is not None, "PARAMETERS": kinds > 0},
    )
    sums = Launch(
        sum_partial_kernel,
        (triton.cdiv(numel, 32), kinds),
        (programs, numel),
        {"KINDS": kinds, "ROWS": 64, "COLUMNS": 32, "num_warps": 8},
    )

    def launch(
        message: Tensor,
        rstd: Tensor,
        dy: Tensor,
        weight: Tensor | None,
        dx: Tensor,
        dweight: Tensor,
        dbias: Tensor,
    ) -> None:
        partial = rstd.new_empty(programs * kinds * numel)
        gradients(message, rstd, dy, weight, dx, partial)
        if kinds:
            sums(partial, dweight, dbias)

    launch(message, rstd, dy, weight, dx, dweight, dbias)
    return launch
