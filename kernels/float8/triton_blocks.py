"""Rounding to FP8 as Triton device functions, bit-identical to ``reference.round_to_float8``."""

from __future__ import annotations

import triton
import triton.language as tl

from lq_lightning.kernels.message.triton_blocks import HAS_PTX, select_bytes


@triton.jit
def inverse_of(scale):
    """``1 / scale`` of an fp32 number, rounded once."""
    return tl.div_rn(1.0, scale)


@triton.jit
def _emulated_byte(y, E5M2: tl.constexpr):
    """int32 with the FP8 code of fp32 ``y`` in its low byte, in operations of any machine."""
    MANTISSA: tl.constexpr = 2 if E5M2 else 3
    MIN_EXPONENT: tl.constexpr = -14 if E5M2 else -6
    LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
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
def float8_word(a, b, c, d, E5M2: tl.constexpr):
    """int32 whose bytes are the FP8 codes of four fp32; what is infinite is clipped as well.

    Both halves are widened before they are joined: of ``{low, high}`` ptxas 12.8 leaves the upper
    half undefined where both hold the same, as the zeros beyond the end of a matrix do.
    """
    if HAS_PTX:
        asm: tl.constexpr = (
            """
            {
            .reg .b16 low, high;
            .reg .b32 first, second;
            cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
            mov.b32 first, {low, 0};
            mov.b32 second, {high, 0};
            prmt.b32 $0, first, second, 0x5410;
            }
            """
            if E5M2
            else """
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
        )
        word = tl.inline_asm_elementwise(asm, "=r,f,f,f,f", [a, b, c, d], tl.int32, True, 1)
    else:
        word = _emulated_byte(a, E5M2) | (_emulated_byte(b, E5M2) << 8)
        word |= (_emulated_byte(c, E5M2) << 16) | (_emulated_byte(d, E5M2) << 24)
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
    """Write ``[P, N]`` words, each the codes of four rows of one column, transposed.

    Args:
        words: int32.
        out_ptr: FP8 matrix ``[columns, padded rows]``.
        stride: of it, in 16 bytes.
        column: the first one, int64.
        row: the first one, a multiple of 16.
        rows_left: padded rows from there on.
        columns_left: columns from there on.
        EVEN: whether all rows and columns of the tile exist.
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
