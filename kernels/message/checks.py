"""Checks that every operator makes on the tensors it was given, outside of any trace."""

from __future__ import annotations

import torch
from torch import Tensor

from .format import ALIGNMENT_NBYTES

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_float(name: str, dtype: torch.dtype) -> None:
    """Check that values have a dtype that can be encoded, or decoded to.

    Args:
        name: of the argument, for the message.
        dtype: of the values.

    Raises:
        ValueError: it is not float32, bfloat16 or float16.
    """
    if dtype not in _FLOATS:
        raise ValueError(
            f"{name} has dtype {dtype}; allowed: float32, bfloat16, float16. Convert it, e.g. "
            f"{name}.float()."
        )


def check_rows(name: str, rows: Tensor) -> None:
    """Check that the last dimension of ``rows`` is contiguous.

    Args:
        name: of the argument, for the message.
        rows: any tensor.

    Raises:
        ValueError: it is not.
    """
    if rows.shape[-1] > 1 and rows.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {rows.stride(-1)} in its last dimension; rows must be contiguous "
            f"(stride 1). Pass {name}.contiguous()."
        )


def check_message(name: str, message: Tensor, nbytes: int) -> None:
    """Check that ``message`` holds encoded rows at aligned addresses.

    Args:
        name: of the argument, for the message.
        message: uint8, last dimension of ``nbytes``.
        nbytes: bytes of an encoded row.

    Raises:
        ValueError: wrong row length, rows that are not contiguous, or rows that do not start at a
            multiple of 16 bytes.
    """
    if message.shape[-1] != nbytes:
        raise ValueError(
            f"{name} has rows of {message.shape[-1]} bytes, but this format and numel need "
            f"{nbytes}. Decode with the spec and numel that the rows were encoded with."
        )
    check_rows(name, message)
    steps = [
        stride
        for size, stride in zip(message.shape[:-1], message.stride()[:-1], strict=True)
        if size > 1
    ]
    if message.numel() and any(at % ALIGNMENT_NBYTES for at in (message.data_ptr(), *steps)):
        raise ValueError(
            f"{name} starts at address {message.data_ptr():#x} with row strides {steps}; every row "
            f"must start at a multiple of {ALIGNMENT_NBYTES} bytes. Slice buffers at multiples of "
            "spec.nbytes(numel)."
        )
