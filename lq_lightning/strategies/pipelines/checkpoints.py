"""Checkpoints of a model whose layers lie on several ranks, by the names of the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lq_lightning.checkpoint import state
from lq_lightning.checkpoint.ranks import RankGroup

__all__ = ["gather_parts", "in_order", "name_positions", "whole_groups"]


class _Place:
    """Stands for a tensor in what is pickled."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype


def gather_parts(part: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """Join dictionaries of all ranks of a group on its first one.

    Tensors travel one at a time, so that the others hold no second copy of theirs.

    Args:
        part: Tensors on the CPU, other values, or dictionaries of them, by name. Of a name on
            several ranks the first one counts.
        group: Of a backend that sends CPU tensors.

    Returns:
        All of them on the first rank, nothing elsewhere.
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


def whole_groups(
    own: dict[str, Any], ranks: RankGroup, order: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Parameter groups of all stages, with names in the order of the whole model's parameters.

    Args:
        own: A state by name; its groups are those of one stage.
        ranks: Of all stages; all of them must call this.
        order: Place of every parameter in the whole model.
    """
    return in_order(state.merge_parameter_groups(own, ranks).get("param_groups", []), order)


def in_order(groups: Sequence[Mapping[str, Any]], order: Mapping[str, int]) -> list[dict[str, Any]]:
    """Parameter groups with names in the order of the whole model's parameters."""
    return [
        {**group, "params": sorted(group["params"], key=lambda name: order.get(name, len(order)))}
        for group in groups
    ]


def name_positions(
    whole: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], optimizer: Optimizer
) -> dict[str, Any]:
    """Turn a state keyed by position into one by parameter name.

    Args:
        whole: As one process saves it.
        groups: Of this run, from :func:`whole_groups`.
        optimizer: For the message.

    Raises:
        ValueError: The groups have other numbers of parameters.
    """
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
