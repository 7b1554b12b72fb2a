"""Saved tensors of a micro-batch that can be let go before its graph."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lq_lightning._compat.saved_tensors import version_of

__all__ = ["SavedTensors"]


class _Saved:
    """One saved tensor of one node."""

    __slots__ = ("done", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = version_of(tensor)
        self.done = False


class SavedTensors:
    """What nodes save in the forward pass of a stage, if its backward pass is split.

    The first half runs every node on the way to the input, and has to retain the graph for the
    second, which runs only nodes where weights come in. What the others have saved is not read
    again, but without this it would stay as long as later nodes lead to them.

    Code with saved-tensor hooks of its own keeps what it saves itself.
    """

    def __init__(self) -> None:
        self._saved: list[_Saved] = []
        self._keeping = False

    def recorded(self) -> AbstractContextManager[None]:
        """Around the forward pass."""
        context: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(
            self._pack, self._unpack
        )
        return context

    def keep(self, keeping: bool) -> None:
        """Say whether what is read now is read in the second half, too."""
        self._keeping = keeping

    def release(self) -> None:
        """After the first half: let go of what was read there and is not to be kept."""
        for saved in self._saved:
            if saved.done:
                saved.tensor = None
        self._saved.clear()

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved.append(saved)
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        tensor = saved.tensor
        if tensor is None:
            raise AssertionError("a node is run in both halves, but no weights come in there")
        if version_of(tensor) != saved.version:  # autograd checks this only without hooks
            raise RuntimeError(
                f"a tensor {list(tensor.shape)} that backward needs was changed in place after it "
                "was saved: change a copy instead."
            )
        saved.done = not self._keeping
        return tensor
