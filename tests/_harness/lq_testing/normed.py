"""A unit whose matrices have 1-D parameters between them, which become gaps of one run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lq_lightning.data_parallel import (
    GradientQuantization,
    QuantizedCommunication,
    Topology,
    WeightQuantization,
    quantize_communication,
)
from lq_testing.devices import device

WIDTH = 80  # so that norms share the blocks of a Hadamard transform with matrices
NORMS = ("norm1", "norm2")


class Normed(nn.Module):
    """Three matrices with a 1-D parameter between them, and one at either end."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "a", "norm1", "b", "norm2", "c", "last"):
            shape = (WIDTH, WIDTH) if len(name) == 1 else (WIDTH,)
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 8))

    def forward(self, x: Tensor) -> Tensor:
        x = ((x * self.first) @ self.a).tanh() * self.norm1
        return ((x @ self.b).tanh() * self.norm2) @ self.c + self.last


def build_normed(
    node_size: int,
    *,
    weights: WeightQuantization | None = None,
    gradients: GradientQuantization | None = None,
    dtype: torch.dtype = torch.float32,
    frozen: tuple[str, ...] = (),
) -> tuple[Any, QuantizedCommunication]:
    """One unit over all ranks."""
    torch.manual_seed(0)
    model: Any = Normed().to(device())
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype))
    communication = quantize_communication(
        model,
        weights=weights,
        gradients=gradients,
        topology=Topology.of(node_size=node_size),
        min_quantized_numel=256,
    )
    return model, communication
