"""Lightning plugins."""

from lq_lightning.plugins.precision import FullyShardedPrecision
from lq_lightning.plugins.quantized_precision import QuantizedPrecision

__all__ = ["FullyShardedPrecision", "QuantizedPrecision"]
