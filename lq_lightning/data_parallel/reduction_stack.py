"""Gradients of several small units that are reduced together."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lq_lightning.data_parallel.gradient_layouts import LevelLayouts
from lq_lightning.foundation import streams

__all__ = ["ReductionStack", "StackedGradients"]


class StackedGradients(NamedTuple):
    """What is reduced together.

    Attributes:
        slots: ``[units, world * n]``.
        outputs: As many ``[n]``, each in memory of its own.
        layouts: Of all messages.
    """

    slots: Tensor
    outputs: list[Tensor]
    layouts: LevelLayouts


class ReductionStack:
    """Memory in which backward puts gradients of units of one shape, one row after another.

    Their reduction then costs the host little more than that of one unit. What it costs else is
    this memory, and that the first of them waits for the last.

    Args:
        units: How many there are.
    """

    def __init__(self, units: int) -> None:
        self._units = units
        self._slots: Tensor | None = None
        self._layouts: LevelLayouts | None = None
        self._outputs: list[Tensor] = []

    def row(
        self, layouts: LevelLayouts, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """Return the next unit's memory, ``[numel]``; None if it is unlike those before.

        :meth:`add` uses it up.
        """
        if not self._outputs:
            self._slots = torch.empty(self._units, numel, dtype=dtype, device=device)
            self._layouts = layouts
        slots = self._slots
        alike = (numel, dtype, layouts)
        if slots is None or (slots.shape[1], slots.dtype, self._layouts) != alike:
            return None
        return slots[len(self._outputs)]

    def add(self, output: Tensor) -> bool:
        """Let the last row be reduced to ``output``; return whether that was the last one."""
        self._outputs.append(output)
        return len(self._outputs) == self._units

    def take(self) -> StackedGradients:
        """Return what was added, and begin anew.

        Streams: rows come from the stream of backward, so the allocator is told of the one that
        reads them, the current one.
        """
        slots, layouts = self._slots, self._layouts
        if slots is None or layouts is None:
            raise AssertionError("nothing was added")
        taken = StackedGradients(slots[: len(self._outputs)], self._outputs, layouts)
        self.forget()
        streams.record_use(slots)
        return taken

    def forget(self) -> None:
        """Begin anew; memory stays with those who were given some."""
        self._slots = self._layouts = None
        self._outputs = []
