"""Checks of the arguments of casts to FP8 and of rebuilds."""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.message.checks import check_rows

from .reference import MAX_VALUES

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# Of a matrix on a GPU, so that offsets in a tile fit 32 bits, and tiles the grid.
_MAX_SIDE = 1 << 22


def check_sides(rows: int, row_length: int) -> None:
    """Raise ``NotImplementedError`` for a matrix that the kernels cannot address."""
    if rows > _MAX_SIDE or row_length > _MAX_SIDE:
        raise NotImplementedError(
            f"a matrix of {rows} rows, {row_length} values apart, is too large for the kernels of "
            f"FP8 operands; both must be at most {_MAX_SIDE}. Pass it in parts."
        )


def check_values(x: Tensor) -> None:
    """Raise ``ValueError`` unless ``x`` is a matrix that can be cast."""
    if x.dim() != 2 or x.dtype not in _FLOATS:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}; it must be a matrix of float32, bfloat16 or "
            "float16. Flatten all but its last dimension."
        )
    check_rows("x", x)


def check_cast(x: Tensor, dtype: torch.dtype) -> None:
    """Raise unless ``x`` can be cast to ``dtype``: ``ValueError``, or as ``check_sides``."""
    check_values(x)
    if dtype not in MAX_VALUES:
        raise ValueError(
            f"dtype={dtype} is not supported; allowed: {', '.join(map(str, MAX_VALUES))}."
        )
    if x.is_cuda:
        check_sides(x.shape[0], max(x.shape[1], x.stride(0) if x.shape[0] > 1 else 0))


def check_number(name: str, number: Tensor) -> None:
    """Raise ``ValueError`` unless ``number`` is fp32 of one element."""
    if number.dtype != torch.float32 or number.numel() != 1:
        raise ValueError(
            f"{name} is {number.dtype} {tuple(number.shape)}; it must be float32 of one element, "
            "as float8_quantize returns it."
        )
