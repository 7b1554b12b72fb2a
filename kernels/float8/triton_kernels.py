"""Triton kernels of the casts, and of the rebuilds from codes to the transposed E4M3 operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.activation.triton_arithmetic import activate
from lq_lightning.kernels.float8.reference import (
    MAX_VALUE,
    MIN_SCALE,
    ROW_MULTIPLE,
    transforms_levels,
)
from lq_lightning.kernels.float8.triton_tiles import ROW_STEP, Recipe, decode_tile, load_runs
from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.launch import INT_TO_FLOAT, MAX_GRID_Y, row_stride
from lq_lightning.kernels.message.launch_cache import Launch, launch_nothing
from lq_lightning.kernels.message.matrix import is_flat
from lq_lightning.kernels.message.triton_blocks import HAS_PTX, program_row, select_bytes
from lq_lightning.kernels.norm.triton_kernels import factor_of


class CastTile(NamedTuple):
    """Work of one program of the cast.

    Attributes:
        rows: a power of two from 16.
        columns: a power of two from 16.
        warps: threads of a program, in units of 32.
    """

    rows: int
    columns: int
    warps: int


class RebuildTile(NamedTuple):
    """Work of one program of a rebuild.

    Attributes:
        rows: tokens, a power of two from 64.
        columns: a power of two from 128, the longest transform.
        run: consecutive values of a row that one thread owns, a power of two from 8.
        warps: threads of a program, in units of 32.
    """

    rows: int
    columns: int
    run: int
    warps: int


CAST_TILE = CastTile(128, 128, 8)

# By source and transform. A thread that owns all of a transform of levels moves nothing.
REBUILD_TILES: dict[str, RebuildTile] = {
    "activation": RebuildTile(128, 128, 32, 4),
    "activation levels": RebuildTile(256, 128, 128, 2),
    "activation values": RebuildTile(128, 128, 32, 4),
    "codes": RebuildTile(128, 128, 32, 4),
    "codes levels": RebuildTile(256, 128, 128, 2),
    "codes values": RebuildTile(128, 128, 32, 4),
    "norm": RebuildTile(128, 128, 32, 4),
    "norm levels": RebuildTile(256, 128, 128, 2),
    "norm values": RebuildTile(128, 128, 32, 4),
}


def rebuild_kind(source: str, fmt: MessageFormat) -> str:
    """Return the key of ``REBUILD_TILES`` for "codes", "norm" or "activation" and a format."""
    if not fmt.hadamard_size:
        return source
    return f"{source} {'levels' if transforms_levels(fmt) else 'values'}"


@triton.jit
def inverse_of(scale):
    """``1 / scale`` of an fp32 number, rounded once."""
    return tl.div_rn(1.0, scale)


@triton.jit
def _emulated_byte(y):
    """int32 with the E4M3 code of fp32 ``y`` in its low byte, in operations of any machine."""
    MANTISSA: tl.constexpr = 3
    MIN_EXPONENT: tl.constexpr = -6
    LARGEST: tl.constexpr = 448.0
    LOWEST: tl.constexpr = (127 + MIN_EXPONENT) << 23
    RAISE: tl.constexpr = ((23 - MANTISSA) << 23) + (1 << 22)
    bits = y.to(tl.int32, bitcast=True)
    size = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), LARGEST)
    # Adding and subtracting 1.5 * 2**23 units of the last place of its own binade rounds.
    rounder = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, LOWEST) + RAISE
    rounder = rounder.to(tl.float32, bitcast=True)
    rounded = (size + rounder) - rounder
    # Its smallest exponent becomes that of fp16.
    half = (rounded * 2.0 ** (-14 - MIN_EXPONENT)).to(tl.float16).to(tl.int16, bitcast=True)
    code = (half.to(tl.int32) >> (10 - MANTISSA)) | ((bits >> 24) & 0x80)
    return tl.where(y == y, code, 0x7F)


@triton.jit
def float8_word(a, b, c, d):
    """int32 whose bytes are the E4M3 codes of four fp32; what is infinite is clipped as well.

    Both halves are widened before they are joined: of ``{low, high}`` ptxas 12.8 leaves the upper
    half undefined where both hold the same, as the zeros beyond the end of a matrix do.
    """
    if HAS_PTX:
        asm: tl.constexpr = """
            {
            .reg .b16 low, high;
            .reg .b32 first, second;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 first, {low, 0};
            mov.b32 second, {high, 0};
            prmt.b32 $0, first, second, 0x5410;
            }
            """
        word = tl.inline_asm_elementwise(asm, "=r,f,f,f,f", [a, b, c, d], tl.int32, True, 1)
    else:
        word = _emulated_byte(a) | (_emulated_byte(b) << 8)
        word |= (_emulated_byte(c) << 16) | (_emulated_byte(d) << 24)
    return word


@triton.jit
def transpose_bytes(a, b, c, d):
    """Words of the first, second, third and fourth bytes of four words."""
    even, odd = select_bytes(a, b, 0x5140), select_bytes(a, b, 0x7362)
    even_high, odd_high = select_bytes(c, d, 0x5140), select_bytes(c, d, 0x7362)
    return (
        select_bytes(even, even_high, 0x5410),
        select_bytes(even, even_high, 0x7632),
        select_bytes(odd, odd_high, 0x5410),
        select_bytes(odd, odd_high, 0x7632),
    )


@triton.jit
def split_four(x, SIZE: tl.constexpr):
    """Cut ``[SIZE]`` values into four tensors, of every fourth one."""
    even, odd = tl.split(tl.reshape(x, (SIZE // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def join_four(a, b, c, d, SIZE: tl.constexpr):
    """Undo ``split_four``."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (SIZE,))


