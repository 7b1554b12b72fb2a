"""Optimizer states in one file, which torch numbers by position: which parameter is which.

Ranks may have their parameters in another order (a ``set`` of names has one of its own in every
process), and so may the run that loads. Files therefore hold the names of all positions beside
them, under a key of its own in each state, which other programs leave alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lq_lightning.checkpoint import state
from lq_lightning.checkpoint.ranks import RankGroup
from lq_lightning.foundation.parameters import clean_name

NAMES = "parameter_names"  # key of a state: names by position


def by_position(states: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An optimizer's state keyed by position, as torch keys it in one process, and the names.

    Args:
        states: States by parameter name.
        groups: Parameter groups with names as ``params``.
    """
    names = [name for group in groups for name in group["params"]]
    position: dict[Any, Any] = {name: i for i, name in enumerate(names)}
    return {
        "state": {position.get(name, name): value for name, value in states.items()},
        "param_groups": [
            {**group, "params": [position[name] for name in group["params"]]} for group in groups
        ],
        NAMES: names,
    }


def by_name(saved: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any] | None:
    """A state keyed by name where it says which parameter is which; else None.

    Args:
        saved: Result of :func:`by_position`, or an optimizer's ``state_dict``, which has names if
            the optimizer was made with some.
        known: Names of all parameters of the model.
    """
    groups = saved["param_groups"]
    names = saved.get(NAMES)
    if names is None and all("param_names" in group for group in groups):
        given = [name for group in groups for name in group["param_names"]]
        names = given if set(given) <= set(known) else None  # else of parts of the model
    if names is None:
        return None
    name_at = dict(enumerate(names))
    return {
        "state": {name_at.get(key, key): value for key, value in saved["state"].items()},
        "param_groups": [
            {**group, "params": [name_at[key] for key in group["params"]]} for group in groups
        ],
    }


def state_by_name(
    module: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]
) -> dict[str, Any] | None:
    """As :func:`by_name`; also None if the optimizer has parameters that are not the module's."""
    if any(None in group for group in _group_names(module, optimizer)):
        return None
    return by_name(saved, {clean_name(name) for name, _ in module.named_parameters()})


