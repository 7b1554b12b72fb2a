"""Codes of optimizer states: codebooks of magnitudes, chosen by a table row per group.

Every format works the same way. A group of up to 128 elements has a scale, its largest magnitude
rounded up to bf16, and a row of a codebook, an increasing sequence of levels in ``[0, 1]``. A code
is the number of a level, with the sign in bit 7 where the state has signs::

    decode: value = levels[row, code] * scale                          (one fp32 product)
    encode: code = number of j with |value| > thresholds[row, j] * scale, and the sign

Levels and thresholds are computed in float64 and rounded to fp32 once, so a table look-up and a
product, the same on every device, stand for the powers that the dynamic range expansion takes.

Dynamic range expansion (COAT, section 4.1) raises the values of a group to a power k, in steps of
1/16, before it rounds them to FP8 E4M3. Its centre cancels out against its scale, which leaves
``value = max * (level / 448) ** (1 / k)``: a codebook per k, two constants per group instead of
three. See :func:`exponent_table` for the choice of k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

GROUP_SIZE = 128
NUM_SCALARS = 8
RULES: tuple[str, ...] = ("adamw", "adam", "lion", "sgd", "nesterov")

# k is stored as 16 k. At 3 a group spans a factor of 2**88 before its smallest values become zero;
# less would need levels that fp32 cannot hold.
MIN_EXPONENT = 3
MAX_EXPONENT = 255
PLAIN_EXPONENT = 16
EXPONENT_UNIT = 16
_E4M3_MAX = 448.0
# COAT's bound on the ratio of largest to smallest magnitude after expansion, 448**2 / 2.
_TARGET_OCTAVES = math.log2(_E4M3_MAX**2 / 2)
# The ratio is read off bit patterns, (bits(max) - bits(min)) / 2**23, which falls short of its
# logarithm by at most this (the error of log2(1 + f) ~ f).
_BIT_LOG_ERROR = 0.0860714
EXPONENT_TABLE_SHIFT = 19  # entries are 1/16 octave apart

# Bit patterns of the smallest normal number and of the largest scale, 2**126, whose reciprocal is
# normal too.
SMALLEST_BITS = 0x00800000
LARGEST_SCALE_BITS = 0x7E800000
# Where tables are computed, whatever the default device: the powers must be the same everywhere.
_CPU = torch.device("cpu")


Spacing = Literal["floating", "linear", "dynamic"]


@dataclass(frozen=True, slots=True)
class StateFormat:
    """What the kernels need to know about the codes of one state.

    Attributes:
        name: a name of ``FORMATS``.
        signed: bit 7 of a code is the sign; otherwise it belongs to the level.
        expanded: a group chooses its row; otherwise all use one.
        spacing: of the levels, which says how a code is predicted: ``"floating"`` are powers of
            E4M3's, ``"dynamic"`` are parts of decades.
    """

    name: str
    signed: bool
    expanded: bool = False
    spacing: Spacing = "linear"

    @property
    def quantized(self) -> bool:
        """Whether the state is stored as codes."""
        return self.name != "float32"

    @property
    def num_levels(self) -> int:
        """Magnitudes of a codebook row, a power of two."""
        return 128 if self.signed or self.spacing == "floating" else 256

    @property
    def num_codes(self) -> int:
        """Entries of a row of levels: every level, then every level with the other sign."""
        return 2 * self.num_levels if self.signed else self.num_levels

    def nbytes_per_element(self, length: int) -> float:
        """Return the bytes per element of a state with rows of ``length`` elements."""
        if not self.quantized:
            return 4.0
        constants = 2 + int(self.expanded)
        return 1.0 + constants * groups_per_row(length) / length


FORMATS: tuple[str, ...] = ("expanded_fp8", "fp8", "dynamic8", "int8", "float32")
_SPACINGS: dict[str, Spacing] = {
    "expanded_fp8": "floating",
    "fp8": "floating",
    "dynamic8": "dynamic",
}


@lru_cache(maxsize=32)
def state_format(name: str, signed: bool) -> StateFormat:
    """Return a format by its name.

    Args:
        name: ``expanded_fp8`` (E4M3 with dynamic range expansion), ``fp8`` (E4M3), ``dynamic8``
            (dynamic map), ``int8`` (linear) or ``float32`` (no codes).
        signed: whether the state has negative values.

    Raises:
        ValueError: another name.
    """
    if name not in FORMATS:
        raise ValueError(
            f"state format {name!r} is not known; allowed: {', '.join(FORMATS)}. Choose one."
        )
    return StateFormat(name, signed, name == "expanded_fp8", _SPACINGS.get(name, "linear"))


def row_length(shape: Sequence[int]) -> int:
    """Return the elements of one index of dimension 0, which groups never cross."""
    return math.prod(shape[1:])


def groups_per_row(length: int) -> int:
    """Return the groups of a row of ``length`` elements; the last may be shorter."""
    return -(-length // GROUP_SIZE)


def _e4m3_levels() -> Tensor:
    codes = torch.arange(128, dtype=torch.float64, device=_CPU)
    exponent, fraction = codes.div(8, rounding_mode="floor"), codes % 8
    normal = (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return torch.where(exponent == 0, fraction * 2.0**-9, normal)


def _with_midpoints(levels: Tensor) -> tuple[Tensor, Tensor]:
    """Levels, and between neighbours the point from which on the upper one is nearer."""
    beyond = torch.full((1,), float("inf"), dtype=torch.float64, device=_CPU)
    return levels, torch.cat([(levels[:-1] + levels[1:]) / 2, beyond])


def _expanded_rows(exponents: Sequence[int]) -> tuple[Tensor, Tensor]:
    levels, midpoints = _with_midpoints(_e4m3_levels()[:127] / _E4M3_MAX)
    # Code 127 is NaN in E4M3: no threshold is below it.
    levels, midpoints = (torch.cat([row, row[-1:]]) for row in (levels, midpoints))
    powers = [[EXPONENT_UNIT / exponent] for exponent in exponents]
    column = torch.tensor(powers, dtype=torch.float64, device=_CPU)
    return levels**column, midpoints**column


def _dynamic_levels(signed: bool) -> Tensor:
    """Seven decades, each cut evenly in twice as many parts as the one below; zero and one."""
    levels = [0.0]
    for decade in range(7):
        parts = 2 ** (decade if signed else decade + 1)
        edges = torch.linspace(0.1, 1.0, parts + 1, dtype=torch.float64, device=_CPU)
        middles: list[float] = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        levels += middles
    if signed:
        levels[-1] = 1.0  # no code is left for it
    else:
        levels.append(1.0)
    return torch.tensor(levels, dtype=torch.float64, device=_CPU)


@lru_cache(maxsize=32)
def codebook(fmt: StateFormat, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return levels and thresholds of a format.

    Returns:
        ``[rows, fmt.num_codes]`` and ``[rows, fmt.num_levels]``, fp32 on ``device``: 256 rows (the
        stored exponent is the row; the first three are empty) for expanded formats, else one.

    Source: E4M3 and the powers as in COAT; the dynamic map of 8-bit optimizers (Dettmers et al.),
    except that a signed state has the magnitude 1 in place of 0.993.
    """
    if fmt.expanded:
        levels, thresholds = _expanded_rows(range(MIN_EXPONENT, MAX_EXPONENT + 1))
        padding = levels.new_zeros(MIN_EXPONENT, levels.shape[1])
        levels, thresholds = (torch.cat([padding, rows]) for rows in (levels, thresholds))
    elif fmt.name == "fp8":
        levels, thresholds = _expanded_rows([PLAIN_EXPONENT])
    elif fmt.name == "dynamic8":
        levels, thresholds = (t[None] for t in _with_midpoints(_dynamic_levels(fmt.signed)))
    elif fmt.name == "int8":
        count = fmt.num_levels
        steps = torch.arange(count, dtype=torch.float64, device=_CPU) / (count - 1)
        levels, thresholds = (t[None] for t in _with_midpoints(steps))
    else:
        raise AssertionError(f"{fmt.name} has no codebook")
    if fmt.signed:
        levels = torch.cat([levels, -levels], dim=1)
    return _with_slack(levels, device), _with_slack(thresholds, device)


