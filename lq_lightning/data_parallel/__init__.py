"""Quantized collectives (SDP4Bit, AGoQ) and 8-bit gradient accumulation (AGoQ)."""

from lq_lightning.data_parallel.all_reduce import QuantizedAllReduce, quantized_all_reduce_hook
from lq_lightning.data_parallel.communication import (
    QuantizationErrors,
    QuantizedCommunication,
)
from lq_lightning.data_parallel.config import GradientQuantization, LocalSteps, WeightQuantization
from lq_lightning.data_parallel.gradient_buffer import KeptGradient, QuantizedGradientBuffer
from lq_lightning.data_parallel.install import quantize_communication
from lq_lightning.data_parallel.local_steps import OuterOptimizer, start_alike
from lq_lightning.data_parallel.packed_agreement import PackedAgreement
from lq_lightning.data_parallel.plan import CommunicationPlan, TensorPlan
from lq_lightning.data_parallel.vocabulary import vocabulary_weights
from lq_lightning.foundation.topology import Topology
from lq_lightning.foundation.traffic import Traffic

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
    "quantize_communication",
    "quantized_all_reduce_hook",
    "start_alike",
    "vocabulary_weights",
]
