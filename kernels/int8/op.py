"""The operators ``int8_quantize`` and ``int8_matmul``.

For the forward product of a linear layer: on a pretrained model, rounding both operands to FP8
moves the loss and all gradients, since 3 bits of mantissa are too few for each of its products.
INT8 in steps of a row's own, after a Hadamard transform, is three times as precise and almost as
fast on Hopper (after QuaRot, Ashkboos et al., 2404.00456, for inference; there the transforms are
merged into weights, here both operands are transformed when they are quantized, by blocks of 128).

Shape legend: R rows of K values, ``K16`` is K rounded up to a multiple of 16; N rows of the other
operand; P rows with second terms (see ``reference``). Values are those of the reference, bit for
bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.float8.reference import amax as largest_magnitude
from lq_lightning.kernels.message import round_up
from lq_lightning.kernels.message.calls import facts, find_call, keep_call
from lq_lightning.kernels.message.operators import define_operator

from . import reference as cpu
from .checks import check_product, check_quantize


def _int8_quantize(
    x: Tensor, hadamard_size: int, amax: bool, length: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize the rows of a matrix, reading it once (twice, if longer than 16384).

    A row with NaN or infinity has the scale NaN. So has one whose transform overflows, from a
    magnitude of ``2**121`` on.

    Args:
        x: ``[R, K]`` fp32, bf16 or fp16, last dimension contiguous.
        hadamard_size: of the transform: a power of two up to 128 that divides K. The same for both
            operands of a product.
        amax: whether to return the last result.
        length: S of sequences whose first rows have second terms; 0 for none.

    Returns:
        ``q`` int8 ``[R, K16]``; its scales, fp32 ``[R]``; second terms, int8 ``[P, K16]``, which
        are undefined, and skipped by products, where a sequence has fewer rows than ``FIRST``; fp32
        ``[1]``, the largest magnitude of ``x``: NaN if a value is, 0 without values, or ``[0]``.

    Raises:
        ValueError: another shape, dtype or stride; a size of the transform or a length that does
            not fit it.
        NotImplementedError: K above 133144; on a GPU, a side of more than ``2**22``.
    """
    key = ("int8_quantize", facts(x), hadamard_size, amax, length)
    call = find_call(key)
    if call is not None:
        q, scale, second, largest = call.repeat(x)
        return q, scale, second, largest
    check_quantize(x, hadamard_size, length)
    if not x.is_cuda:
        largest = largest_magnitude(x) if amax else x.new_empty(0, dtype=torch.float32)
        return *cpu.quantize(x, hadamard_size, length), largest
    from .triton_quantize import launch_quantize

    results = _fake_int8_quantize(x, hadamard_size, amax, length)
    keep_call(key, results, launch_quantize(x, hadamard_size, length, *results))
    return results


def _int8_matmul(
    q: Tensor,
    scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    second: Tensor,
    length: int,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply quantized matrices: ``x @ y.t()``, of which ``q`` and ``w`` were made.

    Sums are exact, and rounded to ``dtype`` once; those of rows with second terms twice.

    Args:
        q: ``[R, K16]`` of ``int8_quantize``.
        scale: of ``q``.
        w: ``[N, K16]``, with the same transform.
        w_scale: of ``w``.
        second: of ``q``.
        length: that ``q`` was made with.
        dtype: fp32, bf16 or fp16, of the result.

    Returns:
        ``[R, N]``, contiguous; NaN where a scale is.

    Raises:
        ValueError: tensors that do not fit each other, or another dtype.
        NotImplementedError: more than ``2**22`` rows on a GPU.
    """
    tensors = (q, scale, w, w_scale, second)
    key = ("int8_matmul", *map(facts, tensors), length, dtype)
    call = find_call(key)
    if call is not None:
        return call.repeat(*tensors)[0]
    check_product(*tensors, length, dtype)
    if q.is_cuda:
        from .triton_products import launch_products

        out = _fake_int8_matmul(*tensors, length, dtype)
        keep_call(key, [out], launch_products(*tensors, length, out))
        return out
    y = cpu.products(q, w, scale, w_scale).to(dtype)
    rows = cpu.rows_with_second(q.shape[0], length)
    exist = rows < q.shape[0]
    rows = rows[exist]
    terms = cpu.products(second[exist], w, scale[rows] * (1.0 / cpu.FINER), w_scale)
    y[rows] = (y[rows].float() + terms).to(dtype)
    return y


def _fake_int8_quantize(
    x: Tensor, hadamard_size: int, amax: bool, length: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, numel = x.shape[0], round_up(x.shape[1], cpu.ROW_MULTIPLE)
    q = x.new_empty(rows, numel, dtype=torch.int8)
    scale = x.new_empty(rows, dtype=torch.float32)
    second = x.new_empty(cpu.second_rows(rows, length), numel, dtype=torch.int8)
    return q, scale, second, x.new_empty(1 if amax else 0, dtype=torch.float32)


def _fake_int8_matmul(
    q: Tensor,
    scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    second: Tensor,
    length: int,
    dtype: torch.dtype,
) -> Tensor:
    return q.new_empty(q.shape[0], w.shape[0], dtype=dtype)


int8_quantize = define_operator(
    "int8_quantize(Tensor x, int hadamard_size, bool amax, SymInt length)"
    " -> (Tensor q, Tensor scale, Tensor second, Tensor largest)",
    _int8_quantize,
    _fake_int8_quantize,
)
int8_matmul = define_operator(
    "int8_matmul(Tensor q, Tensor scale, Tensor w, Tensor w_scale, Tensor second, SymInt length,"
    " ScalarType dtype) -> Tensor",
    _int8_matmul,
    _fake_int8_matmul,
)
