"""Codes and scales as the bytes of encoded rows, in plain torch.

Shape legend: R rows, N elements, G groups, B bytes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .format import MessageFormat, RowLayout

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# Codes that share a byte are packed and unpacked as one integer, a byte each.
_LANES = {4: torch.int16, 2: torch.int32, 1: torch.int64}
_FACTORS = {
    width: sum(1 << (8 - width) * index for index in range(1, 8 // width + 1)) for width in _LANES
}


def pack_plane(codes: Tensor, width: int) -> Tensor:
    """Pack the low ``width`` bits of uint8 codes, neighbours sharing a byte, low bits first.

    Args:
        codes: uint8, contiguous, ``numel`` a multiple of 8, values below ``2**width``.
        width: 1, 2, 4 or 8.

    Returns:
        1-D uint8 of ``numel * width / 8`` bytes.
    """
    flat = codes.reshape(-1)
    if width == 8:
        return flat
    # The product brings all codes of a lane together in its last byte; no two share a bit.
    bits, factor = 64 // width, _FACTORS[width]
    lanes = flat.view(_LANES[width]) * factor
    return lanes.bitwise_right_shift_(bits - 8).to(torch.uint8)


def unpack_plane(packed: Tensor, width: int) -> Tensor:
    """Undo ``pack_plane``.

    Args:
        packed: uint8, contiguous.
        width: 1, 2, 4 or 8.

    Returns:
        1-D uint8 of ``numel * 8 / width`` codes.
    """
    flat = packed.reshape(-1)
    if width == 8:
        return flat
    if width == 4:
        lanes = flat.to(torch.int16)
        lanes |= lanes << 4
        return lanes.bitwise_and_(0x0F0F).view(torch.uint8)
    # 3 to 8 times as fast as to shift and mask
    lanes = _lanes_of_bytes(width).index_select(0, flat.to(torch.int32))
    return lanes.view(torch.uint8)


@lru_cache(maxsize=2)
def _lanes_of_bytes(width: int) -> Tensor:
    """Return what each byte is unpacked to: ``[256]`` of the dtype of lanes."""
    byte = torch.arange(256, dtype=torch.uint8, device="cpu").unsqueeze(1)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device="cpu")
    return ((byte >> shifts) & ((1 << width) - 1)).view(_LANES[width]).view(-1)


def store_codes(
    codes: Tensor, out: Tensor, start: int, fmt: MessageFormat, layout: RowLayout
) -> None:
    """Write codes into the planes of encoded rows.

    Args:
        codes: ``[R, N]`` uint8, contiguous, N a multiple of 8.
        out: ``[R, B]`` uint8 rows.
        start: column of the first code, a multiple of 8.
        fmt: the format.
        layout: of the whole row.
    """
    rows = codes.shape[0]
    shift = 0
    for width, offset in zip(fmt.planes, layout.plane_offsets, strict=True):
        part = codes
        if len(fmt.planes) > 1:
            part = (codes >> shift).bitwise_and_((1 << width) - 1)
        packed = pack_plane(part, width).view(rows, -1)
        begin = offset + start * width // 8
        out[:, begin : begin + packed.shape[1]] = packed
        shift += width


def load_codes(
    message: Tensor, start: int, count: int, fmt: MessageFormat, layout: RowLayout
) -> Tensor:
    """Read codes from the planes of encoded rows.

    Args:
        message: ``[R, B]`` uint8 rows.
        start: column of the first code, a multiple of 8.
        count: codes to read per row, a multiple of 8.
        fmt: the format.
        layout: of the whole row.

    Returns:
        ``[R, count]`` uint8.
    """
    rows = message.shape[0]
    codes: Tensor | None = None
    shift = 0
    for width, offset in zip(fmt.planes, layout.plane_offsets, strict=True):
        begin = offset + start * width // 8
        packed = message[:, begin : begin + count * width // 8].contiguous()
        part = unpack_plane(packed, width).view(rows, count)
        codes = part if codes is None else codes | part << shift
        shift += width
    if codes is None:
        raise AssertionError(f"{fmt} has no code plane")
    return codes


def store_scales(values: Tensor, out: Tensor, offset: int, fmt: MessageFormat) -> None:
    """Write ``[R, G]`` fp32 values, exact in the scale dtype, at byte ``offset`` of each row.

    NaN is written as one fixed bit pattern: what a cast makes of it depends on the machine.
    """
    bits = values.to(fmt.scale.dtype).contiguous().view(_INTEGERS[fmt.scale_nbytes])
    stored = bits.masked_fill(values.isnan(), fmt.scale.nan_bits).view(torch.uint8)
    out[:, offset : offset + stored.shape[1]] = stored


def load_scales(message: Tensor, offset: int, count: int, fmt: MessageFormat) -> Tensor:
    """Read ``[R, count]`` values of the scale dtype from byte ``offset`` of each row, as fp32."""
    stored = message[:, offset : offset + count * fmt.scale_nbytes].contiguous()
    return stored.view(fmt.scale.dtype).to(torch.float32)
