"""Gates of trained widths (AMAQ) between two machines.

All gates are the client's, with their optimizer, so that one mean is held over all sites and a
checkpoint of the client has everything. For the hidden states, which the server sends, the server
sums up gradient times quantization error per channel, and the client turns that into the gradient
of its gate: one float32 per channel and batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lq_lightning.adaptive import AdaptiveBitsConfig, BitGate, GateOptimizer
from lq_lightning.codecs.mixed import Ranges, WidthTable

from .settings import SplitSettings
from .sites import HIDDEN, SiteShape


class SentGate:
    """The server's part of a gate, in place of a ``BitGate`` in ``adaptive_quantize``.

    It has the widths, and sums up the terms of their gradient.

    Args:
        name: of the site, for messages.
        ranges: of its channels.
    """

    def __init__(self, name: str, ranges: Ranges) -> None:
        self.name = name
        self.ranges = ranges
        self.anchor = torch.zeros((), requires_grad=True)
        self._table: WidthTable | None = None
        self._sums: Tensor | None = None
        self._values = 0

    def set_widths(self, table: WidthTable) -> None:
        """Use the widths that the client has sent."""
        self._table = table

    def table(self) -> WidthTable:
        """Return the widths.

        Raises:
            ValueError: the client has sent none.
        """
        if self._table is None:
            raise ValueError(f"There are no widths for `{self.name}`.")
        return self._table

    def expect(self, channels: int) -> None:
        """Check the number of channels.

        Raises:
            ValueError: the client has sent no widths, or of another number of channels.
        """
        if self._table is None or self._table.channels != channels:
            raise ValueError(f"There are no widths of {channels} channels for `{self.name}`.")

    def accumulate(self, sums: Tensor, values: int) -> None:
        """Add the sums of a backward pass."""
        self._sums = sums if self._sums is None else self._sums + sums
        self._values += values

    def take(self) -> tuple[Tensor, int]:
        """Return and reset both sums of ``BitGate.accumulate``, float32 on the CPU, and a count.

        Raises:
            RuntimeError: there was no backward pass.
        """
        if self._sums is None:
            raise RuntimeError(f"No gradient has reached `{self.name}`.")
        taken = self._sums.float().cpu(), self._values
        self._sums, self._values = None, 0
        return taken


class ClientGates:
    """The gates of all sites, and their training.

    Args:
        shapes: of the sites.
        settings: of both ends.
        **changes: other values of ``AdaptiveBitsConfig`` than its preset for the bits.
    """

    def __init__(
        self, shapes: Mapping[str, SiteShape], settings: SplitSettings, **changes: Any
    ) -> None:
        config = AdaptiveBitsConfig.preset(settings.bits, **changes)
        self.gates = {
            name: BitGate(config, shape.num_lines, name=name, ranges=shape.ranges)
            for name, shape in shapes.items()
        }
        self.optimizer = GateOptimizer(self.gates, config)

    def tables(self) -> dict[str, WidthTable]:
        """Return the widths of all sites."""
        return {name: gate.table() for name, gate in self.gates.items()}

    def add_remote(self, sums: Tensor, values: int) -> None:
        """Add the server's sums for the hidden states."""
        self.gates[HIDDEN].accumulate(sums, values)
