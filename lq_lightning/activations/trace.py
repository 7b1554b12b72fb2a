"""Run a module's code on stand-ins, and record what it computes and reads.

Operators are recorded one by one. Nothing runs that is not known beforehand: an unknown operator, a
change of anything, a question about values or about the number of rows ends the run before it
happens. So the code cannot branch on what a run does not show, and leaves no trace in the model or
in the process.

A stand-in has parameters of its own. It notes each attribute that is read, so that a match holds
for all modules of the class with the same values, and as long as they stay.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from lq_lightning._compat.modes import OperatorMode

from .algebra import OPERATORS, Formula, UnknownFormula, atom, number
from .sites import (
    Inherited,
    Path,
    Reads,
    has_value,
    is_constant,
    is_function_without_state,
    is_settings,
    module_at,
)

_ATTRIBUTES = {"dtype", "ndim"}
_PARTS = {"slice", "split", "split_with_sizes"}
_QUESTIONS = {"dim", "ndimension", "is_floating_point", "is_tensor"}
_FORBIDDEN = {"detach", "detach_", "__set__", "__delete__", "register_hook", "requires_grad_"}
_CALLS = {"_call_impl", "_slow_forward", "_wrapped_call_impl"}
_MACHINERY = (frozenset(vars(nn.Module())) | _CALLS) - {"training"}
_STATE = "_lq_probe"


class NotKnown(BaseException):
    """The code does something unknown. Not an ``Exception``, so that the code does not catch it."""


def random_values(*shape: int) -> Tensor:
    """Return random fp32 values on the CPU, the same for a shape, by a generator of their own."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)


def called_by_torch(frame: types.FrameType | None) -> bool:
    """Return whether code of torch called the code of a frame."""
    caller = None if frame is None else frame.f_back
    name = "" if caller is None else caller.f_globals.get("__name__", "")
    return name.startswith("torch.")


class _Rows(tuple):  # type: ignore[type-arg]
    """The rows of a shape, to which code may add a last dimension; it learns only their number."""

    trace: Trace

    @classmethod
    def of(cls, shape: tuple[int, ...], trace: Trace) -> Self:
        """Return a shape whose sizes a trace does not tell."""
        made = cls(shape)
        made.trace = trace
        return made

    def __add__(self, other: Any) -> Any:
        return _Rows.of((*tuple.__iter__(self), *other), self.trace)

    def _refuse(self, *_: Any) -> Any:
        self.trace.refuse("asks for the size of its input")

    def __getitem__(self, index: Any) -> Any:
        torchs = called_by_torch(inspect.currentframe())  # torch uses it for views only
        return tuple.__getitem__(self, index) if torchs else self._refuse()

    __iter__ = __eq__ = __ne__ = __radd__ = __contains__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __mul__ = __rmul__ = index = count = _refuse
    __hash__ = None  # type: ignore[assignment]


class _Shape(_Rows):
    """The shape of an input, whose last dimension may be known."""

    def __getitem__(self, index: Any) -> Any:
        if index == slice(None, -1):
            return _Rows.of(tuple.__getitem__(self, index), self.trace)
        count = len(self)
        last = index in (-1, count - 1) if isinstance(index, int) else index == slice(-1, None)
        known = last and self.trace.knows_width
        return tuple.__getitem__(self, index) if known else self._refuse()


