"""Optimizers whose states are 8-bit codes."""

from .base import ParameterPlan, QuantizedOptimizer
from .config import OptimizerQuantization, embedding_weights, refuse_codes
from .optimizers import (
    QuantizedAdam,
    QuantizedAdamW,
    QuantizedLion,
    QuantizedMuon,
    QuantizedSGD,
    muon_groups,
    quantize_optimizer,
)

__all__ = [
    "OptimizerQuantization",
    "ParameterPlan",
    "QuantizedAdam",
    "QuantizedAdamW",
    "QuantizedLion",
    "QuantizedMuon",
    "QuantizedOptimizer",
    "QuantizedSGD",
    "embedding_weights",
    "muon_groups",
    "quantize_optimizer",
    "refuse_codes",
]
