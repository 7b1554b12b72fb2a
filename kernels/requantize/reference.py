"""Decode, sum and encode again in plain torch, without leaving a shared transformed domain."""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.dequantize.reference import reduce_block
from lq_lightning.kernels.message import MessageFormat, round_up
from lq_lightning.kernels.message import reference as blocks
from lq_lightning.kernels.message.chunks import take_rows
from lq_lightning.kernels.quantize.reference import encode_rows


def requantize(
    message: Tensor,
    numel: int,
    source: MessageFormat,
    target: MessageFormat,
    seed: int,
    out: Tensor,
    skip: int | None = None,
) -> None:
    """Sum messages of format ``source`` and encode the sum in format ``target``.

    With equal ``hadamard_size`` the sum stays in the transformed domain; otherwise it is
    transformed back, cut to ``numel`` and transformed again.

    Args:
        message: ``[K, R, source.layout(numel).nbytes]`` uint8, last dimension contiguous.
        numel: values in a row.
        source: format of ``message``.
        target: format of ``out``.
        seed: for stochastic rounding in ``target``.
        out: ``[R, target.layout(numel).nbytes]`` uint8, last dimension contiguous.
        skip: row of ``message``, then of ``R + 1``, to leave out.
    """
    padded = source.layout(numel).padded_numel
    multiple = max(source.block_multiple, target.block_multiple)
    layout = target.layout(numel)
    target_total = round_up(layout.padded_numel, target.block_multiple)
    same_domain = source.hadamard_size == target.hadamard_size
    norm = 1.0 if same_domain else target.forward_norm
    # What lies beyond `numel` belongs to the transform, or else is padding and must be zero.
    last = padded if same_domain and source.hadamard_size else numel

    def block_at(row: int, row_end: int, column: int, column_end: int) -> Tensor:
        count = min(column_end, padded) - column
        values = reduce_block(take_rows(message, row, row_end, skip), numel, column, count, source)
        if not same_domain and source.hadamard_size:
            values = blocks.hadamard_(values.contiguous(), source.hadamard_size)
            values.mul_(source.inverse_norm)
        width = min(column_end, target_total) - column
        block = torch.zeros(row_end - row, width, dtype=torch.float32)
        keep = min(column_end, last, target_total) - column
        block[:, :keep] = values[:, :keep]
        if target.hadamard_size and not same_domain:
            blocks.hadamard_(block, target.hadamard_size)
        return block

    encode_rows(block_at, norm, out, numel, seed, target, multiple)