def _with_slack(rows: Tensor, device: torch.device) -> Tensor:
    """Rows in fp32, with 2048 entries of memory after them, which a kernel may read for NaN."""
    memory = torch.zeros(rows.numel() + 2048, device=device)
    memory[: rows.numel()] = rows.flatten()
    return memory[: rows.numel()].view_as(rows)


@lru_cache(maxsize=8)
def exponent_table(device: torch.device) -> Tensor:
    """Return 16 k by the range of a group.

    The index is ``(bits(max) - bits(min)) >> 19``, with the bit patterns of the largest and of the
    smallest nonzero magnitude as integers: 16 per octave. The value is COAT's
    ``floor(16 * log2(448**2 / 2) / log2(max / min))``, with the largest ratio that has this index,
    so that it is never above COAT's and at most 0.15 octaves' worth below. It is kept within 3 and
    255, which also serves groups of one element or of equal ones, where COAT divides by zero.

    Returns:
        ``[4096]`` uint8 on ``device``.
    """
    index = torch.arange(4096, dtype=torch.float64, device=_CPU)
    octaves = (index + 1) / 16 + _BIT_LOG_ERROR
    exponents = (EXPONENT_UNIT * _TARGET_OCTAVES / octaves).floor()
    return exponents.clamp(MIN_EXPONENT, MAX_EXPONENT).to(torch.uint8).to(device)
