"""Codes of optimizer states: sets of levels, one of which a group of elements chooses.

States are no messages: codes, scales and exponents are tensors of their own, which FSDP2 shards and
checkpoints hold, and a group chooses its levels.

A group of up to 128 elements (``int8``: 32) has a scale, bf16, and where the format is expanded an
exponent, a byte. In all formats but ``int8`` a code is the number of a level, with the sign in bit
7 where the state has signs, and a value between two levels becomes one of them by chance, so that
small changes add up over many steps instead of being rounded away in each: with ``beta2 = 0.999`` a
second moment changes by a thousandth, far less than half the distance between two levels.

* Signed states (first moments, momentum): the mean over the noise is the value itself.
* Unsigned states (second moments): the mean of the *logarithm* is kept, to first order. Noise in v
  makes the mean of ``1 / sqrt(v)`` larger than that of v says; an unbiased v would give updates
  that are too large, by 2% where levels are 9% apart. Nothing but zero becomes zero: values under
  the smallest level become that level, so that updates are never divided by too little.

``expanded_fp8`` is FP8 whose eight bits each group splits between exponent and mantissa, as its
range needs it: what COAT's dynamic range expansion (section 4.1) does with powers of E4M3. A level
is an fp32 number with n mantissa bits, n from 7 to 2 being the exponent byte of the group, so that
decoding and encoding take a few integer operations on bit patterns.

* Unsigned: the 255 such numbers up to the group's largest, which is the scale. n is the largest
  that reaches down to the group's smallest value: 2 octaves with 7 bits, 64 with 2. Levels with n
  bits are also levels with more, whatever the scale: a new scale or a finer n moves no value. That
  matters where values change slowly, since to round all of them anew would add more noise than the
  steps from one level to the next.
* Signed: the 127 such numbers above a power of two, the scale, less the scale: evenly spaced
  around zero, then ever wider. n is the largest for which the first level is at most twice the
  group's smallest value: 7 octaves with 7 bits, 34 with 2.

``dynamic8`` has a codebook, increasing numbers in ``[0, 1]``, times the scale: the largest
magnitude, rounded up to bf16 if signed and to a power of two if not, which seldom changes.

``int8``, for signed states only, is a signed integer times the scale: the largest magnitude of 32
elements over 127, rounded up to bf16. A value becomes the nearest level if it has changed by a
level or more in this step, and otherwise one of the two by chance. That is for Muon, whose momentum
changes by a twentieth of a gradient that is several times as large, mostly by several levels. Such
changes are not rounded away, and chance would double the variance of their errors. But where a
gradient stays zero the momentum has to end, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

GROUP_SIZE = 128  # of all formats but int8
NUM_SCALARS = 8
RULES: tuple[str, ...] = ("adamw", "adam", "lion", "sgd", "nesterov")

# Mantissa bits of expanded formats, and codes above zero of either sign.
MOST_MANTISSA_BITS = 7
LEAST_MANTISSA_BITS = 2
SIGNED_CODES = 127
UNSIGNED_CODES = 255

# Bit patterns of the smallest normal number and of the largest scale, 2**126, whose reciprocal is
# normal too.
SMALLEST_BITS = 0x00800000
LARGEST_SCALE_BITS = 0x7E800000
# Where tables are computed, whatever the default device: the powers must be the same everywhere.
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StateFormat:
    """Format of the codes of one state.

    Attributes:
        name: a name of ``FORMATS``.
        signed: bit 7 of a code is the sign; otherwise it belongs to the level.
    """

    name: str
    signed: bool

    @property
    def quantized(self) -> bool:
        """Whether the state is stored as codes."""
        return self.name != "float32"

    @property
    def expanded(self) -> bool:
        """Whether a group has an exponent, with which it chooses its levels."""
        return self.name == "expanded_fp8"

    @property
    def has_codebook(self) -> bool:
        """Whether the levels of all groups are those of a codebook."""
        return self.name == "dynamic8"

    @property
    def even(self) -> bool:
        """Whether codes are signed integers, for which most values are rounded to the nearest."""
        return self.name == "int8"

    @property
    def group_size(self) -> int:
        """Elements of a group."""
        return 32 if self.even else GROUP_SIZE

    @property
    def num_levels(self) -> int:
        """Magnitudes of a codebook, a power of two."""
        return 128 if self.signed else 256

    @property
    def num_codes(self) -> int:
        """Entries of a codebook: every level, then every level with the other sign."""
        return 2 * self.num_levels if self.signed else self.num_levels

    def nbytes_per_element(self, length: int) -> float:
        """Return the bytes per element of a state with rows of ``length`` elements."""
        if not self.quantized:
            return 4.0
        constants = 2 + int(self.expanded)
        return 1.0 + constants * groups_per_row(length, self.group_size) / length


FORMATS: tuple[str, ...] = ("expanded_fp8", "dynamic8", "int8", "float32")


@lru_cache(maxsize=32)
def state_format(name: str, signed: bool) -> StateFormat:
    """Return a format by its name.

    ``expanded_fp8`` is FP8 with a dynamic range by group, ``dynamic8`` the dynamic map, ``int8``
    even levels, and ``float32`` no codes. Another name raises ``ValueError``, as does ``int8``
    unsigned.
    """
    if name not in FORMATS:
        raise ValueError(
            f"state format {name!r} is not known; allowed: {', '.join(FORMATS)}. Choose one."
        )
    if name == "int8" and not signed:
        raise ValueError(
            "state format 'int8' has signs, and would store small second moments too large: choose "
            "'expanded_fp8' or 'dynamic8'."
        )
    return StateFormat(name, signed)


def row_length(shape: Sequence[int]) -> int:
    """Return the elements of one index of dimension 0, which groups never cross."""
    return math.prod(shape[1:])


def groups_per_row(length: int, group_size: int = GROUP_SIZE) -> int:
    """Return the groups of a row of ``length`` elements; the last may be shorter."""
    return -(-length // group_size)


@lru_cache(maxsize=32)
def codebook(fmt: StateFormat, device: torch.device) -> Tensor:
    """Return the levels of ``dynamic8``: zero, parts of seven decades, and one.

    Each decade is cut evenly in twice as many parts as the one below.

    Returns:
        ``[fmt.num_codes]`` fp32 on ``device``, the magnitudes first.

    Source: the dynamic map of 8-bit optimizers (Dettmers et al.), except that a signed state has
    the magnitude 1 in place of 0.993.
    """
    if not fmt.has_codebook:
        raise AssertionError(f"{fmt} has no codebook")
    found = [0.0]
    for decade in range(7):
        parts = 2 ** (decade if fmt.signed else decade + 1)
        edges = torch.linspace(0.1, 1.0, parts + 1, dtype=torch.float64, device=_CPU)
        middles: list[float] = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        found += middles
    if fmt.signed:
        found[-1] = 1.0  # no code is left for it
    else:
        found.append(1.0)
    levels = torch.tensor(found, dtype=torch.float64, device=_CPU)
    if fmt.signed:
        levels = torch.cat([levels, -levels])
    return levels.float().to(device)


@lru_cache(maxsize=32)
def level_pairs(fmt: StateFormat, device: torch.device) -> Tensor:
    """Return the magnitudes of a codebook, each with the next one: ``[fmt.num_levels, 2]`` fp32."""
    levels = codebook(fmt, device)[: fmt.num_levels]
    return torch.stack([levels, levels.roll(-1)], dim=1)


@lru_cache(maxsize=2)
def widest_spans() -> tuple[int, ...]:
    """Return how far apart the largest and smallest value of a signed group may be, by n.

    Returns:
        For n = 3 to 7 mantissa bits the difference of bit patterns.
    """
    spans = []
    for n in range(LEAST_MANTISSA_BITS + 1, MOST_MANTISSA_BITS + 1):
        octaves, rest = divmod(SIGNED_CODES, 1 << n)
        largest = (1 + rest / (1 << n)) * 2.0**octaves - 1  # over the scale
        pattern = torch.tensor(largest * 2.0**n, device=_CPU).view(torch.int32)
        spans.append(int(pattern) - 0x3F800000)
    return tuple(spans)
