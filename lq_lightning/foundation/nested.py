"""Nested collections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in mappings, lists and tuples of any depth, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield what mappings, lists, tuples and dataclasses hold, with the path to it."""
    if isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key], f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


def from_plain(kind: Any, value: Any) -> Any:
    """Make the value of a type, such as a dataclass of others, from what ``asdict`` and JSON made.

    Fields that the type does not have are left out; one that is missing raises ``TypeError``.
    """
    origin, args = get_origin(kind), get_args(kind)
    if hasattr(kind, "_fields"):  # a named tuple
        return kind(*map(from_plain, get_type_hints(kind).values(), value))
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        names = [each.name for each in fields(kind) if each.name in value]
        return kind(**{name: from_plain(hints[name], value[name]) for name in names})  # type: ignore[operator]
    if origin is tuple:
        kinds = [args[0]] * len(value) if args[-1] is ... else args
        return tuple(from_plain(each, part) for each, part in zip(kinds, value, strict=True))
    if origin is not None and issubclass(dict, origin):
        return {name: from_plain(args[1], part) for name, part in value.items()}
    if NoneType in args:
        some = next(each for each in args if each is not NoneType)
        return None if value is None else from_plain(some, value)
    return value
