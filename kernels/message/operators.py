"""Registration of the operators with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("lq_lightning", "FRAGMENT")  # type: ignore[no-untyped-call]


def define_operator(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define ``lq_lightning::<name>`` for CPU and CUDA tensors and return it.

    Through the dispatcher alone: the Python layers of ``torch.library.custom_op`` take longer than
    the launch of a kernel. They would derive autograd formulas, of which there are none here, and
    count writes to mutated arguments, which is the task of ``kernel`` (see ``count_write``).

    Args:
        schema: name, arguments and result in the language of ``torch.library.Library.define``.
        kernel: the implementation; raises ``ValueError`` for arguments that it cannot take.
        fake: returns empty results of the right shape, dtype and device, for traces.

    Returns:
        The operator, to be called with the arguments in order.
    """
    name = schema.partition("(")[0]
    tags = (torch.Tag.pt2_compliant_tag,)
    _LIBRARY.define(schema, tags=tags)  # type: ignore[no-untyped-call]
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, kernel, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"lq_lightning::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.lq_lightning, name).default


def count_write(*outs: Tensor) -> None:
    """Tell autograd that a kernel has written to ``outs``, as operators of torch do themselves."""
    try:
        torch.autograd.graph.increment_version(outs)
    except RuntimeError:  # inference tensors count nothing; others may count twice
        torch.autograd.graph.increment_version([out for out in outs if not out.is_inference()])
