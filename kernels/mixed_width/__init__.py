"""Bits of its own for every line, in one tightly packed message: AMAQ on the wire."""

from .format import MAX_CODE_WIDTH, MAX_WIDTH, MixedLayout, mixed_layout, width_counts, width_rows
from .op import (
    mixed_dequantize,
    mixed_quantize,
    mixed_quantize_and_round,
    mixed_round_trip,
)

__all__ = [
    "MAX_CODE_WIDTH",
    "MAX_WIDTH",
    "MixedLayout",
    "mixed_dequantize",
    "mixed_layout",
    "mixed_quantize",
    "mixed_quantize_and_round",
    "mixed_round_trip",
    "width_counts",
    "width_rows",
]
