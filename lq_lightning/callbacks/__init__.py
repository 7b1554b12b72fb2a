"""Lightning callbacks."""

from lq_lightning.callbacks.activation_quantization import ActivationQuantization
from lq_lightning.callbacks.quantization_monitor import QuantizationMonitor, RelativeError

__all__ = ["ActivationQuantization", "QuantizationMonitor", "RelativeError"]
