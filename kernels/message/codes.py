"""The table of codes: how many bits a value takes, and what its bits mean.

A code is one of three kinds:

* ``IntegerCode``: equally spaced levels, scaled to the largest magnitude of a group or its range;
* ``FloatCode``: sign, exponent and fraction, like the floating-point types of hardware;
* ``TableCode``: any ascending levels; a value becomes the nearest one.

To add a code, name it in ``CODES`` with its parameters, and in ``Code`` of
``lq_lightning/codecs/spec.py``: two files. Reference, kernels, layout, checks and tests take the
rest from this table; a third file, ``tests/codecs/test_truth.py``, says independently what its
codes mean. Only a new *kind* needs arithmetic of its own: ``rounding.py`` for the reference,
``triton_rounding.py`` to encode and ``triton_levels.py`` to decode on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IntegerCode:
    """Integers: from ``-max`` to ``max`` if symmetric, else from 0 to the largest of ``bits``.

    Attributes:
        bits: 2 to 8.
    """

    bits: int


@dataclass(frozen=True, slots=True)
class FloatCode:
    """Small floating-point numbers with a sign, and with subnormals.

    Attributes:
        bits: 3 to 8, the sign included.
        mantissa_bits: explicit fraction bits, 1 to 9. With the exponent's they are ``bits - 1``.
        min_exponent: exponent of the smallest normal value (also that of subnormals).
        max_value: what the largest value of a group is scaled to, the largest code that is used.
            Below ``2**(30 + min_exponent)``: codes are cut from fp16.
    """

    bits: int
    mantissa_bits: int
    min_exponent: int
    max_value: float


@dataclass(frozen=True, slots=True)
class TableCode:
    """Levels between -1 and 1, of which the nearest is taken; half way, the lower one.

    At most 32 of them: a GPU finds a level by comparisons, and the value of a code by selections.

    Attributes:
        levels: ``2**bits`` ascending values that fp32 holds exactly. Zero is one of them, so that
            zeros stay zeros.
    """

    levels: tuple[float, ...]

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return len(self.levels).bit_length() - 1


Code = IntegerCode | FloatCode | TableCode

# From -1 to 1 lie 31 cells, those of the values that round to one integer after multiplication by
# the first number; the second is the number of the cell around zero. A warp holds as many numbers.
CELLS_PER_UNIT = 15.4
MIDDLE_CELL = 16


def cells_of(thresholds: Sequence[float]) -> tuple[int, ...]:
    """Return how many thresholds lie below each of 32 cells, so that one comparison is left.

    Args:
        thresholds: ascending, between -1 and 1.

    Returns:
        32 numbers; none if two thresholds lie in one cell, or one too close to its end to tell on
        which side a value next to it is.
    """
    places = [CELLS_PER_UNIT * threshold + MIDDLE_CELL for threshold in thresholds]
    cells = [round(place) for place in places]
    near = any(abs(abs(place - round(place)) - 0.5) < 1e-3 for place in places)
    if near or len(set(cells)) < len(cells):
        return ()
    return tuple(sum(cell < index for cell in cells) for index in range(32))


# Quantiles of the normal distribution, with zero; appendix E of QLoRA (Dettmers et al., 2023), in
# fp32.
_NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

CODES: dict[str, Code] = {
    **{f"int{bits}": IntegerCode(bits) for bits in range(2, 9)},
    # OCP Microscaling Formats 1.0: no infinity and no NaN
    "fp4_e2m1": FloatCode(bits=4, mantissa_bits=1, min_exponent=0, max_value=6.0),
    "nf4": TableCode(_NF4_LEVELS),
    "fp8_e4m3": FloatCode(bits=8, mantissa_bits=3, min_exponent=-6, max_value=448.0),
    "fp8_e5m2": FloatCode(bits=8, mantissa_bits=2, min_exponent=-14, max_value=57344.0),
}
