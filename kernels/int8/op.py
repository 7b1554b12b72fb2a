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

from lq_lightning.kernels.float8.op import check_cast
from lq_lightning.kernels.float8.reference import amax as largest_magnitude
from lq_lightning.kernels.int8 import reference as cpu
from lq_lightning.kernels.int8.reference import MAX_HADAMARD_SIZE, ROW_MULTIPLE, second_rows
from lq_lightning.kernels.message import round_up
from lq_lightning.kernels.message.operators import Launched, cached_operator

OUTPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# int32 sums of products of 127 by 127 are exact up to here.
_MAX_NUMEL = (2**31 - 1) // 127**2


def check_quantize(x: Tensor, hadamard_size: int, length: int) -> None:
    """Raise unless ``x`` can be quantized: ``ValueError``, or ``NotImplementedError``."""
    check_cast(x)
    allowed = [2**power for power in range(MAX_HADAMARD_SIZE.bit_length())]
    if hadamard_size not in allowed or x.shape[1] % hadamard_size:
        raise ValueError(
            f"hadamard_size={hadamard_size} does not fit rows of {x.shape[1]} values; it must be a "
            f"power of two up to {MAX_HADAMARD_SIZE} that divides them, as hadamard_size_of finds."
        )
    check_length(x.shape[0], length)
    if x.shape[1] > _MAX_NUMEL:
        raise NotImplementedError(
            f"rows of {x.shape[1]} values are too long for the int32 sums of INT8 products; they "
            f"may have {_MAX_NUMEL}. Choose native matrix products."
        )


def check_length(rows: int, length: int) -> None:
    """Raise ``ValueError`` unless rows are sequences of ``length``, or that is 0."""
    if length < 0 or (length and rows % length):
        raise ValueError(
            f"length={length} is not that of sequences which make up {rows} rows. Pass 0 for rows "
            "that are no sequences."
        )


def check_product(
    q: Tensor,
    scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    second: Tensor,
    length: int,
    dtype: torch.dtype,
) -> None:
    """Raise ``ValueError`` unless these are results of ``int8_quantize`` that fit each other."""
    for name, codes, scales in (("q", q, scale), ("w", w, w_scale)):
        if (
            codes.dtype != torch.int8
            or codes.dim() != 2
            or codes.shape[1] % ROW_MULTIPLE
            or not codes.is_contiguous()
            or scales.dtype != torch.float32
            or scales.shape != codes.shape[:1]
        ):
            raise ValueError(
                f"{name} is {codes.dtype} {tuple(codes.shape)} with scales {scales.dtype} "
                f"{tuple(scales.shape)}; they must be a contiguous int8 matrix of rows of a "
                f"multiple of {ROW_MULTIPLE}, and a float32 scale for each, as of int8_quantize."
            )
    check_length(q.shape[0], length)
    expected = (second_rows(q.shape[0], length), q.shape[1])
    if q.shape[1] != w.shape[1] or second.shape != expected or second.dtype != q.dtype:
        raise ValueError(
            f"q {tuple(q.shape)}, w {tuple(w.shape)} and second {tuple(second.shape)} of sequences "
            f"of {length} do not fit each other. Quantize both operands with one hadamard_size, "
            "and pass second and length as of int8_quantize for q."
        )
    if dtype not in OUTPUT_DTYPES:
        raise ValueError(
            f"dtype={dtype} is not supported; allowed: {', '.join(map(str, OUTPUT_DTYPES))}."
        )


def _fake_int8_quantize(
    x: Tensor, hadamard_size: int, amax: bool, length: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, numel = x.shape[0], round_up(x.shape[1], cpu.ROW_MULTIPLE)
    q = x.new_empty(rows, numel, dtype=torch.int8)
    scale = x.new_empty(rows, dtype=torch.float32)
    second = x.new_empty(cpu.second_rows(rows, length), numel, dtype=torch.int8)
    return q, scale, second, x.new_empty(1 if amax else 0, dtype=torch.float32)


@cached_operator(
    "int8_quantize(Tensor x, int hadamard_size, bool amax, SymInt length)"
    " -> (Tensor q, Tensor scale, Tensor second, Tensor largest)",
    _fake_int8_quantize,
)
def int8_quantize(
    x: Tensor, hadamard_size: int, amax: bool, length: int
) -> tuple[Tensor, ...] | Launched:
    """Quantize the rows of a matrix, reading it once (twice, if longer than 16384).

    A row with NaN or infinity has the scale NaN. So has one whose transform overflows, from a
    magnitude of ``2**121`` on.

    Args:
        x: ``[R, K]`` fp32, bf16 or fp16, last dimension contiguous.
        hadamard_size: size of the transform, a power of two up to 128 that divides K. The same
            for both operands of a product.
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
    check_quantize(x, hadamard_size, length)
    if not x.is_cuda:
        largest = largest_magnitude(x) if amax else x.new_empty(0, dtype=torch.float32)
        return *cpu.quantize(x, hadamard_size, length), largest
    from lq_lightning.kernels.int8.triton_kernels import launch_quantize

    results = _fake_int8_quantize(x, hadamard_size, amax, length)
    return Launched(results, launch_quantize((x, *results), hadamard_size, length))


@cached_operator(
    "int8_matmul(Tensor q, Tensor scale, Tensor w, Tensor w_scale, Tensor second, SymInt length,"
    " ScalarType dtype) -> Tensor",
    lambda q, scale, w, w_scale, second, length, dtype: q.new_empty(
        q.shape[0], w.shape[0], dtype=dtype
    ),
)
def int8_matmul(
    q: Tensor,
    scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    second: Tensor,
    length: int,
    dtype: torch.dtype,
) -> Tensor | Launched:
    """Multiply quantized matrices: ``x @ y.t()``, of which ``q`` and ``w`` were made.

    Sums are exact, and rounded to ``dtype`` once; those of rows with second terms twice. ``q`` is
    ``[R, K16]`` of ``int8_quantize`` with its second terms and length, ``w`` ``[N, K16]`` with the
    same transform.

    Returns:
        ``[R, N]`` fp32, bf16 or fp16, contiguous; NaN where a scale is.
    """
    check_product(q, scale, w, w_scale, second, length, dtype)
    if q.is_cuda:
        from lq_lightning.kernels.int8.triton_kernels import launch_products

        out = q.new_empty(q.shape[0], w.shape[0], dtype=dtype)
        return Launched((out,), launch_products((q, scale, w, w_scale, second, out), length))
    y = cpu.products(q, w, scale, w_scale).to(dtype)
    rows = cpu.rows_with_second(q.shape[0], length)
    exist = rows < q.shape[0]
    rows = rows[exist]
    terms = cpu.products(second[exist], w, scale[rows] * (1.0 / cpu.FINER), w_scale)
    y[rows] = (y[rows].float() + terms).to(dtype)
    return y