class _Questions(TorchFunctionMode):
    """Answers what code asks of tensors, if the answer is the same for every input."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._trace.paused:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if attribute == "shape":
                return self._shape(args[0])
            if attribute not in _ATTRIBUTES:
                self._trace.refuse(f"asks for `{attribute}` of a tensor")
            return func(*args, **kwargs)
        if name == "size":
            shape = self._shape(args[0])
            dims = (*args[1:], *kwargs.values())
            return shape[dims[0]] if dims else shape
        if name in _FORBIDDEN or (name == "__getitem__" and not self._takes_part(*args)):
            self._trace.refuse(f"calls `{name}`")
        self._trace.functional |= func in self._trace.norms
        result = func(*args, **kwargs)
        if name in _QUESTIONS or isinstance(result, Tensor):
            return result
        if not isinstance(result, (tuple, list)) or not all(isinstance(y, Tensor) for y in result):
            self._trace.refuse(f"asks `{name}` of a tensor")
        return result

    def _takes_part(self, x: Tensor, index: Any) -> bool:
        """Whether an index is one of the last dimension, whose width it does not exceed."""
        index = index if isinstance(index, tuple) else (index,)
        *rows, last = index
        if not isinstance(last, slice) or any(r not in (..., slice(None)) for r in rows):
            return False
        bounds = [bound for bound in (last.start, last.stop) if bound is not None]
        whole = ... in rows or len(index) == x.dim()
        return self._trace.knows_width and whole and all(abs(b) <= x.shape[-1] for b in bounds)

    def _shape(self, x: Tensor) -> Any:
        if isinstance(x, nn.Parameter):
            return x.shape
        return _Shape.of(x.shape, self._trace)


class _Operators(OperatorMode):
    """Lets known operators run, and records their formulas."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        trace, kwargs = self._trace, kwargs or {}
        if trace.paused:
            return func(*args, **kwargs)
        name = str(func.overloadpacket).removeprefix("aten.")
        changes = name.endswith("_") and not name.startswith("__")
        rule = OPERATORS.get(name.removesuffix("_") if changes else name)
        if name in _PARTS and not trace.knows_width:
            rule = None
        if rule is None or not torch.is_grad_enabled():
            trace.refuse(f"runs `{name}`" if rule is None else "switches gradients off")
        if name == "_to_copy":
            trace.check_cast(kwargs.get("dtype"), kwargs.get("device"))
        if changes:
            trace.check_change(args[0])
        try:
            formulas = rule(trace.formula, *args, **kwargs)  # type: ignore[misc]
        except (UnknownFormula, TypeError, ValueError, OverflowError) as error:
            trace.refuse(f"runs `{name}`: {error}")
        if name != "detach":
            trace.consume(args, kwargs)
        result = func(*args, **kwargs)
        trace.note(result, formulas, inner=name == "detach")
        return result


