"""Direct uses of sharded parameters in a step: computing with values, or handling parameters.

Between the calls of modules the parameters of the root are shards, as optimizers, clipping and
writes need them. A step may also compute with one directly, as in ``F.linear(x, self.emb.weight)``,
which needs the gathered values and sends the gradient the way that gradients of modules go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from lq_lightning._compat.modes import SuspendableMode
from lq_lightning.strategies.failures import is_refused_for_shards

# Properties that are part of the computation; all others (`data`, `grad`, `shape`) are not.
_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
# Functions that take values out of torch need whole ones, also without a gradient.
_VALUES = frozenset(
    ("item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__")
)
# Questions about a parameter, and functions that make others like it.
_HANDLING = frozenset(
    (
        *("detach", "detach_", "requires_grad_", "retain_grad", "register_hook"),
        *("register_post_accumulate_grad_hook", "size", "stride", "dim", "ndimension", "numel"),
        *("nelement", "element_size", "storage_offset", "data_ptr", "get_device", "is_contiguous"),
        *("is_floating_point", "is_complex", "is_same_size", "is_pinned", "is_shared", "type"),
        *("is_inference", "storage", "untyped_storage", "result_type", "can_cast", "pin_memory"),
        *("share_memory_", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like"),
        *("randn_like", "randint_like", "new_empty", "new_zeros", "new_ones", "new_full"),
        *("new_tensor", "__len__", "__hash__", "__repr__", "__format__", "__deepcopy__"),
        *("__reduce_ex__", "__reduce__", "__setstate__"),
    )
)
_PARAMETER = "lq_parameter"  # attribute of `parameter.data` and `parameter.detach()`
_NOT_IN_PLACE = frozenset({"__int__", "__invert__", "__index__", "__init__"})


class DirectUses(SuspendableMode):
    """Gives gathered values of the root's parameters to functions that compute with them.

    - A function that writes (``clamp_``, foreach and fused functions, ``out=``), or asks for
      properties, gets shards.
    - With gradients enabled any other function of a trained parameter gets its gathered values.
    - A function that mixes shards with other tensors, or takes values out of torch, gets gathered
      parameters, and whole tensors of results that were computed from shards without gradients.
    - Anything else (averages of weights, norms of gradients) computes with shards if torch can.

    Args:
        gathered: Gives the gathered values of a shard that is a parameter of the root, None for any
            other tensor. Gathers if need be: all ranks together.
        wrote: Called when something was written into shards or gradients.
        name_of: The name of a sharded parameter, for errors.
        backward: Entered around a backward that the step calls, which may run forwards again; told
            whether it leaves gradients.
    """

    def __init__(
        self,
        gathered: Callable[[Tensor], Tensor | None],
        wrote: Callable[[], None],
        name_of: Callable[[Tensor], str],
        backward: Callable[[bool], AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        self._backward = backward
        self._gathered = gathered
        self._wrote = wrote
        self._name_of = name_of

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of torch on shards or on gathered values."""
        if func is Tensor.backward or func is torch.autograd.grad:
            self._check_gradients_of(args, kwargs)
            args, kwargs = self.arguments(args, kwargs)
            with self._backward(func is Tensor.backward):
                return func(*args, **kwargs)
        tensors = list(_tensors(args, kwargs))
        if not any(isinstance(t, DTensor) for t in tensors):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if name == "__set__" and attribute == "data" and isinstance(args[1], DTensor):
                return self._assign(args[0], args[1])
            if attribute not in _VIEWS:
                return _remember(args[0], func(*args, **kwargs))
        elif name in _HANDLING:
            return _remember(args[0] if args else None, func(*args, **kwargs))
        elif _writes(name, kwargs):
            target = kwargs["out"] if "out" in kwargs else next(chain(args, kwargs.values()))
            if any(isinstance(t, DTensor) for t in _tensors((target,), {})):
                result = func(*args, **kwargs)
                self._note(target)
                return result
        elif name.startswith("_foreach"):
            return func(*args, **kwargs)
        if name in _VALUES or any(_is_other(t) or self._is_trained(t) for t in tensors):
            args, kwargs = _map(self._whole, args, kwargs)
            return func(*args, **kwargs)
        return self._read(func, args, kwargs)

    def _read(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute with shards, or with whole tensors where torch has no form for shards."""
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not is_refused_for_shards(error):
                raise
            args, kwargs = _map(self._whole, args, kwargs)
            return func(*args, **kwargs)

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace parameters of the root with their gathered values."""
        if not any(isinstance(t, DTensor) for t in _tensors(args, kwargs)):
            return args, kwargs
        return _map(self._parameter, args, kwargs)

    def _parameter(self, tensor: Tensor) -> Tensor:
        found = self._gathered(tensor) if isinstance(tensor, DTensor) else None
        return tensor if found is None else found

    def _is_trained(self, tensor: Tensor) -> bool:
        """Whether this use of a parameter is to give it a gradient."""
        needed = tensor.requires_grad and torch.is_grad_enabled()
        return needed and self._parameter(tensor) is not tensor

    def _whole(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        found = self._gathered(tensor)
        if found is not None:
            return found
        # torch refuses parameters of a unit, and mixtures that would need a gradient
        if tensor.requires_grad or isinstance(tensor, nn.Parameter):
            return tensor
        return tensor.full_tensor()

    def _assign(self, target: Tensor, value: DTensor) -> None:
        """Assign ``target.data = value``; a DTensor's own assignment would lose the value."""
        if value.shape != target.shape or value.dtype != target.dtype:
            raise RuntimeError(
                f"`.data` of the sharded parameter `{self._name_of(target)}` was assigned a tensor "
                f"of shape {tuple(value.shape)} and {value.dtype}; it has shape "
                f"{tuple(target.shape)} and {target.dtype}, which cannot change any more."
            )
        self._wrote()
        with torch.no_grad():
            target.copy_(value)

    def _note(self, written: Any) -> None:
        """Count a write where torch does not: by foreach functions, and through ``.data``."""
        self._wrote()
        for tensor in _tensors((written,), {}):
            parameter = getattr(tensor, _PARAMETER, tensor)
            if isinstance(parameter, nn.Parameter):
                increment_version(parameter)

    def _check_gradients_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in _tensors((*args[1:2], kwargs.get("inputs")), {}):
            if isinstance(tensor, DTensor) and self._gathered(tensor) is None:
                raise RuntimeError(
                    "autograd was asked for the gradient of the parameter "
                    f"`{self._name_of(tensor)}`, which is a shard while its unit computes with "
                    "gathered values, so that there is none. Run backward, after which `p.grad` "
                    "is the shard's gradient, averaged over the ranks."
                )


def _remember(parameter: Any, value: Any) -> Any:
    """Note on a tensor which parameter it shares memory with."""
    if isinstance(value, DTensor) and isinstance(parameter, nn.Parameter):
        setattr(value, _PARAMETER, parameter)
    return value


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for value in chain(args, kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for inner in value:
                if isinstance(inner, Tensor):
                    yield inner


def _is_other(tensor: Tensor) -> bool:
    """Whether an operation with DTensors would mix; they take floating scalars."""
    return not isinstance(tensor, DTensor) and (
        tensor.dim() > 0 or not tensor.dtype.is_floating_point
    )


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    if kwargs.get("out") is not None or name == "__setitem__":
        return True
    if name.endswith("__"):
        return name.startswith("__i") and name not in _NOT_IN_PLACE
    return name.endswith("_")


def _map(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (
        tuple(_changed(change, value) for value in args),
        {key: _changed(change, value) for key, value in kwargs.items()},
    )


def _changed(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (list, tuple) and any(isinstance(v, DTensor) for v in value):
        return type(value)(change(v) if isinstance(v, Tensor) else v for v in value)
    return value
