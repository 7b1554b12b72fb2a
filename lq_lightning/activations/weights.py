"""Which tensors that autograd saves are weights, or copies that stand for them."""

from __future__ import annotations

from torch import Tensor, nn

from lq_lightning._compat.saved_tensors import base_of, has_storage, storage_key
from lq_lightning.foundation.parameters import is_copy_of_parameter

__all__ = ["WeightStorages"]


class WeightStorages:
    """Tells weights among saved tensors: they are held anyway, or must not be.

    Args:
        model: Whose parameters and buffers are weights.
        extra: More weights.
    """

    def __init__(self, model: nn.Module, extra: tuple[Tensor, ...] = ()) -> None:
        tensors = (*model.parameters(), *model.buffers(), *extra)
        self._storages = {storage_key(t) for t in tensors if has_storage(t)}

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a weight, a view of one, or a cast of one.

        FSDP2 hands modules parameters whose storage it frees after forward: those are parameters,
        or views whose base is one, but at other addresses than before. Autocast's copies are new
        tensors without a base: what made them shows.
        """
        if isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter):
            return True
        if storage_key(tensor) in self._storages:
            return True
        return is_copy_of_parameter(tensor)
