"""Activation functions, plain or gated, that keep their inputs as codes: three operators."""

from .op import activation_backward, activation_dequantize, activation_quantize
from .reference import ACTIVATIONS, OF_POSITIVE_PART

__all__ = [
    "ACTIVATIONS",
    "OF_POSITIVE_PART",
    "activation_backward",
    "activation_dequantize",
    "activation_quantize",
]
