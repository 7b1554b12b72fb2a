"""Lightning callbacks."""

from lq_lightning.callbacks.quantization_monitor import QuantizationMonitor, RelativeError

__all__ = ["QuantizationMonitor", "RelativeError"]
