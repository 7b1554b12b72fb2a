"""Tables of codes, scale dtypes and planes, and the byte layout of a message: one encoded row.

A row of ``N`` values becomes the sections below, each starting at a multiple of 16 bytes::

    [ code plane 0 | code plane 1 | ... | scales | minima (asymmetric only) ]

* ``N`` is padded with zeros to ``N_pad``, a multiple of ``max(8, hadamard_size)``.
* A code is cut into the planes of ``PLANES``. A plane of width ``w`` holds ``N_pad * w / 8`` bytes;
  neighbouring elements share a byte, the element with the lower index in the lower bits.
* One scale (and one minimum) per group of ``group_size`` consecutive elements, or per row; the last
  group may be shorter.

The layout depends on ``N`` alone, never on the data, so that allocation, receive buffers and
traffic accounting agree.

A new code or scale dtype is a row of ``CODES`` or ``SCALES`` and a name in
``lq_lightning/codecs/spec.py``. All formats, kernels, checks and tests read these tables;
``tests/codecs/test_truth.py`` says independently what the codes mean. Only a new *kind* of code
needs arithmetic of its own: in ``reference.py``, ``triton_rounding.py`` (encode) and
``triton_codes.py`` (decode).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

import torch

ALIGNMENT_NBYTES = 16
FP32_MAX = (2.0 - 2.0**-23) * 2.0**127
_ROW = "row"

# Widths of a code's planes by its bits; the first plane has the lowest bits.
PLANES: dict[int, tuple[int, ...]] = {
    1: (1,),
    2: (2,),
    3: (2, 1),
    4: (4,),
    5: (4, 1),
    6: (4, 2),
    7: (4, 2, 1),
    8: (8,),
}


@dataclass(frozen=True, slots=True)
class ScaleDtype:
    """Storage of scales and minima.

    Attributes:
        dtype: torch's dtype.
        significand_bits: bits of precision, the implicit one included.
        truncated: low bits of fp32 that are not stored; None for fp16, whose exponent is narrower.
    """

    dtype: torch.dtype
    significand_bits: int
    truncated: int | None

    @property
    def max_value(self) -> float:
        """Largest value that fp32 arithmetic may produce for it."""
        return FP32_MAX if self.truncated is not None else 65504.0

    @property
    def nan_bits(self) -> int:
        """Stored bits of every NaN."""
        return 0x7E00 if self.truncated is None else 0x7FC00000 >> self.truncated


SCALES: dict[str, ScaleDtype] = {
    "float32": ScaleDtype(torch.float32, 24, 0),
    "bfloat16": ScaleDtype(torch.bfloat16, 8, 16),
    "float16": ScaleDtype(torch.float16, 11, None),
}
SCALE_DTYPES: dict[str, torch.dtype] = {name: scale.dtype for name, scale in SCALES.items()}


@dataclass(frozen=True, slots=True)
class Code:
    """Meaning of the codes of one value.

    Integers go from ``-max`` to ``max`` if symmetric, else from 0 to the largest of ``bits``.
    Floats are small floating-point numbers with a sign and with subnormals. Values of a table
    become the nearest of its levels; half way, the lower one.

    Attributes:
        kind: one of the three.
        bits: 2 to 8, the sign included; 8 for floats, at most 5 for tables: a GPU finds a level by
            comparisons, and the value of a code by selections.
        mantissa_bits: explicit fraction bits of floats, 1 to 9; with the exponent's ``bits - 1``.
        min_exponent: exponent of the smallest normal float (also that of subnormals).
        max_value: largest float that is used, to which the largest value of a group is scaled.
            Below ``2**(30 + min_exponent)``: codes are cut from fp16.
        levels: ``2**bits`` ascending levels of a table between -1 and 1, exact in fp32. Zero is one
            of them, so that zeros stay zeros.
    """

    kind: Literal["integer", "float", "table"]
    bits: int
    mantissa_bits: int = 0
    min_exponent: int = 0
    max_value: float = 0.0
    levels: tuple[float, ...] = ()


# From -1 to 1 lie 31 cells of equal width, as many as a warp can look up: the values that round
# to one integer after multiplication by the first number. The second is the cell around zero.
CELLS_PER_UNIT = 15.4
MIDDLE_CELL = 16


@lru_cache(maxsize=64)
def _cells(thresholds: tuple[float, ...]) -> tuple[int, ...]:
    """Return how many thresholds lie below each of 32 cells, so that one comparison is left.

    No two thresholds may lie in one cell, and none so close to the end of its cell that fp32 cannot
    tell on which side a value next to it lies.
    """
    cells = [round(CELLS_PER_UNIT * threshold + MIDDLE_CELL) for threshold in thresholds]
    return tuple(sum(cell < index for cell in cells) for index in range(32))


# Quantiles of the normal distribution, with zero; appendix E of QLoRA (Dettmers et al., 2023), in
# fp32.
_NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)

CODES: dict[str, Code] = {
    **{f"int{bits}": Code("integer", bits) for bits in range(2, 9)},
    "nf4": Code("table", 4, levels=_NF4_LEVELS),
    "fp8_e4m3": Code("float", bits=8, mantissa_bits=3, min_exponent=-6, max_value=448.0),
}


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def section_starts(sizes: Sequence[int]) -> list[int]:
    """Return where sections begin, each at a multiple of 16 bytes, and where the last one ends."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + round_up(size, ALIGNMENT_NBYTES))
    return starts


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Sections of one encoded row; all offsets and sizes in bytes.

    Attributes:
        padded_numel: values that have a code.
        num_groups: scales in the row.
        minimum_offset: start of the minima; equals ``nbytes`` for symmetric formats.
        used: sizes of all sections, in order, without their padding.
        nbytes: a multiple of 16.
    """

    padded_numel: int
    num_groups: int
    plane_offsets: tuple[int, ...]
    scale_offset: int
    minimum_offset: int
    used: tuple[int, ...]
    nbytes: int


@lru_cache(maxsize=256)
def _max_scale(max_level: float, scale: ScaleDtype) -> float:
    """Return the largest scale that its dtype holds and that keeps all levels finite in fp32."""
    exact = Fraction(FP32_MAX) / Fraction(max_level)
    places = scale.significand_bits - math.frexp(float(exact))[1]
    floor = float(math.floor(exact * Fraction(2) ** places) / Fraction(2) ** places)
    return min(floor, scale.max_value)


@lru_cache(maxsize=64)
def _thresholds(levels: tuple[float, ...]) -> tuple[float, ...]:
    """Return the middle between neighbours, rounded to fp32."""
    middles = [(low + high) / 2 for low, high in zip(levels[:-1], levels[1:], strict=True)]
    return struct.unpack(f"{len(middles)}f", struct.pack(f"{len(middles)}f", *middles))


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """Format of a codec for the kernels; operators take it as a string.

    Attributes:
        code: a name of ``CODES``.
        group_size: elements that share a scale; 0 if all elements of a row do.
        symmetric: no stored minimum.
        hadamard_size: length of the transform over consecutive elements, 0 for none.
        stochastic: stochastic instead of nearest-even rounding.
        scale_dtype: a key of ``SCALES``.
    """

    code: str
    group_size: int
    symmetric: bool
    hadamard_size: int
    stochastic: bool
    scale_dtype: str

    @property
    def parameters(self) -> Code:
        """The code's entry in the table."""
        return CODES[self.code]

    @property
    def kind(self) -> str:
        """``"integer"``, ``"float"`` or ``"table"``."""
        return self.parameters.kind

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
        return self.parameters.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Smallest exponent of a floating-point code; 0 for others."""
        return self.parameters.min_exponent

    @property
    def magnitude_mask(self) -> int:
        """Bits of a floating-point code below its sign."""
        return (1 << (self.bits - 1)) - 1

    @property
    def levels(self) -> tuple[float, ...]:
        """Ascending levels of a table; empty for others."""
        return self.parameters.levels

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Thresholds between the levels of a table; values equal to one take the lower level."""
        return _thresholds(self.levels)

    @property
    def cells(self) -> tuple[int, ...]:
        """Thresholds below each of 32 cells; see ``_cells``."""
        return _cells(self.thresholds)

    @property
    def max_level(self) -> float:
        """Value of the largest code, in units of the scale."""
        if self.kind == "float":
            return self.parameters.max_value
        if self.kind == "table":
            return self.levels[-1]
        return float(2 ** (self.bits - 1) - 1 if self.symmetric else 2**self.bits - 1)

    @property
    def smallest_level(self) -> float:
        """Value of the smallest code above zero, in units of the scale."""
        if self.kind == "float":
            return 2.0 ** (self.min_exponent - self.mantissa_bits)
        return min((level for level in self.levels if level > 0.0), default=1.0)

    @property
    def smallest_share(self) -> float:
        """Share of a group's largest magnitude from which on no value is encoded as zero."""
        return self.smallest_level / self.max_level

    @property
    def min_level(self) -> float:
        """Value of the smallest code, in units of the scale."""
        return -self.max_level if self.symmetric else 0.0

    @property
    def max_scale(self) -> float:
        """Largest scale of a symmetric format: the dtype holds it, and all levels stay finite."""
        return _max_scale(self.max_level, self.scale)

    @property
    def max_width(self) -> float:
        """Largest range of a group of an asymmetric format, from its minimum to its maximum."""
        return min(self.scale.max_value * self.max_level, FP32_MAX)

    @property
    def shrunk_exponent(self) -> int:
        """Exponent of the largest magnitude of a shrunk group; see ``reference``."""
        return math.frexp(self.scale.max_value)[1] - 3

    @property
    def zero_code(self) -> int:
        """Stored integer of level 0 of integer codes (even, so that ties stay ties)."""
        return 2 ** (self.bits - 1) if self.symmetric and self.kind == "integer" else 0

    @property
    def fraction_bits(self) -> int:
        """Binary places to which scaled values are rounded before noise is added, 7 to 14.

        Together with an integer code's bits 16: rounding makes the largest level exact again, so
        that noise never carries it beyond the code. Floating-point codes have the bits of fp16 that
        are below the code: 7 (E4M3).
        """
        if self.kind == "float":
            return 10 - self.mantissa_bits
        return 16 - self.bits if self.stochastic else 0

    @property
    def noise_mask(self) -> int:
        """``fraction_bits`` ones in both halves of a 32-bit word."""
        return 0x10001 * ((1 << self.fraction_bits) - 1)

    @property
    def scale(self) -> ScaleDtype:
        """The scale dtype's entry in the table."""
        return SCALES[self.scale_dtype]

    @property
    def scale_nbytes(self) -> int:
        """Bytes of one stored scale."""
        return self.scale.dtype.itemsize

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
    used = [padded * width // 8 for width in fmt.planes]
    used += [num_groups * fmt.scale_nbytes] * (1 if fmt.symmetric else 2)
    starts, planes = section_starts(used), len(fmt.planes)
    scales, minima = starts[planes : planes + 2]
    offsets = tuple(starts[:planes])
    return RowLayout(padded, num_groups, offsets, scales, minima, tuple(used), starts[-1])


_cached_layout = lru_cache(maxsize=4096)(_layout)


@lru_cache(maxsize=1024)
def parse_format(text: str) -> MessageFormat:
    """Parse a result of ``str(MessageFormat(...))``; ``ValueError`` for another string."""
    parts = text.split("/")
    if len(parts) != 6 or parts[0] not in CODES or parts[5] not in SCALES:
        raise ValueError(
            f"format={text!r} is not a message format; expected "
            f"'code/group_size|{_ROW}/symmetric|asymmetric/hadamard_size/nearest|stochastic/"
            "scale_dtype'. Build it with str(MessageFormat(...))."
        )
    return MessageFormat(
        code=parts[0],
        group_size=0 if parts[1] == _ROW else int(parts[1]),
        symmetric=parts[2] == "symmetric",
        hadamard_size=int(parts[3]),
        stochastic=parts[4] == "stochastic",
        scale_dtype=parts[5],
    )
