"""Keep the modules of some stages of a model, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from lq_lightning.foundation.trunk import hidden_name

from .absent import AbsentAfter, AbsentLayer, stand_ins
from .calls import LayerCalls
from .plan import PipelinePlan

__all__ = ["KeptStages", "keep_stages", "kept_stages"]

_RECORD = "_lq_pipeline"  # kept in the module, so that both are freed together


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptStages:
    """What is left of a model on this rank.

    Attributes:
        plan: Of the whole model.
        stages: Those that this rank holds, ascending.
        absent: Names of the modules that were replaced by stand-ins.
        calls: Of the layers.
    """

    plan: PipelinePlan
    stages: tuple[int, ...]
    absent: tuple[str, ...]
    calls: LayerCalls


def kept_stages(module: nn.Module) -> KeptStages | None:
    """Return what :func:`keep_stages` left of the module; None if it is whole."""
    record: KeptStages | None = module.__dict__.get(_RECORD)
    return record


def keep_stages(module: nn.Module, plan: PipelinePlan, stages: Iterable[int]) -> KeptStages:
    """Replace all modules of ``module`` that ``stages`` do not hold, in place.

    Names stay those of the whole model: what is absent leaves a stand-in without parameters at its
    place. Modules and parameters that stay are the same objects; nothing is moved or copied, so
    this works on the meta device, before weights are allocated. Buffers outside of what is replaced
    stay on every stage.

    Call this before the model is sharded or compiled. Afterwards it runs in parts only, by
    :class:`StageModule`.

    Args:
        module: The whole model.
        plan: Made for it.
        stages: Stages of this rank.

    Returns:
        What is left; the same when called again.

    Raises:
        ValueError: a stage that ``plan`` does not have.
        RuntimeError: other stages of the module were kept before.
    """
    kept = tuple(sorted(set(stages)))
    if not kept or kept[0] < 0 or kept[-1] >= plan.num_stages:
        raise ValueError(
            f"`stages={list(kept)}` must name one or more of the {plan.num_stages} stages, counted "
            "from 0."
        )
    record = kept_stages(module)
    if record is not None:
        if (record.plan, record.stages) != (plan, kept):
            raise RuntimeError(
                f"the stages {list(record.stages)} of this module were kept before, so that it "
                f"cannot become the stages {list(kept)}: build it again."
            )
        return record
    calls = LayerCalls(plan.layers)
    absent: dict[str, nn.Module] = {}
    for index, name in enumerate(plan.layers):
        layer = module.get_submodule(name)
        if plan.stages_of(name)[0] in kept:
            _let_call(layer, partial(calls.call_layer, index, hidden_name(layer)))
        else:
            absent[name] = AbsentLayer(name, calls, index, layer)
    for name in plan.before:
        for each, stand_in in stand_ins(module.get_submodule(name), name, calls).items():
            replaced = module.get_submodule(each)
            stand_in.may_draw = not type(replaced).__module__.startswith("torch.nn.")
            if 0 not in kept:
                absent[each] = stand_in
            elif stand_in.may_draw:
                _let_call(replaced, calls.call_before)
    if plan.num_stages - 1 not in kept:
        absent |= {name: AbsentAfter(name, calls) for name in plan.after}
    _replace(module, absent)
    record = KeptStages(plan=plan, stages=kept, absent=tuple(absent), calls=calls)
    module.__dict__[_RECORD] = record
    return record


def _replace(root: nn.Module, absent: dict[str, nn.Module]) -> None:
    by_module = {id(root.get_submodule(name)): new for name, new in absent.items()}
    for name, module in list(root.named_modules(remove_duplicate=False)):
        new = by_module.get(id(module))
        if new is not None:  # under every name that the module has
            parent, _, key = name.rpartition(".")
            root.get_submodule(parent).add_module(key, new)


_CLASSES: dict[type, type] = {}


def _let_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let ``call(forward, args, kwargs)`` do every call; the module and its class name stay.

    The class changes, as ``fully_shard`` does it, because ``module(...)`` looks up ``__call__``
    there: nothing on the instance comes before compiled calls, hooks and checkpointing.
    """
    cls = type(module)
    if cls not in _CLASSES:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        # One base only: the layout of instances must not change.
        _CLASSES[cls] = type(cls.__name__, (cls,), {**names, "__call__": _calling(cls)})
    module.__dict__["_lq_call"] = call
    module.__class__ = _CLASSES[cls]


def _calling(cls: type[nn.Module]) -> Callable[..., Any]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_lq_call"](partial(cls.__call__, self), args, kwargs)

    return __call__
