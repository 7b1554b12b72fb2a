"""Quantize: [difference ->] Hadamard -> scale -> round -> pack, one pass over memory."""

from .op import quantize, quantize_out

__all__ = ["quantize", "quantize_out"]
