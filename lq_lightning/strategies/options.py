"""The strategies' options: errors and warnings that name the value, and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import Any, get_args, get_type_hints

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lq_lightning.foundation.checks import is_number, is_whole

__all__ = [
    "check_backend",
    "check_count",
    "check_flag",
    "check_option_names",
    "check_timeout",
    "given_options",
    "warn_without_effect",
]


def check_option_names(cls: type, given: Mapping[str, Any]) -> None:
    """Name unknown options together with the known ones.

    Raises:
        TypeError: ``cls.__init__`` has no such option.
    """
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = [name for name in given if name not in parameters]
    if unknown:
        allowed = ", ".join(name for name in parameters if name != "self")
        shown = f"{unknown[0]}={given[unknown[0]]!r}"
        configs = _configs_with(unknown[0], cls)
        remedy = " or ".join(f"`{name}={config}({shown})`" for name, config in configs)
        raise TypeError(
            f"`{cls.__name__}` has no option `{shown}`. {f'Give {remedy}. ' if remedy else ''}"
            f"Options are: {allowed}."
        )


def _configs_with(option: str, cls: type) -> list[tuple[str, str]]:
    """Options of a class that take a configuration, and its class, where that has this option."""
    # Annotations of a user's subclass may have names that exist for type checkers only.
    ours = next(c for c in cls.__mro__ if c.__module__.startswith("lq_lightning."))
    return [
        (name, config.__name__)
        for name, hint in get_type_hints(ours.__init__).items()  # type: ignore[misc]
        if name in inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        for config in get_args(hint)
        if isinstance(config, type) and is_dataclass(config)
        if option in (field.name for field in fields(config))
    ]


def given_options(
    cls: type, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Options in a call of ``cls`` that do not have their defaults."""
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    given = {**dict(zip(list(parameters)[1:], args, strict=False)), **kwargs}
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    return {n: v for n, v in given.items() if n not in defaults or v != defaults[n]}


def warn_without_effect(
    owner: str, given: Mapping[str, object], names: Iterable[str], why: str
) -> None:
    """Warn on rank zero of options that do nothing in this run, if any of ``names`` was given.

    ``"none"`` does not count, as nothing is what it asks for.
    """
    found = {name: given[name] for name in names if given.get(name, "none") != "none"}
    if found:
        options = ", ".join(f"{name}={_brief(value)}" for name, value in found.items())
        rank_zero_warn(f"`{owner}({options})` has no effect: {why}.")


def _brief(value: object) -> str:
    """``repr`` without the fields of a config that have their defaults."""
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    found = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    defaults = {field.name: field.default for field in fields(value)}
    shown = ", ".join(f"{n}={_brief(v)}" for n, v in found.items() if v != defaults[n])
    return f"{type(value).__name__}({shown})"


def _refused(owner: str, name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"`{owner}({name}={value!r})` is not supported: give {allowed}.")


def check_flag(owner: str, name: str, value: object) -> None:
    """Refuse what is no bool, such as the string ``"no"``, which Python takes for true.

    Raises:
        ValueError: ``value`` is something else.
    """
    if not isinstance(value, bool):
        raise _refused(owner, name, value, "True or False")


def check_count(
    owner: str, name: str, value: object, least: int, config: type | None = None
) -> None:
    """Refuse what is no whole number of at least ``least``.

    ``config`` is a class of which an instance could be given instead.

    Raises:
        ValueError: ``value`` is something else.
    """
    if not is_whole(value) or value < least:
        instead = "" if config is None else f", or a `{config.__name__}`"
        raise _refused(owner, name, value, f"a whole number of {least} or more{instead}")


def check_timeout(owner: str, timeout: object) -> timedelta | None:
    """Take seconds for a ``timedelta``; ``None`` leaves the choice to torch.

    Raises:
        ValueError: ``timeout`` is not positive, or something else.
    """
    if timeout is None:
        return None
    if is_number(timeout) and timeout > 0:
        return timedelta(seconds=timeout)
    if isinstance(timeout, timedelta) and timeout > timedelta(0):
        return timeout
    allowed = "a positive number of seconds, a `datetime.timedelta`, or None"
    raise _refused(owner, "timeout", timeout, allowed)


def check_backend(owner: str, backend: object) -> None:
    """Refuse what names no backend of ``torch.distributed``.

    Raises:
        ValueError: ``backend`` is neither ``None`` nor such a name, or "device:name" pairs of them.
    """
    known = dist.Backend.backend_list
    name = "process_group_backend"
    allowed = (
        f"one of {', '.join(map(repr, known[1:]))}, pairs such as 'cpu:gloo,cuda:nccl', or None"
    )
    if backend is None:
        return
    if not isinstance(backend, str):
        raise _refused(owner, name, backend, allowed)
    if any(part.rpartition(":")[2].lower() not in known for part in backend.split(",")):
        raise _refused(owner, name, backend, allowed)
