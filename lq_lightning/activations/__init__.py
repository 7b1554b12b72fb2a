"""Saved activations as codes: norms, activation functions and linear layers that keep few bits."""

from .install import QuantizedActivations, quantize_activations
from .policy import ActivationPolicy, ActivationRule

__all__ = [
    "ActivationPolicy",
    "ActivationRule",
    "QuantizedActivations",
    "quantize_activations",
]
