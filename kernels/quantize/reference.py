"""Encode rows in plain torch: [x - reference ->] Hadamard -> scale -> round -> pack."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lq_lightning.kernels.message import MessageFormat, round_up
from lq_lightning.kernels.message import reference as blocks
from lq_lightning.kernels.message.chunks import row_chunks, take_rows


def encode_block(
    x: Tensor,
    norm: float,
    out: Tensor,
    numel: int,
    row: int,
    column: int,
    seed: int,
    fmt: MessageFormat,
    row_range: blocks.GroupRange | None = None,
) -> None:
    """Quantize one transformed block and write it into its rows.

    Args:
        x: ``[R, N]`` fp32 contiguous, N a multiple of ``fmt.block_multiple``; encodes ``x * norm``.
            Overwritten.
        norm: power of two; ``fmt.forward_norm`` for the output of the butterfly, else 1.
        out: ``[R, B]`` the encoded rows that the block belongs to.
        numel: values in a whole row.
        row: index of the first row of the block.
        column: index of the first column of the block.
        seed: for stochastic rounding.
        fmt: the format.
        row_range: ``[R, 1]`` range of the whole rows, for formats with one scale per row.
    """
    layout = fmt.layout(numel)
    rows, width = x.shape
    noise = None
    if fmt.stochastic:
        noise = blocks.rounding_noise(seed, row, rows, column, width, fmt.fraction_bits)
    extremes = row_range or block_range(x, numel, column, fmt)
    scaling = blocks.scaling_of(extremes, norm, fmt)
    grouped = x.view(rows, -1, fmt.group_size or width)
    codes = blocks.quantize_groups(grouped, scaling, noise, fmt).view_as(x)
    count = min(width, layout.padded_numel - column)
    blocks.store_codes(codes[:, :count].contiguous(), out, column, fmt, layout)
    group = column // fmt.group_size * fmt.scale_nbytes if fmt.group_size else 0
    blocks.store_scales(scaling.scale, out, layout.scale_offset + group, fmt)
    if scaling.minimum is not None:
        blocks.store_scales(scaling.minimum, out, layout.minimum_offset + group, fmt)


def block_range(x: Tensor, numel: int, column: int, fmt: MessageFormat) -> blocks.GroupRange:
    """Find the extremes of the groups of a transformed block; arguments as for ``encode_block``."""
    end = fmt.layout(numel).padded_numel if fmt.hadamard_size else numel
    rows, width = x.shape
    grouped = x.view(rows, -1, fmt.group_size or width)
    return blocks.group_range(grouped, min(end - column, width), fmt)


def encode_rows(
    block_at: Callable[[int, int, int, int], Tensor],
    norm: float,
    out: Tensor,
    numel: int,
    seed: int,
    fmt: MessageFormat,
    multiple: int,
) -> None:
    """Encode all rows, block by block.

    Args:
        block_at: given ``(row, row_end, column, column_end)``, returns the transformed block, new
            for every call, and no wider than the groups of the row.
        norm: as for ``encode_block``.
        out: ``[R, fmt.layout(numel).nbytes]`` uint8.
        numel: values in a row.
        seed: for stochastic rounding.
        fmt: the format.
        multiple: columns at whose multiples ``block_at`` may cut.
    """
    _zero_padding_bytes(out, numel, fmt)
    total = round_up(fmt.layout(numel).padded_numel, multiple)
    chunks = list(row_chunks(out.shape[0], total, multiple))
    ranges: dict[int, blocks.GroupRange] = {}
    if not fmt.group_size:
        for chunk in chunks:
            extremes = block_range(block_at(*chunk), numel, chunk[2], fmt)
            row = chunk[0]
            ranges[row] = ranges[row].widened(extremes) if row in ranges else extremes
    for chunk in chunks:
        row, row_end, column, _ = chunk
        rows, block = out[row:row_end], block_at(*chunk)
        encode_block(block, norm, rows, numel, row, column, seed, fmt, ranges.get(row))


def _zero_padding_bytes(out: Tensor, numel: int, fmt: MessageFormat) -> None:
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
    skip: int | None = None,
) -> None:
    """Encode ``x`` (or ``x - reference``) into ``out``.

    Args:
        x: ``[R, N]`` or ``[P, Q, N]`` floating point, last dimension contiguous.
        reference: same shape as ``x``; the difference is taken in fp32.
        fmt: the format.
        seed: for stochastic rounding.
        out: ``[R, fmt.layout(N).nbytes]`` uint8, last dimension contiguous; or ``[P, Q, ...]``.
        skip: row of ``x``, then ``[R + 1, N]``, to leave out.
    """
    numel = x.shape[-1]
    if out.dim() == 3:
        rows = out.new_empty(out.shape[:2].numel(), out.shape[2])
        other = None if reference is None else reference.flatten(0, 1)
        quantize(x.flatten(0, 1), other, fmt, seed, rows)
        out.copy_(rows.view_as(out))
        return

    def block_at(row: int, row_end: int, column: int, column_end: int) -> Tensor:
        end = min(column_end, numel)
        block = torch.zeros(row_end - row, column_end - column, dtype=torch.float32)
        values = block[:, : max(0, end - column)]
        values.copy_(take_rows(x, row, row_end, skip)[:, column:end])
        if reference is not None:
            values.sub_(reference[row:row_end, column:end])
        return blocks.hadamard_(block, fmt.hadamard_size) if fmt.hadamard_size else block

    encode_rows(block_at, fmt.forward_norm, out, numel, seed, fmt, fmt.block_multiple)
