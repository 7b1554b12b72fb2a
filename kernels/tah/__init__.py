"""TAH-Quant: bits by entropy or the same, a transform for tiles with an outlier, one message."""

from .format import OUTLIER_RATIO, TAHFormat, parse_tah_format
from .op import tah_dequantize, tah_quantize

__all__ = ["OUTLIER_RATIO", "TAHFormat", "parse_tah_format", "tah_dequantize", "tah_quantize"]