@triton.jit
def store_transposed(
    words, out_ptr, stride, column, row, rows_left, columns_left, EVEN: tl.constexpr
):
    """Write ``[P, N]`` int32 words, each the codes of four rows of one column, transposed.

    To an FP8 matrix ``[columns, padded rows]`` whose ``stride`` counts 16 bytes, from ``column``
    (int64) and ``row`` (a multiple of 16) on; ``rows_left`` includes padding. ``EVEN`` says that
    all rows and columns of the tile exist.
    """
    target = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    target += column * (stride * 4) + row // 4
    down = tl.arange(0, words.shape[1])[:, None]
    along = tl.arange(0, words.shape[0])[None, :]
    offsets = down * (stride * 4) + along
    if EVEN:
        tl.store(target + offsets, tl.trans(words))
    else:
        inside = (down < columns_left) & (along * 4 < rows_left)
        tl.store(target + offsets, tl.trans(words), inside)


_MAX_VALUE, _MIN_SCALE = tl.constexpr(MAX_VALUE), tl.constexpr(MIN_SCALE)
# Elements of a row that a program of `amax_kernel` reads at once, and how often.
_AMAX_BLOCK, _AMAX_TILES = 4096, 4


@triton.jit
def amax_kernel(x_ptr, out_ptr, stride, rows, numel, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """Raise ``out`` to the largest magnitude of ``TILES`` blocks of a row.

    As bits, whose order is that of magnitudes, with NaN above infinity. The result does not depend
    on the order of programs.
    """
    row = program_row()
    if row < rows:
        start = tl.program_id(0).to(tl.int64) * (BLOCK * TILES)
        source = x_ptr + row * stride + start
        offsets = tl.arange(0, BLOCK)
        largest = tl.zeros((BLOCK,), tl.int32)
        for tile in tl.static_range(TILES):
            at = offsets + tile * BLOCK
            x = tl.load(source + at, at < numel - start, 0.0).to(tl.float32)
            largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        largest = tl.max(largest, 0)
        target = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        # Most programs change nothing: a look, even at an old value, saves their atomics.
        if largest > tl.load(target):
            tl.atomic_max(target, largest, sem="relaxed")


def launch_amax(x: Tensor, out: Tensor) -> Callable[..., None]:
    """Raise fp32 ``[1]`` ``out``, which holds 0, to the largest magnitude of ``[R, N]`` ``x``.

    Returns a launch on other tensors alike, as all launchers here.
    """
    if x.numel() == 0:
        return launch_nothing
    if x.is_contiguous():
        x = x.view(1, -1)
    rows, numel = x.shape
    grid = (
        triton.cdiv(numel, _AMAX_BLOCK * _AMAX_TILES),
        min(rows, MAX_GRID_Y),
        triton.cdiv(rows, MAX_GRID_Y),
    )
    sizes = (row_stride(x, 0), rows, numel)
    tile = {"BLOCK": _AMAX_BLOCK, "TILES": _AMAX_TILES, "num_warps": 8}
    launch = Launch(amax_kernel, grid, sizes, tile)
    launch(x, out)
    return launch


@triton.jit
def cast_kernel(
    x_ptr,
    amax_ptr,
    q_ptr,
    q_t_ptr,
    scale_ptr,
    stride,
    rows,
    numel,
    q_stride,
    q_t_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Cast a ``[BLOCK_R, BLOCK_N]`` tile, and write it as it is and transposed.

    The strides of the results are in 16 bytes. Four rows are loaded apart, so that each thread has
    blocks of four by four codes: words of four columns become words of four rows in registers, and
    words are what moves between threads.
    """
    QUARTER: tl.constexpr = BLOCK_R // 4
    scale = tl.div_rn(tl.load(amax_ptr), _MAX_VALUE)
    scale = tl.where(scale < _MIN_SCALE, _MIN_SCALE, scale)  # NaN stays
    inverse = inverse_of(scale)
    column, row = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_R
    if (column == 0) & (row == 0):
        tl.store(scale_ptr, scale)
    VECTOR: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    index = tl.arange(0, QUARTER * BLOCK_N)
    down = tl.arange(0, QUARTER)[:, None]
    word = column // 4 + tl.arange(0, BLOCK_N // 4)[None, :]
    for part in tl.static_range(4):
        rows_left = (rows - row - part + 3) // 4
        source = x_ptr + (row + part).to(tl.int64) * stride + column
        x = load_runs(
            *(source, stride * 4, rows_left, numel - column),
            *(QUARTER, BLOCK_N, VECTOR, 16, EVEN),
        )
        y = x.to(tl.float32) * inverse
        y = tl.fma(y, tl.zeros_like(y), y)  # infinities become NaN
        if not EVEN:  # also where the scale is NaN
            inside = (index // BLOCK_N < rows_left) & (index % BLOCK_N < numel - column)
            y = tl.where(inside, y, 0.0)
        codes = float8_word(*split_four(y, QUARTER * BLOCK_N))
        if ROWS:
            at = (row + part).to(tl.int64) + down * 4
            target = q_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
            target += at * (q_stride * 4) + word
            values = tl.reshape(codes, (QUARTER, BLOCK_N // 4))
            if EVEN:
                tl.store(target, values)
            else:
                tl.store(target, values, (down < rows_left) & (word < q_stride * 4))
        if part == 0:
            first = codes
        elif part == 1:
            second = codes
        elif part == 2:
            third = codes
        else:
            words = transpose_bytes(first, second, third, codes)
    if COLUMNS:
        words = tl.reshape(join_four(*words, QUARTER * BLOCK_N), (QUARTER, BLOCK_N))
        store_transposed(
            *(words, q_t_ptr, q_t_stride, column.to(tl.int64), row),
            *(q_t_stride * 16 - row, numel - column, EVEN),
        )


def launch_cast(
    x: Tensor,
    amax: Tensor,
    q: Tensor,
    q_t: Tensor,
    scale: Tensor,
    *,
    tile: CastTile | None = None,
) -> Callable[..., None]:
    """Launch the kernel with the operator's arguments and results; ``tile`` overrides the table."""
    tile = tile or CAST_TILE
    rows, numel = x.shape
    grid = (1, 1)  # for the scale alone
    if q.numel() or q_t.numel():
        grid = (triton.cdiv(numel, tile.columns), triton.cdiv(rows, tile.rows))
    strides = (row_stride(x, 0), q.shape[1] // ROW_MULTIPLE, q_t.shape[1] // ROW_MULTIPLE)
    launch = Launch(
        cast_kernel,
        grid,
        (strides[0], rows, numel, *strides[1:]),
        {
            "ROWS": q.numel() > 0,
            "COLUMNS": q_t.numel() > 0,
            "EVEN": x.numel() > 0 and rows % tile.rows == 0 and numel % tile.columns == 0,
            "BLOCK_R": tile.rows,
            "BLOCK_N": tile.columns,
            "num_warps": tile.warps,
            "enable_fp_fusion": False,
        },
    )
    launch(x, amax, q, q_t, scale)
    return launch


def launch_quantize(
    x: Tensor, q: Tensor, q_t: Tensor, scale: Tensor, amax: Tensor
) -> Callable[..., None]:
    """Launch both kernels; arguments as of ``launch_cast``, ``amax`` zero before."""
    find, cast = launch_amax(x, amax), launch_cast(x, amax, q, q_t, scale)

    def launch(x: Tensor, q: Tensor, q_t: Tensor, scale: Tensor, amax: Tensor) -> None:
        find(x, amax)
        cast(x, amax, q, q_t, scale)

    return launch


@triton.jit
def _norm_values(centred, pointers, inverse, row, column, rows, numel, R: tl.constexpr):
    """``reference.norm_dequantize`` of a decoded tile, divided by the scale."""
    NORM: tl.constexpr = R.norm
    rstd_ptr, weight_ptr, bias_ptr = pointers
    at = row + tl.arange(0, centred.shape[0]) * ROW_STEP
    if not R.even:
        at = tl.minimum(at, tl.cast(rows, tl.int64) - 1)
    y = centred * tl.load(rstd_ptr + at)[:, None]
    along = column + tl.arange(0, centred.shape[1])
    inside = along < numel
    if R.weight:
        weight = tl.load(weight_ptr + along, inside, 0.0)
        y = y * (factor_of(weight, NORM) * inverse)[None, :]
    else:
        y = y * inverse
    if R.bias:
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
    R: tl.constexpr,
):
    """Decode a tile, apply a norm or an activation, round, and transpose.

    Rows 0, 4, 8, ..., then 1, 5, 9, ... and so on, so that each thread has blocks of four by four
    codes: words of four columns become words of four rows in registers, and words are what moves
    between threads.
    """
    P: tl.constexpr = R.rows // ROW_STEP
    SIZE: tl.constexpr = P * R.columns
    ACTIVATION: tl.constexpr = R.activation
    inverse = inverse_of(tl.load(scale_ptr))
    column = tl.program_id(0).to(tl.int64) * R.columns
    first_row = tl.program_id(1).to(tl.int64) * (P * ROW_STEP)
    pitches = (word_pitch * R.unit, scale_pitch)
    for part in tl.static_range(4):
        row = first_row + part
        y = decode_tile(
            *(message_ptr, pitches, row, column, rows, numel),
            *(inverse if R.norm == "" and R.activation == "" else 1.0, int_to_float, R),
        )
        if R.norm != "":
            pointers = (rstd_ptr, weight_ptr, bias_ptr)
            y = _norm_values(y, pointers, inverse, row, column, rows, numel, R)
        elif R.activation != "":
            y = activate(y, ACTIVATION)
            if R.up:
                y = y * decode_tile(
                    up_ptr, pitches, row, column, rows, numel, inverse, int_to_float, R
                )
            else:
                y = y * inverse
        if not R.even:
            exists = row + tl.arange(0, P)[:, None] * ROW_STEP < rows
            y = tl.where(exists, y, 0.0)
        codes = float8_word(*split_four(y, SIZE))
        if part == 0:
            first = codes
        elif part == 1:
            second = codes
        elif part == 2:
            third = codes
        else:
            words = transpose_bytes(first, second, third, codes)
    words = tl.reshape(join_four(*words, SIZE), (P, R.columns))
    store_transposed(
        *(words, out_ptr, out_stride, column, first_row),
        *(out_stride * 16 - first_row, numel - column, R.even),
    )


def launch_rebuild(
    message: Tensor,
    up: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    out: Tensor,
    *,
    rows: int,
    fmt: MessageFormat,
    norm: str = "",
    activation: str = "",
    tile: RebuildTile | None = None,
) -> Callable[..., None]:
    """Launch the kernel with the arguments of an operator; ``out`` ``[N, round16(T)]`` its result.

    ``rows`` are T; ``norm`` is a kind of norm, ``activation`` a function. ``tile`` overrides the
    choice from the table; it changes the speed, not the bits.
    """
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
    unit = 4 if word_pitch % 4 == 0 else 1
    even = rows % tile.rows == 0 and numel % tile.columns == 0
    used = (up is not None, weight is not None, bias is not None)
    prepared = Launch(
        rebuild_kernel,
        (triton.cdiv(numel, tile.columns), triton.cdiv(rows, tile.rows)),
        (word_pitch // unit, scale_pitch, rows, numel, out.shape[1] // ROW_MULTIPLE, INT_TO_FLOAT),
        {
            "R": Recipe(
                fmt, flat, norm, activation, *used, even, unit, tile.rows, tile.columns, tile.run
            ),
            "num_warps": tile.warps,
            "enable_fp_fusion": False,
        },
    )

    def launch(message: Tensor, up: Tensor | None, *others: Tensor | None) -> None:
        prepared(message.contiguous(), None if up is None else up.contiguous(), *others)

    launch(message, up, rstd, weight, bias, scale, out)
    return launch
