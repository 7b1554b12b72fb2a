"""Checkpoints of a model cut into stages, by the names of the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lq_lightning.checkpoint import state
from lq_lightning.checkpoint.checkpointer import ALL_RANKS, ModelLayout
from lq_lightning.checkpoint.state import by_name, by_position
from lq_lightning.foundation.parameters import clean_name
from lq_lightning.strategies.pipelines.stages import CutModule


@dataclass(frozen=True, kw_only=True)
class StageLayout(ModelLayout):
    """The layout of a module of which each rank of a pipeline holds some stages."""

    cut: CutModule
    control_group: dist.ProcessGroup  # ranks of this pipeline, on a backend for CPU tensors

    @property
    def is_part(self) -> bool:
        """Whether other ranks hold other parameters: always."""
        return True

    @property
    def aliases(self) -> Mapping[str, str]:
        """Return the first name in the whole model by name of a tied parameter here."""
        return self.cut.aliases

    @property
    def ties(self) -> Mapping[str, str]:
        """Return the first name by further name of tied parameters of the whole model."""
        return self.cut.ties

    def join_parts(self, part: dict[str, Any]) -> dict[str, Any]:
        """Collect all stages on the first rank, in the order of the whole model."""
        if not self.shard_ranks.is_first:
            return {}
        joined = gather_parts(part, self.control_group)
        for name, first in self.cut.ties.items():
            if name in joined and first in joined:
                joined[name] = joined[first]  # one tensor, in the file too
        order = self.cut.order
        names = sorted(joined, key=lambda name: order.get(clean_name(name), len(order)))
        return {name: joined[name] for name in names}

    def _state_by_name(self, optimizer: Optimizer) -> dict[str, Any]:
        return state.optimizer_state_by_name(self.module, optimizer, self.aliases)

    def _whole_groups(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Parameter groups of all stages, in the order of the whole model; all ranks call it."""
        groups = state.merge_parameter_groups(own, ALL_RANKS).get("param_groups", [])
        return _in_order(groups, self.cut.order)

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return this part's state, with all groups in the order of the whole model."""
        own = self._state_by_name(optimizer)
        groups = self._whole_groups(own)
        return {**own, "param_groups": groups} if own else own

    def whole_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Collect the states of all stages on the first rank, keyed as in one process."""
        own = self._state_by_name(optimizer)
        if not own:
            return {}
        groups = self._whole_groups(own)
        states = state.gather_states(optimizer, own["state"], self.shard_ranks)
        if not self.shard_ranks.is_first:
            return {}
        states = gather_parts(states, self.control_group)
        return by_position(states, groups) if ALL_RANKS.is_first else {}

    def load_whole_optimizer_state(self, optimizer: Optimizer, whole: Mapping[str, Any]) -> None:
        """Load this stage's part of a state that one process or all stages saved."""
        own = self._state_by_name(optimizer)
        if not own:
            super().load_whole_optimizer_state(optimizer, whole)
            return
        named = by_name(whole, self.cut.order)
        if named is None:
            named = _name_positions(whole, self._whole_groups(own), optimizer)
        strict = self.module.strict_loading
        state.load_optimizer(self.module, optimizer, named, self.aliases, strict)


class _Place:
    """Placeholder of a tensor in a pickled dictionary."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype


def gather_parts(part: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """Join dictionaries of all ranks of a group on its first one; others return an empty one.

    ``part`` has CPU tensors, other values or dictionaries of them, by name; of a name on several
    ranks the first value counts. Tensors are sent one at a time, so that no rank holds a second
    copy of its own.
    """
    tensors: list[Tensor] = []
    outline = _outline(part, tensors)
    outlines: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(outline, outlines, group=group, group_dst=0)
    if outlines is None:
        for tensor in tensors:
            if tensor.numel():
                dist.send(_as_bytes(tensor.contiguous()), group=group, group_dst=0)
        return {}
    joined = dict(part)
    for source in range(1, group.size()):
        theirs = _receive(outlines[source], source, group)
        joined = {**theirs, **joined}
    return joined


def _outline(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Mapping):
        return {key: _outline(item, tensors) for key, item in value.items()}
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(value)
    return value


def _receive(outline: Any, source: int, group: dist.ProcessGroup) -> Any:
    if isinstance(outline, Mapping):
        return {key: _receive(item, source, group) for key, item in outline.items()}
    if isinstance(outline, _Place):
        tensor = torch.empty(outline.shape, dtype=outline.dtype)
        if tensor.numel():
            dist.recv(_as_bytes(tensor), group=group, group_src=source)
        return tensor
    return outline


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)  # gloo knows no float8


def _in_order(
    groups: Sequence[Mapping[str, Any]], order: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Sort the names in parameter groups by the order of the whole model."""
    return [
        {**group, "params": sorted(group["params"], key=lambda name: order.get(name, len(order)))}
        for group in groups
    ]


def _name_positions(
    whole: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], optimizer: Optimizer
) -> dict[str, Any]:
    """Turn a state keyed by position into one by parameter name."""
    saved = whole["param_groups"]
    sizes = [[len(group["params"]) for group in each] for each in (saved, groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the checkpoint's {type(optimizer).__name__} has parameter groups of {sizes[0]} "
            f"parameters, but this run's have {sizes[1]} over all stages. Load only the weights, "
            "or configure the optimizer as in the run that saved it."
        )
    names = {
        position: name
        for group, own in zip(saved, groups, strict=True)
        for position, name in zip(group["params"], own["params"], strict=True)
    }
    return {
        "state": {names[key]: value for key, value in whole["state"].items()},
        "param_groups": [
            {**group, "params": own["params"]} for group, own in zip(saved, groups, strict=True)
        ],
    }
