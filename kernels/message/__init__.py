"""What all kernels share: the byte layout of a message and the building blocks of a codec."""

from .format import (
    ALIGNMENT_NBYTES,
    CODES,
    FLOAT_CODES,
    INTEGER_CODES,
    SCALE_DTYPES,
    FloatCode,
    MessageFormat,
    RowLayout,
    parse_format,
    round_up,
)

__all__ = [
    "ALIGNMENT_NBYTES",
    "CODES",
    "FLOAT_CODES",
    "INTEGER_CODES",
    "SCALE_DTYPES",
    "FloatCode",
    "MessageFormat",
    "RowLayout",
    "parse_format",
    "round_up",
]
