"""Saved-tensor hooks: what modules save that are not recognized, as codes.

Only tensors that are worth it and may be changed a little are packed: floating point, 1024 values
or more, with a last dimension of 16 or more (statistics have less), no weights, and nothing that
the caller holds anyway (masks, rotary tables). A storage that is saved through several views is
stored once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lq_lightning._compat.saved_tensors import (
    Hooks,
    checkpoint_region,
    has_storage,
    outer_hooks,
    storage_key,
    version_of,
)
from lq_lightning.foundation.nested import tensors_in

from .linear import encode_source
from .sites import HookSite
from .sources import Codes
from .weights import WeightStorages

__all__ = ["pack_saved_tensors"]

_MIN_NUMEL = 1024
_MIN_WIDTH = 16
_ROW = 128
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Code:
    """How a storage, or a part of one, was encoded.

    Attributes:
        codes: how to decode it.
        rows: of the matrix that was encoded.
        dtype: of the tensor.
    """

    codes: Codes
    rows: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor: a view of a decoded storage.

    The message is given to the hooks around ours once for each saved tensor, as without ours: those
    of a split backward pass let go of what its node will not read again, and other nodes may.

    Attributes:
        code: of the storage.
        message: the code itself, as the hooks around ours packed it.
        shape: of the tensor.
        stride: of the tensor.
        offset: of the tensor in the storage.
    """

    code: _Code
    message: Any
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Packer:
    """The hooks of one forward of one module."""

    def __init__(self, module: nn.Module, site: HookSite, args: Any, outer: Hooks | None) -> None:
        self._site = site
        self._weights = WeightStorages(module)
        tensors = [tensor for tensor in tensors_in(args) if has_storage(tensor)]
        self._held = {storage_key(t) for t in tensors if not t.requires_grad}
        self._inputs = {storage_key(t) for t in tensors if t.requires_grad}
        self._codes: dict[tuple[Any, ...], tuple[_Code, Tensor]] = {}
        self._alive: list[Tensor] = []
        self.outer = outer

    def forget(self) -> None:
        """The module has run: let go of the tensors."""
        self._codes.clear()
        self._alive.clear()

    def pack(self, tensor: Tensor) -> Any:
        if not has_storage(tensor):
            return tensor if self.outer is None else self.outer[0](tensor)
        storage = (storage_key(tensor), version_of(tensor), tensor.dtype)
        offset, shape, stride = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        if storage in self._codes:
            return self._view(storage, shape, stride, offset)
        if not self._takes(tensor):
            return tensor if self.outer is None else self.outer[0](tensor)
        whole = tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
        key = storage if whole else (*storage, shape, stride, offset)
        if key not in self._codes:
            self._codes[key] = self._encode(tensor, whole=whole)
            self._alive.append(tensor.detach())  # else a later storage could get its place
        if whole:
            return self._view(key, shape, stride, offset)
        return self._view(key, shape, _contiguous_strides(shape), 0)

    def _view(
        self, key: tuple[Any, ...], shape: torch.Size, stride: tuple[int, ...], offset: int
    ) -> _View:
        code, message = self._codes[key]
        kept = message if self.outer is None else self.outer[0](message)
        return _View(code, kept, shape, stride, offset)

    def _takes(self, tensor: Tensor) -> bool:
        if tensor.dtype not in _FLOATS:
            return False
        if tensor.numel() < _MIN_NUMEL or tensor.shape[-1] < _MIN_WIDTH:
            return False
        if self._site.kind == "attention" and tensor.dim() < 4:  # not the sums of exponentials
            return False
        storage = storage_key(tensor)
        if self._site.kind == "checkpoint" and storage not in self._inputs:
            return False
        return storage not in self._held and not self._weights.holds(tensor)

    def _encode(self, tensor: Tensor, *, whole: bool) -> tuple[_Code, Tensor]:
        with torch.no_grad():
            values = tensor.detach()
            values = values.as_strided((values.numel(),), (1,), 0) if whole else values.reshape(-1)
            width = _ROW if values.numel() % _ROW == 0 else tensor.shape[-1]
            source = encode_source(
                values.view(-1, width), self._site.format(width), self._site.kind
            )
        (message,) = source.tensors
        if message is None:
            raise AssertionError("a matrix is rebuilt from its message")
        return _Code(source.codes, values.numel() // width, tensor.dtype), message

    def unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _View):
            tensor: Tensor = packed if self.outer is None else self.outer[1](packed)
            return tensor
        code = packed.code
        message = packed.message if self.outer is None else self.outer[1](packed.message)
        values = code.codes.rebuild((message,), code.rows, code.dtype).view(-1)
        return values.as_strided(packed.shape, packed.stride, packed.offset)


def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


@contextlib.contextmanager
def _packing(packer: _Packer) -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(packer.pack, packer.unpack):
        try:
            yield
        finally:
            packer.forget()


def _as_is(value: Any) -> Any:
    return value


def pack_saved_tensors(
    module: nn.Module, site: HookSite, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AbstractContextManager[None]:
    """Store what a module saves in its forward as codes, inside of a ``with`` block.

    Hooks of others around the block (``save_on_cpu``) get the codes. Within a checkpointed region
    nothing is done: what is saved there is dropped, and computed again.

    Args:
        module: The module; its weights are never packed.
        site: What to pack, and how.
        args: Of its forward.
        kwargs: Of its forward.
    """
    outer = outer_hooks()
    ours = None if outer is None else getattr(outer[0], "__self__", None)
    if checkpoint_region() is not None:
        return contextlib.nullcontext()
    if site.codec is None:
        if not isinstance(ours, _Packer):
            return contextlib.nullcontext()
        hooks = ours.outer or (_as_is, _as_is)
        return torch.autograd.graph.saved_tensors_hooks(*hooks)
    if isinstance(ours, _Packer):  # what this module packs is not packed again by those around it
        outer = ours.outer
    return _packing(_Packer(module, site, (args, kwargs), outer))
