"""Quantize: [difference ->] Hadamard -> scale -> round -> pack, one pass over memory."""

from .op import quantize, quantize_out, repeat_quantize

__all__ = ["quantize", "quantize_out", "repeat_quantize"]
