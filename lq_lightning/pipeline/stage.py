"""One stage of a pipeline: its forward and backward passes, and its state between them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lq_lightning._compat.saved_tensors import has_storage, storage_key

from .message import BoundaryMeta
from .split_backward import Received, SavedTensors, SplitBackward, receive

__all__ = ["Stage"]


@dataclass(slots=True)
class _Kept:
    """State of a micro-batch from its forward pass on."""

    received: Received | None  # where the gradient of the input arrives; None on stage 0
    # Where backward starts; None if nothing in the stage needs a gradient. An edge, not the output:
    # that is freed as soon as it is sent, unless the graph itself keeps it.
    output: GradientEdge | None
    saved: SavedTensors | None  # tensors of nodes, if the backward pass is split
    nbytes: int | None  # bytes of these, if they are counted


class Stage:
    """Runs the module of a stage on one micro-batch at a time.

    Args:
        module: its ``forward(hidden=None)`` returns the hidden state, and on the last stage a
            scalar loss in training, anything in evaluation. ``module.index`` is set to the
            micro-batch before. Its ``parameters()`` are those of this stage.
        index: index of the stage.
        num_stages: stages of the pipeline.

    Attributes:
        kept_nbytes: bytes kept by the first micro-batch whose backward pass was split, before it
            and between its halves, without weights and autocast's copies of them. None before
            there was one; set it to None to count again.
    """

    def __init__(self, module: nn.Module, index: int, num_stages: int) -> None:
        self.module = module
        self.index = index
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.kept_nbytes: tuple[int, int] | None = None
        self._kept: dict[int, _Kept] = {}
        self._halves: dict[int, SplitBackward] = {}

    def _run(self, microbatch: int, hidden: Tensor | None) -> Any:
        self.module.index = microbatch  # type: ignore[assignment]
        return self.module() if hidden is None else self.module(hidden)

    def evaluate(self, microbatch: int, hidden: Tensor | None, boundary: BoundaryMeta) -> Any:
        """Return the output of a micro-batch."""
        output = self._run(microbatch, hidden)
        if not self.is_last:
            self._check_hidden(output, boundary)
        return output

    def forward(
        self, microbatch: int, hidden: Tensor | None, boundary: BoundaryMeta, split: bool = False
    ) -> Tensor:
        """Return the hidden state behind this stage, or on the last stage the loss; no graph.

        Args:
            microbatch: index of the micro-batch.
            hidden: hidden state before this stage, without a graph; None on stage 0.
            boundary: shape and dtype that hidden states must have.
            split: whether ``backward_input`` and ``backward_weight`` follow, not ``backward``.
        """
        received = None
        if hidden is not None:
            hidden, received = receive(hidden)
        counted = split and self.kept_nbytes is None
        saved = SavedTensors(counted) if split else None
        with nullcontext() if saved is None else saved.recorded():
            output = self._run(microbatch, hidden)
        if self.is_last:
            self._check_loss(output)
            output = output.reshape(())
        else:
            self._check_hidden(output, boundary)
        edge = get_gradient_edge(output) if output.requires_grad else None
        nbytes = self._nbytes(saved.kept()) if counted and saved is not None else None
        self._kept[microbatch] = _Kept(received, edge, saved, nbytes)
        result: Tensor = output.detach()
        return result

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Add to the gradients of the parameters; return the gradient of the input.

        ``gradient`` is that of the output; None on the last stage.
        """
        kept = self._kept.pop(microbatch)
        if kept.output is not None:
            torch.autograd.backward((kept.output,), (gradient,))
        return None if kept.received is None else kept.received.take_gradient()

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of the input; keep what those of the parameters need."""
        kept = self._kept.pop(microbatch)
        if kept.received is None:
            return None
        if kept.output is not None:
            weights = self.module.parameters()
            half = SplitBackward(kept.output, kept.received, weights, kept.saved)
            half.backward_input(gradient)
            self._halves[microbatch] = half
            if kept.nbytes is not None and kept.saved is not None:
                self.kept_nbytes = (kept.nbytes, self._nbytes(kept.saved.kept() + half.kept()))
        return kept.received.take_gradient()

    def backward_weight(self, microbatch: int) -> None:
        """Add to the gradients of the parameters, after ``backward_input``."""
        half = self._halves.pop(microbatch, None)
        if half is not None:
            half.backward_weight()

    def clear(self) -> None:
        """Drop all micro-batches, after an error."""
        self._kept.clear()
        self._halves.clear()

    def _nbytes(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of storages, each once, without those of weights."""
        weights = {storage_key(p) for p in self.module.parameters() if has_storage(p)}
        found = {storage_key(t): t.untyped_storage().nbytes() for t in tensors if has_storage(t)}
        return sum(nbytes for key, nbytes in found.items() if key not in weights)

    def _check_loss(self, loss: object) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise RuntimeError(
                f"the last stage has to return its loss as a tensor of one value, not {found}."
            )

    def _check_hidden(self, hidden: object, boundary: BoundaryMeta) -> None:
        wanted = (tuple(boundary.shape), boundary.dtype)
        found = (tuple(hidden.shape), hidden.dtype) if isinstance(hidden, Tensor) else None
        if found != wanted:
            raise RuntimeError(
                f"stage {self.index} returned {found or type(hidden).__name__}, but hidden states "
                f"between stages are {wanted}: every stage has to return the same shape and dtype, "
                "that of the first boundary."
            )
