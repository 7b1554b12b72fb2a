"""Options of the strategies, and their checks: errors name the value and the remedy."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lq_lightning.data_parallel import GradientQuantization, WeightQuantization
from lq_lightning.foundation.checks import check_choice, check_count, is_number

DEFAULT_TIMEOUT = timedelta(minutes=30)

UnitSelector = Sequence[str] | Callable[[nn.Module], bool] | None
"""Classes or modules by name, or a predicate over modules, or ``None`` to find repeated blocks."""

WeightName = Literal["auto", "qWD", "none"]
GradientName = Literal["auto", "TLq-HS", "TLq", "ULq", "QuanGrad", "none"]
ReplicaName = Literal["auto", "full", "node"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPOptions:
    """Options of every strategy that shards by FSDP2; ``QuantizedFSDPStrategy`` explains them.

    Attributes:
        weights: Quantization of the weights' all-gather.
        gradients: Quantization of the gradients' reduce-scatter.
        replica: Placement of the reference weights that differences are taken from.
        node_size: Ranks per node; ``None`` takes it from Lightning.
        tensor_parallel_size: Neighbouring ranks that share each layer's computation.
        tensor_parallel: ``"auto"`` applies a plan; None leaves it to ``configure_model``.
        min_quantized_numel: Smaller tensors are sent in full precision.
        units: Modules that are gathered as one piece.
        reshard_after_forward: Free a unit's weights between forward and backward.
        reduce_every_microbatch: Do not defer reductions with ``accumulate_grad_batches``.
        skip_nonfinite_steps: Skip optimizer steps with infinite or NaN gradients.
        check_replicas_every_n_steps: Compare checksums of the weight replicas that often; 0 never.
        on_drift: Reaction to replicas that differ.
        compile_units: ``torch.compile`` the forward of each unit.
        save_distributed_checkpoint: Write checkpoint directories with one file per rank.
        verify_checkpoints: Compare checkpoints with their checksums before anything is loaded.
        process_group_backend: ``None`` for NCCL on GPUs and gloo on CPUs.
        timeout: Time that a rank waits for others before the run fails; a number is seconds.
        start_timeout: The same until the first training batch is done.
        seed: Base of the seeds of stochastic rounding.
    """

    weights: WeightName | WeightQuantization = "auto"
    gradients: GradientName | GradientQuantization = "auto"
    replica: ReplicaName = "auto"
    node_size: int | None = None
    tensor_parallel_size: int = 1
    tensor_parallel: Literal["auto"] | None = None
    min_quantized_numel: int = 4096
    units: list[str] | Callable[[nn.Module], bool] | None = None
    reshard_after_forward: bool = True
    reduce_every_microbatch: bool = False
    skip_nonfinite_steps: bool = False
    check_replicas_every_n_steps: int = 100
    on_drift: Literal["resync", "raise"] = "resync"
    compile_units: bool = False
    save_distributed_checkpoint: bool = True
    verify_checkpoints: bool = True
    process_group_backend: str | None = None
    timeout: timedelta | float | None = DEFAULT_TIMEOUT
    start_timeout: timedelta | float | None = None
    seed: int = 0

    def check(self, owner: str) -> None:
        """Refuse values that no run could use; ``QuantizedCollectives`` checks its own."""
        for field in fields(self):
            if isinstance(field.default, bool):
                check_flag(owner, field.name, getattr(self, field.name))
        check_selector(self.units)
        _check_backend(owner, self.process_group_backend)
        check_count(owner, "node_size", self.node_size, 1, NoneType)
        check_count(owner, "tensor_parallel_size", self.tensor_parallel_size, 1)
        check_choice(owner, "tensor_parallel", self.tensor_parallel, ("auto", None))
        check_count(owner, "min_quantized_numel", self.min_quantized_numel, 1)
        check_count(owner, "check_replicas_every_n_steps", self.check_replicas_every_n_steps, 0)
        check_count(owner, "seed", self.seed, 0)

    def timeouts(self, owner: str) -> tuple[timedelta | None, timedelta | None]:
        """Those of the start and of steps; ``None`` leaves the choice to torch."""
        steps = _duration(owner, "timeout", self.timeout)
        start = _duration(owner, "start_timeout", self.start_timeout)
        if start is None and steps is not None:
            start = max(steps, DEFAULT_TIMEOUT)
        if steps is None and start is not None:
            steps = DEFAULT_TIMEOUT  # else groups would keep that of the start
        return start, steps


def _defaults(cls: type) -> tuple[dict[str, object], bool]:
    """Defaults of a strategy's options by name, and whether it takes others as well."""
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    found = {n: p.default for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    takes_others = len(found) < len(parameters)
    del found["self"]
    if takes_others and cls.__init__.__module__.startswith("lq_lightning."):  # type: ignore[misc]
        shared = {field.name: field.default for field in fields(FSDPOptions)}
        return {**found, **shared, **found}, False  # the class's own first, with its defaults
    return found, takes_others


def check_option_names(cls: type, given: Mapping[str, Any]) -> None:
    """Refuse unknown options, naming the known ones."""
    known, takes_others = _defaults(cls)
    unknown = [name for name in given if name not in known]
    if unknown and not takes_others:
        shown = f"{unknown[0]}={given[unknown[0]]!r}"
        configs = _configs_with(unknown[0], cls, known)
        remedy = " or ".join(f"`{name}={config}({shown})`" for name, config in configs)
        raise TypeError(
            f"`{cls.__name__}` has no option `{shown}`. {f'Give {remedy}. ' if remedy else ''}"
            f"Options are: {', '.join(known)}."
        )


def _configs_with(option: str, cls: type, known: Iterable[str]) -> list[tuple[str, str]]:
    """Options of a class that take a configuration with this option, and that one's class."""
    # annotations of a user's subclass may have names that exist for type checkers only
    ours = next(c for c in cls.__mro__ if c.__module__.startswith("lq_lightning."))
    hints = {**get_type_hints(FSDPOptions), **get_type_hints(ours.__init__)}  # type: ignore[misc]
    return [
        (name, config.__name__)
        for name in known
        for config in get_args(hints.get(name))
        if isinstance(config, type) and is_dataclass(config)
        if option in (field.name for field in fields(config))
    ]


def given_options(
    cls: type, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Options in a call of ``cls`` that do not have their defaults."""
    defaults, _ = _defaults(cls)
    given = {**dict(zip(defaults, args, strict=False)), **kwargs}
    return {n: v for n, v in given.items() if n not in defaults or v != defaults[n]}


def shown_options(cls: type, given: Mapping[str, object]) -> dict[str, str]:
    """All options of this package's strategy as text, which a checkpoint may hold."""
    options = {**_defaults(cls)[0], **given}
    ours = next(c for c in cls.__mro__ if c.__module__.startswith("lq_lightning."))
    known = _defaults(ours)[0]  # those of a user's class may be secrets
    return {name: _brief(value) for name, value in options.items() if name in known}


def warn_without_effect(
    owner: str, given: Mapping[str, object], names: Iterable[str], why: str
) -> None:
    """Warn on rank zero of options that do nothing in this run, if any of ``names`` was given.

    ``"none"`` does not count: it asks for no effect.
    """
    found = {name: given[name] for name in names if given.get(name, "none") != "none"}
    if found:
        options = ", ".join(f"{name}={_brief(value)}" for name, value in found.items())
        rank_zero_warn(f"`{owner}({options})` has no effect: {why}.")


def _brief(value: object) -> str:
    """``repr`` without addresses, and the fields of a config that have their defaults."""
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    if not is_dataclass(value) or isinstance(value, type):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    found = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    defaults = {field.name: field.default for field in fields(value)}
    shown = ", ".join(f"{n}={_brief(v)}" for n, v in found.items() if v != defaults[n])
    return f"{type(value).__name__}({shown})"


def _refused(owner: str, name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"`{owner}({name}={value!r})` is not supported: give {allowed}.")


def _duration(owner: str, name: str, value: timedelta | float | None) -> timedelta | None:
    if value is None:
        return None
    if is_number(value) and value > 0:
        return timedelta(seconds=value)
    if isinstance(value, timedelta) and value > timedelta(0):
        return value
    allowed = "a positive number of seconds, a `datetime.timedelta`, or None"
    raise _refused(owner, name, value, allowed)


def check_selector(units: UnitSelector) -> None:
    """Refuse anything but ``None``, a sequence of names and a callable."""
    if units is None or callable(units):
        return
    names = isinstance(units, Sequence) and not isinstance(units, str)
    if not names or not all(isinstance(name, str) for name in units):
        raise TypeError(
            f"`units={units!r}` is not supported: give a list of class names such as ['Block'], or "
            "of names of modules, or a function of a module that returns whether it is a unit."
        )


def check_flag(owner: str, name: str, value: object) -> None:
    """Refuse values that are not bool, such as the string ``"no"``, which Python takes for true."""
    if not isinstance(value, bool):
        raise _refused(owner, name, value, "True or False")


def _check_backend(owner: str, backend: object) -> None:
    known = dist.Backend.backend_list
    if backend is None:
        return
    parts = backend.split(",") if isinstance(backend, str) else [""]
    if any(part.rpartition(":")[2].lower() not in known for part in parts):
        names = ", ".join(map(repr, known[1:]))
        allowed = f"one of {names}, pairs such as 'cpu:gloo,cuda:nccl', or None"
        raise _refused(owner, "process_group_backend", backend, allowed)
