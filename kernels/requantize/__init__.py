"""Requantize: unpack -> sum over messages -> quantize, one pass over memory."""

from .op import requantize, requantize_out

__all__ = ["requantize", "requantize_out"]
