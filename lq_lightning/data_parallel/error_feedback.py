"""What quantization leaves out of one gradient message, added to the next one (error feedback)."""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.codecs import CodecSpec, encode_with_residual
from lq_lightning.data_parallel.gradient_layouts import LevelLayouts
from lq_lightning.data_parallel.layout import MessageLayout

__all__ = ["GradientResidual"]


class GradientResidual:
    """The residual of the messages that one rank sends for one unit.

    It is stored as messages of its own, one per message sent. Groups that are not finite are
    dropped; the rest of such a gradient is kept until :meth:`drop`.
    """

    def __init__(self) -> None:
        self._of: tuple[tuple[int, ...], MessageLayout] | None = None
        self._messages: Tensor | None = None

    def prepare(self, rows: int, layouts: LevelLayouts, device: torch.device) -> None:
        """Have the residual of the last call ready; zeros at first, and for other parameters.

        Args:
            rows: R, messages that this rank sends.
            layouts: Of these. What is kept of them is stored in the layout within the node.
            device: Of the messages.
        """
        of = (layouts.packed, layouts.intra)
        if self._messages is None or self._of != of:
            nbytes = layouts.intra.codes_nbytes  # what is exact leaves nothing
            self._messages = torch.zeros(rows, nbytes, dtype=torch.uint8, device=device)
            self._of = of

    def encode(
        self,
        index: int,
        values: Tensor,
        spec: CodecSpec,
        *,
        seed: int | None,
        out: Tensor,
        skip: int | None = None,
    ) -> None:
        """Encode values and what is kept of earlier ones; keep what the codes leave out.

        Args:
            index: Of the run of the prepared layout.
            values: ``[R, N]``, or ``[K, R, B']`` uint8 messages in the codec of the layout to sum.
                Of R + 1 rows one may be left out.
            spec: Codec of ``out``.
            seed: For stochastic rounding.
            out: ``[R, B]`` uint8.
            skip: Which row of the values is left out.
        """
        if self._of is None or self._messages is None:
            raise AssertionError("prepare() comes first")
        layout, messages = self._of[1], self._messages
        kept, run = layout.part(messages, index), layout.runs[index]
        encode_with_residual(
            *(spec, values, run.numel, layout.spec_of(run), kept), seed=seed, out=out, skip=skip
        )

    def drop(self) -> None:
        """Start from zeros again."""
        if self._messages is not None:
            self._messages.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return 0 if self._messages is None else self._messages.numel()
