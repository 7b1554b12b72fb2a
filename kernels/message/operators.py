"""Registration of operators with torch, and the checks of tensors that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lq_lightning.kernels.message.format import ALIGNMENT_NBYTES
from lq_lightning.kernels.message.launch_cache import facts, find_call, keep_call

_LIBRARY = torch.library.Library("lq_lightning", "FRAGMENT")  # type: ignore[no-untyped-call]


def define_operator(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] | None = None
) -> Any:
    """Define ``lq_lightning::<name>`` for CPU and CUDA tensors and return it.

    Through the dispatcher alone: the Python layers of ``torch.library.custom_op`` take longer than
    the launch of a kernel. They would derive autograd formulas, of which there are none here, and
    count writes to mutated arguments, which is the task of ``kernel`` (see ``count_write``).

    Args:
        schema: name, arguments and result in the language of ``torch.library.Library.define``.
        kernel: the implementation; raises ``ValueError`` for arguments that it cannot take.
        fake: returns empty results of the right shape, dtype and device, for traces; None for
            operators without results.

    Returns:
        The operator, to be called with the arguments in order.
    """
    name = schema.partition("(")[0]
    tags = (torch.Tag.pt2_compliant_tag,)
    _LIBRARY.define(schema, tags=tags)  # type: ignore[no-untyped-call]
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, kernel, key)  # type: ignore[no-untyped-call]
    fake = fake or (lambda *arguments: None)
    torch.library.register_fake(f"lq_lightning::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.lq_lightning, name).default


class Launched(NamedTuple):
    """Results of a launch, and what launches again; see ``launch_cache.keep_call``."""

    results: tuple[Tensor, ...]
    launch: Callable[..., None]
    zeroed: int | None = None


def cached_operator(
    schema: str, fake: Callable[..., Any]
) -> Callable[[Callable[..., Tensor | tuple[Tensor, ...] | Launched]], Any]:
    """Define an operator whose checks and launch are kept for calls with equal arguments.

    Decorates what takes the arguments of ``schema``, checks them, and computes on a CPU or returns
    a ``Launched``; the name becomes the operator.

    Args:
        schema: as for ``define_operator``; arguments of which the type begins with ``Tensor`` are
            those that a launch is repeated with.
        fake: as for ``define_operator``.
    """
    name, _, rest = schema.partition("(")
    arguments, _, result = rest.partition(") ->")
    is_tensor = [part.strip().startswith("Tensor") for part in arguments.split(",")]
    single = "(" not in result

    def decorate(kernel: Callable[..., Tensor | tuple[Tensor, ...] | Launched]) -> Any:
        def run(*given: Any) -> Tensor | tuple[Tensor, ...]:
            pairs = list(zip(given, is_tensor, strict=True))
            key = (name, *[facts(value) if tensor else value for value, tensor in pairs])
            call = find_call(key)
            if call is not None:
                results = call.repeat(*[value for value, tensor in pairs if tensor])
                return results[0] if single else results
            made = kernel(*given)
            if not isinstance(made, Launched):
                return made
            keep_call(key, made.results, made.launch, made.zeroed)
            return made.results[0] if single else made.results

        return define_operator(schema, run, fake)

    return decorate


def count_write(*outs: Tensor) -> None:
    """Tell autograd that a kernel has written to ``outs``, as operators of torch do themselves."""
    try:
        torch.autograd.graph.increment_version(outs)
    except RuntimeError:  # inference tensors count nothing; others may count twice
        torch.autograd.graph.increment_version([out for out in outs if not out.is_inference()])


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_float(name: str, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless values of ``dtype`` can be encoded, or decoded to."""
    if dtype not in _FLOATS:
        raise ValueError(
            f"{name} has dtype {dtype}; allowed: float32, bfloat16, float16. Convert it, e.g. "
            f"{name}.float()."
        )


def check_rows(name: str, rows: Tensor) -> None:
    """Raise ``ValueError`` unless the last dimension of ``rows`` is contiguous."""
    if rows.shape[-1] > 1 and rows.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {rows.stride(-1)} in its last dimension; rows must be contiguous "
            f"(stride 1). Pass {name}.contiguous()."
        )


def check_message(name: str, message: Tensor, nbytes: int) -> None:
    """Raise ``ValueError`` unless ``message`` holds encoded rows of ``nbytes``.

    They are contiguous and start at multiples of 16 bytes.
    """
    if message.shape[-1] != nbytes:
        raise ValueError(
            f"{name} has rows of {message.shape[-1]} bytes, but this format and numel need "
            f"{nbytes}. Decode with the spec and numel that the rows were encoded with."
        )
    check_rows(name, message)
    steps = [
        stride
        for size, stride in zip(message.shape[:-1], message.stride()[:-1], strict=True)
        if size > 1
    ]
    if message.numel() and any(at % ALIGNMENT_NBYTES for at in (message.data_ptr(), *steps)):
        raise ValueError(
            f"{name} starts at address {message.data_ptr():#x} with row strides {steps}; every row "
            f"must start at a multiple of {ALIGNMENT_NBYTES} bytes. Slice buffers at multiples of "
            "spec.nbytes(numel)."
        )
