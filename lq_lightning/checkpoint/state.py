"""Convert model and optimizer state between sharded tensors and checkpoints.

In one file torch numbers an optimizer's states by position. Ranks may have their parameters in
another order (every process orders a ``set`` of names in its own way), and so may the run that
loads. Files therefore hold the names of all positions beside them, under a key of its own in each
state, which other programs leave alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lq_lightning._compat.checkpoint import unflatten_checkpoint
from lq_lightning._compat.tensors import empty_like_sharded, local_shard, whole_tensor
from lq_lightning.checkpoint.folder import ShardedCheckpoint
from lq_lightning.checkpoint.ranks import ALONE, RankGroup
from lq_lightning.foundation.parameters import clean_name, tied_names
from lq_lightning.optim import QuantizedOptimizer, refuse_codes

NAMES = "parameter_names"  # key of a state: names by position
_NO_ALIASES: Mapping[str, str] = {}


def _names(module: nn.Module, aliases: Mapping[str, str] = _NO_ALIASES) -> dict[int, str]:
    names = {id(p): clean_name(n) for n, p in module.named_parameters()}
    return {key: aliases.get(name, name) for key, name in names.items()}


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by every name that they have: tied ones are stored under any of theirs."""
    return {clean_name(n): p for n, p in module.named_parameters(remove_duplicate=False)}


# --- whole tensors ----------------------------------------------------------------------------


