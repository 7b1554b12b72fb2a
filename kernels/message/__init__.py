"""What all kernels share: the table of codes, the byte layout of a message, the building blocks."""

from .format import (
    ALIGNMENT_NBYTES,
    CODES,
    SCALE_DTYPES,
    Code,
    FloatCode,
    IntegerCode,
    MessageFormat,
    RowLayout,
    TableCode,
    parse_format,
    round_up,
)

__all__ = [
    "ALIGNMENT_NBYTES",
    "CODES",
    "SCALE_DTYPES",
    "Code",
    "FloatCode",
    "IntegerCode",
    "MessageFormat",
    "RowLayout",
    "TableCode",
    "parse_format",
    "round_up",
]
