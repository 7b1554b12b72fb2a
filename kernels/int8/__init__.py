"""INT8 matrix products: a scale per row after a Hadamard transform, two terms for first rows."""

from .op import int8_matmul, int8_quantize
from .reference import hadamard_size_of

__all__ = ["hadamard_size_of", "int8_matmul", "int8_quantize"]
