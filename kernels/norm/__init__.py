"""Norms that keep a quantized input: forward, rebuilding of the output, and backward."""

from .op import norm_backward, norm_dequantize, norm_quantize
from .reference import KINDS

__all__ = ["KINDS", "norm_backward", "norm_dequantize", "norm_quantize"]
