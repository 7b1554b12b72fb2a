"""Keep the modules of some stages of a model, in place, and run their parts of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lq_lightning._compat.tensor_parallel import keep_style_hooks
from lq_lightning.foundation.layer_stack import hidden_name

from .interceptor import LayerInterceptor, PlaceholderAfter, PlaceholderLayer, placeholders
from .message import BoundaryMeta
from .placeholder_tracking import PlaceholderTracker
from .plan import PipelinePlan

_RECORD = "_lq_pipeline"  # kept in the module, so that both are freed together


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptStages:
    """The stages of a model that this rank holds, ascending.

    ``absent`` are the names of the modules that were replaced by placeholders.
    """

    plan: PipelinePlan
    stages: tuple[int, ...]
    absent: tuple[str, ...]
    calls: LayerInterceptor


def kept_stages(module: nn.Module) -> KeptStages | None:
    """Return what :func:`keep_stages` kept of the module; None if it is whole."""
    record: KeptStages | None = module.__dict__.get(_RECORD)
    return record


def keep_stages(module: nn.Module, plan: PipelinePlan, stages: Iterable[int]) -> KeptStages:
    """Replace all modules of a whole model that ``stages`` do not hold, in place.

    All names stay as in the whole model: an absent module leaves a placeholder without parameters.
    Modules and parameters that stay are the same objects; nothing is moved or copied, so this works
    on the meta device, before weights are allocated. Buffers outside replaced modules stay on
    every stage.

    Call this before the model is sharded or compiled. Afterwards it runs in parts only, by
    :class:`StageModule`.
    """
    kept = tuple(sorted(stages))
    if kept_stages(module) is not None:
        raise AssertionError("stages of this module were kept before")
    calls = LayerInterceptor(plan.layers)
    absent: dict[str, nn.Module] = {}
    for index, name in enumerate(plan.layers):
        layer = module.get_submodule(name)
        if plan.stages_of(name)[0] in kept:
            _let_call(layer, partial(calls.call_layer, index, hidden_name(layer)))
        else:
            absent[name] = PlaceholderLayer(name, calls, index, layer)
    for name in plan.before:
        for each, placeholder in placeholders(module.get_submodule(name), name, calls).items():
            replaced = module.get_submodule(each)
            keep_style_hooks(replaced, placeholder)
            placeholder.may_draw = not type(replaced).__module__.startswith("torch.nn.")
            if 0 not in kept:
                absent[each] = placeholder
            elif placeholder.may_draw:
                _let_call(replaced, calls.call_before)
    if plan.num_stages - 1 not in kept:
        absent |= {name: PlaceholderAfter(name, calls) for name in plan.after}
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
    """Route every call through ``call(forward, args, kwargs)``; the module and its name stay.

    The class changes, as in ``fully_shard``, because ``module(...)`` looks up ``__call__`` there:
    nothing on the instance comes before compiled calls, hooks and checkpointing.
    """
    cls = type(module)
    if cls not in _CLASSES:

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            own = partial(cls.__call__, self)
            call = self.__dict__.get("_lq_call")  # none in a copy
            return own(*args, **kwargs) if call is None else call(own, args, kwargs)

        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        # One base only: the layout of instances must not change.
        _CLASSES[cls] = type(cls.__name__, (cls,), {**names, "__call__": __call__})
    module.__dict__["_lq_call"] = call
    module.__class__ = _CLASSES[cls]


# --- parts of a step ----------------------------------------------------------------------------


_Part = Callable[[Tensor | None], Any]


class StageModule(nn.Module):
    """One stage: runs the part of a step that has its layers. See [Note: a step in parts].

    It has no modules of its own, so that ``state_dict`` and modes stay with ``module``. Its
    ``parameters()`` are read from ``module`` anew each time, since FSDP2 puts others there while it
    runs; ``named_parameters()`` gives the names in the whole model.

    Make it after :func:`keep_stages`, weights, and ``fully_shard`` on the layers and ``module``.
    Several stages of a rank share one ``module``; one of them runs at a time.

    Args:
        module: A model of which :func:`keep_stages` kept this stage.
        stage: Index of the stage.
        run: Runs the user's step on the micro-batch of an index.
        enter: Called as ``enter(part, hidden)``, must return ``part(hidden)``. A wrapper that no
            exception may cross: pass a method of ``module`` that ``register_fsdp_forward_method``
            made a forward, so that the root of FSDP2 sees the received hidden state as its input,
            and the one for the next stage as its output.

    Attributes:
        index: Micro-batch of the next call; set it before.
        watched: Whether the next part refuses uses of modules that earlier stages hold, see [Note:
            values that depend on placeholders]. None: the first part does, later ones do not.
        refused: List to which such refusals are added; None: they are raised.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        run: Callable[[int], Any],
        enter: Callable[[_Part, Tensor | None], Any] = lambda part, hidden: part(hidden),
    ) -> None:
        super().__init__()
        record = kept_stages(module)
        if record is None or stage not in record.stages:
            raise AssertionError(f"stage {stage} was not kept")
        self.index = 0
        self.stage = stage
        self._plan, self._calls = record.plan, record.calls
        self._module = [module]  # not a submodule
        self._run, self._enter = run, enter
        first = self._plan.layers.index(self._plan.stages[stage][0])
        self._span = (first, first + len(self._plan.stages[stage]) - 1)
        self.watched: bool | None = None
        self.refused: list[str] | None = None
        names = (name for name, _ in module.named_parameters(remove_duplicate=False))
        self._names = frozenset(name for name in names if stage in self._plan.stages_of(name))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters of the stage with their names in the whole model."""
        dot = f"{prefix}." if prefix else ""
        seen = set[Parameter]()
        # With all names: the first name of a shared parameter may belong to another stage.
        for name, parameter in self._module[0].named_parameters(remove_duplicate=False):
            if name in self._names and parameter not in seen:
                if remove_duplicate:
                    seen.add(parameter)
                yield f"{dot}{name}", parameter

    def set_boundary(self, boundary: BoundaryMeta) -> None:
        """Set shape and dtype of hidden states from now on; on all stages, before they run."""
        self._calls.boundary = boundary

    def forward(self, hidden: Tensor | None = None) -> Any:
        """Run the part on the micro-batch ``index`` and the hidden state of the stage before.

        Returns the hidden state for the next stage; on the last stage the result of the step.
        """
        return self._enter(self._part, hidden)

    def _part(self, hidden: Tensor | None) -> Any:
        watched = self.watched is not False
        if self.watched is None:
            self.watched = False
        tracker = PlaceholderTracker(self._module[0]) if watched and self.stage > 0 else None
        result = self._calls.run(partial(self._run, self.index), self._span, hidden, tracker)
        if tracker is not None and tracker.refused:
            if self.refused is None:
                raise NotImplementedError(tracker.refused[0])
            self.refused += tracker.refused
        return result

    def probe(self, index: int) -> BoundaryMeta:
        """Find shape and dtype of hidden states for the micro-batch ``index``, on the first stage.

        Runs the step up to and through the first layer without gradients; random numbers and
        buffers, such as running statistics, stay as they were. With FSDP2 it is a forward of the
        root: all ranks of its mesh must probe.
        """

        def part(hidden: Tensor | None) -> Any:
            return self._calls.probe(partial(self._run, index))

        numbers = self._calls.random.batch(0, advance=False)
        with torch.no_grad(), numbers, _unchanged_buffers(self._module[0]):
            boundary: BoundaryMeta = self._enter(part, None)
        return boundary


@contextmanager
def _unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Undo changes of buffers, in place or by putting other tensors there."""
    saved = [
        (owner, name, buffer, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for owner, name, buffer, value in saved:
            buffer.copy_(value)
            setattr(owner, name, buffer)