def with_names(module: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """The ``state_dict`` of an optimizer with the names, if all its parameters are the module's."""
    groups = _group_names(module, optimizer)
    names = [name for group in groups for name in group]
    return saved if not saved or None in names else {**saved, NAMES: names}


def _group_names(module: nn.Module, optimizer: Optimizer) -> list[list[str | None]]:
    names = {id(p): clean_name(name) for name, p in module.named_parameters()}
    return [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]


# --- several ranks ----------------------------------------------------------------------------


def check_alike(module: nn.Module, optimizers: Sequence[Optimizer], ranks: RankGroup) -> None:
    """Refuse optimizers that differ between ranks which hold shards of the same parameters.

    The order of parameters within a group may differ. All ranks call it.

    Raises:
        ValueError: On all ranks: kinds, groups, or parameters of a group differ.
    """
    own = [
        (type(o).__name__, [sorted(map(str, group)) for group in _group_names(module, o)])
        for o in optimizers
    ]
    found = ranks.first_other(own)
    if found is None:
        return
    raise ValueError(
        f"{_first_difference(*found)}. Each rank updates its shards by its "
        "own optimizer, so parameters would be trained in part. Let `configure_optimizers` make "
        "the same groups on all ranks."
    )


def check_order(module: nn.Module, optimizer: Optimizer, ranks: RankGroup) -> None:
    """Refuse to load by position where ranks have other parameters at a position.

    Raises:
        ValueError: On all ranks: they do.
    """
    found = ranks.first_other([n for group in _group_names(module, optimizer) for n in group])
    if found is None:
        return
    *both, other = found
    pairs = zip(*both, strict=False)
    place, (first, second) = next((i, pair) for i, pair in enumerate(pairs) if len({*pair}) > 1)
    raise ValueError(
        f"the checkpoint tells the parameters of {type(optimizer).__name__} by their positions "
        f"only, and number {place} is `{first}` on rank 0, but `{second}` on rank {other}. Let "
        "`configure_optimizers` give them in the same order on all ranks and in the run that "
        "saved it (not from a `set`)."
    )


def _first_difference(first: list[Any], second: list[Any], rank: int) -> str:
    for index, ((kind, groups), (other, others)) in enumerate(zip(first, second, strict=False)):
        if kind != other:
            return f"optimizer {index} is {kind} on rank 0, but {other} on rank {rank}"
        where = f"optimizer {index} ({kind}) has"
        for number, (names, theirs) in enumerate(zip(groups, others, strict=False)):
            more, fewer = set(names) - set(theirs), set(theirs) - set(names)
            if more or fewer:
                ranks = (0, rank) if more else (rank, 0)
                return (
                    f"{where} `{min(more or fewer)}` in parameter group {number} on rank "
                    f"{ranks[0]}, but not on rank {ranks[1]}"
                )
        if len(groups) != len(others):
            return f"{where} {len(groups)} parameter groups on rank 0, {len(others)} on rank {rank}"
    return f"there are {len(first)} optimizers on rank 0, but {len(second)} on rank {rank}"


def gather_optimizer(module: nn.Module, optimizer: Optimizer, ranks: RankGroup) -> dict[str, Any]:
    """The whole state of an optimizer by position on the first rank, nothing elsewhere.

    All ranks call it; states are gathered by name, in the first rank's order.

    Args:
        optimizer: Its parameters may have another order on another rank.
        ranks: The ranks that hold shards of them.

    Raises:
        ValueError: On all ranks: an optimizer or its states differ.
    """
    own = state.optimizer_state_by_name(module, optimizer)
    if not own:
        return {}
    check_alike(module, [optimizer], ranks)
    states = own["state"]
    keys = {name: list(entry) for name, entry in states.items() if isinstance(entry, Mapping)}
    order: dict[str, list[str]] = ranks.broadcast(keys)
    ranks.together(lambda: _check_keys(optimizer, keys, order))
    keep = ranks.is_first
    whole = {
        name: {key: state.gather_tensors(states[name][key], keep) for key in order[name]}
        for name in order
    }
    if not keep:
        return {}
    others = {name: entry for name, entry in states.items() if name not in whole}
    return by_position({**whole, **others}, state.gather_tensors(own["param_groups"], keep))


def _check_keys(
    optimizer: Optimizer, own: Mapping[str, list[str]], first: Mapping[str, list[str]]
) -> None:
    for name in {**first, **own}:
        found, wanted = own.get(name, []), first.get(name, [])
        if sorted(found) != sorted(wanted):
            raise ValueError(
                f"{type(optimizer).__name__} keeps of `{name}` {sorted(found)} here, but "
                f"{sorted(wanted)} on the first rank: the checkpoint cannot hold both. Let all "
                "ranks take the same optimizer steps."
            )


# --- schedules --------------------------------------------------------------------------------


def check_schedules(configs: Sequence[Any], saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse schedules whose base rates, which go by position, would move to other groups.

    Call it when optimizers are loaded, by name, and schedules are not yet.

    Args:
        configs: Lightning's configurations of all schedules.

    Raises:
        ValueError: Parameter groups have another order than in the checkpoint.
    """
    for index, (config, values) in enumerate(zip(configs, saved, strict=False)):
        optimizer = getattr(config.scheduler, "optimizer", None)
        groups = [] if optimizer is None else optimizer.param_groups
        rates = [float(group.get("initial_lr", -1.0)) for group in groups]
        for part in (values, *values.get("_schedulers", ())):  # SequentialLR and similar
            bases = [float(rate) for rate in part.get("base_lrs", ())]
            if bases != rates and sorted(bases) == sorted(rates):
                raise ValueError(
                    f"schedule {index} ({type(config.scheduler).__name__}) has base rates {bases} "
                    f"in the checkpoint, but the parameter groups of its optimizer start from "
                    f"{rates}: they have another order than in the run that saved it. Let "
                    "`configure_optimizers` make the groups in that order."
                )
