"""Byte layout of a message: one encoded row, as pure arithmetic.

A row of ``N`` values becomes the sections below, each starting at a multiple of 16 bytes::

    [ code plane 0 | code plane 1 | ... | scales | minima (asymmetric only) ]

* ``N`` is padded with zeros to ``N_pad``, a multiple of ``max(8, hadamard_size)``.
* A code of 3, 5, 6 or 7 bits is cut into planes of power-of-two width, low bits first
  (3 = 2+1, 5 = 4+1, 6 = 4+2, 7 = 4+2+1). A plane of width ``w`` holds ``N_pad * w / 8`` bytes;
  neighbouring elements share a byte, the element with the lower index in the lower bits.
* One scale (and one minimum) per group of ``group_size`` consecutive elements; the last group may
  be shorter.

Everything is a function of ``N`` alone, never of the data, so that allocation, receive buffers and
traffic accounting agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

ALIGNMENT_NBYTES = 16

_PLANES: dict[int, tuple[int, ...]] = {
    2: (2,),
    3: (2, 1),
    4: (4,),
    5: (4, 1),
    6: (4, 2),
    7: (4, 2, 1),
    8: (8,),
}

SCALE_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class FloatCode:
    """Parameters of a small floating-point code.

    Attributes:
        mantissa_bits: explicit fraction bits.
        min_exponent: exponent of the smallest normal value (also that of subnormals).
        max_value: largest finite value.
    """

    mantissa_bits: int
    min_exponent: int
    max_value: float


FLOAT_CODES: dict[str, FloatCode] = {
    "fp8_e4m3": FloatCode(mantissa_bits=3, min_exponent=-6, max_value=448.0),
    "fp8_e5m2": FloatCode(mantissa_bits=2, min_exponent=-14, max_value=57344.0),
}
INTEGER_CODES: tuple[str, ...] = tuple(f"int{bits}" for bits in range(2, 9))
CODES: tuple[str, ...] = INTEGER_CODES + tuple(FLOAT_CODES)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the sections of one encoded row lie; all offsets and sizes in bytes.

    Attributes:
        numel: values in the row.
        padded_numel: values that have a code.
        num_groups: scales in the row.
        plane_offsets: start of each code plane.
        scale_offset: start of the scales.
        minimum_offset: start of the minima; equals ``nbytes`` for symmetric formats.
        nbytes: bytes of the row, a multiple of 16.
    """

    numel: int
    padded_numel: int
    num_groups: int
    plane_offsets: tuple[int, ...]
    scale_offset: int
    minimum_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """What the kernels need to know about a codec; travels through the operators as a string.

    Attributes:
        code: a name of ``CODES``.
        group_size: elements that share a scale.
        symmetric: no stored minimum.
        hadamard_size: length of the transform over consecutive elements, 0 for none.
        stochastic: stochastic instead of nearest-even rounding.
        scale_dtype: a key of ``SCALE_DTYPES``.
    """

    code: str
    group_size: int
    symmetric: bool
    hadamard_size: int
    stochastic: bool
    scale_dtype: str

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return 8 if self.code in FLOAT_CODES else int(self.code[3:])

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths of the code planes in bits, low bits first."""
        return _PLANES[self.bits]

    @property
    def float_code(self) -> FloatCode | None:
        """Parameters of the floating-point code; None for integer codes."""
        return FLOAT_CODES.get(self.code)

    @property
    def mantissa_bits(self) -> int:
        """Fraction bits of a floating-point code; 0 for integer codes."""
        return 0 if self.float_code is None else self.float_code.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Smallest exponent of a floating-point code; 0 for integer codes."""
        return 0 if self.float_code is None else self.float_code.min_exponent

    @property
    def max_level(self) -> float:
        """Value of the largest code, in units of the scale."""
        if self.float_code is not None:
            return self.float_code.max_value
        return float(2 ** (self.bits - 1) - 1 if self.symmetric else 2**self.bits - 1)

    @property
    def min_level(self) -> float:
        """Value of the smallest code, in units of the scale."""
        return -self.max_level if self.symmetric else 0.0

    @property
    def zero_code(self) -> int:
        """Stored integer of level 0 (even, so that an offset never moves a rounding tie)."""
        return 2 ** (self.bits - 1) if self.symmetric and self.float_code is None else 0

    @property
    def fraction_bits(self) -> int:
        """Binary places to which scaled values are rounded before noise is added, 7 to 14.

        With the bits of an integer code 16 altogether. There the largest level, computed with a few
        roundings, is exact again, so that noise can never carry it beyond the code. Floating-point
        codes have the bits of fp16 that are below the code: 8 (E5M2) or 7 (E4M3).
        """
        if self.float_code is not None:
            return 10 - self.mantissa_bits
        return 16 - self.bits if self.stochastic else 0

    @property
    def noise_mask(self) -> int:
        """``fraction_bits`` ones in both halves of a 32-bit word."""
        return 0x10001 * ((1 << self.fraction_bits) - 1)

    @property
    def scale_nbytes(self) -> int:
        """Bytes of one stored scale."""
        return 4 if self.scale_dtype == "float32" else 2

    @property
    def forward_norm(self) -> float:
        """Factor of the forward transform, a power of two (1 without transform)."""
        return 2.0 ** -(self.hadamard_size.bit_length() // 2) if self.hadamard_size else 1.0

    @property
    def inverse_norm(self) -> float:
        """Factor of the inverse transform; times ``forward_norm`` gives 1/size exactly."""
        if not self.hadamard_size:
            return 1.0
        return 1.0 / (self.hadamard_size * self.forward_norm)

    def __str__(self) -> str:
        """Encode as the string that the operators take; ``parse`` is the inverse."""
        symmetry = "symmetric" if self.symmetric else "asymmetric"
        rounding = "stochastic" if self.stochastic else "nearest"
        return (
            f"{self.code}/{self.group_size}/{symmetry}/{self.hadamard_size}"
            f"/{rounding}/{self.scale_dtype}"
        )

    def layout(self, numel: int) -> RowLayout:
        """Return the layout of a row of ``numel`` values, which may be symbolic in a trace."""
        return _cached_layout(self, numel) if type(numel) is int else _layout(self, numel)


def _layout(fmt: MessageFormat, numel: int) -> RowLayout:
    padded = round_up(numel, max(8, fmt.hadamard_size))
    num_groups = -(-padded // fmt.group_size)
    offset = 0
    plane_offsets = []
    for width in fmt.planes:
        plane_offsets.append(offset)
        offset += round_up(padded * width // 8, ALIGNMENT_NBYTES)
    scale_offset = offset
    offset += round_up(num_groups * fmt.scale_nbytes, ALIGNMENT_NBYTES)
    minimum_offset = offset
    if not fmt.symmetric:
        offset += round_up(num_groups * fmt.scale_nbytes, ALIGNMENT_NBYTES)
    return RowLayout(
        numel, padded, num_groups, tuple(plane_offsets), scale_offset, minimum_offset, offset
    )


_cached_layout = lru_cache(maxsize=4096)(_layout)


@lru_cache(maxsize=1024)
def parse_format(text: str) -> MessageFormat:
    """Parse the string form of a format.

    Args:
        text: what ``str(MessageFormat(...))`` returns.

    Returns:
        The format.

    Raises:
        ValueError: ``text`` is not such a string.
    """
    parts = text.split("/")
    if len(parts) != 6 or parts[0] not in CODES or parts[5] not in SCALE_DTYPES:
        raise ValueError(
            f"format={text!r} is not a message format; expected "
            "'code/group_size/symmetric|asymmetric/hadamard_size/nearest|stochastic/scale_dtype'. "
            "Build it with str(MessageFormat(...))."
        )
    return MessageFormat(
        code=parts[0],
        group_size=int(parts[1]),
        symmetric=parts[2] == "symmetric",
        hadamard_size=int(parts[3]),
        stochastic=parts[4] == "stochastic",
        scale_dtype=parts[5],
    )
