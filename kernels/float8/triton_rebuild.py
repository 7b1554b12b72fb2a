"""Triton kernel of the rebuilds: from codes straight to the transposed E4M3 operand."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.activation.triton_arithmetic import activate
from lq_lightning.kernels.float8.reference import ROW_MULTIPLE
from lq_lightning.kernels.float8.triton_kernels import (
    REBUILD_TILES,
    RebuildTile,
    float8_word,
    inverse_of,
    join_four,
    rebuild_kind,
    split_four,
    store_transposed,
    transpose_bytes,
)
from lq_lightning.kernels.float8.triton_tiles import ROW_STEP, decode_tile
from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.launch import INT_TO_FLOAT
from lq_lightning.kernels.message.launch_cache import Launch, launch_nothing
from lq_lightning.kernels.message.matrix import is_flat
from lq_lightning.kernels.norm.triton_kernels import factor_of


@triton.jit
def _norm_values(
    centred,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    inverse,
    row,
    column,
    rows,
    numel,
    KIND: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """``reference.norm_dequantize`` of a decoded tile, divided by the scale."""
    P: tl.constexpr = centred.shape[0]
    BLOCK_N: tl.constexpr = centred.shape[1]
    at = row + tl.arange(0, P) * ROW_STEP
    if not EVEN:
        at = tl.minimum(at, tl.cast(rows, tl.int64) - 1)
    y = centred * tl.load(rstd_ptr + at)[:, None]
    along = column + tl.arange(0, BLOCK_N)
    inside = along < numel
    if WEIGHT:
        weight = tl.load(weight_ptr + along, inside, 0.0)
        y = y * (factor_of(weight, KIND) * inverse)[None, :]
    else:
        y = y * inverse
    if BIAS:
        bias = tl.load(bias_ptr + along, inside, 0.0)
        y = y + (bias.to(tl.float32) * inverse)[None, :]
    return y


@triton.jit(do_not_specialize=["int_to_float"])
def rebuild_kernel(
    message_ptr,
    up_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    out_ptr,
    word_pitch,
    scale_pitch,
    rows,
    numel,
    out_stride,
    int_to_float,
    FORMAT: tl.constexpr,
    FLAT: tl.constexpr,
    UNIT: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UP: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUN: tl.constexpr,
):
    """Decode ``[4 * P, BLOCK_N]`` values, apply a norm or an activation, round, and transpose.

    ``NORM`` is a kind of norm or "", ``ACTIVATION`` a function or "". Rows 0, 4, 8, ..., then 1, 5,
    9, ... and so on, so that each thread has blocks of four by four codes: words of four columns
    become words of four rows in registers, and words are what moves between threads.
    """
    inverse = inverse_of(tl.load(scale_ptr))
    column = tl.program_id(0).to(tl.int64) * BLOCK_N
    first_row = tl.program_id(1).to(tl.int64) * (P * ROW_STEP)
    for part in tl.static_range(4):
        row = first_row + part
        y = decode_tile(
            *(message_ptr, word_pitch * UNIT, scale_pitch, row, column, rows, numel),
            *(inverse if NORM == "" and ACTIVATION == "" else 1.0, int_to_float),
            *(P, BLOCK_N, RUN, FORMAT, FLAT, EVEN),
        )
        if NORM != "":
            y = _norm_values(
                *(y, rstd_ptr, weight_ptr, bias_ptr, inverse, row, column, rows, numel),
                *(NORM, WEIGHT, BIAS, EVEN),
            )
        elif ACTIVATION != "":
            y = activate(y, ACTIVATION)
            if UP:
                y = y * decode_tile(
                    *(up_ptr, word_pitch * UNIT, scale_pitch, row, column, rows, numel),
                    *(inverse, int_to_float, P, BLOCK_N, RUN, FORMAT, FLAT, EVEN),
                )
            else:
                y = y * inverse
        if not EVEN:
            exists = row + tl.arange(0, P)[:, None] * ROW_STEP < rows
            y = tl.where(exists, y, 0.0)
        codes = float8_word(*split_four(y, P * BLOCK_N))
        if part == 0:
            first = codes
        elif part == 1:
            second = codes
        elif part == 2:
            third = codes
        else:
            words = transpose_bytes(first, second, third, codes)
    words = tl.reshape(join_four(*words, P * BLOCK_N), (P, BLOCK_N))
    store_transposed(
        *(words, out_ptr, out_stride, column, first_row),
        *(out_stride * 16 - first_row, numel - column, EVEN),
    )


def _prepare(
    message: Tensor,
    fmt: MessageFormat,
    rows: int,
    out: Tensor,
    *,
    tile: RebuildTile | None = None,
    norm: str = "",
    activation: str = "",
    up: bool = False,
    weight: bool = False,
    bias: bool = False,
) -> Callable[..., None]:
    """Return a launch, given the pointers of the kernel; messages have to be contiguous."""
    numel = out.shape[0]
    if out.numel() == 0:
        return launch_nothing
    if tile is None:
        source = "norm" if norm else "activation" if activation else "codes"
        tile = REBUILD_TILES[rebuild_kind(source, fmt)]
    flat = is_flat(fmt, numel)
    word_nbytes = 4 if fmt.planes[0] == 8 else fmt.planes[0]
    codes_per_word = word_nbytes * 8 // fmt.planes[0]
    if flat:
        word_pitch, scale_pitch = numel // codes_per_word, numel // fmt.group_size
    else:
        word_pitch, scale_pitch = (message.shape[1] // n for n in (word_nbytes, fmt.scale_nbytes))
    unit = 4 if word_pitch % 4 == 0 else 1  # so that the compiler knows of it
    sizes = (rows, numel, out.shape[1] // ROW_MULTIPLE)
    return Launch(
        rebuild_kernel,
        (triton.cdiv(numel, tile.columns), triton.cdiv(rows, tile.rows)),
        (word_pitch // unit, scale_pitch, *sizes, INT_TO_FLOAT),
        {
            "FORMAT": fmt,
            "FLAT": flat,
            "UNIT": unit,
            "NORM": norm,
            "ACTIVATION": activation,
            "UP": up,
            "WEIGHT": weight,
            "BIAS": bias,
            "EVEN": rows % tile.rows == 0 and numel % tile.columns == 0,
            "P": tile.rows // 4,
            "BLOCK_N": tile.columns,
            "RUN": tile.run,
            "num_warps": tile.warps,
            "enable_fp_fusion": False,
        },
    )


def launch_dequantize(
    message: Tensor,
    rows: int,
    fmt: MessageFormat,
    scale: Tensor,
    out: Tensor,
    *,
    tile: RebuildTile | None = None,
) -> Callable[..., None]:
    """Launch the kernel; arguments as the operator's, ``out`` ``[N, round16(T)]`` its result.

    ``tile`` overrides the choice from the table; it changes the speed, not the bits. Returns what
    does the same with other tensors alike.
    """
    prepared = _prepare(message, fmt, rows, out, tile=tile)

    def launch(message: Tensor, scale: Tensor, out: Tensor) -> None:
        prepared(message.contiguous(), None, None, None, None, scale, out)

    launch(message, scale, out)
    return launch


def launch_norm_dequantize(
    message: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    fmt: MessageFormat,
    scale: Tensor,
    out: Tensor,
) -> Callable[..., None]:
    """Launch the kernel; arguments as the operator's, otherwise as ``launch_dequantize``."""
    prepared = _prepare(
        *(message, fmt, rstd.shape[0], out),
        norm=kind,
        weight=weight is not None,
        bias=bias is not None,
    )

    def launch(
        message: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: Tensor,
        out: Tensor,
    ) -> None:
        prepared(message.contiguous(), None, rstd, weight, bias, scale, out)

    launch(message, rstd, weight, bias, scale, out)
    return launch


def launch_activation_dequantize(
    message: Tensor,
    up: Tensor | None,
    rows: int,
    activation: str,
    fmt: MessageFormat,
    scale: Tensor,
    out: Tensor,
) -> Callable[..., None]:
    """Launch the kernel; arguments as the operator's, otherwise as ``launch_dequantize``."""
    gated = up is not None
    prepared = _prepare(message, fmt, rows, out, activation=activation, up=gated)

    def launch(message: Tensor, up: Tensor | None, scale: Tensor, out: Tensor) -> None:
        up = None if up is None else up.contiguous()
        prepared(message.contiguous(), up, None, None, None, scale, out)

    launch(message, up, scale, out)
    return launch
