"""Encoded rows: tables of codes, byte layout, and operators that encode, decode and sum them."""

from .format import (
    ALIGNMENT_NBYTES,
    CODES,
    SCALE_DTYPES,
    Code,
    MessageFormat,
    RowLayout,
    parse_format,
    round_up,
    section_starts,
)
from .operators import (
    accumulate_,
    dequantize,
    dequantize_out,
    quantize,
    quantize_out,
    relaunch_accumulate,
    relaunch_dequantize,
    relaunch_quantize,
    relaunch_requantize,
    requantize,
    requantize_out,
)

__all__ = [
    "ALIGNMENT_NBYTES",
    "CODES",
    "SCALE_DTYPES",
    "Code",
    "MessageFormat",
    "RowLayout",
    "parse_format",
    "round_up",
    "section_starts",
    "accumulate_",
    "dequantize",
    "dequantize_out",
    "quantize",
    "quantize_out",
    "relaunch_accumulate",
    "relaunch_dequantize",
    "relaunch_quantize",
    "relaunch_requantize",
    "requantize",
    "requantize_out",
]
