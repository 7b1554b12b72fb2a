"""Gradients of a pipeline between its schedule, which computes them, and the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lq_lightning._compat.modules import discard_unreduced_gradients, reduce_gradients
from lq_lightning._compat.tensors import local_tensor
from lq_lightning._compat.torch import all_gather_flat
from lq_lightning.codecs import CodecSpec, decode_reduce, encode


class SharedTensor:
    """A parameter that several ranks of a pipeline hold, such as a tied embedding.

    Args:
        name: First name in the whole model.
        parameter: Copy on this rank; None if there is none.
        group: Ranks that hold a copy, in the order of their stages.
        codec: Code of gradients on the wire; None for their own dtype.

    Attributes:
        sent_nbytes: Bytes of gradients that this rank has sent to the others.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter | None,
        group: dist.ProcessGroup,
        codec: CodecSpec | None,
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.sent_nbytes = 0
        self._group = group
        self.codec = codec

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all that hold it."""
        return self._group.rank() == 0

    @torch.no_grad()
    def share_value(self) -> None:
        """Give all copies the value of the first one."""
        if self.parameter is not None:
            local = local_tensor(self.parameter.detach())
            if local.numel():  # shards of one copy are as those of another
                dist.broadcast(local, group=self._group, group_src=0)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add up the gradients of all copies; each has used the parameter for something else."""
        if self.parameter is None or not self.parameter.requires_grad:
            return
        if self.parameter.grad is None:  # not used here in this batch, but others wait
            self.parameter.grad = torch.zeros_like(self.parameter)
        local = local_tensor(self.parameter.grad)
        if not local.numel():
            return
        others = self._group.size() - 1
        if self.codec is None:
            # Bytes of a ring all-reduce; gloo and NCCL may use another algorithm.
            self.sent_nbytes += 2 * others * local.nbytes // (others + 1)
            dist.all_reduce(local, group=self._group)
        else:
            self.sent_nbytes += others * self._sum_codes(local, self.codec)

    def _sum_codes(self, gradient: Tensor, codec: CodecSpec) -> int:
        """Decode the same bytes on all ranks and sum in fp32, so that the copies stay equal."""
        flat = gradient.contiguous().view(1, -1)
        message = encode(codec, flat).view(-1)
        gathered = message.new_empty(self._group.size() * message.numel())
        all_gather_flat(gathered, message, self._group)
        messages = gathered.view(self._group.size(), 1, -1)
        decode_reduce(codec, messages, flat.shape[1], out=flat)
        if flat.data_ptr() != gradient.data_ptr():
            gradient.copy_(flat.view_as(gradient))
        return message.numel()


class PipelineGradients:
    """Keeps a batch's gradients from ``zero_grad`` until Lightning asks for them.

    The schedule of a pipeline runs forward and backward together, as Lightning's ``training_step``.
    Then Lightning calls ``zero_grad``, and only then ``backward``, which hands them out. Gradients
    are moved, never copied. A sharded module's stay unreduced inside FSDP2, out of reach of
    ``zero_grad``.

    Args:
        shared: Parameters that other stages hold, too.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, shared: Sequence[SharedTensor]
    ) -> None:
        self._root = module if isinstance(module, FSDPModule) else None
        self._optimizer = optimizer
        self._device = next(module.parameters()).device
        self._shared = shared
        self._held: list[tuple[nn.Parameter, Tensor]] = []
        # all but the first holder leave a shared parameter out of norms
        self._silent = {id(s.parameter) for s in shared if not s.is_first}
        if self._root is not None:
            discard_unreduced_gradients(module)

    def _parameters(self) -> Iterable[nn.Parameter]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def start(self, first: bool) -> None:
        """Before a schedule: gradients add up from zero if the batch is the first of a window."""
        self._held.clear()  # left by a batch that an error ended
        if first:
            for parameter in self._parameters():
                parameter.grad = None
            if self._root is not None:
                discard_unreduced_gradients(cast(nn.Module, self._root))
        if self._root is not None:
            # Whole gradients add up over the micro-batches, in weights that stay gathered.
            self._root.set_is_last_backward(False)
            self._root.set_reshard_after_backward(False)
            self._root.set_requires_gradient_sync(False)

    def hold(self) -> None:
        """After a schedule: take the gradients out of ``zero_grad``'s reach."""
        if self._root is None:
            for parameter in self._parameters():
                if parameter.grad is not None:
                    self._held.append((parameter, parameter.grad))
                    parameter.grad = None

    def give_back(self, reduce: bool) -> None:
        """Within Lightning's backward: hand the gradients out.

        Args:
            reduce: Reduce-scatter gradients over the ranks of the stage now.
        """
        for parameter, gradient in self._held:
            parameter.grad = gradient
        self._held.clear()
        if self._root is not None and reduce:
            reduce_gradients(self._root)

    def sum_shared(self) -> None:
        """Add up the gradients of shared parameters, complete and reduced, over their stages."""
        for shared in self._shared:
            shared.sum_gradients()

    def total_norm(self, parameters: Iterable[nn.Parameter] | None = None) -> Tensor:
        """The L2 norm of the gradients of all stages, shared parameters counted once.

        All ranks of the run must call this. Infinite and NaN gradients of any rank make it so on
        every rank.

        Args:
            parameters: Parameters of this rank that count; None for all of the optimizer.

        Returns:
            A float32 scalar, the same on every rank.
        """
        gradients = [
            local_tensor(p.grad)
            for p in (self._parameters() if parameters is None else parameters)
            if p.grad is not None and id(p) not in self._silent
        ]
        norm = torch.nn.utils.get_total_norm([g for g in gradients if g.numel()])
        squares = norm.to(self._device, torch.float64).square()
        dist.all_reduce(squares)
        return squares.sqrt().float()

    @torch.no_grad()
    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        """Scale the gradients of all stages by one factor, so that their norm is at most this."""
        parameters = list(parameters)
        factor = torch.clamp(
            max_norm / (self.total_norm(parameters) + 1e-6), max=1.0
        )  # 1e-6 as in torch
        for parameter in parameters:
            if parameter.grad is not None:
                local_tensor(parameter.grad).mul_(factor)
