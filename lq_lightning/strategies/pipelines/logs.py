"""Logging of a step that runs in parts: recorded where it ends, logged on every rank.

A step runs once for each micro-batch, and only on the last stage to its end. Its calls of
``self.log`` there are recorded instead of executed, and become one call for each name, with which
every rank of the pipeline logs the same: so callbacks such as ``ModelCheckpoint`` decide alike.
"""

from __future__ import annotations

import inspect
import io
import numbers
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

from lq_lightning._compat.lightning import has_separate_lists, set_step_value, step_value
from lq_lightning.strategies.pipelines.stages import PipelineRanks

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}
_NAMES: dict[Any, str] = {
    **{name: name for name in _REDUCTIONS},
    "avg": "mean",
    torch.mean: "mean",
    torch.sum: "sum",
    torch.max: "max",
    torch.min: "min",
    max: "max",
    min: "min",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LogCall:
    """One call of ``self.log`` without its value. Plain data, equal on every rank."""

    name: str
    metric: str | None  # attribute of the LightningModule; None for a number
    has_value: bool  # False for a metric that was only updated
    arguments: tuple[tuple[str, Any], ...]  # further keyword arguments, by name


@dataclass(frozen=True, kw_only=True, slots=True)
class Logged:
    """Logged values of one batch, reduced over its micro-batches."""

    calls: tuple[LogCall, ...]  # one for each name; they rarely change between steps
    values: Tensor  # [len(calls)] float64, on the device of the module; NaN where there is none


@dataclass(slots=True)
class _Entry:
    metric: str | None
    arguments: dict[str, Any]
    batch_sizes: list[int | None] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class LogRecorder:
    """Takes the place of ``self.log`` (and so of ``self.log_dict``) of a LightningModule.

    ``check`` is called with each value and a description of its use, before it is recorded.
    """

    def __init__(
        self,
        module: LightningModule,
        check: Callable[[object, str], None] = lambda value, use: None,
    ) -> None:
        self._module, self._check_value = module, check
        self._entries: dict[str, _Entry] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls made inside, around the step of one micro-batch."""
        with self._replaced(self._record):
            yield

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Drop the calls made inside."""
        with self._replaced(lambda *args, **kwargs: None):
            yield

    @contextmanager
    def _replaced(self, log: Callable[..., None]) -> Iterator[None]:
        attributes = self._module.__dict__  # found before the method of the class
        previous = attributes.get("log")
        attributes["log"] = log
        try:
            yield
        finally:
            del attributes["log"]
            if previous is not None:
                attributes["log"] = previous

    def _record(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        arguments = dict(zip(_POSITIONAL, args, strict=False)) | kwargs
        _check(name, value, arguments)
        self._check_value(value, f"what the step logs as '{name}'")
        arguments["reduce_fx"] = _NAMES[arguments.get("reduce_fx", "mean")]
        size = arguments.pop("batch_size", None)
        metric = arguments.pop("metric_attribute", None)
        if isinstance(value, Metric):
            metric = metric or self._attribute(name, value)
            value = step_value(value)
        entry = self._entries.setdefault(name, _Entry(metric, arguments))
        if (entry.metric, entry.arguments) != (metric, arguments):
            raise ValueError(
                f"`self.log({name!r}, ...)` is called with different arguments in one step: "
                f"{entry.arguments} and {arguments}. Use another name for each."
            )
        entry.batch_sizes.append(None if size is None else int(size))
        if value is not None:
            value = value.full_tensor() if isinstance(value, DTensor) else value
            number = torch.as_tensor(value, device=self._module.device)
            entry.values.append(number.detach().to(torch.float64).reshape(()))

    def _attribute(self, name: str, metric: Metric) -> str:
        for attribute, module in self._module.named_modules():
            if module is metric:
                return str(attribute)
        raise ValueError(
            f"`self.log({name!r}, ...)` logs a metric that is no attribute of "
            f"`{type(self._module).__name__}`: keep it as `self.<name>`."
        )

    def take(self, shares: Sequence[float] | None = None) -> Logged:
        """Return and forget the records since the last call, reduced over micro-batches.

        Numbers are reduced as ``reduce_fx`` says (mean, unless given), in means weighted by
        ``shares``; batch sizes are added up.
        """
        entries, self._entries = self._entries, {}
        device = self._module.device
        calls, values = [], [torch.empty(0, dtype=torch.float64, device=device)]
        for name, entry in entries.items():
            arguments = dict(entry.arguments)
            sizes = [size for size in entry.batch_sizes if size is not None]
            if sizes:
                arguments["batch_size"] = sum(sizes)
            numbers = entry.values
            if shares is not None and arguments["reduce_fx"] == "mean":
                numbers = _weighted(numbers, shares)
            reduction = _REDUCTIONS[arguments["reduce_fx"]]
            number = (
                reduction(torch.stack(numbers))
                if numbers
                else torch.full((), float("nan"), dtype=torch.float64, device=device)
            )
            values.append(number.reshape(1))
            calls.append(
                LogCall(
                    name=name,
                    metric=entry.metric,
                    has_value=bool(entry.values),
                    arguments=tuple(sorted(arguments.items())),
                )
            )
        return Logged(calls=tuple(calls), values=torch.cat(values))


def _weighted(values: list[Tensor], shares: Sequence[float]) -> list[Tensor]:
    """Weight values so that their mean is over targets; unchanged if some micro-batch has none."""
    if len(values) != len(shares):
        return values
    return [
        value * share if share else torch.zeros_like(value)
        for value, share in zip(values, shares, strict=True)
    ]


def replay(
    module: LightningModule, logged: Logged, replicas: dist.ProcessGroup | None = None
) -> None:
    """Log recorded calls in the hook that runs now; all ranks of a pipeline call it.

    A metric is logged as the object of that attribute. Ranks whose stage did not update it
    contribute empty states, when torchmetrics adds them up over all ranks at the end of an epoch.
    ``sync_dist=True`` reduces over ``replicas``, which have other data: the stages of a pipeline
    log the same values, which a sum must not count again.
    """
    for call, value in zip(logged.calls, logged.values.unbind(), strict=True):
        arguments = dict(call.arguments)
        if call.metric is None:
            arguments["sync_dist_group"] = replicas
            module.log(call.name, value.float(), **arguments)
            continue
        metric = module.get_submodule(call.metric)
        if not isinstance(metric, Metric):
            raise TypeError(f"`{call.metric}` is a `{type(metric).__name__}`, not a metric.")
        set_step_value(metric, value.float() if call.has_value else None)
        module.log(call.name, metric, metric_attribute=call.metric, **arguments)


class OutcomeBroadcast:
    """Sends outcomes from the last stage to all ranks of a pipeline, which call it together.

    Numbers stay on the device, so that no host waits for it. Names are sent only when they change,
    which is rare. ``source`` is the number of the last stage's rank in the pipeline.
    """

    def __init__(self, ranks: PipelineRanks, source: int) -> None:
        self._ranks, self._source = ranks, source
        self._known: dict[str, tuple[LogCall, ...]] = {}

    @property
    def is_source(self) -> bool:
        """Whether this rank has the last stage."""
        return self._ranks.rank == self._source

    def share(
        self, step: str, losses: Sequence[Tensor | None], logged: Logged
    ) -> tuple[Tensor | None, Logged]:
        """Return on all ranks the mean loss of the micro-batches and their log records.

        Both come from the last stage. The mean is a float32 scalar; None if a loss is None.
        """
        present = [loss for loss in losses if loss is not None]
        has_loss = len(present) == len(losses) > 0
        calls = logged.calls if self.is_source else self._known.get(step, ())
        header = torch.tensor([has_loss, calls != self._known.get(step, ())], dtype=torch.int64)
        dist.broadcast(header, group=self._ranks.control_group, group_src=self._source)
        has_loss, changed = bool(header[0]), bool(header[1])
        if changed:
            calls = self._known[step] = self.share_object(calls)
        numbers = torch.zeros(1 + len(calls), dtype=torch.float64, device=self._ranks.device)
        if self.is_source:
            numbers[1:] = logged.values
            if has_loss:
                numbers[0] = torch.stack([loss.float().reshape(()) for loss in present]).mean()
        if has_loss or calls:
            dist.broadcast(numbers, group=self._ranks.group, group_src=self._source)
        loss = numbers[0].float() if has_loss else None
        return loss, Logged(calls=calls, values=numbers[1:])

    def share_output(self, value: Any) -> Any:
        """Return on all ranks the output of the last stage, on each rank's device."""
        file = io.BytesIO()
        if self.is_source:
            torch.save(value, file)
        content = self.share_object(file.getvalue())
        if self.is_source:
            return value
        # Written by this very run.
        return torch.load(io.BytesIO(content), self._ranks.device, weights_only=False)

    def share_object(self, value: Any) -> Any:
        """Return the last stage's value on all ranks."""
        box = [value]
        group = self._ranks.control_group
        dist.broadcast_object_list(box, group=group, group_src=self._source)
        return box[0]


# Arguments of `LightningModule.log` after `self`, name and value.
_POSITIONAL = list(inspect.signature(LightningModule.log).parameters)[3:]


def _check(name: str, value: Any, arguments: dict[str, Any]) -> None:
    call = f"`self.log({name!r}, ...)`"
    if not isinstance(value, (Tensor, numbers.Number, Metric)):
        raise ValueError(f"{call} logs a `{type(value).__name__}`: use a number or a metric.")
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(
            f"{call} logs a tensor of shape {tuple(value.shape)}: use a single number."
        )
    if isinstance(value, Metric) and value.dist_sync_on_step:
        raise NotImplementedError(
            f"{call} logs a metric with `dist_sync_on_step=True`, which waits for ranks that do "
            "not compute it in a pipeline: leave that out."
        )
    reduction = arguments.get("reduce_fx", "mean")
    if reduction not in _NAMES:
        raise NotImplementedError(
            f"{call}: `reduce_fx={reduction!r}` cannot be applied over micro-batches: choose one "
            f"of {list(_REDUCTIONS)}."
        )
    if arguments.get("sync_dist_group") is not None:
        raise NotImplementedError(
            f"{call}: `sync_dist_group` is not supported in a pipeline; `sync_dist=True` reduces "
            "over the replicas of the model."
        )


class _OverPipelines:
    """A ``dist_sync_fn`` that takes states from the last stage of each pipeline.

    torchmetrics adds up or joins the states of all ranks. In a pipeline the states of other stages
    are empty, of a dtype that torchmetrics guesses, or would be counted again.
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
    """Let ``compute`` of all metrics use the states of the last stages, on every rank.

    Metrics with a ``dist_sync_fn`` of their own keep it. ``from_last`` returns the last stage's
    tensor on all ranks of a pipeline, which call it together.
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
    """Let metrics return NaN without an update, around a step that does not come to its end.

    Each stage runs the code in front of the layers, so metrics there would be updated several times
    on a rank that has the last stage and others.
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
