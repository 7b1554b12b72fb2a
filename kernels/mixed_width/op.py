"""The operators that encode, decode and round values of lines of mixed widths.

Shape legend: T tokens, N lines.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lq_lightning.kernels.message.operators import check_float, check_message, define_operator

from . import reference as cpu
from .format import FIRST_PLANE_ROW, MAX_WIDTH, PLANES, mixed_layout

_ROWS = FIRST_PLANE_ROW + len(PLANES)
# Kernels count words and lines in 32 bits.
_MAX_NUMEL = 1 << 31


def _check_values(x: Tensor, rows: Tensor) -> None:
    check_float("x", x.dtype)
    if x.dim() != 2 or x.shape[1] != rows.shape[-1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, rows {tuple(rows.shape)}; expected [T, N] and "
            f"[{_ROWS}, N]. Pass x.view(-1, N) and width_rows(widths) of N widths."
        )
    _check_rows(rows, x.shape[0], x.device)


def _check_rows(rows: Tensor, tokens: int, device: torch.device) -> None:
    if rows.dim() != 2 or rows.shape[0] != _ROWS or rows.device != device:
        raise ValueError(
            f"rows has shape {tuple(rows.shape)} on {rows.device}; expected [{_ROWS}, N] on "
            f"{device}. Pass width_rows(widths) and move it there."
        )
    if tokens * rows.shape[1] >= _MAX_NUMEL:
        raise ValueError(
            f"{tokens} tokens of {rows.shape[1]} lines are too many for one message; allowed: less "
            f"than {_MAX_NUMEL} values. Split the tokens."
        )


def _check_counts(rows: Tensor, counts: Sequence[int]) -> None:
    if len(counts) != MAX_WIDTH or sum(counts) != rows.shape[1]:
        raise ValueError(
            f"counts={list(counts)} does not count {rows.shape[1]} lines by widths from 1 to "
            f"{MAX_WIDTH}. Pass width_counts(widths)."
        )


def _empty_message(x: Tensor, counts: Sequence[int]) -> Tensor:
    nbytes = mixed_layout(counts, x.shape[0]).nbytes
    return torch.empty(nbytes, dtype=torch.uint8, device=x.device)


def _empty_values(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _encode(
    x: Tensor, rows: Tensor, counts: Sequence[int], fitted: bool, rounded: Tensor | None
) -> Tensor:
    _check_values(x, rows)
    _check_counts(rows, counts)
    out = _empty_message(x, counts)
    if x.is_cuda:
        from lq_lightning.kernels.mixed_width.triton_kernels import launch_mixed_quantize

        launch_mixed_quantize(x, rows, counts, fitted, out, rounded)
    else:
        cpu.quantize(x, rows, counts, fitted, out, rounded)
    return out


def _quantize(x: Tensor, rows: Tensor, counts: Sequence[int], fitted: bool = False) -> Tensor:
    """Encode values. CPU and CUDA write the same bits.

    Args:
        x: ``[T, N]`` fp32, bf16 or fp16, any strides.
        rows: ``[8, N]`` int32 of ``width_rows`` on the device of ``x``, contiguous.
        counts: result of ``width_counts`` for the same widths.
        fitted: whether ranges are those with the least error for normal values, ``HALF_RANGES``,
            and not those of the values.

    Returns:
        ``[nbytes]`` uint8.

    Raises:
        ValueError: a shape, dtype or device other than above.
    """
    return _encode(x, rows, counts, fitted, None)


def _quantize_and_round(
    x: Tensor, rows: Tensor, counts: Sequence[int], fitted: bool = False
) -> tuple[Tensor, Tensor]:
    """Return what ``mixed_quantize`` and ``mixed_round_trip`` do; lines are scaled once."""
    rounded = _empty_values(x)
    return _encode(x, rows, counts, fitted, rounded), rounded


def _dequantize(
    message: Tensor, rows: Tensor, counts: Sequence[int], tokens: int, dtype: torch.dtype
) -> Tensor:
    """Decode ``[tokens, N]`` values of ``dtype``. CPU and CUDA return the same bits."""
    check_float("dtype", dtype)
    _check_rows(rows, tokens, message.device)
    _check_counts(rows, counts)
    check_message("message", message, mixed_layout(counts, tokens).nbytes)
    out = message.new_empty(tokens, rows.shape[1], dtype=dtype)
    if message.is_cuda:
        from lq_lightning.kernels.mixed_width.triton_kernels import launch_mixed_dequantize

        launch_mixed_dequantize(message, rows, counts, out)
    else:
        cpu.dequantize(message, rows, counts, out)
    return out


def _round_trip(x: Tensor, rows: Tensor, fitted: bool = False) -> Tensor:
    """Return what decoding the message of ``x`` gives, to the bit, without packing."""
    _check_values(x, rows)
    out = _empty_values(x)
    if x.is_cuda:
        from lq_lightning.kernels.mixed_width.triton_kernels import launch_mixed_round_trip

        launch_mixed_round_trip(x, rows, fitted, out)
    else:
        cpu.round_trip(x, rows, fitted, out)
    return out


mixed_quantize = define_operator(
    "mixed_quantize(Tensor x, Tensor rows, int[] counts, bool fitted=False) -> Tensor",
    _quantize,
    lambda x, rows, counts, fitted=False: _empty_message(x, counts),
)
mixed_quantize_and_round = define_operator(
    "mixed_quantize_and_round(Tensor x, Tensor rows, int[] counts, bool fitted=False)"
    " -> (Tensor, Tensor)",
    _quantize_and_round,
    lambda x, rows, counts, fitted=False: (_empty_message(x, counts), _empty_values(x)),
)
mixed_dequantize = define_operator(
    "mixed_dequantize(Tensor message, Tensor rows, int[] counts, SymInt tokens, ScalarType dtype)"
    " -> Tensor",
    _dequantize,
    lambda message, rows, counts, tokens, dtype: message.new_empty(
        tokens, rows.shape[1], dtype=dtype
    ),
)
mixed_round_trip = define_operator(
    "mixed_round_trip(Tensor x, Tensor rows, bool fitted=False) -> Tensor",
    _round_trip,
    lambda x, rows, fitted=False: _empty_values(x),
)
