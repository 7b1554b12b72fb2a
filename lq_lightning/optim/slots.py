"""What an optimizer remembers of a parameter from one step to the next, to save host time.

A slot is a cache: it has weak references only, is compared with the parameter and its states before
every use and made anew where they changed, and is never saved or copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lq_lightning._compat.tensors import add_one_to_all, local_tensor
from lq_lightning.kernels.optimizer_step import PreparedTensor, StateFormat, prepare

from .config import OptimizerQuantization
from .state import STEP, part_names


def _nothing(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return ()


@dataclass(slots=True, eq=False)
class Slot:
    """A parameter that had a gradient in the last step.

    Attributes:
        param: the parameter.
        shape: of the whole parameter, which decides whether torch updates it.
        config: of the optimizer when the slot was made.
        position: in the parameter groups, from 1 on.
        sharded: parameter and states are DTensors.
        prepared: for the kernel; None where torch updates the parameter. Then nothing below is set.
        find: returns the tensors of the states from the entry, in the order of ``prepare``; then
            the step.
        found: what it returned, local tensors, after that of the parameter.
        first_group: number of the first local group of elements in the whole parameter.
        step_on_cpu: the step is a number of fp32 on the CPU, as torch makes them.
        count: the step after :func:`advance`.
        is_first: the states were made in this step.
    """

    param: ref[Tensor]
    shape: torch.Size
    config: OptimizerQuantization
    position: int
    sharded: bool
    prepared: PreparedTensor | None = None
    find: Callable[[Mapping[str, Any]], tuple[Any, ...]] = _nothing
    found: tuple[ref[Tensor], ...] = ()
    first_group: int = 0
    step_on_cpu: bool = False
    count: int = 0
    is_first: bool = False

    def current(
        self, param: Tensor, entry: Mapping[str, Any], config: OptimizerQuantization
    ) -> list[Any] | None:
        """Return the tensors for the kernel if they are those of the last step, each where it was.

        Args:
            param: in the place of the parameter.
            entry: its states; not used where torch updates it.
            config: of the optimizer.

        Returns:
            The local tensors that were prepared; none where torch updates the parameter. None if
            the slot must be made anew.
        """
        if self.param() is not param or self.config is not config:
            return None
        prepared = self.prepared
        if prepared is None:
            same = param.shape == self.shape and param.dtype is torch.float32
            return [] if same else None
        try:
            tensors = [param, *self.find(entry)]
        except KeyError:
            return None
        if self.sharded:
            tensors = [local_tensor(tensor) for tensor in tensors]
        if not all(map(is_, tensors, [tensor() for tensor in self.found])):
            return None
        tensors.pop()
        return tensors if prepared.is_in_place(tensors) else None

    def fill(
        self,
        local: Tensor,
        entry: Mapping[str, Any],
        names: Sequence[str],
        formats: Sequence[StateFormat],
    ) -> list[Tensor]:
        """Prepare the tensors for the kernel.

        Args:
            local: the parameter's shard, ``[D, ...]`` or without dimensions; contiguous.
            entry: of the parameter.
            names: of the states.
            formats: of the states.

        Returns:
            What :meth:`current` does, with views of tensors without dimensions.
        """
        keys = [
            key for name, fmt in zip(names, formats, strict=True) for key in part_names(name, fmt)
        ]
        tensors = [local, *[local_tensor(entry[key]) for key in keys]]
        if local.dim() == 0:
            tensors = [tensor.view(1) for tensor in tensors]
        self.prepared = prepare(tensors, formats)
        step = entry[STEP]
        self.found = tuple(ref(tensor) for tensor in [*tensors, step])
        self.step_on_cpu = (
            type(step) is Tensor and step.is_cpu and step.dim() == 0 and step.dtype == torch.float32
        )
        self.find = itemgetter(*keys, STEP)
        return tensors


def advance(slots: Sequence[Slot]) -> None:
    """Add one to the step counters of parameters, and read them.

    Args:
        slots: of parameters whose entries have a step.
    """
    slots_on_cpu, on_cpu = [], []
    for slot in slots:
        step = slot.found[-1]()
        if step is None:
            raise AssertionError("the entry keeps the step alive")
        if slot.step_on_cpu:
            slots_on_cpu.append(slot)
            on_cpu.append(step)
        else:  # torch's fused optimizers have them on the GPU
            step += 1
            slot.count = int(step)
    if on_cpu:
        add_one_to_all(on_cpu)
        for slot, value in zip(slots_on_cpu, torch.stack(on_cpu).tolist(), strict=True):
            slot.count = int(value)
