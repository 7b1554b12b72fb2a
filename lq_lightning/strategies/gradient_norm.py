"""The norm of gradients that lie on several meshes: each element of the model counts once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lq_lightning._compat.tensor_parallel import TENSOR, tensor_shard
from lq_lightning._compat.tensors import local_tensor


class GradientNorm:
    """L2 norm of all gradients of a model, which torch computes on a single mesh only.

    Args:
        parameters: Returns this rank's parameters, plain or DTensors.
        mesh: Mesh of the run. What is not sharded along its tensor-parallel axis is the same there.
        group: Ranks that hold the model; None are all.

    Attributes:
        silent: ``id`` of parameters that other ranks count.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[nn.Parameter]],
        mesh: DeviceMesh,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._parameters, self._group = parameters, group
        self.silent: Collection[int] = ()
        self._device = torch.device(mesh.device_type)
        self._is_first = mesh.get_local_rank(TENSOR) == 0

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts its elements: the first of those that hold the same ones."""
        holds_others = self._is_first or tensor_shard(parameter) is not None
        return holds_others and id(parameter) not in self.silent

    def total(self, parameters: Iterable[nn.Parameter] | None = None) -> Tensor:
        """Return the norm, a float32 scalar, the same on all ranks, which call this together.

        It is not finite if any gradient is not. ``parameters`` are some of this rank's.
        """
        gradients = [
            local_tensor(p.grad)
            for p in (self._parameters() if parameters is None else parameters)
            if p.grad is not None and self._counts(p)
        ]
        norm = torch.nn.utils.get_total_norm([g for g in gradients if g.numel()])
        squares = norm.to(self._device, torch.float64).square()
        dist.all_reduce(squares, group=self._group)
        return squares.sqrt().float()

    @torch.no_grad()
    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        """Scale the gradients on all ranks by one factor, so that their norm is at most this."""
        parameters = list(parameters)
        norm = self.total(parameters) + 1e-6  # as in torch
        factor = torch.clamp(max_norm / norm, max=1.0)
        for parameter in parameters:
            if parameter.grad is not None:
                local_tensor(parameter.grad).mul_(factor)
