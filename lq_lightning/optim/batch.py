"""What one step of a quantized optimizer has to do, sorted by what does it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from lq_lightning._compat.tensors import local_tensor, waited
from lq_lightning.kernels.optimizer_step import PreparedTensor

from .slots import Slot


class Batch(NamedTuple):
    """Parameters of one launch; ``groups`` are numbers of parameter groups."""

    rule: str
    slots: list[Slot]
    groups: list[int]
    prepared: list[PreparedTensor]
    tensors: list[list[Tensor]]
    grads: list[Tensor]


class Work(NamedTuple):
    """What a step has to do.

    Attributes:
        for_torch: parameter groups for the optimizer of torch.
        batches: by rule, kind of the prepared tensors and dtype of the gradients.
        write_back: non-contiguous parameters and what becomes of them.
    """

    for_torch: list[dict[str, Any]]
    batches: dict[tuple[Any, ...], Batch]
    write_back: list[tuple[Tensor, Tensor]]


def local_gradient(param: Tensor, grad: Tensor) -> Tensor:
    """Return this rank's part of a gradient, complete.

    Raises:
        RuntimeError: it is placed otherwise than its parameter.
    """
    placements = getattr(param, "placements", None)
    if isinstance(grad, DTensor) and grad.placements != placements:
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(param.shape)} is placed as "
            f"{grad.placements}, the parameter as {placements}. Set `param.grad = "
            "param.grad.redistribute(placements=param.placements)` before the step."
        )
    return waited(local_tensor(grad))
