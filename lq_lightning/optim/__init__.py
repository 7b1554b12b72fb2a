"""Optimizers whose states are 8-bit codes."""

from .base import ParameterPlan, QuantizedOptimizer
from .config import OptimizerQuantization, embedding_weights, refuse_codes
from .conversion import quantize_optimizer
from .muon import QuantizedMuon, muon_groups
from .optimizers import QuantizedAdam, QuantizedAdamW, QuantizedLion, QuantizedSGD

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
