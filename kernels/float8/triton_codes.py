"""The transform of small integer codes as Triton device functions, exact and two at a time.

Sums of up to 128 levels of 4 bits are integers below 2048, which fp16 holds: where the transform
lies within a group, scale and minimum can be applied after it, and the order of the sums does not
matter. Half the additions of ``triton_blocks.hadamard``, and half the registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lq_lightning.kernels.message.triton_blocks import HAS_PTX, and_or, select_bytes
from lq_lightning.kernels.message.triton_planes import pairs_of_word


@triton.jit
def _half(x, HIGH: tl.constexpr):
    """fp32 of one of the two fp16 in int32."""
    bits = (x >> 16) if HIGH else x
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _two_halves(low, high):
    """int32 of two fp16, from fp32 that fp16 holds."""
    bits = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _butterfly(x, y):
    """Sums and differences of two fp16 each."""
    if HAS_PTX:
        add: tl.constexpr = "add.rn.f16x2 $0, $1, $2;"
        sub: tl.constexpr = "sub.rn.f16x2 $0, $1, $2;"
        total = tl.inline_asm_elementwise(add, "=r,r,r", [x, y], tl.int32, True, 1)
        rest = tl.inline_asm_elementwise(sub, "=r,r,r", [x, y], tl.int32, True, 1)
    else:
        low, high = _half(x, False), _half(x, True)
        other, other_high = _half(y, False), _half(y, True)
        total = _two_halves(low + other, high + other_high)
        rest = _two_halves(low - other, high - other_high)
    return total, rest


@triton.jit
def _butterfly_of_halves(x):
    """The sum of the two fp16 in the low half, the low one minus the high one in the high half."""
    if HAS_PTX:
        asm: tl.constexpr = "fma.rn.f16x2 $0, $1, $2, $3;"
        swapped = select_bytes(x, x, 0x1032)
        signs = tl.full(x.shape, -0x43FFC400, tl.int32)  # 1 and -1
        y = tl.inline_asm_elementwise(asm, "=r,r,r,r", [x, signs, swapped], tl.int32, True, 1)
    else:
        low, high = _half(x, False), _half(x, True)
        y = _two_halves(low + high, low - high)
    return y


@triton.jit
def _butterfly_of_words(x, NUM: tl.constexpr, DISTANCE: tl.constexpr):
    """Sums and differences of ``[NUM]`` words ``DISTANCE`` apart."""
    pairs = tl.permute(tl.reshape(x, (NUM // (2 * DISTANCE), 2, DISTANCE)), (0, 2, 1))
    low, high = tl.split(pairs)
    total, rest = _butterfly(low, high)
    return tl.reshape(tl.permute(tl.join(total, rest), (0, 2, 1)), (NUM,))


@triton.jit
def _levels(pair, FORMAT: tl.constexpr):
    """Two codes in the low bits of the halves of a word, as levels in fp16."""
    # 1024 and a code are the bits of 1024 + code
    wide = and_or(pair, 0x10001 * ((1 << FORMAT.bits) - 1), 0x64006400)
    if HAS_PTX:
        asm: tl.constexpr = "sub.rn.f16x2 $0, $1, $2;"
        base = tl.full(pair.shape, 0x10001 * (0x6400 + FORMAT.zero_code), tl.int32)
        levels = tl.inline_asm_elementwise(asm, "=r,r,r", [wide, base], tl.int32, True, 1)
    else:
        base = 1024.0 + FORMAT.zero_code
        levels = _two_halves(_half(wide, False) - base, _half(wide, True) - base)
    return levels


@triton.jit
def _across_words(x, NUM: tl.constexpr, WORDS: tl.constexpr, DISTANCE: tl.constexpr = 1):
    """Transform every ``WORDS`` consecutive words; ``DISTANCE`` is for the recursion."""
    if DISTANCE < WORDS:
        x = _butterfly_of_words(x, NUM, DISTANCE)
        x = _across_words(x, NUM, WORDS, 2 * DISTANCE)
    return x


@triton.jit
def transformed_levels(words, NUM: tl.constexpr, FORMAT: tl.constexpr):
    """fp32 ``[8 * NUM]``: the levels of eight 4-bit codes per word, transformed.

    If a thread owns as many consecutive words as a transform has, nothing moves.
    """
    WORDS: tl.constexpr = FORMAT.hadamard_size // 8
    a, b, c, d = pairs_of_word(words, 4)
    a, b = _butterfly(_levels(a, FORMAT), _levels(b, FORMAT))
    c, d = _butterfly(_levels(c, FORMAT), _levels(d, FORMAT))
    a, c = _butterfly(a, c)
    b, d = _butterfly(b, d)
    a = _across_words(_butterfly_of_halves(a), NUM, WORDS)
    b = _across_words(_butterfly_of_halves(b), NUM, WORDS)
    c = _across_words(_butterfly_of_halves(c), NUM, WORDS)
    d = _across_words(_butterfly_of_halves(d), NUM, WORDS)
    even = tl.join(
        tl.join(_half(a, False), _half(a, True)), tl.join(_half(c, False), _half(c, True))
    )
    odd = tl.join(
        tl.join(_half(b, False), _half(b, True)), tl.join(_half(d, False), _half(d, True))
    )
    return tl.reshape(tl.join(even, odd), (8 * NUM,))
