"""Encode values with a residual and keep the new one, in plain torch, in the transformed domain."""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.dequantize.reference import decode_block, reduce_block
from lq_lightning.kernels.message import MessageFormat, round_up
from lq_lightning.kernels.message import reference as blocks
from lq_lightning.kernels.message.chunks import row_chunks, take_rows
from lq_lightning.kernels.quantize.reference import encode_block, zero_padding_bytes


def feedback(
    x: Tensor,
    numel: int,
    stored: MessageFormat,
    target: MessageFormat,
    seed: int,
    residual: Tensor,
    out: Tensor,
    skip: int | None = None,
) -> None:
    """Encode ``x`` plus ``residual`` into ``out``, and what ``out`` leaves out into ``residual``.

    Groups that are not finite decode to NaN in ``out`` and to zero in ``residual``.

    Args:
        x: ``[R, numel]`` floating point, or ``[K, R, stored.layout(numel).nbytes]`` uint8 messages
            of format ``stored``, which are summed; last dimension contiguous.
        numel: values in a row.
        stored: format of ``residual``: symmetric, with the groups and the transform of ``target``.
        target: format of ``out``, symmetric.
        seed: for stochastic rounding in ``target``; ``stored`` is rounded to neaerror.
        residual: ``[R, stored.layout(numel).nbytes]`` uint8.
        out: ``[R, target.layout(numel).nbytes]`` uint8.
        skip: row of ``x``, then of ``R + 1``, to leave out.
    """
    rows, padded = out.shape[0], target.layout(numel).padded_numel
    zero_padding_bytes(out, numel, target)
    zero_padding_bytes(residual, numel, stored)
    # What lies beyond `numel` belongs to the transform, or else is padding and must be zero.
    last = padded if target.hadamard_size else numel
    total = round_up(padded, target.group_size)
    for row, row_end, column, column_end in row_chunks(rows, total, target.group_size):
        count, kept = min(column_end, padded) - column, residual[row:row_end]
        block = torch.zeros(row_end - row, column_end - column, dtype=torch.float32)
        taken = take_rows(x, row, row_end, skip)
        if x.dtype == torch.uint8:
            block[:, :count] = reduce_block(taken, numel, column, count, stored)
        else:
            end = min(column_end, numel)
            block[:, : end - column] = taken[:, column:end]
            if target.hadamard_size:
                blocks.hadamard_(block, target.hadamard_size)
            block.mul_(target.forward_norm)
        block[:, :count] += decode_block(kept, numel, column, count, stored)
        block[:, max(0, last - column) :] = 0
        error = block.clone()
        encode_block(block, 1.0, out[row:row_end], numel, row, column, seed, target)
        sent = decode_block(out[row:row_end], numel, column, count, target)
        error[:, :count] = torch.where(sent.isnan(), 0.0, error[:, :count] - sent)
        encode_block(error, 1.0, kept, numel, row, column, 0, stored)
