"""Checks of the arguments of INT8 products."""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.float8.checks import check_sides, check_values

from .reference import MAX_HADAMARD_SIZE, ROW_MULTIPLE, second_rows

OUTPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# int32 sums of products of 127 by 127 are exact up to here.
_MAX_NUMEL = (2**31 - 1) // 127**2


def check_quantize(x: Tensor, hadamard_size: int, length: int) -> None:
    """Raise unless ``x`` can be quantized: ``ValueError``, or ``NotImplementedError``."""
    check_values(x)
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
    if x.is_cuda:
        check_sides(x.shape[0], max(x.shape[1], x.stride(0) if x.shape[0] > 1 else 0))


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
