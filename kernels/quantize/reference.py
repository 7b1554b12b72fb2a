"""Encode rows in plain torch: [x - reference ->] Hadamard -> scale -> round -> pack."""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message import reference as blocks
from lq_lightning.kernels.message.chunks import row_chunks


def store_block(
    x: Tensor,
    norm: float,
    out: Tensor,
    numel: int,
    row: int,
    column: int,
    seed: int,
    fmt: MessageFormat,
) -> None:
    """Quantize one transformed block and write it into its rows.

    Args:
        x: ``[R, N]`` fp32 contiguous, N a multiple of the group size; encodes ``x * norm``.
            Overwritten.
        norm: power of two; ``fmt.forward_norm`` for the output of the butterfly, else 1.
        out: ``[R, B]`` the encoded rows that the block belongs to.
        numel: values in a whole row.
        row: index of the first row of the block.
        column: index of the first column of the block.
        seed: for stochastic rounding.
        fmt: the format.
    """
    layout = fmt.layout(numel)
    rows, width = x.shape
    noise = None
    if fmt.stochastic:
        noise = blocks.rounding_noise(seed, row, rows, column, width, fmt.fraction_bits)
    end = layout.padded_numel if fmt.hadamard_size else numel
    grouped = x.view(rows, -1, fmt.group_size)
    scale, minimum = blocks.group_range(grouped, min(end - column, width), norm, fmt)
    codes = blocks.quantize_groups(grouped, norm, scale, minimum, noise, fmt).view_as(x)
    count = min(width, layout.padded_numel - column)
    blocks.store_codes(codes[:, :count].contiguous(), out, column, fmt, layout)
    group = column // fmt.group_size * fmt.scale_nbytes
    blocks.store_scales(scale, out, layout.scale_offset + group, fmt)
    if minimum is not None:
        blocks.store_scales(minimum, out, layout.minimum_offset + group, fmt)


def zero_padding_bytes(out: Tensor, numel: int, fmt: MessageFormat) -> None:
    """Zero the bytes between the sections of encoded rows, so that equal data gives equal bytes."""
    layout = fmt.layout(numel)
    starts = (*layout.plane_offsets, layout.scale_offset, layout.minimum_offset, layout.nbytes)
    sizes = [layout.padded_numel * width // 8 for width in fmt.planes]
    sizes += [layout.num_groups * fmt.scale_nbytes] * (1 if fmt.symmetric else 2)
    for index, size in enumerate(sizes):
        out[:, starts[index] + size : starts[index + 1]] = 0


def quantize(
    x: Tensor,
    reference: Tensor | None,
    fmt: MessageFormat,
    seed: int,
    out: Tensor,
) -> None:
    """Encode ``x`` (or ``x - reference``) into ``out``.

    Args:
        x: ``[R, N]`` floating point, last dimension contiguous.
        reference: same shape as ``x``; the difference is taken in fp32.
        fmt: the format.
        seed: for stochastic rounding.
        out: ``[R, fmt.layout(N).nbytes]`` uint8, last dimension contiguous.
    """
    rows, numel = x.shape
    zero_padding_bytes(out, numel, fmt)
    layout = fmt.layout(numel)
    total = layout.num_groups * fmt.group_size
    for row, row_end, column, column_end in row_chunks(rows, total, fmt.group_size):
        end = min(column_end, numel)
        block = torch.zeros(row_end - row, column_end - column, dtype=torch.float32)
        values = block[:, : end - column]
        values.copy_(x[row:row_end, column:end])
        if reference is not None:
            values.sub_(reference[row:row_end, column:end])
        if fmt.hadamard_size:
            blocks.hadamard_(block, fmt.hadamard_size)
        store_block(block, fmt.forward_norm, out[row:row_end], numel, row, column, seed, fmt)
