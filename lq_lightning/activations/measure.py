"""Count what autograd saves in a forward: unique storages, by the module that saved them first."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lq_lightning._compat.saved_tensors import base_of, has_storage, running_modules, storage_key
from lq_lightning.foundation.parameters import is_copy_of_parameter


class WeightStorages:
    """Tells weights from other saved tensors: they are held anyway.

    Args:
        model: model whose parameters and buffers are weights.
        extra: more weights.
    """

    def __init__(self, model: nn.Module, extra: tuple[Tensor, ...] = ()) -> None:
        tensors = (*model.parameters(), *model.buffers(), *extra)
        self._storages = {storage_key(t) for t in tensors if has_storage(t)}

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a weight, a view of one, or a cast of one.

        FSDP2 hands modules parameters whose storage it frees after forward: those are parameters,
        or views whose base is one, but at other addresses than before. Autocast's copies are new
        tensors without a base; their graph node tells.
        """
        if isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter):
            return True
        if storage_key(tensor) in self._storages:
            return True
        return is_copy_of_parameter(tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """A storage that autograd keeps.

    Attributes:
        nbytes: size of the whole storage, which stays as long as one view of it is kept.
        dtype: dtype of the first tensor that was saved in it.
        shape: shape of that tensor.
        module: module whose forward saved it, ``""`` for the root; None outside of all.
    """

    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    module: str | None


@dataclass
class SavedTensors:
    """Counts what is saved for backward inside of a ``with`` block, weights excluded.

    Run the forward in the block and keep its output until the end: memory that is freed earlier may
    be counted. Recomputation and checkpoints keep their own accounts, as they keep their own hooks.

    Attributes:
        model: model whose modules the tensors are attributed to.
        extra: weights that the model does not hold itself.
        storages: saved storages, in order.
    """

    model: nn.Module
    extra: tuple[Tensor, ...] = ()
    storages: list[SavedTensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Look up the model's modules and weights."""
        self._names = {id(module): name for name, module in self.model.named_modules()}
        self._weights = WeightStorages(self.model, self.extra)
        self._seen: dict[int, Tensor] = {}
        self._hooks: Any = None

    @property
    def nbytes(self) -> int:
        """Total bytes."""
        return sum(saved.nbytes for saved in self.storages)

    def __enter__(self) -> SavedTensors:
        """Start counting."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop counting."""
        self._hooks.__exit__(kind, error, traceback)
        self._seen.clear()

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:  # sparse tensors have no storage to identify
            return tensor
        key = storage_key(tensor)
        if key not in self._seen and not self._weights.holds(tensor):
            self._seen[key] = tensor.detach()  # keeps a later storage from reusing the address
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
