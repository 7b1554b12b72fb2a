"""The hidden state that a stage has received, as the place where its gradient arrives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["Received", "receive"]


class _Arrived:
    """What backward has brought to a received hidden state."""

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: Tensor | None = None


class _Receive(torch.autograd.Function):
    """Puts a hidden state at the beginning of a graph.

    Not as a leaf: that could not be changed in place, as a layer may do with its input, and would
    be kept until backward, also where the layers keep only a code of it.
    """

    @staticmethod
    def forward(ctx: Any, root: Tensor, hidden: Tensor, arrived: _Arrived) -> Tensor:
        ctx.arrived = arrived
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.arrived.gradient = gradient
        return None, None, None


class Received:
    """Where the gradient of a received hidden state arrives; holds no values.

    Attributes:
        edge: of the hidden state in the graph.
    """

    __slots__ = ("_arrived", "_like", "edge")

    def __init__(self, edge: GradientEdge, arrived: _Arrived, like: Tensor) -> None:
        self.edge = edge
        self._arrived = arrived
        self._like = like.new_empty(1).expand(like.shape)  # shape, dtype and device

    def arrive(self, gradient: Tensor | None) -> None:
        """Bring a gradient that was computed for ``edge``, instead of by a backward through it."""
        self._arrived.gradient = gradient

    def take_gradient(self) -> Tensor:
        """Return what backward has brought, zeros if nothing; contiguous."""
        gradient, self._arrived.gradient = self._arrived.gradient, None
        if gradient is None:  # the stage does not use its input
            return torch.zeros_like(self._like, memory_format=torch.contiguous_format)
        return gradient.contiguous()


def receive(hidden: Tensor) -> tuple[Tensor, Received]:
    """Return a hidden state that requires a gradient, and where that arrives.

    It has the memory of ``hidden``, may be changed in place, and is freed as soon as no node and
    nobody else keeps it. Each call begins a graph of its own, also for one tensor.

    Args:
        hidden: without a graph.
    """
    arrived = _Arrived()
    root = hidden.new_empty(0).requires_grad_()
    entered: Tensor = _Receive.apply(root, hidden, arrived)  # type: ignore[no-untyped-call]
    return entered, Received(get_gradient_edge(entered), arrived, hidden)
