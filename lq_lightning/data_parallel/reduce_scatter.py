"""Quantized reduce-scatter of FSDP2 units: two-level gradient quantization (SDP4Bit §3.2).

One object serves one FSDP2 unit. Gradients arrive as one slot per rank. Within a node every rank
sends each slot's codes to the local rank that collects them; that rank decodes, sums in fp32 and
encodes again for the matching ranks of the other nodes, which decode and sum once more. Between the
two levels values stay in the Hadamard domain: the transform is linear, so one inverse at the end is
enough (SDP4Bit §3.3).

Deviation: the paper's kernels also encode what a node contributes to its own slots. That part never
leaves the node, so here it stays as it is: of N nodes, N - 1 add quantization noise to a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning._compat.fsdp2 import PackedGradients, ReduceScatter
from lq_lightning._compat.tensors import copy_all
from lq_lightning._compat.torch import backward_id, reduce_scatter_flat
from lq_lightning.codecs import derive_seed
from lq_lightning.data_parallel.config import GradientQuantization
from lq_lightning.data_parallel.gradient_layouts import GradientLayouts
from lq_lightning.data_parallel.layout import MessageLayout
from lq_lightning.data_parallel.reduction_levels import ReductionLevels
from lq_lightning.data_parallel.reduction_stack import ReductionStack, StackedGradients
from lq_lightning.data_parallel.unit import UnitCollective, UnitDescription
from lq_lightning.foundation import streams
from lq_lightning.foundation.traffic import ring_bytes

__all__ = ["TwoLevelReduceScatter"]


class TwoLevelReduceScatter(UnitCollective, ReduceScatter):
    """Reduce-scatter that sends INT8 codes within a node and INT4 codes between nodes.

    With one node, or one rank per node, only the level that exists is used. Sums are formed in fp32
    in a fixed order, so the result does not depend on timing: first what this node contributes,
    then the other nodes, by number. A result in bf16 is rounded after each of the two. A non-finite
    gradient is NaN or Inf on the rank that owns it, and where it was encoded so is its whole group,
    so the gradient norm of every rank sees it.

    Args:
        config: Codecs and method.
        unit: The unit.
        stack: Of the units that this one may be reduced together with; None: there are none.

    Attributes:
        layouts: Of messages.
        levels: What is done within a node and between nodes.
        stack: See above.
    """

    def __init__(
        self,
        config: GradientQuantization,
        unit: UnitDescription,
        stack: ReductionStack | None = None,
    ) -> None:
        super().__init__(unit)
        self._config = config
        self.layouts = GradientLayouts(config, unit)
        self.levels = ReductionLevels(unit.context, self._seed)
        self.stack = stack
        self._expected: PackedGradients | None = None
        self._packs_into: ReductionStack | None = None
        self._allocations = 0
        self._calls = 0
        self._calls_step = -1

    # --- what the next call gets ------------------------------------------------------------

    def expect(self, packed: PackedGradients) -> None:
        """Say what the next call reduces; an earlier word of a call that never came is forgotten.

        FSDP2 hands the call nothing but a flat buffer.
        """
        self._expected, self._packs_into, self._allocations = packed, None, 0

    def _take_expected(self) -> PackedGradients:
        packed, self._expected = self._expected, None
        if packed is None:
            raise AssertionError(
                f"unit `{self.name}` is reduced, but nothing said which gradients are packed"
            )
        return packed

    def _seed(self, level: int) -> int | None:
        """Seed of this call's stochastic rounding: differs by step, call, rank, unit and level."""
        if self._config.rounding != "stochastic":
            return None
        context = self._context
        return derive_seed(
            context.seed, level, context.step, self._calls, context.topology.rank, self._index
        )

    # --- the collective ---------------------------------------------------------------------

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate an input or output buffer, ``size`` elements of ``dtype`` on ``device``.

        FSDP2 allocates the input first. That of a unit that is reduced with others is in their
        memory; outputs never are, as FSDP2 takes each for a storage of its own.
        """
        self._allocations += 1
        if self._expected is not None and self._allocations == 1 and len(size) == 1:
            row = self._row(self._expected, int(size[0]), dtype, device)
            if row is not None:
                return row
        return torch.empty(*size, dtype=dtype, device=device)

    def _row(
        self, packed: PackedGradients, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """Memory of the stack for what is packed now, ``[numel]``; None if it is reduced alone."""
        context, stack = self._context, self.stack
        if stack is None or packed.read_in_backward or context.measure_errors:
            return None
        if not _may_be_deferred(device):
            return None
        context.reductions.begin()
        layouts = self.layouts.of(packed.indices, numel // context.topology.world_size, dtype)
        row = stack.row(layouts, numel, dtype, device)
        self._packs_into = None if row is None else stack
        return row

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor`` (``[world * n]``) to this rank's slot in ``output_tensor``.

        Args:
            output_tensor: ``[n]`` in the reduction dtype.
            input_tensor: ``[world * n]`` in the reduction dtype. Full-precision values between
                quantized ones are overwritten with zeros.
            group: All ranks of the topology.
            op: Sum or average.
            async_op: Not used. The result is complete on the current stream, or, if only the
                optimizer reads it, on the stream that called backward when backward ends.

        Raises:
            NotImplementedError: ``op`` is neither a sum nor an average.
        """
        topology = self._context.topology
        if group.size() != topology.world_size:
            raise NotImplementedError(
                f"unit `{self.name}` reduces over {group.size()} ranks, but its topology has "
                f"{topology.world_size}: quantized reduction needs one flat mesh over all ranks."
            )
        scale = _scale_of(op, topology.world_size)
        packed = self._take_expected()
        try:
            self._start_call(output_tensor)
            exact = self._exact(output_tensor, input_tensor, group, scale)
            in_backward = packed.read_in_backward or exact is not None
            # of a sum, FSDP2 divides the result itself
            may_defer = not in_backward and op == dist.ReduceOp.AVG
            stack, self._packs_into = self._packs_into, None
            if stack is not None and may_defer:
                self._reduce_with_others(stack, output_tensor, scale)
            else:
                layouts = self.layouts.of(packed.indices, output_tensor.numel(), input_tensor.dtype)
                alone = StackedGradients(input_tensor.view(1, -1), [output_tensor], layouts)
                self._reduce(alone, scale, may_defer and _may_be_deferred(input_tensor.device))
                if stack is not None:  # FSDP2 keeps the row until it is read
                    stack.forget()
                    self.stack = None
        except BaseException:  # out of memory, for example, after which a user may go on
            self.recover()
            raise
        if exact is not None:
            self._context.gradient_errors.add(output_tensor, exact)

    def recover(self) -> None:
        """Leave nothing of a backward that failed, whose gradients nobody will use."""
        self._expected = self._packs_into = None
        self._context.reductions.drop()
        if self.stack is not None:
            self.stack.forget()
        self._context.reductions.join()

    def _reduce(self, stacked: StackedGradients, scale: float, deferred: bool) -> None:
        """Reduce gradients of one unit, or of a stack."""
        topology, reductions = self._context.topology, self._context.reductions
        if deferred:
            reductions.make_room()
        else:
            reductions.join()  # FSDP2 may add this result to one of them
        outputs, layouts = stacked.outputs, stacked.layouts
        slots = stacked.slots.view(len(outputs), topology.world_size, -1)
        if len(outputs) == 1:
            sums = outputs[0].view(1, -1)
        else:
            sums = outputs[0].new_empty(len(outputs), outputs[0].numel())
        messages = self.levels.start(slots, layouts, sums, scale)

        def finish(received: Tensor) -> None:
            self.levels.finish(received, layouts, sums, scale)
            if len(outputs) > 1:
                copy_all(tuple(outputs), sums.unbind())
                streams.record_use(sums)  # allocated on the stream of the first level

        self._count_messages(messages, layouts.inter)
        if deferred:
            reductions.submit(messages, lambda: self.levels.exchange(messages), finish)
        else:
            finish(self.levels.exchange(messages))

    def _reduce_with_others(self, stack: ReductionStack, output: Tensor, scale: float) -> None:
        """Let gradients that are packed in a row of the stack be reduced with the others'."""

        def reduce() -> None:
            self._reduce(stack.take(), scale, deferred=True)

        self._context.reductions.wait_for_more(stack, reduce)
        if stack.add(output):
            self._context.reductions.make_room()

    def _start_call(self, output: Tensor) -> None:
        context = self._context
        if self._calls_step != context.step:
            self._calls_step, self._calls = context.step, 0
        self._calls += 1
        intra, inter = ring_bytes(output.numel() * output.itemsize, context.topology)
        context.traffic.baseline_gradients += intra + inter
        context.traffic.baseline_inter += inter
        context.traffic.reductions += 1

    def _exact(
        self, output: Tensor, slots: Tensor, group: dist.ProcessGroup, scale: float
    ) -> Tensor | None:
        """The full-precision result, when errors are measured."""
        if not self._context.measure_errors:
            return None
        exact = torch.empty(output.shape, dtype=torch.float32, device=output.device)
        reduce_scatter_flat(exact, slots.float(), group)
        return exact * scale

    def _count_messages(self, messages: Tensor, layout: MessageLayout) -> None:
        """Count the payload of the slowest level that this topology has."""
        traffic = self._context.traffic
        traffic.gradients_messages += messages.numel()
        traffic.gradients_elements += layout.numel * (messages.shape[0] * messages.shape[1])


def _may_be_deferred(device: torch.device) -> bool:
    return streams.has_streams(device) and backward_id() != -1


def _scale_of(op: Any, world_size: int) -> float:
    if op == dist.ReduceOp.AVG:
        return 1.0 / world_size
    if op == dist.ReduceOp.SUM:
        return 1.0
    raise NotImplementedError(
        f"quantized reduction supports sums and averages, not {op}. With a gradient divide factor, "
        "call `module.set_force_sum_reduction_for_comms(True)` on the FSDP2 modules."
    )
