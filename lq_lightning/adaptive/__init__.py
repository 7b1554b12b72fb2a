"""Bit widths of activations that are trained per channel (AMAQ)."""

from .config import AdaptiveBitsConfig
from .gate import BitGate, adaptive_quantize
from .optimizer import GateOptimizer
from .sites import attach, find_sites

__all__ = [
    "AdaptiveBitsConfig",
    "BitGate",
    "GateOptimizer",
    "adaptive_quantize",
    "attach",
    "find_sites",
]
