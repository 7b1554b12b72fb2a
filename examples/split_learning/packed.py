"""The adapters as they cross, kept from one batch to the next, and whether they have changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .adapters import Packing

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class PackedAdapters:
    """Matrices that are made anew when adapters are no longer, bit for bit, what they hold.

    All values are compared: nothing else tells whether they have changed. torch counts changes in
    place (``Tensor._version``), but not those of fused optimizers, through ``.data`` (as those of
    Lightning's ``WeightAveraging`` around a validation) or through numpy. It costs little: the
    comparison ends at the first difference, which after most steps is at the beginning, and where
    there is none, nothing has to be packed.

    Args:
        packing: how adapters cross.

    Attributes:
        changes: how often matrices were made.
        matrices: by name.
    """

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self.changes = 0
        self.matrices: dict[str, Tensor] = {}

    def refresh(self, adapters: Mapping[str, Tensor]) -> None:
        """Take over the adapters, if they have changed."""
        if self.matrices and self._holds(adapters):
            return
        self.matrices = {}  # freed first
        # The first batch to see a change may be one of a validation, the next one of training.
        with torch.inference_mode(False), torch.no_grad():
            self.matrices = self._packing.pack(adapters)
        self.changes += 1

    def connected(self, adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the matrices with a graph, so that their gradients become those of adapters.

        Args:
            adapters: what `refresh` was given last.
        """
        matrices: tuple[Tensor, ...] = _Connect.apply(self, tuple(adapters), *adapters.values())  # type: ignore[no-untyped-call]
        return dict(zip(self.matrices, matrices, strict=True))

    def _holds(self, adapters: Mapping[str, Tensor]) -> bool:
        before = self._packing.unpack(self.matrices)
        return all(_same(value, before[name]) for name, value in adapters.items())

    def unpack(self, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what is packed in matrices, by the names of the adapters."""
        return self._packing.unpack(matrices)


class _Connect(torch.autograd.Function):
    """The matrices as they are, as a function of the adapters."""

    @staticmethod
    def forward(
        ctx: Any, packed: PackedAdapters, names: tuple[str, ...], *adapters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.packed, ctx.names, ctx.keys = packed, names, tuple(packed.matrices)
        return tuple(value.detach() for value in packed.matrices.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradients = ctx.packed.unpack(dict(zip(ctx.keys, grads, strict=True)))
        return (None, None, *(gradients[name] for name in ctx.names))


def _same(value: Tensor, before: Tensor) -> bool:
    """Whether two tensors have the same bits: zeros of both signs differ, and NaN is itself."""
    if (value.dtype, value.device) != (before.dtype, before.device):
        return False
    integers = _INTEGERS[value.element_size()]
    return torch.equal(value.detach().view(integers), before.view(integers))
