"""Decode rows in plain torch: unpack -> scale -> sum over messages -> inverse Hadamard."""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.message import MessageFormat, round_up
from lq_lightning.kernels.message import reference as blocks
from lq_lightning.kernels.message.chunks import row_chunks


def decode_block(
    message: Tensor, numel: int, column: int, count: int, fmt: MessageFormat
) -> Tensor:
    """Decode a block of columns, without the inverse transform.

    Args:
        message: ``[R, B]`` uint8 rows.
        numel: values in a whole row.
        column: first column, a multiple of ``fmt.block_multiple``.
        count: columns, a multiple of 8.
        fmt: the format.

    Returns:
        ``[R, count]`` fp32.
    """
    layout = fmt.layout(numel)
    size = fmt.group_size or count
    groups = -(-count // size)
    values = torch.zeros(message.shape[0], groups * size, dtype=torch.float32)
    codes = blocks.load_codes(message, column, count, fmt, layout)
    values[:, :count] = blocks.dequantize_codes(codes, fmt)
    first = column // fmt.group_size * fmt.scale_nbytes if fmt.group_size else 0
    scale = blocks.load_scales(message, layout.scale_offset + first, groups, fmt)
    grouped = values.view(-1, groups, size).mul_(scale.unsqueeze(-1))
    if not fmt.symmetric:
        minimum = blocks.load_scales(message, layout.minimum_offset + first, groups, fmt)
        grouped.add_(minimum.unsqueeze(-1))
    return values[:, :count]


def reduce_block(
    message: Tensor, numel: int, column: int, count: int, fmt: MessageFormat
) -> Tensor:
    """Decode a block of every message and sum in index order.

    Args:
        message: ``[K, R, B]`` uint8.
        numel: values in a whole row.
        column: first column, a multiple of ``fmt.block_multiple``.
        count: columns, a multiple of 8.
        fmt: the format.

    Returns:
        ``[R, count]`` fp32, still in the transformed domain.
    """
    total = decode_block(message[0], numel, column, count, fmt)
    for index in range(1, message.shape[0]):
        total += decode_block(message[index], numel, column, count, fmt)
    return total


def dequantize(
    message: Tensor, numel: int, fmt: MessageFormat, scale: float, add: bool, out: Tensor
) -> None:
    """Decode messages and sum them in fp32, in index order.

    Args:
        message: ``[K, R, fmt.layout(numel).nbytes]`` uint8, last dimension contiguous; or
            ``[K, P, Q, ...]``.
        numel: values in a row.
        fmt: the format.
        scale: factor of the sum.
        add: add to ``out`` instead of overwriting it (fp32 addition, rounded once).
        out: ``[R, numel]`` or ``[P, Q, numel]`` floating point, last dimension contiguous.
    """
    if out.dim() == 3:
        for index, rows in enumerate(out):
            dequantize(message[:, index], numel, fmt, scale, add, rows)
        return
    layout = fmt.layout(numel)
    rows = message.shape[1]
    # Rounded to fp32 once, on the host, for every device alike.
    factor = torch.tensor(scale * fmt.inverse_norm, dtype=torch.float32)
    total = round_up(layout.padded_numel, fmt.block_multiple)
    for row, row_end, column, column_end in row_chunks(rows, total, fmt.block_multiple):
        count = min(column_end, layout.padded_numel) - column
        values = reduce_block(message[:, row:row_end], numel, column, count, fmt)
        if fmt.hadamard_size:
            values = blocks.hadamard_(values.contiguous(), fmt.hadamard_size)
        target = out[row:row_end, column : min(column_end, numel)]
        values = values.mul_(factor)[:, : target.shape[1]]
        if add:
            values = values.add_(target)
        target.copy_(values)
