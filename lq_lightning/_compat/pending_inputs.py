"""Results of collectives that are still under way, as inputs of compiled code.

Parallel styles hand them to the module that runs next. torch 2.13 traces such an input as a tensor
that needs no gradient, so that backward ends there without an error, and older versions fail in
backward. Kernels that inductor makes do not wait for the local tensor of a DTensor.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lq_lightning._compat.tensors import local_tensor, waited


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Tensor) -> Tensor:
        value = waited(local_tensor(pending))
        if isinstance(pending, DTensor):  # a view of another one would be traced with that one
            mesh, layout, size = pending.device_mesh, pending.placements, pending.shape
            return DTensor.from_local(value, mesh, layout, shape=size, stride=pending.stride())
        return value.view_as(value)  # autograd writes to what is returned

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def ready(tensor: Tensor) -> Tensor:
    """The tensor once its collective is done, without a trace of that one; itself if it was."""
    pending = isinstance(local_tensor(tensor), AsyncCollectiveTensor)
    return cast(Tensor, _Wait.apply(tensor)) if pending else tensor  # type: ignore[no-untyped-call]


def _when_ready(compiled: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            args, kwargs = tree_map_only(Tensor, ready, (args, kwargs))
        return compiled(*args, **kwargs)

    return call


def _with_gradients(process: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(process)
    def process_inputs(inputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        pending = [isinstance(x, AsyncCollectiveTensor) and x.requires_grad for x in inputs]
        result = process(inputs, *args, **kwargs)
        traced = result[0] if isinstance(result, tuple) else result
        for tensor, differentiated in zip(traced, pending, strict=True):
            if differentiated:
                tensor.requires_grad_()
        return result

    return process_inputs


def wait_before_compiled(root: nn.Module) -> None:
    """Let compiled modules of ``root`` begin when their inputs are there.

    Other compiled code, such as a function or what follows a part that is not traced, at least
    passes gradients to inputs that are not there yet.
    """
    module: Any = importlib.import_module("torch._functorch.aot_autograd")  # slow
    process = getattr(module, "process_inputs", None)
    if process is not None and not hasattr(process, "__wrapped__"):
        module.process_inputs = _with_gradients(process)
    for part in root.modules():
        # of `module.forward = torch.compile(module.forward)` and `torch.compile(module)`, or of
        # `module.compile()`
        for name in ("forward", "_compiled_call_impl"):
            compiled: Any = part.__dict__.get(name)
            if hasattr(compiled, "_torchdynamo_orig_callable"):
                part.__dict__[name] = _when_ready(compiled)
