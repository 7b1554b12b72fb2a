"""Measure the times of a model's modules, to balance stages by time."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from lq_lightning.foundation.layer_stack import find_layer_stack
from lq_lightning.foundation.streams import has_streams


def measure_times(
    module: nn.Module, run: Callable[[], Any], *, trunk: str | None = None, repeats: int = 3
) -> dict[str, float]:
    """Run the whole model a few times and return the seconds that each of its parts takes.

    The result is a ``split`` of :func:`plan_stages`. Only forward passes are timed: backward takes
    about twice as long in every layer. Measure on one rank and broadcast, or plans may differ.

    Args:
        module: The whole model, with its weights, on one device.
        run: Runs it on a micro-batch of the real size.
        trunk: As in :func:`plan_stages`.
        repeats: Runs of which the median counts, after one more to warm up.

    Returns:
        Seconds of a run, all calls of a module together, by name of the layers and of the modules
        around them.

    Raises:
        RuntimeError: ``run`` does not call the layers.
        ValueError, NotImplementedError: as :func:`plan_stages` for models that cannot be cut.
    """
    found = find_layer_stack(module, trunk)
    names = (*found.before, *found.layers, *found.after)
    started: dict[str, float] = {}
    seconds: dict[str, list[float]] = defaultdict(list)

    def start(name: str, *args: Any) -> None:
        started[name] = _now(module)

    def stop(name: str, *args: Any) -> None:
        seconds[name].append(_now(module) - started[name])

    with ExitStack() as hooks, torch.no_grad():
        for name in names:
            part = module.get_submodule(name)
            hooks.callback(part.register_forward_pre_hook(partial(start, name)).remove)
            hooks.callback(part.register_forward_hook(partial(stop, name)).remove)
        for _ in range(repeats + 1):
            run()
    missing = [name for name in found.layers if name not in seconds]
    if missing:
        raise RuntimeError(f"`run` did not call `{missing[0]}`: it must run the whole model.")
    calls = {name: len(values) // (repeats + 1) for name, values in seconds.items()}
    return {
        name: statistics.median(values[calls[name] :]) * calls[name]
        for name, values in seconds.items()
    }


def _now(module: nn.Module) -> float:
    device = next(module.parameters()).device
    if has_streams(device):
        torch.accelerator.synchronize(device)
    return time.perf_counter()
