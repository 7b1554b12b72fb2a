"""Encoded rows: tables of codes, byte layout, and operators that encode, decode and sum them."""

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
from .op import (
    dequantize,
    dequantize_out,
    quantize,
    quantize_out,
    repeat_dequantize,
    repeat_quantize,
    repeat_requantize,
    requantize,
    requantize_out,
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
    "dequantize",
    "dequantize_out",
    "quantize",
    "quantize_out",
    "repeat_dequantize",
    "repeat_quantize",
    "repeat_requantize",
    "requantize",
    "requantize_out",
]
