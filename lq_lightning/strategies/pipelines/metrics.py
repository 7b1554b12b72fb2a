"""Metrics of torchmetrics in a pipeline: what they know is what the last stage has given them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

from lq_lightning._compat.metrics import has_separate_lists
from lq_lightning.strategies.pipelines.ranks import PipelineRanks

__all__ = ["sum_over_pipelines", "unchanged"]


class _OverPipelines:
    """A ``dist_sync_fn`` that takes states from the last stage of each pipeline.

    torchmetrics adds up or joins the states of all ranks. In a pipeline those of other stages are
    empty, of a dtype that torchmetrics guesses, or would be counted again.
    """

    def __init__(self, ranks: PipelineRanks, from_last: Callable[[Tensor], Tensor]) -> None:
        self._ranks, self._from_last = ranks, from_last

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        state = self._from_last(state)
        if self._ranks.replicas == 1:
            return [state]
        gathered: list[Tensor] = gather_all_tensors(state, self._ranks.stage_group)
        return gathered

    def __deepcopy__(self, memo: dict[int, Any]) -> _OverPipelines:
        return self  # process groups are not copied with a metric


def sum_over_pipelines(
    module: nn.Module, ranks: PipelineRanks, from_last: Callable[[Tensor], Tensor]
) -> None:
    """Let ``compute`` of all metrics of a module use what the last stages have, on every rank.

    Args:
        module: Of this rank; metrics with a ``dist_sync_fn`` of their own keep it.
        ranks: Of the run.
        from_last: Returns the last stage's tensor on all ranks of a pipeline, which call it
            together.

    Raises:
        NotImplementedError: A metric keeps a list that is not joined.
    """
    for name, metric in module.named_modules():
        if not isinstance(metric, Metric):
            continue
        if not (metric.dist_sync_fn is None or isinstance(metric.dist_sync_fn, _OverPipelines)):
            continue
        if has_separate_lists(metric):
            raise NotImplementedError(
                f"the metric `{name}` (`{type(metric).__name__}`) has a list as state with "
                "`dist_reduce_fx=None`: in a pipeline only the last stage fills it, and the other "
                "ranks would wait for a list of another length. Use `dist_reduce_fx='cat'`."
            )
        metric.dist_sync_fn = _OverPipelines(ranks, from_last)


@contextmanager
def unchanged(metrics: Sequence[Metric | MetricCollection]) -> Iterator[None]:
    """Leave out updates inside, around a part of a step that does not come to its end.

    Each stage runs what is in front of the layers, so that metrics there would be updated several
    times on a rank that has the last stage and others. They return NaN.
    """
    names = ("forward", "update")
    replaced = [(m, {name: m.__dict__.get(name) for name in names}) for m in metrics]
    for metric, previous in replaced:
        metric.__dict__.update(dict.fromkeys(previous, _without_update(metric)))
    try:
        yield
    finally:
        for metric, previous in replaced:
            for name, method in previous.items():
                del metric.__dict__[name]
                if method is not None:
                    metric.__dict__[name] = method


def _without_update(metric: Metric | MetricCollection) -> Callable[..., Any]:
    def nothing(*args: Any, **kwargs: Any) -> Any:
        nan = torch.tensor(float("nan"))
        return dict.fromkeys(metric.keys(), nan) if isinstance(metric, MetricCollection) else nan

    return nothing