def gather_tensors(tree: Any, keep: bool) -> Any:
    """Replace every tensor in nested dictionaries and lists by the whole tensor, on the CPU.

    Every rank must call this on the same structure. Where ``keep`` is false leaves become ``None``,
    which frees memory as the gathering goes on.
    """
    if isinstance(tree, Mapping):
        return {key: gather_tensors(value, keep) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(gather_tensors(value, keep) for value in tree)
    if isinstance(tree, DTensor):
        whole = whole_tensor(tree).detach()
        return whole.cpu() if keep else None
    if isinstance(tree, Tensor):
        return tree.detach().cpu() if keep else None
    return tree if keep else None


def full_state(module: nn.Module, keep: bool) -> dict[str, Any]:
    """``module.state_dict()`` with whole tensors; tied parameters are gathered once and stay tied.

    Every rank must call this; returns an empty dictionary where ``keep`` is false.
    """
    state = module.state_dict()
    ties, keys = tied_names(module), {clean_name(key): key for key in state}
    same = {key: keys[ties[name]] for name, key in keys.items() if ties.get(name) in keys}
    gathered = gather_tensors({k: v for k, v in state.items() if k not in same}, keep)
    if not keep:
        return {}
    return {key: gathered[same.get(key, key)] for key in state}


def _shard_like(value: Any, like: Any) -> Any:
    """Cut a whole tensor the way ``like`` is sharded; anything else stays as it is."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        converted = [(key, _shard_like(item, like)) for key, item in items]
        return dict(converted) if isinstance(value, dict) else [item for _, item in converted]
    whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if isinstance(like, DTensor) and whole and value.shape == like.shape:
        return local_shard(value, like)
    return value


def load_model(
    module: nn.Module, state: Mapping[str, Any], strict: bool, ranks: RankGroup = ALONE
) -> None:
    """Load a full state dict of the whole model, which ``ranks`` hold together; all call this."""
    current = module.state_dict()
    by_clean_name = {clean_name(key): key for key in current}
    elsewhere = set().union(*ranks.all_gather(set(by_clean_name))) - by_clean_name.keys()
    converted = {}
    for key, value in state.items():
        if clean_name(key) in elsewhere:
            continue
        name = key if key in current else by_clean_name.get(clean_name(key), key)
        converted[name] = _shard_like(value, current.get(name))
    ranks.together(lambda: module.load_state_dict(converted, strict=strict))


def load_optimizer(
    module: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    aliases: Mapping[str, str] = _NO_ALIASES,
    strict: bool = True,
) -> None:
    """Load a full optimizer state, keyed by position as torch does, or by parameter name.

    Args:
        state: State of the optimizer, or by name of one that has more parameters.
        aliases: Name in ``state`` by name of a parameter in ``module``, where they differ.
        strict: Refuse a state by name that lacks some of the optimizer's parameters.
    """
    if not optimizer.state_dict():  # Lightning's stand-in for a module without optimizer
        return
    names = _names(module, aliases)
    by_key: dict[Any, Tensor] = {}
    groups = state["param_groups"]
    for group, saved in zip(optimizer.param_groups, groups, strict=False):
        by_key.update(zip(saved["params"], group["params"], strict=False))
    if any(isinstance(key, str) for key in by_key):
        by_key = {names[id(p)]: p for g in optimizer.param_groups for p in g["params"]}
        groups = _match_groups(optimizer, names, groups, strict)
        position = _positions(optimizer)
        entries = {clean_name(key): value for key, value in state["state"].items()}
        converted = {
            position[id(by_key[name])]: _shard_like(value, by_key[name])
            for name, value in entries.items()
            if name in by_key
        }
    else:
        converted = {k: _shard_like(v, by_key.get(k)) for k, v in state["state"].items()}
    _load(optimizer, {"state": converted, "param_groups": groups})


def _load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    if not isinstance(optimizer, QuantizedOptimizer):
        refuse_codes(state, type(optimizer).__name__)
    optimizer.load_state_dict(state)


def load_like(module: nn.Module, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Shard whole tensors of a full checkpoint like the parameters of the same names."""
    parameters = _parameters(module)
    return {n: _shard_like(t, parameters[n]) for n, t in whole.items() if n in parameters}


# --- sharded tensors --------------------------------------------------------------------------


def check_optimizer(module: nn.Module, optimizer: Optimizer, index: int) -> None:
    """Refuse an optimizer that holds tensors which sharding has replaced."""
    names = _names(module)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in names:
                raise ValueError(
                    f"optimizer {index} ({type(optimizer).__name__}) holds in parameter group "
                    f"{number} a tensor of shape {tuple(parameter.shape)} that is no parameter of "
                    f"`{type(module).__name__}`. It was probably collected before the model was "
                    "sharded, which replaces the parameters: collect them in "
                    "`configure_optimizers`."
                )


def _positions(optimizer: Optimizer) -> dict[int, int]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {id(p): i for i, p in enumerate(parameters)}


def optimizer_state_by_name(
    module: nn.Module, optimizer: Optimizer, aliases: Mapping[str, str] = _NO_ALIASES
) -> dict[str, Any]:
    """``optimizer.state_dict()`` with names (or their aliases) for positions, nothing gathered."""
    state = optimizer.state_dict()
    if not state:  # Lightning's stand-in for a module without optimizer
        return {}
    names = _names(module, aliases)
    name_at = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    groups = [
        {**group, "params": [name_at[position] for position in group["params"]]}
        for group in state["param_groups"]
    ]
    by_name = {  # states of no parameter have keys of their own
        key if isinstance(key, str) else name_at[key]: value
        for key, value in state["state"].items()
    }
    return {"state": by_name, "param_groups": groups}


def merge_parameter_groups(state: dict[str, Any], ranks: RankGroup) -> dict[str, Any]:
    """Let every rank's parameter groups name the parameters of all ranks.

    Ranks that hold other parts of the model have other parameters in the group of an index. Groups
    of one index with equal hyperparameters become one; others follow at the end.
    """
    merged: dict[tuple[int, str], dict[str, Any]] = {}
    for groups in ranks.all_gather(state.get("param_groups", [])):
        for index, group in enumerate(groups):
            values = {key: value for key, value in group.items() if key != "params"}
            found = merged.setdefault((index, repr(values)), {**values, "params": []})
            found["params"] += [name for name in group["params"] if name not in found["params"]]
    return {**state, "param_groups": list(merged.values())} if state else state


def _match_groups(
    optimizer: Optimizer, names: Mapping[int, str], saved: list[dict[str, Any]], strict: bool
) -> list[dict[str, Any]]:
    """Saved hyperparameters of each group of the optimizer, with positions as ``params``."""
    position = _positions(optimizer)
    home = {clean_name(name): group for group in saved for name in group["params"]}
    matched = []
    for index, group in enumerate(optimizer.param_groups):
        members = [names[id(p)] for p in group["params"]]
        absent = [name for name in members if name not in home]
        if absent and strict:
            raise ValueError(
                f"the checkpoint has no optimizer state for parameter `{absent[0]}` "
                f"({len(absent)} in group {index}). It was saved with other trainable parameters; "
                "load only the weights, or set `strict_loading = False` on the LightningModule."
            )
        found = next((home[name] for name in members if name in home), None)
        if found is None:
            found = saved[index] if not members and index < len(saved) else group
        values = {k: v for k, v in found.items() if k not in ("params", "param_names")}
        matched.append({**values, "params": [position[id(p)] for p in group["params"]]})
    return matched


def _model_keys(checkpoint: ShardedCheckpoint) -> dict[str, str]:
    """Clean parameter name -> flat key; stock Lightning writes ``state_dict`` or ``model``."""
    for prefix in ("state_dict", "model"):
        keys = checkpoint.keys_under(prefix)
        if keys:
            return {clean_name(".".join(map(str, path))): key for key, path in keys.items()}
    return {}


def load_sharded_model(module: nn.Module, checkpoint: ShardedCheckpoint, strict: bool) -> None:
    """Load the model's state from a sharded checkpoint of any world size, in place."""
    stored = _model_keys(checkpoint)
    current = module.state_dict()
    wanted = {key: stored[clean_name(key)] for key in current if clean_name(key) in stored}
    # ranks that hold other parts of the model know other names
    names = checkpoint.ranks.all_gather({clean_name(key) for key in current})
    everywhere: set[str] = set().union(*names)
    problems = []
    if strict:
        missing = [key for key in current if key not in wanted]
        unexpected = [name for name in stored if name not in everywhere]
        if missing:
            problems.append(f"missing in the checkpoint: {', '.join(missing)}")
        if unexpected:
            problems.append(f"not in the model: {', '.join(unexpected)}")
    for key, flat_key in wanted.items():
        described, value = checkpoint.tensor(flat_key), current[key]
        if described and isinstance(value, Tensor) and described[0] != value.shape:
            shapes = f"{tuple(described[0])} stored, {tuple(value.shape)} in the model"
            problems.append(f"`{key}`: {shapes}")
    remedy = " Set `strict_loading = False` on the LightningModule to load what fits by name."

    def check() -> None:
        if problems:
            raise RuntimeError(
                f"`{checkpoint.path}` does not fit `{type(module).__name__}`: "
                f"{'; '.join(problems)}.{remedy if strict else ''}"
            )

    checkpoint.ranks.together(check)
    flat = {flat_key: current[key] for key, flat_key in wanted.items()}
    checkpoint.load(flat)
    module.load_state_dict({key: flat[k] for key, k in wanted.items()}, strict=False)


def load_sharded_optimizer(
    module: nn.Module,
    optimizer: Optimizer,
    checkpoint: ShardedCheckpoint,
    place: tuple[str, ...],
    strict: bool,
    aliases: Mapping[str, str] = _NO_ALIASES,
) -> None:
    """Load an optimizer's state by parameter name from a checkpoint of any world size.

    ``place`` is its path in the checkpoint; ``aliases`` are names in the checkpoint, by those in
    ``module``. Parameters without stored state, which never had a gradient, keep none.
    """
    keys = checkpoint.keys_under(*place)
    if not optimizer.state_dict():  # Lightning's stand-in for a module without optimizer
        return
    if not keys:
        raise ValueError(
            f"`{checkpoint.path}` holds no state for optimizer `{place[-1]}`: it was saved with "
            "fewer optimizers or with `save_weights_only=True`. Load it without `ckpt_path`, for "
            "example with `load_state_dict` after consolidating it."
        )
    names = _names(module, aliases)
    like = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    paths = {
        key: path for key, path in keys.items() if path[0] != "state" or clean_name(path[1]) in like
    }
    flat = {
        key: _destination(checkpoint, key, like.get(clean_name(str(path[1]))) if path[1:] else None)
        for key, path in paths.items()
    }
    checkpoint.load(flat)
    nested = unflatten_checkpoint(flat, paths)
    position = _positions(optimizer)
    state = {
        position[id(like[clean_name(name)])]: value
        for name, value in nested.get("state", {}).items()
    }
    groups = _match_groups(optimizer, names, nested["param_groups"], strict)
    _load(optimizer, {"state": state, "param_groups": groups})


def _destination(checkpoint: ShardedCheckpoint, key: str, like: Tensor | None) -> Any:
    described = checkpoint.tensor(key)
    if described is None:
        return None
    size, dtype = described
    if isinstance(like, DTensor) and size == like.shape:
        return empty_like_sharded(like, dtype)
    return torch.empty(size, dtype=dtype)


def load_sharded_like(
    module: nn.Module, checkpoint: ShardedCheckpoint, kind: str
) -> dict[str, Tensor]:
    """Tensors of a kind, sharded like the parameters of the same names at this world size."""
    parameters = _parameters(module)
    keys = {key: str(path[0]) for key, path in checkpoint.keys_under(kind).items()}
    flat = {
        key: _destination(checkpoint, key, parameters[name])
        for key, name in keys.items()
        if name in parameters
    }
    if keys:  # a collective: on every rank, whatever it has of them
        checkpoint.load(flat)
    return {keys[key]: value for key, value in flat.items()}


# --- positions and names -------------------------------------------------------------------------


def by_position(states: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Replace names by positions, as torch keys a state in one process, and add the names."""
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
    """Replace positions by names where the state has them, else return None.

    Args:
        saved: Result of :func:`by_position`, or the ``state_dict`` of an optimizer, which may have
            been made with names.
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
    """As :func:`by_name`; None also if the optimizer has parameters that are not the module's."""
    if any(None in group for group in _group_names(module, optimizer)):
        return None
    return by_name(saved, _names(module).values())


def with_names(module: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """The ``state_dict`` of an optimizer with the names, if all its parameters are the module's."""
    names = [name for group in _group_names(module, optimizer) for name in group]
    return saved if not saved or None in names else {**saved, NAMES: names}


def _group_names(module: nn.Module, optimizer: Optimizer) -> list[list[str | None]]:
    names = _names(module)
    return [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]


# --- several ranks ----------------------------------------------------------------------------


def check_alike(module: nn.Module, optimizers: Sequence[Optimizer], ranks: RankGroup) -> None:
    """Refuse, on all ranks, optimizers that differ between ranks which shard the same parameters.

    The order of parameters within a group may differ. All ranks call it.
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
    """Refuse, on all ranks, to load by position where they have other parameters at one."""
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

    All ranks that hold its shards call it.
    """
    own = optimizer_state_by_name(module, optimizer)
    if not own:
        return {}
    check_alike(module, [optimizer], ranks)
    whole = gather_states(optimizer, own["state"], ranks)
    groups = gather_tensors(own["param_groups"], keep=True)
    return by_position(whole, groups) if ranks.is_first else {}


def gather_states(
    optimizer: Optimizer, states: Mapping[str, Any], ranks: RankGroup
) -> dict[str, Any]:
    """The whole states of an optimizer by name on the first rank, nothing elsewhere.

    Gathered in the first rank's order, as parameters may have another order on another rank.
    """
    keys = {name: list(entry) for name, entry in states.items() if isinstance(entry, Mapping)}
    order: dict[str, list[str]] = ranks.broadcast(keys)
    ranks.together(lambda: _check_keys(optimizer, keys, order))
    keep = ranks.is_first
    whole = {
        name: {key: gather_tensors(states[name][key], keep) for key in order[name]}
        for name in order
    }
    return {**states, **whole} if keep else {}


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

    ``configs`` are Lightning's, of optimizers that are loaded and schedules that are not yet.
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
