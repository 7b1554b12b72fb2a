"""The operators ``lq_lightning::tah_quantize`` and ``lq_lightning::tah_dequantize``.

Shape legend: B sequences, S tokens, N channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.message.operators import check_float, check_message, define_operator

from . import reference as cpu
from .format import parse_tah_format


def _quantize(x: Tensor, format: str) -> Tensor:
    """Encode values.

    CPU and CUDA write the same bits, except that entropies within a rounding error of each other
    may be ranked otherwise. Decoding does not depend on the ranking, which the message tells.

    Args:
        x: ``[B, S, N]`` fp32, bf16 or fp16, contiguous; N a multiple of the tile.
        format: a ``TAHFormat`` as a string.

    Returns:
        ``[nbytes]`` uint8.

    Raises:
        ValueError: a format, shape, dtype or stride other than above.
    """
    fmt = parse_tah_format(format)
    check_float("x", x.dtype)
    if x.dim() != 3 or not x.is_contiguous():
        raise ValueError(
            f"x has shape {tuple(x.shape)} and strides {x.stride()}; expected contiguous [B, S, N]."
            " Pass x.contiguous()."
        )
    out = _fake_quantize(x, format)
    if x.is_cuda:
        from lq_lightning.kernels.tah.triton_kernels import launch_tah_quantize

        launch_tah_quantize(x, fmt, out)
    else:
        cpu.quantize(x, fmt, out)
    return out


def _dequantize(
    message: Tensor, sequences: int, tokens: int, channels: int, format: str, dtype: torch.dtype
) -> Tensor:
    """Decode values. CPU and CUDA return the same bits.

    Args:
        message: ``[nbytes]`` uint8.
        sequences: B.
        tokens: S.
        channels: N.
        format: format of the message.
        dtype: dtype of the result, ``[B, S, N]``.

    Raises:
        ValueError: a format or dtype other than above, or a message of another size.
    """
    fmt = parse_tah_format(format)
    check_float("dtype", dtype)
    check_message("message", message, fmt.layout(sequences, tokens, channels).nbytes)
    out = message.new_empty(sequences, tokens, channels, dtype=dtype)
    if message.is_cuda:
        from lq_lightning.kernels.tah.triton_kernels import launch_tah_dequantize

        launch_tah_dequantize(message, fmt, out)
    else:
        cpu.dequantize(message, fmt, out)
    return out


def _fake_quantize(x: Tensor, format: str) -> Tensor:
    layout = parse_tah_format(format).layout(*x.shape)
    return torch.empty(layout.nbytes, dtype=torch.uint8, device=x.device)


tah_quantize = define_operator(
    "tah_quantize(Tensor x, str format) -> Tensor", _quantize, _fake_quantize
)
tah_dequantize = define_operator(
    "tah_dequantize(Tensor message, SymInt sequences, SymInt tokens, SymInt channels, str format,"
    " ScalarType dtype) -> Tensor",
    _dequantize,
    lambda message, sequences, tokens, channels, format, dtype: message.new_empty(
        sequences, tokens, channels, dtype=dtype
    ),
)
