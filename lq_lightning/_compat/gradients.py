"""Gradients that FSDP2 keeps unreduced between backward passes, and norms of all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad


class GradientKeeper(Protocol):
    """Keeps unreduced gradients of a parameter group between backward passes."""

    def store(self, index: int, gradient: Tensor) -> bool:
        """Add the gradient of parameter ``index``; False leaves it where it is."""

    def restore(
        self, index: int, gradient: Tensor | None, like: Tensor, dtype: torch.dtype
    ) -> Tensor | None:
        """Return what was stored plus ``gradient``, shaped as ``like``; None if there is none."""

    def discard(self) -> None:
        """Forget everything."""


def keep_unreduced_gradients(group: Any, keeper: GradientKeeper) -> Callable[[], None]:
    """Hand the group's unreduced gradients to ``keeper`` until the backward that reduces them.

    While ``set_requires_gradient_sync(False)`` holds, FSDP2 accumulates whole gradients, in the
    reduction dtype. The keeper gets them before that cast. Call it after
    ``fsdp2.announce_packed_gradients``, which sees what is given back.

    Returns:
        A function that undoes it.
    """
    original = group.post_backward

    def post_backward(*unused: Any) -> None:
        for index, fsdp_param in enumerate(group.fsdp_params):
            unsharded = getattr(fsdp_param, "_unsharded_param", None)
            if unsharded is None:
                continue
            gradient = _unreduced_gradient(fsdp_param)
            if group.reduce_grads:
                dtype = fsdp_param.mp_policy.reduce_dtype or unsharded.dtype
                total = keeper.restore(index, gradient, unsharded, dtype)
                if total is not None:
                    _set_unreduced_gradient(fsdp_param, total)
            elif gradient is not None and keeper.store(index, gradient):
                _set_unreduced_gradient(fsdp_param, None)
        original(*unused)

    def remove() -> None:
        if group.__dict__.get("post_backward") is post_backward:
            group.post_backward, group.gradient_keeper = original, None

    group.post_backward, group.gradient_keeper = post_backward, keeper
    return remove


def _unreduced_gradient(fsdp_param: Any) -> Tensor | None:
    accumulated: Tensor | None = vars(fsdp_param).get("unsharded_accumulated_grad")  # torch < 2.15
    return fsdp_param._unsharded_param.grad if accumulated is None else accumulated


def _set_unreduced_gradient(fsdp_param: Any, gradient: Tensor | None) -> None:
    gathered = fsdp_param._unsharded_param
    if "unsharded_accumulated_grad" in vars(fsdp_param):  # torch < 2.15
        fsdp_param.unsharded_accumulated_grad, gradient = gradient, None
    if gradient is not None and gradient.dtype != gathered.dtype:
        gathered.grad_dtype = None  # any
    gathered.grad = gradient


@contextmanager
def refuse_norm_clipping(message: str) -> Iterator[None]:
    """Let ``torch.nn.utils.clip_grad_norm_`` raise inside, however it was imported.

    Raises:
        NotImplementedError: With the message, where it is called.
    """

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError(message)

    original = clip_grad._get_total_norm
    clip_grad._get_total_norm = refuse
    try:
        yield
    finally:
        clip_grad._get_total_norm = original
