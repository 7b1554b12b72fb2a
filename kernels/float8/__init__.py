"""FP8 operands of matrix products: casts with transpose, and rebuilds straight from codes."""

from .op import (
    activation_dequantize_float8,
    dequantize_float8,
    float8_cast,
    float8_quantize,
    norm_dequantize_float8,
)

__all__ = [
    "activation_dequantize_float8",
    "dequantize_float8",
    "float8_cast",
    "float8_quantize",
    "norm_dequantize_float8",
]
