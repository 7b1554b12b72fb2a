"""Bit widths of activations that are trained per channel (AMAQ)."""

from .config import AdaptiveBitsConfig
from .gate import BitGate
from .optimizer import GateOptimizer
from .quantize import adaptive_quantize
from .sites import attach, attach_quantizers, find_sites

__all__ = [
    "AdaptiveBitsConfig",
    "BitGate",
    "GateOptimizer",
    "adaptive_quantize",
    "attach",
    "attach_quantizers",
    "find_sites",
]
