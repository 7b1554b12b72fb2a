"""Building blocks of the codec in plain torch: the truth that the Triton kernels must match.

Every function works on contiguous tensors, does the same IEEE fp32 operations in the same order
as its Triton twin in ``triton_*.py``, and may overwrite its input.

Shape legend: R rows, N elements, G groups, S elements of a group, B bytes.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from .format import SCALE_DTYPES, FloatCode, MessageFormat, RowLayout

# Groups whose scale would be subnormal are stored as zeros: 1/scale could overflow.
MIN_SCALE = 2.0**-126
# Groups whose scale is larger become NaN like those with infinities: 1/scale, times the norm of a
# transform, could be subnormal and too inexact to keep the largest level inside the code.
MAX_SCALE = 2.0**120

_MASK_32 = 0xFFFFFFFF
_HASH_A = 0x7FEB352D
_HASH_B = 0x846CA68B
_ROW_HIGH_FACTOR = 0x85EBCA6B
_QUAD_HIGH_FACTOR = 0xC2B2AE35

_Word = TypeVar("_Word", int, Tensor)  # 32 bits, in an int64 tensor many of them


def hadamard_(x: Tensor, size: int) -> Tensor:
    """Apply the unnormalised Sylvester transform to every ``size`` consecutive elements.

    The butterfly runs over distances 1, 2, 4, ..., ``size / 2``; that order is part of the
    definition, since it decides the rounding.

    Args:
        x: fp32, contiguous, ``numel`` a multiple of ``size``. Overwritten.
        size: power of two.

    Returns:
        ``x``, transformed in place.
    """
    # Transposed, so that every butterfly is one vector operation over contiguous memory.
    current = x.view(-1, size).t().contiguous()
    other = torch.empty_like(current)
    distance = 1
    while distance < size:
        source = current.view(size // (2 * distance), 2, -1)
        target = other.view(size // (2 * distance), 2, -1)
        torch.add(source[:, 0], source[:, 1], out=target[:, 0])
        torch.sub(source[:, 0], source[:, 1], out=target[:, 1])
        current, other = other, current
        distance *= 2
    x.view(-1, size).copy_(current.t())
    return x


def _int32(value: int) -> int:
    """Return the two's complement reading of the low 32 bits."""
    value &= _MASK_32
    return value - (1 << 32) if value >> 31 else value


def _shift_right(x: Tensor, amount: int) -> Tensor:
    """Logical right shift of int32."""
    return (x >> amount).bitwise_and_((1 << (32 - amount)) - 1)


def _mix(x: _Word) -> _Word:
    """Mix 32 bits (two multiply-xorshift rounds; constants of the ``lowbias32`` hash)."""
    x ^= x >> 16
    x = x * _HASH_A & _MASK_32
    x ^= x >> 15
    x = x * _HASH_B & _MASK_32
    return x ^ (x >> 16)


def _mix_words(low: _Word, high: _Word) -> tuple[_Word, _Word]:
    first = _mix(_mix(low ^ 0x9E3779B9) ^ high)
    second = _mix(_mix(high ^ 0x7F4A7C15) ^ low)
    return first, second


def seed_words(seed: int) -> tuple[int, int]:
    """Turn a seed of up to 64 bits into two signed 32-bit words, each depending on all bits."""
    first, second = _mix_words(seed & _MASK_32, seed >> 32 & _MASK_32)
    return _int32(first), _int32(second)


def packed_seed_words(seeds: Tensor) -> Tensor:
    """``seed_words`` of many seeds at once.

    Args:
        seeds: ``[N]`` int64.

    Returns:
        ``[N]`` int64 with the first word in the low 32 bits and the second in the high ones.
    """
    first, second = _mix_words(seeds & _MASK_32, (seeds >> 32) & _MASK_32)
    return (second << 32) | first


def _stream_keys(words: tuple[int, int], row: int, quad_high: int) -> tuple[int, int]:
    first = _mix(words[0] + row & _MASK_32)
    extra = (row >> 32) * _ROW_HIGH_FACTOR + quad_high * _QUAD_HIGH_FACTOR
    second = _mix((words[1] ^ first ^ extra) & _MASK_32)
    return _int32(first), _int32(second)


