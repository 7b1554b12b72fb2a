"""Counters of the bytes and errors of quantized communication."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from lq_lightning.foundation.topology import Topology

__all__ = ["ErrorSums", "Traffic", "ring_bytes"]


@dataclass(slots=True)
class Traffic:
    """Bytes sent by this rank and elements exchanged since the start.

    A gather or reduce-scatter over ``k`` ranks with ``b`` bytes a rank counts ``(k - 1) * b`` bytes
    sent by each rank, as in a ring. The part counted as leaving the node is the least that must
    leave it, averaged over its ranks.

    Attributes:
        weights_intra: Weight bytes sent within the node.
        weights_inter: Weight bytes sent to other nodes.
        gradients_intra: Gradient bytes sent within the node.
        gradients_inter: Gradient bytes sent to other nodes.
        baseline_weights: Bytes that plain FSDP2 sends for the same weight gathers.
        baseline_gradients: Bytes that plain FSDP2 sends for the same gradient reductions.
        baseline_inter: Part of both that leaves the node.
        weights_messages: Bytes of this rank's weight messages (payload, not times receivers).
        weights_elements: Elements of these.
        gradients_messages: Bytes of this rank's gradient messages on the slowest level used.
        gradients_elements: Elements of these.
        full_precision_gathers: Full-precision gathers of a unit (the first one, and resyncs).
        exchanges: Quantized weight exchanges of a unit.
        reductions: Quantized gradient reductions of a unit.
    """

    weights_intra: float = 0.0
    weights_inter: float = 0.0
    gradients_intra: float = 0.0
    gradients_inter: float = 0.0
    baseline_weights: float = 0.0
    baseline_gradients: float = 0.0
    baseline_inter: float = 0.0
    weights_messages: int = 0
    weights_elements: int = 0
    gradients_messages: int = 0
    gradients_elements: int = 0
    full_precision_gathers: int = 0
    exchanges: int = 0
    reductions: int = 0

    @property
    def sent(self) -> float:
        """Bytes sent by this rank."""
        return self.weights_intra + self.weights_inter + self.gradients_intra + self.gradients_inter

    @property
    def baseline(self) -> float:
        """Bytes that plain FSDP2 would have sent."""
        return self.baseline_weights + self.baseline_gradients

    @property
    def bits_per_weight(self) -> float:
        """Bits on the wire per exchanged weight, scales included; NaN before any exchange."""
        return _ratio(8 * self.weights_messages, self.weights_elements)

    @property
    def bits_per_gradient(self) -> float:
        """Bits on the wire per gradient on the slowest level, scales included; NaN before any."""
        return _ratio(8 * self.gradients_messages, self.gradients_elements)

    def since(self, earlier: Traffic) -> Traffic:
        """Return the counts since the snapshot ``earlier``."""
        values = {f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        return Traffic(**values)

    def snapshot(self) -> Traffic:
        """Return a copy that stops counting."""
        return replace(self)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")


def ring_bytes(nbytes: int, topology: Topology) -> tuple[float, float]:
    """Return the bytes one rank sends in a ring over all ranks: within the node, to other nodes.

    ``nbytes`` are the bytes of one rank's slot.
    """
    inter = (topology.world_size - topology.node_size) / topology.node_size * nbytes
    if topology.node_size == topology.world_size:
        inter = 0.0
    return (topology.world_size - 1) * nbytes - inter, inter


@dataclass(slots=True)
class ErrorSums:
    """Running sums behind the relative L2 error, kept on the device until read."""

    squared_error: Tensor | None = None
    squared_norm: Tensor | None = None

    def add(self, approximate: Tensor, exact: Tensor) -> None:
        """Add the error of ``approximate`` against ``exact`` (same shape, any float dtype)."""
        exact = exact.float()
        error = torch.sum((approximate.float() - exact) ** 2)
        norm = torch.sum(exact**2)
        self.squared_error = error if self.squared_error is None else self.squared_error + error
        self.squared_norm = norm if self.squared_norm is None else self.squared_norm + norm

    def pop(self) -> tuple[float, float]:
        """Return ``(sum of squared errors, sum of squares)`` and reset them."""
        error = 0.0 if self.squared_error is None else float(self.squared_error)
        norm = 0.0 if self.squared_norm is None else float(self.squared_norm)
        self.squared_error = self.squared_norm = None
        return error, norm
