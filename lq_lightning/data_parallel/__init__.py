"""Quantized collectives (SDP4Bit, AGoQ) and 8-bit gradient accumulation (AGoQ)."""

import warnings
from typing import Any

from lq_lightning.data_parallel.all_reduce import QuantizedAllReduce, quantized_all_reduce_hook
from lq_lightning.data_parallel.communication import QuantizationErrors, QuantizedCommunication
from lq_lightning.data_parallel.config import GradientQuantization, LocalSteps, WeightQuantization
from lq_lightning.data_parallel.gradient_buffer import KeptGradient, QuantizedGradientBuffer
from lq_lightning.data_parallel.install import quantize_communication
from lq_lightning.data_parallel.local_steps import OuterOptimizer, start_alike
from lq_lightning.data_parallel.packed_agreement import PackedAgreement
from lq_lightning.data_parallel.plan import CommunicationPlan, TensorPlan
from lq_lightning.data_parallel.unit import Traffic
from lq_lightning.foundation.parameters import embedding_params
from lq_lightning.foundation.topology import Topology

__all__ = [
    "CommunicationPlan",
    "GradientQuantization",
    "KeptGradient",
    "LocalSteps",
    "OuterOptimizer",
    "PackedAgreement",
    "QuantizationErrors",
    "QuantizedAllReduce",
    "QuantizedCommunication",
    "QuantizedGradientBuffer",
    "TensorPlan",
    "Topology",
    "Traffic",
    "WeightQuantization",
    "embedding_params",
    "quantize_communication",
    "quantized_all_reduce_hook",
    "start_alike",
]


def __getattr__(name: str) -> Any:
    if name != "vocabulary_weights":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "`vocabulary_weights` is now called `embedding_params`; the old name will be removed in "
        "the next release",
        DeprecationWarning,
        stacklevel=2,
    )
    return embedding_params