def rounding_noise(
    seed: int, row: int, num_rows: int, start: int, count: int, noise_bits: int
) -> Tensor:
    """Return the random bits that stochastic rounding adds below the unit before truncating.

    Of every eight columns, 0, 1, 4 and 5 share one 32-bit hash of (column, row, seed), and 2, 3, 6
    and 7 the next; each takes ``noise_bits`` of it from another byte on, cyclically. Beyond 8 bits
    the fine bits of one are the coarse bits of another: their correlation is ``2**-8``. The noise
    depends on the position only, not on who computes it.

    The noise is a multiple of ``u = 2**-noise_bits``. A value that is a multiple of ``u`` is
    rounded without bias; others are first rounded to the nearest multiple, so the expectation is
    off by at most ``u / 2`` of the distance between codes, with a sign that depends on the value.

    Args:
        seed: 64-bit seed.
        row: index of the first row.
        num_rows: number of rows R.
        start: index of the first column, a multiple of 16.
        count: number of columns N, a multiple of 8.
        noise_bits: bits per element, at most 16.

    Returns:
        ``[R, N]`` int32, uniform on ``[0, 2**noise_bits)``.
    """
    words = seed_words(seed)
    noise = torch.empty(num_rows, count // 4, dtype=torch.int32)
    first_quad = start // 4
    segment_start = 0
    while segment_start < count // 4:
        low = (first_quad + segment_start) & _MASK_32
        length = min(count // 4 - segment_start, (1 << 32) - low)
        quads = torch.arange(low, low + length, dtype=torch.int64).to(torch.int32)
        for index in range(num_rows):
            quad_high = (first_quad + segment_start) >> 32
            key_a, key_b = _stream_keys(words, row + index, quad_high)
            x = quads + key_a
            x ^= _shift_right(x, 16)
            x.mul_(_int32(_HASH_A)).add_(key_b)
            x ^= _shift_right(x, 15)
            x.mul_(_int32(_HASH_B))
            x ^= _shift_right(x, 16)
            noise[index, segment_start : segment_start + length] = x
        segment_start += length
    rotated = _shift_right(noise, 8) | noise << 24
    # [.., which hash, rotated or not, which half of it] -> [.., half, hash, rotated]
    each = torch.stack([noise, rotated], dim=-1).view(torch.int16).view(num_rows, -1, 2, 2, 2)
    each = each.permute(0, 1, 4, 2, 3).to(torch.int32)
    return each.bitwise_and_((1 << noise_bits) - 1).reshape(num_rows, count)


def round_scale_up(scale: Tensor, scale_dtype: str) -> Tensor:
    """Round non-negative fp32 to a value of ``scale_dtype`` that is not smaller, kept as fp32.

    Rounding up means that dividing by the scale never leaves the range of the code.
    """
    if scale_dtype == "float32":
        return scale
    if scale_dtype == "bfloat16":
        bits = (scale.view(torch.int32) + 0xFFFF) & -0x10000
        return torch.where(scale.isnan(), scale, bits.view(torch.float32))
    rounded = scale.to(torch.float16)
    up = (rounded.view(torch.int16) + 1).view(torch.float16)
    return torch.where(rounded < scale, up, rounded).to(torch.float32)


def round_minimum_down(minimum: Tensor, scale_dtype: str) -> Tensor:
    """Round fp32 to a value of ``scale_dtype`` that is not greater, kept as fp32; -0 becomes +0."""
    minimum = torch.where(minimum == 0, 0.0, minimum)
    if scale_dtype == "float32":
        return minimum
    if scale_dtype == "bfloat16":
        away_from_zero = torch.where(minimum < 0, 0xFFFF, 0)
        bits = (minimum.view(torch.int32) + away_from_zero) & -0x10000
        return torch.where(minimum.isnan(), minimum, bits.to(torch.int32).view(torch.float32))
    rounded = minimum.to(torch.float16)
    bits = rounded.view(torch.int16)
    down = torch.where(rounded > 0, bits - 1, bits + 1)
    down = torch.where(rounded == 0, torch.tensor(-0x7FFF, dtype=torch.int16), down)
    down = down.to(torch.int16).view(torch.float16)
    return torch.where(rounded > minimum, down, rounded).to(torch.float32)


def group_range(
    x: Tensor, valid: int, norm: float, fmt: MessageFormat
) -> tuple[Tensor, Tensor | None]:
    """Find scale and minimum of each group.

    Args:
        x: ``[R, G, S]`` fp32; the values to encode are ``x * norm``.
        valid: elements of a row that count for the minimum (padding must not widen the range).
        norm: power of two; ``fmt.forward_norm`` for the output of ``hadamard_``, else 1.
        fmt: the format.

    Returns:
        ``[R, G]`` scale and, for asymmetric formats, minimum; values of the scale dtype held as
        fp32. The scale is 0 where the range is too small to divide by and NaN (with minimum 0)
        where anything in the group is not finite or the scale exceeds its dtype or ``MAX_SCALE``.
    """
    minimum = None
    if fmt.symmetric:
        raw = x.abs().amax(-1).mul_(norm).div_(fmt.max_level)
    else:
        groups, size = x.shape[1:]
        if valid == groups * size:
            low, high = x.aminmax(dim=-1)
        else:
            beyond = torch.arange(groups * size).view(groups, size) >= valid
            low = x.masked_fill(beyond, float("inf")).amin(-1)
            high = x.masked_fill(beyond, float("-inf")).amax(-1)
        low, high = low * norm, high * norm
        minimum = round_minimum_down(low, fmt.scale_dtype)
        raw = high.sub_(minimum).div_(fmt.max_level)
    scale = round_scale_up(raw, fmt.scale_dtype)
    scale = torch.where(raw < MIN_SCALE, 0.0, scale)
    broken = ~(scale <= MAX_SCALE)
    scale = scale.masked_fill_(broken, float("nan"))
    if minimum is not None:
        minimum = minimum.masked_fill_(broken, 0.0)
    return scale, minimum


def quantize_groups(
    x: Tensor,
    norm: float,
    scale: Tensor,
    minimum: Tensor | None,
    noise: Tensor | None,
    fmt: MessageFormat,
) -> Tensor:
    """Turn values into stored integer codes.

    Args:
        x: ``[R, G, S]`` fp32, as for ``group_range``. Overwritten.
        norm: as for ``group_range``.
        scale: ``[R, G]`` fp32.
        minimum: ``[R, G]`` fp32 for asymmetric formats.
        noise: same numel as ``x`` for stochastic rounding.
        fmt: the format.

    Returns:
        ``[R, G, S]`` uint8 codes; 0 in groups whose scale is NaN.
    """
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    if minimum is None:
        x.mul_((inverse * norm).unsqueeze(-1))
    else:
        x.mul_(norm).sub_(minimum.unsqueeze(-1)).mul_(inverse.unsqueeze(-1))
        x.clamp_(fmt.min_level, fmt.max_level)  # padding may lie outside the range of the group
    broken = scale.isnan().unsqueeze(-1)
    if broken.any():
        x.masked_fill_(broken, 0.0)
    if noise is not None:
        codes = _round_stochastic(x, noise, fmt)
    elif fmt.float_code is not None:
        codes = _round_to_float(x, fmt.float_code)
    else:
        codes = x.round_().add_(fmt.zero_code).to(torch.uint8)
    return codes.masked_fill_(broken, 0) if broken.any() else codes


def _round_stochastic(x: Tensor, noise: Tensor, fmt: MessageFormat) -> Tensor:
    """Round to ``fraction_bits`` places, add the noise and truncate; ``x`` is overwritten.

    What is a code already stays itself.
    """
    if fmt.float_code is None:
        fixed = x.mul_(2.0**fmt.fraction_bits).round_().to(torch.int32)
        fixed += noise.view_as(x)
        fixed += fmt.zero_code << fmt.fraction_bits
        return fixed.bitwise_right_shift_(fmt.fraction_bits).to(torch.uint8)
    # Its smallest exponent becomes that of fp16, whose bits then begin with those of the code.
    half = x.mul_(2.0 ** (-14 - fmt.min_exponent)).to(torch.float16)
    bits = half.view(torch.int16).to(torch.int32).add_(noise.view_as(x))
    magnitude = bits.bitwise_right_shift(fmt.fraction_bits).bitwise_and_(0x7F)
    return magnitude.bitwise_or_(bits.bitwise_right_shift_(8).bitwise_and_(0x80)).to(torch.uint8)


def _round_to_float(x: Tensor, code: FloatCode) -> Tensor:
    """Round scaled values to the nearest small float by integers; ``x`` is overwritten."""
    bits = x.view(torch.int32)
    sign = bits.bitwise_right_shift(24).bitwise_and_(0x80)
    exponent = bits.bitwise_right_shift(23).bitwise_and_(0xFF)
    exponent = exponent.sub_(127).clamp_(min=code.min_exponent)
    # |x| in units of the last place of its own binade, so rounding is rounding to an integer.
    unit = (127 + code.mantissa_bits - exponent).bitwise_left_shift_(23).view(torch.float32)
    steps = x.abs_().mul_(unit).round_().to(torch.int32)
    # A carry out of the fraction moves into the exponent field by itself.
    steps += exponent.sub_(code.min_exponent).bitwise_left_shift_(code.mantissa_bits)
    return steps.bitwise_or_(sign).to(torch.uint8)


def dequantize_codes(codes: Tensor, fmt: MessageFormat) -> Tensor:
    """Turn stored integer codes into levels, in units of the scale.

    Args:
        codes: uint8, any shape.
        fmt: the format.

    Returns:
        fp32 levels of the same shape.
    """
    code = fmt.float_code
    if code is None:
        return codes.to(torch.float32).sub_(fmt.zero_code)
    # Read the code as an fp32 bit pattern with a tiny exponent, then rescale by a power of two.
    wide = codes.to(torch.int32)
    magnitude = (wide & 0x7F).bitwise_left_shift_(23 - code.mantissa_bits)
    sign = (wide & 0x80).bitwise_left_shift_(24)
    rescale = 2.0 ** (126 + code.min_exponent)
    return magnitude.bitwise_or_(sign).view(torch.float32).mul_(rescale)


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
    if width == 4:
        lanes = flat.view(torch.int16)
        return (lanes | lanes >> 4).bitwise_and_(0xFF).to(torch.uint8)
    if width == 2:
        lanes = flat.view(torch.int32)
        lanes = lanes | lanes >> 6
        return (lanes | lanes >> 12).bitwise_and_(0xFF).to(torch.uint8)
    lanes = flat.view(torch.int64)
    lanes = lanes | lanes >> 7
    lanes |= lanes >> 14
    return (lanes | lanes >> 28).bitwise_and_(0xFF).to(torch.uint8)


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
        return (lanes | lanes << 4).bitwise_and_(0x0F0F).view(torch.uint8)
    if width == 2:
        lanes = flat.to(torch.int32)
        lanes = (lanes | lanes << 12).bitwise_and_(0x000F000F)
        return (lanes | lanes << 6).bitwise_and_(0x03030303).view(torch.uint8)
    lanes = flat.to(torch.int64)
    lanes = (lanes | lanes << 28).bitwise_and_(0x0000000F0000000F)
    lanes = (lanes | lanes << 14).bitwise_and_(0x0003000300030003)
    return (lanes | lanes << 7).bitwise_and_(0x0101010101010101).view(torch.uint8)


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
    if fmt.scale_dtype == "float32":
        bits = values.contiguous().view(torch.int32)
        nan_bits = 0x7FC00000
    else:
        bits = values.to(SCALE_DTYPES[fmt.scale_dtype]).contiguous().view(torch.int16)
        nan_bits = 0x7FC0 if fmt.scale_dtype == "bfloat16" else 0x7E00
    stored = bits.masked_fill(values.isnan(), nan_bits).view(torch.uint8)
    out[:, offset : offset + stored.shape[1]] = stored


def load_scales(message: Tensor, offset: int, count: int, fmt: MessageFormat) -> Tensor:
    """Read ``[R, count]`` values of the scale dtype from byte ``offset`` of each row, as fp32."""
    stored = message[:, offset : offset + count * fmt.scale_nbytes].contiguous()
    return stored.view(SCALE_DTYPES[fmt.scale_dtype]).to(torch.float32)
