"""Messages of matrices: layout of ``[T, N]`` values in encoded rows, and their reference.

Where N is a multiple of ``MessageFormat.block_multiple``, no group and no transform crosses a row
of the matrix, and the matrix is one encoded row, without padding between rows. Any other matrix has
one encoded row per row.

Shape legend: T rows and N columns of the matrix, R encoded rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.message.operators import check_message
from lq_lightning.kernels.message.reference import dequantize, quantize

from .format import MessageFormat, parse_format


def parse_matrix_format(text: str) -> MessageFormat:
    """Parse the format of a matrix, which has groups and rounds to nearest.

    Raises:
        ValueError: not the string of a ``MessageFormat``, or stochastic rounding.
        NotImplementedError: one scale per row; the kernels of matrices see a group once.
    """
    fmt = parse_format(text)
    if not fmt.group_size:
        raise NotImplementedError(
            f"format={text!r} has one scale per row; messages of matrices need groups. Choose a "
            "group_size of 16 to 4096."
        )
    if fmt.stochastic:
        raise ValueError(
            f"format={text!r} rounds stochastically; messages of matrices have no seed. Choose "
            "rounding='nearest'."
        )
    return fmt


def is_flat(fmt: MessageFormat, numel: int) -> bool:
    """Return whether matrices of ``numel`` columns are one encoded row."""
    return numel % fmt.block_multiple == 0


def matrix_shape(fmt: MessageFormat, rows: int, numel: int) -> tuple[int, int]:
    """Return R, the encoded rows of a ``[rows, numel]`` matrix, and the values in each."""
    return (1, rows * numel) if is_flat(fmt, numel) else (rows, numel)


def empty_message(fmt: MessageFormat, rows: int, numel: int, device: torch.device) -> Tensor:
    """Return ``[R, nbytes]`` uint8 for a ``[rows, numel]`` matrix; sizes may be symbolic."""
    count, length = matrix_shape(fmt, rows, numel)
    return torch.empty(count, fmt.layout(length).nbytes, dtype=torch.uint8, device=device)


def check_matrix(name: str, message: Tensor, rows: int, numel: int, fmt: MessageFormat) -> None:
    """Raise ``ValueError`` unless ``message`` can hold a ``[rows, numel]`` matrix."""
    count, length = matrix_shape(fmt, rows, numel)
    if message.dtype != torch.uint8 or message.dim() != 2 or message.shape[0] != count:
        raise ValueError(
            f"{name} is {message.dtype} {tuple(message.shape)}; a [{rows}, {numel}] matrix in "
            f"{fmt} has {count} encoded rows: torch.uint8 ({count}, {fmt.layout(length).nbytes}). "
            "Decode with the format and sizes that it was encoded with."
        )
    check_message(name, message, fmt.layout(length).nbytes)


def encode_matrix(x: Tensor, fmt: MessageFormat) -> Tensor:
    """Encode a ``[T, N]`` matrix of floats on the CPU, as the operator ``quantize`` would."""
    rows, numel = x.shape
    message = empty_message(fmt, rows, numel, x.device)
    quantize(x.contiguous().view(matrix_shape(fmt, rows, numel)), None, fmt, 0, message)
    return message


def decode_matrix(message: Tensor, rows: int, numel: int, fmt: MessageFormat) -> Tensor:
    """Undo ``encode_matrix``: return ``[rows, numel]`` fp32 of an ``[R, nbytes]`` message."""
    out = torch.empty(rows, numel, dtype=torch.float32, device=message.device)
    shape = matrix_shape(fmt, rows, numel)
    dequantize(message[None], shape[1], fmt, 1.0, False, out.view(shape))
    return out
