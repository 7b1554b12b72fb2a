"""Saved activations as codes: norms, activation functions and linear layers that keep few bits."""

from .adaptation import Adaptation
from .budget import ActivationPlan, MemoryBudget, plan_activations
from .calibrate import calibrate_activations
from .calibration import ActivationCalibration
from .install import QuantizedActivations, quantize_activations
from .policy import ActivationPolicy, ActivationRule

__all__ = [
    "ActivationCalibration",
    "ActivationPlan",
    "ActivationPolicy",
    "ActivationRule",
    "Adaptation",
    "MemoryBudget",
    "QuantizedActivations",
    "calibrate_activations",
    "plan_activations",
    "quantize_activations",
]
