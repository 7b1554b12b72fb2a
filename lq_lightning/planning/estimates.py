"""The same run with fewer of its equal layers, and what two of those say of all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lq_lightning.callbacks.model_setup import AfterConfigureModel
from lq_lightning.foundation.layer_stack import find_layer_stack
from lq_lightning.planning.machine import Machine
from lq_lightning.planning.run_options import RunOptions
from lq_lightning.planning.simulation import Build, Overrides, UserRun

_FEW_LAYERS = 4  # models of so many are simulated as a whole at once
_LEAST = 2
_NEAR = 0.02  # share of the memory that an estimate may miss


def with_layers(build: Build, count: int) -> Build:
    """Return a function that builds the run with the first ``count`` layers of its model."""

    def shortened(overrides: Overrides) -> UserRun:
        trainer, module, data = build(overrides)
        AfterConfigureModel(module, lambda built: keep_layers(built, count))
        return trainer, module, data

    return shortened


def number_of_equal_layers(module: nn.Module) -> int:
    """Return the number of layers of a model; 0 if it has no single list of them, or they differ.

    Layers are equal if their modules are of the same classes, with parameters of the same shapes.
    """
    try:
        names = find_layer_stack(module).layers
    except (ValueError, NotImplementedError):
        return 0
    known = {_outline(module.get_submodule(name)) for name in names}
    return len(names) if len(known) == 1 else 0


def _outline(layer: nn.Module) -> str:
    modules = [f"{name}:{type(each).__qualname__}" for name, each in layer.named_modules()]
    tensors = [f"{n}:{tuple(p.shape)}:{p.dtype}" for n, p in layer.named_parameters()]
    return ";".join([*modules, *tensors])


def keep_layers(module: nn.Module, count: int) -> None:
    """Remove all layers of a model but the first ``count``."""
    names = find_layer_stack(module).layers
    for name in reversed(names[count:]):
        path, _, key = name.rpartition(".")
        container: Any = module.get_submodule(path)
        del container[key if isinstance(container, nn.ModuleDict) else int(key)]


# --- all layers from a few ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Memory of the fullest rank, time of a step, and tokens of all ranks per second."""

    device_nbytes: int
    seconds: float
    tokens_per_s: float


Evaluate = Callable[[RunOptions, int | None], Outcome]
"""Simulates a run with these options, of the whole model or of so many of its layers.

It raises ``ValueError``, ``NotImplementedError`` or ``RuntimeError`` for what cannot run.
"""


class Estimator:
    """Estimates runs from two simulations with few of a model's equal layers, in a line."""

    def __init__(self, evaluate: Evaluate, cluster: Machine, layers: int) -> None:
        self._evaluate, self._cluster, self._layers = evaluate, cluster, layers
        self._more_nbytes, self._slower = 0, 1.0
        self._least: int | None = _LEAST  # of the numbers of layers; None: always the whole model

    def few_layers(self, options: RunOptions) -> tuple[int, int] | None:
        """Two numbers of layers to simulate; None for the whole model at once."""
        stages = options.stages(self._cluster) if options.strategy == "quantized_pipeline" else 1
        stages *= options.others.get("stages_per_rank", 1)
        if self._least is None or options.others.get("split", "parameters") != "parameters":
            return None
        per_stage = max(1, self._least // stages)
        few = (per_stage * stages, (per_stage + 1) * stages)
        return None if self._layers <= max(_FEW_LAYERS, few[1]) else few

    def compare(self, options: RunOptions, known: Outcome) -> None:
        """Take as many layers as it takes to be near a known outcome, and correct the rest.

        Where logits need more memory than few layers do, layers add nothing to the peak before
        there are more of them: then a line through few of them misses it.
        """
        for least in (_LEAST, max(_LEAST, self._layers // 4), None):
            self._least = least
            if self.few_layers(options) is None:
                self._least = None  # other options are not better off
                return
            estimate = self(options)
            missed = known.device_nbytes - estimate.device_nbytes
            if abs(missed) <= _NEAR * known.device_nbytes:
                self._more_nbytes, self._slower = missed, known.seconds / estimate.seconds
                return

    def __call__(self, options: RunOptions) -> Outcome:
        """Estimate a run; simulate it where few layers are no less work."""
        few = self.few_layers(options)
        if few is None:
            return self._evaluate(options, None)
        first, second = (self._evaluate(options, layers) for layers in few)

        def continued(of: Callable[[Outcome], float]) -> float:
            slope = (of(second) - of(first)) / (few[1] - few[0])
            return of(first) + slope * (self._layers - few[0])

        seconds = self._slower * continued(lambda outcome: outcome.seconds)
        nbytes = self._more_nbytes + continued(lambda outcome: outcome.device_nbytes)
        tokens = second.tokens_per_s * second.seconds  # of a step, whatever the layers
        return Outcome(device_nbytes=round(nbytes), seconds=seconds, tokens_per_s=tokens / seconds)
