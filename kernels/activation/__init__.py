"""Activation functions, plain or gated, that keep their inputs as codes: three operators."""

from .op import activation_backward, activation_dequantize, activation_quantize
from .reference import ACTIVATIONS

__all__ = ["ACTIVATIONS", "activation_backward", "activation_dequantize", "activation_quantize"]
