"""Requantize: unpack -> sum over messages -> quantize, one pass over memory."""

from .op import repeat_requantize, requantize, requantize_out

__all__ = ["requantize", "requantize_out", "repeat_requantize"]
