"""Optimizers whose states are 8-bit codes."""

from .base import ParameterPlan, QuantizedOptimizer
from .config import OptimizerQuantization, embedding_weights, refuse_codes
from .optimizers import (
    QuantizedAdam,
    QuantizedAdamW,
    QuantizedLion,
    QuantizedSGD,
    quantize_optimizer,
)

__all__ = [
    "OptimizerQuantization",
    "ParameterPlan",
    "QuantizedAdam",
    "QuantizedAdamW",
    "QuantizedLion",
    "QuantizedOptimizer",
    "QuantizedSGD",
    "embedding_weights",
    "quantize_optimizer",
    "refuse_codes",
]
