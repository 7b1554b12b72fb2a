"""Stand-ins for modules: they run the modules' code and record which attributes it reads.

A stand-in has parameters of its own. It notes each attribute that is read, so that a match holds
for all modules of the class with the same values, and as long as they stay.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .proof import (
    Inherited,
    Path,
    Read,
    Reads,
    is_constant,
    is_function_without_state,
    is_settings,
)
from .trace import NotKnown, Trace, called_by_torch

__all__ = ["Probe"]


_CALLS = {"_call_impl", "_slow_forward", "_wrapped_call_impl"}
_MACHINERY = (frozenset(vars(nn.Module())) | _CALLS) - {"training"}
_STATE = "_lq_probe"


class _Settings:
    """Settings that cannot be changed, and give nothing that could."""

    def __init__(self, value: Any, refuse: Callable[[str], Any]) -> None:
        object.__setattr__(self, "held", (value, refuse))

    def __getattribute__(self, name: str) -> Any:
        value, refuse = object.__getattribute__(self, "held")
        found = getattr(value, name)
        if is_constant(found):
            return found
        return _Settings(found, refuse) if is_settings(found) else refuse(f"reads `{name}`")

    def _refuse(self, *_: Any) -> Any:
        return object.__getattribute__(self, "held")[1]("uses settings in another way")

    __setattr__ = __delattr__ = __bool__ = __eq__ = __hash__ = _refuse


class _Probed:
    """Base class of stand-ins, before the module's own class."""

    def __init_subclass__(cls) -> None:
        """Let the module's class take no notice."""

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        probe: Probe = own[_STATE]
        if name in _MACHINERY or name == "__dict__":
            if not called_by_torch(inspect.currentframe()):
                probe.trace.refuse(f"reads `{name}`")
        elif not name.startswith("__"):
            return probe.read(self, own, name)
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        probe: Probe = object.__getattribute__(self, "__dict__")[_STATE]
        probe.trace.refuse(f"sets `{name}`")

    __delattr__ = __setattr__  # type: ignore[assignment]


class _Projecting:
    """In front of the class of a projection, which does not run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = object.__getattribute__(self, "__dict__")
        probe: Probe = own[_STATE]
        arguments = (*args, *kwargs.values())
        if len(arguments) != 1:
            probe.trace.refuse("calls a projection with several arguments")
        return probe.trace.call(own["_lq_name"], arguments[0], own["_lq_width"])


@functools.lru_cache(maxsize=256)
def _probed(cls: Any, *before: type) -> type:
    try:
        return types.new_class(cls.__name__, (*before, _Probed, cls))
    except TypeError as error:  # a class that others cannot be derived from
        raise NotKnown(str(error)) from None


class Probe:
    """A stand-in for a module and those in it.

    Args:
        module: The module.
        parameters: Those of the stand-in, by name; submodules have none.
        widths: Output widths of its projections, by name; None means the width of its input.

    Attributes:
        trace: that of the current run.
        parameters: those of the stand-in, by name; may be replaced between runs.
        reads: the attributes that its code has read in all runs.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, Any] | None = None,
        widths: dict[str, int | None] | None = None,
    ) -> None:
        self.trace: Trace
        self.reads: Reads = {}
        self.parameters = {} if parameters is None else parameters
        self._widths = widths or {}
        self._paths: dict[int, tuple[Path, nn.Module]] = {}
        self._probes: list[Any] = []
        self._function = type(module).forward
        if not is_function_without_state(self._function):
            raise NotKnown("a forward with a closure")
        self._top = self._made(module, ())

    def _made(self, module: nn.Module, path: Path) -> Any:
        projects = len(path) == 1 and path[0] in self._widths
        kind: Any = type(module)
        cls = _probed(kind, *([_Projecting] if projects else []))
        made: Any = object.__new__(cls)
        own = vars(nn.Module()) if projects else {**vars(module), **vars(nn.Module())}
        for name in ("forward", "_lq_site", "_lq_function"):
            own.pop(name, None)
        own["_parameters"] = {} if path else self.parameters
        if projects:
            own |= {"_lq_name": path[0], "_lq_width": self._widths[path[0]]}
        else:
            children = vars(module)["_modules"].items()
            own["_modules"] = {
                name: None if child is None else self._made(child, (*path, name))
                for name, child in children
            }
        own[_STATE] = self
        object.__setattr__(made, "__dict__", own)
        self._paths[id(made)] = (path, module)
        self._probes.append(made)
        return made

    def read(self, made: Any, own: dict[str, Any], name: str) -> Any:
        """Return an attribute of a stand-in as its module would."""
        path, module = self._paths[id(made)]
        for key in ("_parameters", "_modules"):
            if name in own[key]:
                value = own[key][name]
                real = vars(module)[key].get(name)
                self.reads[Read(path, name)] = real
                return value
        if name == "training":
            return own[name]
        if name in own:
            value = own[name]
            self.reads[Read(path, name)] = value
        else:
            self.reads[Read(path, name)] = Inherited.of(type(module), name)
            value = object.__getattribute__(made, name)
        if isinstance(value, types.MethodType) and any(
            value.__self__ is each for each in (made, module)
        ):
            if not is_function_without_state(value.__func__):
                self.trace.refuse(f"calls `{name}`, which has a closure")
            return types.MethodType(value.__func__, made)
        if is_constant(value):
            return value
        if not is_settings(value):
            self.trace.refuse(f"reads `{name}`")
        return _Settings(value, self.trace.refuse)

    def run(self, trace: Trace, x: Tensor, *, training: bool) -> tuple[Tensor, Any]:
        """Run the module's code on an input; see ``Trace.run``."""
        self.trace = trace
        for made in self._probes:
            object.__getattribute__(made, "__dict__")["training"] = training
        return trace.run(lambda value: self._function(self._top, value), x)
