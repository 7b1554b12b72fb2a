"""Make uninitialised memory loud: NaN in floating point, 0xFF in uint8 (our payloads)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import _device_constructors

_MODULE_FUNCTIONS = ("empty", "empty_like", "empty_strided")
_TENSOR_METHODS = ("new_empty", "new_empty_strided")


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, FakeTensor) or tensor.is_meta:  # there is nothing to read
        return tensor
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    with torch.no_grad():
        if tensor.dtype == torch.uint8:
            tensor.fill_(0xFF)
        elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
    return tensor


def _poisoned(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _poison(original(*args, **kwargs))

    return allocate


@contextlib.contextmanager
def poison_uninitialized_memory() -> Iterator[None]:
    """Fill what `torch.empty` and its relatives return, for the duration of the context.

    Code that reads memory it never wrote then yields NaN (floats) or 0xFF (uint8) instead of the
    zeros that a fresh page usually holds. Allocations made inside C++ are not covered.
    """
    # `with torch.device(...)` remembers, at its first use, the functions that it finds then.
    _device_constructors()
    saved = [(torch, name, getattr(torch, name)) for name in _MODULE_FUNCTIONS]
    saved += [(torch.Tensor, name, getattr(torch.Tensor, name)) for name in _TENSOR_METHODS]
    for owner, name, original in saved:
        setattr(owner, name, _poisoned(original))
    try:
        yield
    finally:
        for owner, name, original in saved:
            setattr(owner, name, original)
