"""Attributes that code has read from a module, and whether they have changed since."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .binding import Attached


class MISSING(enum.Enum):
    """Value of an attribute that an instance does not have."""

    VALUE = 0


@dataclass(frozen=True, slots=True, eq=False)
class Inherited:
    """Value that a class gives for an attribute that the instance does not have."""

    value: Any

    @classmethod
    def of(cls, kind: type, name: str) -> Inherited:
        """Look it up in a class; methods of the class count as their functions."""
        found = getattr(kind, name, MISSING.VALUE)
        return cls(found.__func__ if isinstance(found, types.MethodType) else found)

    def holds(self, kind: type, name: str) -> bool:
        """Return whether a class still gives the same value."""
        found = Inherited.of(kind, name).value
        return found is self.value or _equal(found, self.value)


_VALUES = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, type, range, slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """An attribute that code reads.

    Attributes:
        path: names of submodules from the recognized module to the owner.
        name: name of the attribute.
    """

    path: Path
    name: str


Reads = dict[Read, Any]  # their values


def is_function_without_state(value: Any, depth: int = 0) -> bool:
    """Return whether a function depends on nothing but its arguments and globals."""
    if isinstance(value, types.BuiltinFunctionType):  # but not, say, a list's method
        return isinstance(value.__self__, (type, types.ModuleType, type(None)))
    if isinstance(value, type):
        return True
    if isinstance(value, functools.partial):
        return all(map(is_constant, (value.func, *value.args, *value.keywords.values())))
    if not isinstance(value, types.FunctionType) or depth > 4:
        return False
    try:
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
    except ValueError:  # an empty cell
        return False
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    inside = all(
        isinstance(each, type) or is_function_without_state(each, depth + 1) for each in cells
    )
    return inside and all(map(is_constant, defaults))


def is_constant(value: Any) -> bool:
    """Return whether a value cannot change, and is neither tensor nor module."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_constant, value))
    return isinstance(value, _VALUES) or is_function_without_state(value)


def is_settings(value: Any) -> bool:
    """Return whether an object only holds settings, such as the configuration of a model."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (Tensor, nn.Module, types.ModuleType, dict, list, set))
        and not callable(value)
        and not any(isinstance(each, Tensor) for each in vars(value).values())
    )


def _same(values: dict[str, Any], others: dict[str, Any]) -> bool:
    return values.keys() == others.keys() and all(v is others[k] for k, v in values.items())


def _equal(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if isinstance(value, functools.partial) and isinstance(other, functools.partial):
        same = value.func is other.func and len(value.args) == len(other.args)
        return (
            same
            and all(map(_equal, value.args, other.args))
            and value.keywords.keys() == other.keywords.keys()
            and all(_equal(v, other.keywords[k]) for k, v in value.keywords.items())
        )
    return type(value) is type(other) and is_constant(value) and bool(value == other)


def _at(module: nn.Module, path: Path) -> nn.Module | None:
    found: nn.Module | None = module
    for name in path:
        found = None if found is None else vars(found)["_modules"].get(name)
    return found


def reads_same(module: nn.Module, reads: Reads) -> bool:
    """Return whether a module has the same values for everything that code read in another one."""
    for read, value in reads.items():
        part = _at(module, read.path)
        if part is None:
            return False
        own = vars(part)
        if read.name in own["_parameters"]:
            found = own["_parameters"][read.name]
            if (found is None) != (value is None):
                return False
            if found is not None and (not isinstance(value, Tensor) or found.shape != value.shape):
                return False
        elif read.name in own["_modules"]:
            if type(own["_modules"][read.name]) is not type(value):
                return False
        elif isinstance(value, Inherited):
            if read.name in own or not value.holds(type(part), read.name):
                return False
        elif not _equal(_unbound(own.get(read.name, MISSING.VALUE), part), _unbound(value, None)):
            return False
    return True


def _unbound(value: Any, owner: Any) -> Any:
    """The function of a method of the module itself; bound methods differ between modules."""
    own = isinstance(value, types.MethodType) and (owner is None or value.__self__ is owner)
    return value.__func__ if own else value


@dataclass(slots=True)
class _Kept:
    """Attributes that were read from a module.

    Attributes:
        module: the module.
        forward: forward of its class.
        values: attributes by name.
        inherited: attributes of the class that the instance does not have.
        modules: submodules that do not run and do not have to be called.
        settings: objects and their attributes.
        replaced: whether its forward is not run, so that it must have no hooks.
    """

    module: nn.Module
    forward: Callable[..., Any]
    values: tuple[tuple[str, Any], ...]
    inherited: tuple[tuple[str, Inherited], ...]
    modules: tuple[tuple[str, Any], ...]
    settings: tuple[tuple[Any, dict[str, Any]], ...]
    replaced: bool

    def holds(self) -> bool:
        own = self.module.__dict__
        for name, value in self.values:
            found = own.get(name, MISSING.VALUE)
            if found is not value and not _equal(found, value):
                return False
        kind = type(self.module)
        for name, each in self.inherited:
            if not each.holds(kind, name):
                return False
        children = own["_modules"]
        for name, value in self.modules:
            if children.get(name) is not value:
                return False
        for settings, before in self.settings:
            if not _same(vars(settings), before):
                return False
        if kind.forward is not self.forward:
            return False
        return not self.replaced or not (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
        )


@dataclass(slots=True)
class Proof(Attached):
    """Why a site computes what its module does, as long as the module stays as it was.

    Attributes:
        kept: attributes read from the module and from its submodules that do not run.
    """

    kept: tuple[_Kept, ...] = field(default=())

    @classmethod
    def of(cls, module: nn.Module, reads: Reads, projections: Any = ()) -> Proof:
        """Return the proof for a module; its site calls ``projections``, too."""
        parts: dict[Path, dict[str, Any]] = {(): {}}
        for read in reads:
            if not (read.path and read.path[0] in projections) and read != Read((), "forward"):
                parts.setdefault(read.path, {})[read.name] = None
        return cls(tuple(_kept(module, path, names, projections) for path, names in parts.items()))

    @property
    def leaves_out_modules(self) -> bool:
        """Whether submodules exist that do not run."""
        return len(self.kept) > 1

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        return all(part.holds() for part in self.kept)


def _nested(value: Any, depth: int = 0) -> Iterator[Any]:
    if depth < 3 and is_settings(value):
        yield value
        for each in vars(value).values():
            if not is_constant(each):
                yield from _nested(each, depth + 1)


def _kept(top: nn.Module, path: Path, names: dict[str, Any], projections: Any) -> _Kept:
    module = _at(top, path)
    if module is None:
        raise AssertionError(f"{'.'.join(path)} was read")
    own = vars(module)
    parameters, children = own["_parameters"], own["_modules"]
    plain = {n: own.get(n, MISSING.VALUE) for n in names if n not in children}
    plain = {n: v for n, v in plain.items() if parameters.get(n) is None}
    inside = [n for n in names if n in children and (path or n not in projections)]
    absent = [n for n, v in plain.items() if v is MISSING.VALUE]
    inherited = {n: Inherited.of(type(module), n) for n in absent}
    found = [*plain.values(), *(each.value for each in inherited.values())]
    settings = [each for v in found if not is_constant(v) for each in _nested(v)]
    return _Kept(
        module=module,
        forward=type(module).forward,
        values=tuple(plain.items()),
        inherited=tuple(inherited.items()),
        modules=tuple((name, children[name]) for name in inside),
        settings=tuple((each, dict(vars(each))) for each in settings),
        replaced=bool(path),
    )
