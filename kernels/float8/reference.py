"""Casts to FP8 with one scale per tensor, in plain torch: the truth of the Triton kernels.

Shape legend: R rows and N columns of a matrix; T tokens, the rows of a matrix in a message.

A value becomes ``value * (1 / scale)`` in fp32, rounded to nearest even. What is larger than the
largest finite value becomes that one; NaN becomes the byte 0x7F, as does infinity in a cast.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_tensor

from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message import reference as blocks
from lq_lightning.kernels.message.matrix import matrix_shape

E4M3 = torch.float8_e4m3fn
MAX_VALUE = 448.0
# Below, scales end. Its inverse times any weight and any inverse standard deviation is finite, so
# that zeros stay zeros. Tensors whose largest magnitude is below 5e-27 lose bits by it.
MIN_SCALE = 2.0**-96
# Rows of operands are multiples of it; cuBLASLt demands that.
ROW_MULTIPLE = 16
NAN_BYTE = 0x7F


def amax(x: Tensor) -> Tensor:
    """Largest magnitude of ``x`` as fp32 ``[1]``; NaN if one value is, 0 without values."""
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return x.abs().amax().float().view(1)


def scale_of(amax: Tensor) -> Tensor:
    """The factor of decoding: ``amax`` over the largest value of E4M3, at least MIN_SCALE."""
    return (amax / MAX_VALUE).clamp_min(MIN_SCALE)


def round_to_float8(scaled: Tensor) -> Tensor:
    """Round fp32 values, already divided by the scale, to E4M3; infinity is clipped too."""
    rounded = scaled.clamp(-MAX_VALUE, MAX_VALUE).to(E4M3).view(torch.uint8)
    return rounded.masked_fill(scaled.isnan(), NAN_BYTE).view(E4M3)


def padded_rows(matrix: Tensor) -> Tensor:
    """Append zeros to the rows of an FP8 matrix up to a multiple of ROW_MULTIPLE; contiguous."""
    missing = -matrix.shape[1] % ROW_MULTIPLE
    return pad_tensor(matrix.view(torch.uint8), (0, missing)).contiguous().view(matrix.dtype)


def transposed(matrix: Tensor) -> Tensor:
    """``padded_rows`` of the transposed FP8 matrix."""
    return padded_rows(matrix.view(torch.uint8).t().contiguous().view(matrix.dtype))


def cast(x: Tensor, scale: Tensor) -> Tensor:
    """Cast ``[R, N]`` fp32, bf16 or fp16 to E4M3, without padding."""
    scaled = x.float() * scale.reciprocal()
    return round_to_float8(scaled.masked_fill(scaled.isinf(), float("nan")))


def transforms_levels(fmt: MessageFormat) -> bool:
    """Whether ``decode`` transforms levels instead of values: integer codes of 4 bits."""
    return fmt.hadamard_size > 0 and fmt.kind == "integer" and fmt.bits == 4


def decode(
    message: Tensor, rows: int, numel: int, fmt: MessageFormat, factor: Tensor | float = 1.0
) -> Tensor:
    """Decode a matrix to fp32 ``[T, N]``, times ``factor``.

    This is ``decode_matrix`` up to the rounding of fp32, in what GPUs are faster at: the factor is
    multiplied into the scales and minima, and the minimum is added in the multiplication by the
    scale, which rounds once. Where ``transforms_levels``, the inverse transform is that of the
    levels, integers whose sums are exact; scale and minimum follow.
    """
    if rows * numel == 0:
        return torch.zeros(rows, numel, dtype=torch.float32)
    count, length = matrix_shape(fmt, rows, numel)
    layout, size, group = fmt.layout(length), fmt.hadamard_size, fmt.group_size
    codes = blocks.load_codes(message, 0, layout.padded_numel, fmt.planes, layout.plane_offsets)
    values = torch.zeros(count, layout.num_groups * group, dtype=torch.float32)
    values[:, : layout.padded_numel] = blocks.dequantize_codes(codes, fmt)
    if transforms_levels(fmt):
        values = blocks.hadamard_(values, size)
    values = values.view(count, layout.num_groups, group)
    factor = factor * fmt.inverse_norm
    scale = blocks.load_scales(message, layout.scale_offset, layout.num_groups, fmt)
    scale = (scale * factor)[..., None]
    if fmt.symmetric:
        values = values * scale
    else:
        minimum = blocks.load_scales(message, layout.minimum_offset, layout.num_groups, fmt)
        minimum = (minimum * factor)[..., None]
        if transforms_levels(fmt):  # the transform of a constant
            values = values * scale
            values[..., ::size] += minimum * size
        else:
            values = (values.double() * scale + minimum).float()
    if size and not transforms_levels(fmt):
        values = blocks.hadamard_(values.contiguous(), size)
    return values.view(count, -1)[:, :length].reshape(rows, numel)