class Trace:
    """One run. ``knows_width`` says whether every input has the last dimension of this one's."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        norms: tuple[Any, ...] = (),
        knows_width: bool = True,
        autocast: bool = False,
    ) -> None:
        self.dtype = dtype
        self.norms = norms
        self.knows_width = knows_width
        self.autocast = autocast
        self.paused = False  # while code other than the module's is running
        self.functional = False  # whether one of the functions of torch in `norms` was called
        # argument, a leaf, and its copy, the result, of each stand-in for a projection
        self.calls: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self._refused = ""
        self._formulas: dict[tuple[Any, ...], tuple[Formula, int]] = {}
        self._unused: set[int] = set()
        self._alive: list[Tensor] = []
        self._steps = 0

    def refuse(self, reason: str) -> None:
        """End the run with ``NotKnown``, for good even if the code catches it."""
        self._refused = self._refused or reason
        raise NotKnown(self._refused)

    @staticmethod
    def _place(x: Tensor) -> tuple[Any, ...]:
        """Key that tells a value from all others: no memory is reused in a run."""
        return x.data_ptr(), x.shape, x.stride(), x.dtype

    def add(self, x: Tensor, formula: Formula) -> None:
        """Let the code use a tensor."""
        self._alive.append(x)
        self._formulas[self._place(x)] = (formula, -1)

    def formula(self, x: Any) -> Formula:
        """Return the formula of a tensor or number."""
        if isinstance(x, Tensor):
            found = self._formulas.get(self._place(x))
            if found is None:
                raise UnknownFormula("a tensor from elsewhere")
            return found[0]
        if isinstance(x, bool) or not isinstance(x, (int, float)):
            raise UnknownFormula("no number")
        return number(x)

    def consume(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Note that operators read tensors."""
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and (found := self._formulas.get(self._place(x))) is not None:
                self._unused.discard(found[1])

    def note(self, result: Any, formulas: Any, *, inner: bool) -> None:
        """Record the result of an operator; ``inner`` if autograd ran it, not the code."""
        several = isinstance(result, (tuple, list))
        results, formulas = (result, formulas) if several else ([result], [formulas])
        if inner:
            return
        self._steps += 1
        self._unused.add(self._steps)
        for y, formula in zip(results, formulas, strict=True):
            if formula is not None:
                self._alive.append(y)
                self._formulas[self._place(y)] = (formula, self._steps)

    def check_cast(self, dtype: Any, device: Any) -> None:
        """Refuse to leave floating point numbers or to round to fewer bits than the input has."""
        wide = (self.dtype, torch.float32, torch.float64)
        if dtype not in (None, *wide) or device not in (None, torch.device("cpu")):
            self.refuse(f"casts to {dtype}, {device}")

    def check_change(self, x: Any) -> None:
        """Refuse in-place changes of the input, a parameter, or a tensor with views."""
        memory = x.untyped_storage().data_ptr()
        found = self._formulas.get(self._place(x))
        places = {self._place(y) for y in self._alive if y.untyped_storage().data_ptr() == memory}
        if found is None or found[1] < 0 or len(places) != 1:
            self.refuse("changes a tensor in place")

    def call(self, name: str, argument: Any, width: int | None) -> Tensor:
        """Run the stand-in for a projection."""
        if not isinstance(argument, Tensor) or name in self.calls or not torch.is_grad_enabled():
            self.refuse(f"calls `{name}` in another way")
        self.paused = True
        try:
            formula = atom("call", (name, self.formula(argument)))
        except UnknownFormula as error:
            self.refuse(str(error))
        self.consume((argument,), {})
        shape = (*argument.shape[:-1], width or argument.shape[-1])
        values = random_values(*shape).to(argument.dtype).requires_grad_()
        result = values.clone()  # a copy, which may be changed in place
        self.calls[name] = (argument, values, result)
        self.note(result, formula, inner=False)
        self.paused = False
        return result

    def run(self, function: Callable[[Tensor], Any], x: Tensor) -> tuple[Tensor, Formula]:
        """Run the code on an input; return its output and the formula of that.

        Raises ``NotKnown`` if it does something unknown. Other tensors it may use were given to
        ``add``.
        """
        self.add(x, atom("input"))
        autocast = torch.autocast("cpu", dtype=torch.bfloat16) if self.autocast else nullcontext()
        try:
            with autocast, _Operators(self), _Questions(self):
                y = function(x)
        except Exception as error:  # anything that unknown code does with our input
            raise NotKnown(f"{type(error).__name__}: {error}") from None
        if self._refused or not isinstance(y, Tensor):
            raise NotKnown(self._refused or "returns no tensor")
        self.consume((y,), {})
        if self._unused or self._place(y) not in self._formulas:
            raise NotKnown("computes more than its output, or that from elsewhere")
        return y, self._formulas[self._place(y)][0]


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Restore global random generators; raise ``NotKnown`` if numbers were drawn meanwhile."""
    numpy = sys.modules.get("numpy.random")
    before = random.getstate(), torch.get_rng_state()
    others = None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        drawn = random.getstate() != before[0] or not torch.get_rng_state().equal(before[1])
        random.setstate(before[0])
        torch.set_rng_state(before[1])
        if numpy is not None:
            drawn |= any(
                bool((a != b).any()) if hasattr(a, "any") else a != b
                for a, b in zip(numpy.get_state(), others or (), strict=True)
            )
            numpy.set_state(others)
    if drawn:
        raise NotKnown("draws random numbers")


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
        """Do not call the module's class."""

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
    """Base class of stand-ins for projections, whose code does not run."""

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
    except TypeError as error:  # a class that cannot be subclassed
        raise NotKnown(str(error)) from None


class Probe:
    """A stand-in for a module and its submodules, which have no parameters.

    ``widths`` are the output widths of its projections; None means the width of the input.
    ``parameters``, by name, may be replaced between runs.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, Any] | None = None,
        widths: dict[str, int | None] | None = None,
    ) -> None:
        self.trace: Trace  # of the current run
        self.reads: Reads = {}  # what its code has read in all runs
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
                self.reads[path, name] = vars(module)[key].get(name)
                return own[key][name]
        if name == "training":
            return own[name]
        if name in own:
            value = own[name]
            self.reads[path, name] = value
        else:
            self.reads[path, name] = Inherited.of(type(module), name)
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


def reads_same(module: nn.Module, reads: Reads) -> bool:
    """Return whether a module has the same values for everything that code read in another one."""
    for (path, name), value in reads.items():
        part = module_at(module, path)
        if part is None:
            return False
        own = vars(part)
        if name in own["_parameters"]:
            found = own["_parameters"][name]
            if (found is None) != (value is None):
                return False
            if found is not None and (not isinstance(value, Tensor) or found.shape != value.shape):
                return False
        elif name in own["_modules"]:
            if type(own["_modules"][name]) is not type(value):
                return False
        elif not has_value(part, name, value):
            return False
    return True
