"""Count what autograd keeps from a forward: unique storages, by the module that saved first."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lq_lightning._compat.saved_tensors import running_modules, storage_key

from .weights import WeightStorages

__all__ = ["SavedTensor", "SavedTensors"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """A storage that autograd keeps.

    Attributes:
        nbytes: of the whole storage, which stays as long as one view of it is kept.
        dtype: of the first tensor that was saved in it.
        shape: of that tensor.
        module: name of the module whose forward saved it, ``""`` for the root; None outside of all.
    """

    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    module: str | None


@dataclass
class SavedTensors:
    """Counts what is saved for backward inside of a ``with`` block; weights are left out.

    Run the forward in the block and keep its output until after it: what is freed again may be
    counted. Recomputation and checkpoints keep their own accounts, as they keep their own hooks.

    Attributes:
        model: whose modules the tensors are attributed to.
        extra: weights that the model does not hold itself.
        storages: what was saved, in order.
    """

    model: nn.Module
    extra: tuple[Tensor, ...] = ()
    storages: list[SavedTensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Look at the model."""
        self._names = {id(module): name for name, module in self.model.named_modules()}
        self._weights = WeightStorages(self.model, self.extra)
        self._seen: dict[int, Tensor] = {}
        self._hooks: Any = None

    @property
    def nbytes(self) -> int:
        """Of all storages."""
        return sum(saved.nbytes for saved in self.storages)

    def __enter__(self) -> SavedTensors:
        """Start to count."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop."""
        self._hooks.__exit__(kind, error, traceback)
        self._seen.clear()

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:  # sparse: no storage of its own to tell it by
            return tensor
        key = storage_key(tensor)
        if key not in self._seen and not self._weights.holds(tensor):
            self._seen[key] = tensor.detach()  # else a later storage could get its place
            self.storages.append(
                SavedTensor(
                    nbytes=tensor.untyped_storage().nbytes(),
                    dtype=tensor.dtype,
                    shape=tuple(tensor.shape),
                    module=self._running(),
                )
            )
        return tensor

    def _running(self) -> str | None:
        names = (self._names.get(id(module)) for module in running_modules())
        return next((name for name in names if name is not None), None)


def _unpack(tensor: Tensor) -> Tensor:
    return tensor
