"""Conversion of optimizers of torch in place."""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lq_lightning._compat.torch import note_optimizer_step

from .base import QuantizedOptimizer, excluded
from .config import OptimizerQuantization, embedding_weights
from .muon import QuantizedMuon
from .optimizers import QuantizedAdam, QuantizedAdamW, QuantizedLion, QuantizedSGD

_LION_KEYS = {"params", "param_names", "lr", "initial_lr", "betas", "weight_decay", "maximize"}
_SCHEDULER_MARK = "_wrapped_by_lr_sched"  # on the function that a scheduler puts in place of `step`

_TWINS: dict[type[Optimizer], type[QuantizedOptimizer]] = {
    torch.optim.AdamW: QuantizedAdamW,
    torch.optim.Adam: QuantizedAdam,
    torch.optim.SGD: QuantizedSGD,
    torch.optim.Muon: QuantizedMuon,
}


def quantize_optimizer(
    optimizer: Optimizer,
    config: OptimizerQuantization | None = None,
    *,
    module: nn.Module | None = None,
    full_precision: Iterable[Tensor] = (),
) -> QuantizedOptimizer:
    """Make an optimizer store its states as codes, in place.

    Learning-rate schedulers, parameter groups, hooks and references to the optimizer continue to
    work. Existing states are quantized.

    Args:
        optimizer: ``torch.optim.AdamW``, ``Adam``, ``Muon`` or ``SGD`` with momentum, or one named
            ``Lion`` that has only its learning rate, betas and weight decay.
        config: Formats, and the choice of states that stay in fp32.
        module: Model with the names for ``quantization_plan`` and the embeddings, whose states stay
            in fp32 unless ``config`` says otherwise.
        full_precision: Further parameters whose states stay in fp32.

    Returns:
        The same object, now of a quantized class.

    Raises:
        TypeError: The optimizer is another one. Subclasses are refused, too, since they may update
            differently.
        ValueError: Hyperparameters have no quantized form, such as ``amsgrad=True``.
    """
    config = config or OptimizerQuantization()
    kept = excluded(full_precision)
    if module is not None and not config.quantize_embeddings:
        kept = {**embedding_weights(module), **kept}
    if isinstance(optimizer, QuantizedOptimizer):
        name = type(optimizer).__name__
        raise TypeError(f"the optimizer is a `{name}` already: use it as it is.")
    twin = _twin_of(optimizer)
    for group in optimizer.param_groups:
        twin.check_group(group)
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, _SCHEDULER_MARK):
        raise TypeError(
            f"`{type(optimizer).__name__}.step` was replaced on this object by {step!r}, which "
            "would skip the quantized step. Quantize the optimizer before wrapping its `step`."
        )
    optimizer.__class__ = twin
    if not isinstance(optimizer, QuantizedOptimizer):
        raise AssertionError("the class was just assigned")
    Optimizer.__setstate__(optimizer, {})  # puts the hooks around the new class's `step`
    if step is not None:
        _track_calls(optimizer)
    names: dict[Tensor, str] = {}
    if module is not None:
        names = {param: name for name, param in module.named_parameters()}
    optimizer.enable_quantization(config, kept, names)
    return optimizer


def _twin_of(optimizer: Optimizer) -> type[QuantizedOptimizer]:
    kind = type(optimizer)
    if kind in _TWINS:
        return _TWINS[kind]
    if kind.__name__ == "Lion":
        extra = {
            key
            for group in optimizer.param_groups
            for key, value in group.items()
            if key not in _LION_KEYS and value
        }
        if not extra:
            return QuantizedLion
        raise ValueError(
            f"{kind.__module__}.Lion has options without a quantized form: "
            f"{', '.join(sorted(extra))}. Switch them off."
        )
    raise TypeError(
        f"no quantized form of {kind.__module__}.{kind.__qualname__}; supported are "
        "torch.optim.AdamW, Adam, Muon and SGD themselves (no subclasses), and Lion. Use one of "
        'them, or leave the optimizer as it is (`optimizer_state="none"`).'
    )


def _track_calls(optimizer: Optimizer) -> None:
    """Note calls of ``step`` for learning-rate schedulers, which warn when there were none.

    A scheduler has bound the step of the former class to the object.
    """
    weak = ref(optimizer)
    inner = type(optimizer).step

    @wraps(inner)
    def step(*args: Any, **kwargs: Any) -> Any:
        this = weak()
        if this is None:
            raise ReferenceError("the optimizer of this step is gone")
        note_optimizer_step(this)
        return inner(this, *args, **kwargs)

    setattr(step, _SCHEDULER_MARK, True)
    optimizer.step = step  # type: ignore[method-assign]
