"""FP8 codes by the instructions of NVIDIA GPUs from compute capability 8.9 on.

They give the bits of the arithmetic that other GPUs and the interpreter do: exact to decode,
rounded half to even and clipped to the largest finite value to encode.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from lq_lightning.kernels.message import MessageFormat


@triton.constexpr_function
def has_float8_instructions(fmt: MessageFormat, rounds: bool) -> bool:
    """Return whether they exist for a format; ``rounds`` if values are to be rounded to codes."""
    if triton.knobs.runtime.interpret or torch.version.hip is not None:
        return False
    fits = fmt.kind == "float" and fmt.bits == 8 and not (rounds and fmt.stochastic)
    return fits and bool(cuda_capability_geq(8, 9))


@triton.constexpr_function
def _encoding(fmt: MessageFormat) -> str:
    name = "e4m3x2" if fmt.mantissa_bits == 3 else "e5m2x2"
    return (
        "{ .reg .b16 low, high; .reg .b32 first, second;"
        f"cvt.rn.satfinite.{name}.f32 low, $2, $1; cvt.rn.satfinite.{name}.f32 high, $4, $3;"
        # not {low, high}: see `float8_word` in `kernels/float8/triton_blocks.py`
        "mov.b32 first, {low, 0}; mov.b32 second, {high, 0};"
        "prmt.b32 first, first, second, 0x5410; and.b32 $0, first, $5; }"
    )


@triton.constexpr_function
def _decoding(fmt: MessageFormat) -> str:
    name = "e4m3x2" if fmt.mantissa_bits == 3 else "e5m2x2"
    return (
        "{ .reg .b16 low, high, a, b, c, d; .reg .b32 first, second;"
        f"mov.b32 {{low, high}}, $4; cvt.rn.f16x2.{name} first, low;"
        f"cvt.rn.f16x2.{name} second, high; mov.b32 {{a, b}}, first; mov.b32 {{c, d}}, second;"
        "cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }"
    )


@triton.jit
def _four(x):
    """Cut ``[N]`` into four ``[N // 4]`` by the columns of every four."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0] // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def float8_words(y, keep, FORMAT: tl.constexpr):
    """Codes of a ``[GROUPS, GROUP]`` tile of fp32 as int32 of four.

    ``keep`` is ``[GROUPS]`` int32: -1, or 0 where codes are to be 0.
    """
    BLOCK: tl.constexpr = y.shape[0] * y.shape[1]
    a, b, c, d = _four(tl.reshape(y, (BLOCK,)))
    keep, _, _, _ = _four(tl.reshape(tl.broadcast_to(keep[:, None], y.shape), (BLOCK,)))
    ASM: tl.constexpr = _encoding(FORMAT)
    return tl.inline_asm_elementwise(ASM, "=r,f,f,f,f,r", [a, b, c, d, keep], tl.int32, True, 1)


@triton.jit
def float8_levels(words, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """``[BLOCK]`` fp32 of the codes in ``[BLOCK // 4]`` int32."""
    ASM: tl.constexpr = _decoding(FORMAT)
    first, second, third, fourth = tl.inline_asm_elementwise(
        *(ASM, "=f,=f,=f,=f,r", [words]),
        *((tl.float32, tl.float32, tl.float32, tl.float32), True, 1),
    )
    even = tl.join(first, third)
    odd = tl.join(second, fourth)
    return tl.reshape(tl.join(even, odd), (BLOCK,))
