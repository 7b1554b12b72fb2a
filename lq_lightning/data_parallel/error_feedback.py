"""What quantization leaves out of one gradient message, added to the next one (error feedback)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lq_lightning.codecs import CodecSpec, clear_nonfinite_, decode, encode
from lq_lightning.data_parallel.layout import MessageLayout

__all__ = ["GradientResidual"]

_ALL = slice(None)


class GradientResidual:
    """The residual of the messages that one rank sends for one unit.

    It is stored as messages of its own, one per message sent, so that it can be summed with those
    that arrive from the ranks of the node. Groups that are not finite are dropped; the rest of such
    a gradient is kept until :meth:`drop`.
    """

    def __init__(self) -> None:
        self._layout: MessageLayout | None = None
        self._packed: Sequence[int] | None = None
        self._messages: Tensor | None = None

    def prepare(
        self,
        rows: int,
        layout: MessageLayout,
        device: torch.device,
        packed: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the residual of the last call; zeros at first, and for other parameters.

        Args:
            rows: R, messages that this rank sends.
            layout: Of the stored messages.
            packed: Which parameters the messages hold.
            device: Of the result.

        Returns:
            ``[R, nbytes]`` uint8.
        """
        if self._messages is None or (self._layout, self._packed) != (layout, packed):
            self._messages = torch.zeros(rows, layout.nbytes, dtype=torch.uint8, device=device)
            self._layout, self._packed = layout, packed
        return self._messages

    def add_to(self, index: int, values: Tensor, rows: slice = _ALL) -> None:
        """Add what is kept of one run of the prepared layout to ``values``, ``[R, N]``.

        Args:
            index: Of the run.
            values: ``[R, N]``, which is overwritten.
            rows: Which messages they belong to.
        """
        layout, messages = self._prepared()
        part, numel = layout.part(messages[rows], index), layout.runs[index].numel
        decode(layout.spec, part, numel, out=values, add=True)

    def keep(
        self, index: int, values: Tensor, sent: Tensor, spec: CodecSpec, rows: slice = _ALL
    ) -> None:
        """Store what ``sent`` leaves out of ``values``, for one run of the prepared layout.

        Args:
            index: Of the run.
            values: ``[R, N]``, which is overwritten.
            sent: ``[R, B]`` uint8, the codes of ``values``.
            spec: Codec of ``sent``.
            rows: Which messages they belong to.
        """
        layout, messages = self._prepared()
        numel = layout.runs[index].numel
        decode(spec, sent, numel, scale=-1.0, out=values, add=True)
        stored, own = layout.part(messages[rows], index), replace(layout.spec, rounding="nearest")
        encode(own, values, out=stored)
        clear_nonfinite_(own, stored, numel)

    def _prepared(self) -> tuple[MessageLayout, Tensor]:
        if self._layout is None or self._messages is None:
            raise AssertionError("prepare() comes first")
        return self._layout, self._messages

    def drop(self) -> None:
        """Start from zeros again."""
        if self._messages is not None:
            self._messages.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return 0 if self._messages is None else self._messages.numel()
