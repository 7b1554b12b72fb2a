"""How much memory tensors take at most while something runs, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldMemory(TorchDispatchMode):
    """Counts the storages that operators make inside of a ``with`` block until they are freed.

    What an operator needs while it runs is not counted: that of this package's codecs on a CPU,
    which GPUs do without, would be most of it.

    Args:
        known: Tensors that are there already.

    Attributes:
        nbytes: Of the storages that are there now.
        peak_nbytes: Most of them so far.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.nbytes = self.peak_nbytes = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and count what it returns."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        weakref.finalize(storage, self._free, key, nbytes)

    def _free(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)  # another storage may get its place
        self.nbytes -= nbytes
