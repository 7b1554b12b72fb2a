"""Lightning callbacks."""

from lq_lightning.callbacks.activation_quantization import ActivationQuantization
from lq_lightning.callbacks.adaptive_bits import AdaptiveBits
from lq_lightning.callbacks.ema import EMA
from lq_lightning.callbacks.plan_check import PlanCheck
from lq_lightning.callbacks.quantization_monitor import QuantizationMonitor, RelativeError
from lq_lightning.callbacks.stage_bit_compensation import StageBitCompensation

__all__ = [
    "ActivationQuantization",
    "EMA",
    "AdaptiveBits",
    "PlanCheck",
    "QuantizationMonitor",
    "RelativeError",
    "StageBitCompensation",
]
