"""Dequantize: unpack -> sum over messages -> inverse Hadamard [-> add], one pass over memory."""

from .op import dequantize, dequantize_out, repeat_dequantize

__all__ = ["dequantize", "dequantize_out", "repeat_dequantize"]
