"""Byte layout of a message: one encoded row, as pure arithmetic.

A row of ``N`` values becomes the sections below, each starting at a multiple of 16 bytes::

    [ code plane 0 | code plane 1 | ... | scales | minima (asymmetric only) ]

* ``N`` is padded with zeros to ``N_pad``, a multiple of ``max(8, hadamard_size)``.
* A code of 3, 5, 6 or 7 bits is cut into planes of power-of-two width, low bits first
  (3 = 2+1, 5 = 4+1, 6 = 4+2, 7 = 4+2+1). A plane of width ``w`` holds ``N_pad * w / 8`` bytes;
  neighbouring elements share a byte, the element with the lower index in the lower bits.
* One scale (and one minimum) per group of ``group_size`` consecutive elements, or per row; the last
  group may be shorter.

Everything is a function of ``N`` alone, never of the data, so that allocation, receive buffers and
traffic accounting agree.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch

from .codes import CODES, Code, FloatCode, IntegerCode, TableCode, cells_of

ALIGNMENT_NBYTES = 16
FP32_MAX = (2.0 - 2.0**-23) * 2.0**127

PLANES: dict[int, tuple[int, ...]] = {
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
_ROW = "row"


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


@lru_cache(maxsize=256)
def _max_scale(max_level: float, scale_dtype: str) -> float:
    """Return the largest scale that its dtype holds and that keeps all levels finite in fp32."""
    if scale_dtype == "float16":
        return 65504.0
    exact = Fraction(FP32_MAX) / Fraction(max_level)
    places = (24 if scale_dtype == "float32" else 8) - math.frexp(float(exact))[1]
    return float(math.floor(exact * Fraction(2) ** places) / Fraction(2) ** places)


@lru_cache(maxsize=64)
def _thresholds(levels: tuple[float, ...]) -> tuple[float, ...]:
    """Return the middle between neighbours, rounded to fp32."""
    middles = [(low + high) / 2 for low, high in zip(levels[:-1], levels[1:], strict=True)]
    return struct.unpack(f"{len(middles)}f", struct.pack(f"{len(middles)}f", *middles))


_cells = lru_cache(maxsize=64)(cells_of)


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """What the kernels need to know about a codec; travels through the operators as a string.

    Attributes:
        code: a name of ``CODES``.
        group_size: elements that share a scale; 0 if all elements of a row do.
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
    def parameters(self) -> Code:
        """The entry of the code in the table of codes."""
        return CODES[self.code]

    @property
    def kind(self) -> str:
        """``"integer"``, ``"float"`` or ``"table"``."""
        names = {IntegerCode: "integer", FloatCode: "float", TableCode: "table"}
        return names[type(self.parameters)]

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return self.parameters.bits

    @property
    def block_multiple(self) -> int:
        """Columns at whose multiples a row may be cut: whole groups and transforms, whole bytes."""
        return self.group_size or max(16, self.hadamard_size)

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths of the code planes in bits, low bits first."""
        return PLANES[self.bits]

    @property
    def mantissa_bits(self) -> int:
        """Fraction bits of a floating-point code; 0 for others."""
        code = self.parameters
        return code.mantissa_bits if isinstance(code, FloatCode) else 0

    @property
    def min_exponent(self) -> int:
        """Smallest exponent of a floating-point code; 0 for others."""
        code = self.parameters
        return code.min_exponent if isinstance(code, FloatCode) else 0

    @property
    def magnitude_mask(self) -> int:
        """The bits of a floating-point code without its sign, which is the bit above them."""
        return (1 << (self.bits - 1)) - 1

    @property
    def levels(self) -> tuple[float, ...]:
        """Levels of a table code, ascending; empty for others."""
        code = self.parameters
        return code.levels if isinstance(code, TableCode) else ()

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Between the levels of a table code; what equals a threshold takes the lower level."""
        return _thresholds(self.levels)

    @property
    def cells(self) -> tuple[int, ...]:
        """Where among the thresholds 32 cells lie; see ``codes.cells_of``."""
        return _cells(self.thresholds)

    @property
    def max_level(self) -> float:
        """Value of the largest code, in units of the scale."""
        code = self.parameters
        if isinstance(code, FloatCode):
            return code.max_value
        if isinstance(code, TableCode):
            return code.levels[-1]
        return float(2 ** (self.bits - 1) - 1 if self.symmetric else 2**self.bits - 1)

    @property
    def smallest_level(self) -> float:
        """Value of the smallest code above zero, in units of the scale."""
        code = self.parameters
        if isinstance(code, FloatCode):
            return 2.0 ** (code.min_exponent - code.mantissa_bits)
        return min((level for level in self.levels if level > 0.0), default=1.0)

    @property
    def min_level(self) -> float:
        """Value of the smallest code, in units of the scale."""
        return -self.max_level if self.symmetric else 0.0

    @property
    def max_scale(self) -> float:
        """Largest scale of a symmetric format: the dtype holds it, and all levels stay finite."""
        return _max_scale(self.max_level, self.scale_dtype)

    @property
    def max_width(self) -> float:
        """Largest range of a group of an asymmetric format, from its minimum to its maximum."""
        return 65504.0 * self.max_level if self.scale_dtype == "float16" else FP32_MAX

    @property
    def shrunk_exponent(self) -> int:
        """Exponent of the largest magnitude of a group that is shrunk to fit; see ``rounding``."""
        return 13 if self.scale_dtype == "float16" else 125

    @property
    def zero_code(self) -> int:
        """Stored integer of level 0 of integer codes (even, so that ties stay ties)."""
        return 2 ** (self.bits - 1) if self.symmetric and self.kind == "integer" else 0

    @property
    def fraction_bits(self) -> int:
        """Binary places to which scaled values are rounded before noise is added, 7 to 14.

        With the bits of an integer code 16 altogether. There the largest level, computed with a few
        roundings, is exact again, so that noise can never carry it beyond the code. Floating-point
        codes have the bits of fp16 that are below the code: 7 (E4M3), 8 (E5M2) or 9 (E2M1).
        """
        if self.kind == "float":
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
            f"{self.code}/{self.group_size or _ROW}/{symmetry}/{self.hadamard_size}"
            f"/{rounding}/{self.scale_dtype}"
        )

    def layout(self, numel: int) -> RowLayout:
        """Return the layout of a row of ``numel`` values, which may be symbolic in a trace."""
        return _cached_layout(self, numel) if type(numel) is int else _layout(self, numel)


def _layout(fmt: MessageFormat, numel: int) -> RowLayout:
    padded = round_up(numel, max(8, fmt.hadamard_size))
    num_groups = -(-padded // fmt.group_size) if fmt.group_size else int(padded > 0)
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
            f"'code/group_size|{_ROW}/symmetric|asymmetric/hadamard_size/nearest|stochastic/"
            "scale_dtype'. "
            "Build it with str(MessageFormat(...))."
        )
    return MessageFormat(
        code=parts[0],
        group_size=0 if parts[1] == _ROW else int(parts[1]),
        symmetric=parts[2] == "symmetric",
        hadamard_size=int(parts[3]),
        stochastic=parts[4] == "stochastic",
        scale_dtype=parts[5],
    )
