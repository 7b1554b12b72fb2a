"""Track values computed from placeholders, and refuse uses of them.

[Note: values that depend on placeholders]
Placeholders for modules of other stages give NaN, but NaN alone is not enough: `where`,
`nan_to_num`, comparisons, `argmax` and `item` turn it into values that look like any other. So in
the first batch of each shape every operation of the step's own code is watched, below autograd:
results computed from a marked tensor are marked, too. Marks belong to storages, so that views share
them. Layers are not watched: they get the received hidden state, and nothing else that is marked.

Only surviving values are refused: values that go into a layer or to the next stage, that the step
returns or logs, that modules keep, that become a Python value or decide a shape. The step goes on
after a finding, so that every rank reaches the end of the batch, where all of them hear of it.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lq_lightning._compat.modes import (
    OperatorMode,
    OpOverload,
    operation_name,
    without_modes,
    written_by,
)
from lq_lightning._compat.saved_tensors import has_storage, storage_key
from lq_lightning._compat.tensor_parallel import local_memory
from lq_lightning.foundation.nested import tensors_in

# They read shape, dtype and device alone.
_FROM_SHAPE = frozenset(
    ("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
) | frozenset(("new_zeros", "new_ones", "new_full"))
# They write all elements without reading one.
_OVERWRITING = frozenset(
    ("fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_")
)
# Python reads the memory of a tensor, which no operation shows.
_ESCAPES = frozenset(("tolist", "numpy", "__array__", "__dlpack__"))
_NAMES = {"_local_scalar_dense": "item", "_unique2": "unique"}
_MAX_OPERATIONS = 6
_OWN_FOLDERS = tuple(
    os.path.dirname(file) + os.sep for file in (torch.__file__, os.path.dirname(__file__))
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Mark:
    """Origin of a marked value."""

    module: str  # that a placeholder replaces
    operations: tuple[str, ...]  # on its output, in order
    place: str  # line of the user's code with the last of them
    tensor: Tensor  # keeps the storage alive, whose address is the key


class PlaceholderTracker:
    """Marks of one part of a step. See [Note: values that depend on placeholders].

    The attributes of the user's ``module`` are checked when the part ends. ``refused`` has one
    message per finding.
    """

    def __init__(self, module: nn.Module) -> None:
        self.refused: list[str] = []
        self._module = module
        self._marks: dict[int, _Mark] = {}
        self._below = _Operations(self)
        self._calls = _Escapes(self)
        self._eager: AbstractContextManager[Any] = nullcontext()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every operation inside. Compiled code runs eagerly, which keeps it compiled."""
        with ExitStack() as stack:
            self._eager = _eagerly()
            stack.callback(lambda: self._eager.__exit__(None, None, None))
            stack.enter_context(self._below)
            stack.enter_context(self._calls)
            try:
                yield
                self._check_state()
            finally:
                self._marks.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run a layer inside without watching it."""
        self._eager.__exit__(None, None, None)
        try:
            with without_modes(self._below, self._calls):
                yield
        finally:
            self._eager = _eagerly()

    def mark(self, tensor: Tensor, module: str) -> None:
        """Mark the output of the placeholder for ``module``."""
        self._marks[_key(tensor)] = _Mark(module, (), "", tensor)

    def check(self, value: object, use: str) -> None:
        """Refuse a value if a tensor in it is marked, in collections and objects of any kind.

        ``use``, the beginning of a sentence, says how the step uses the value.
        """
        mark = self._first(_reachable(value))
        if mark is not None:
            self._refuse(use, mark)

    def _check_state(self) -> None:
        for path, owner in self._module.named_modules():
            for name, value in _attributes(owner):
                mark = self._first(_reachable(value, objects=False))
                if mark is not None:
                    full = f"{path}.{name}" if path else name
                    self._refuse(f"what the step keeps as `{full}`", mark)

    def _first(self, tensors: Iterator[Tensor]) -> _Mark | None:
        if not self._marks:
            return None
        return next((m for m in (self._marks.get(_key(t)) for t in tensors) if m), None)

    def _refuse(self, use: str, mark: _Mark) -> None:
        way = " -> ".join(mark.operations)
        way = f" (by {way}{f', {mark.place}' if mark.place else ''})" if way else ""
        message = (
            f"{use} depends on `{mark.module}`{way}, which another stage of the pipeline holds: "
            "here a placeholder gives NaN of its shape. Stages pass on the hidden state alone. "
            "Compute this from the batch or from the hidden state behind the layers, let the "
            "layers hand it on within the hidden state, or use `quantized_fsdp`."
        )
        if message not in self.refused:
            self.refused.append(message)

    # --- operations -----------------------------------------------------------------------------

    def run(self, operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and mark its results."""
        mark = self._first(tensors_in((args, kwargs)))
        if mark is None:
            return operation(*args, **kwargs)
        name = operation_name(operation)
        read = self._first(_read_by(operation, name, args, kwargs))
        if read is not None:
            self.refuse_reading(name, read)
        result = operation(*args, **kwargs)
        if name in _FROM_SHAPE or (name == "bernoulli" and operation.overloadpacket.p == operation):
            return result
        if name in _OVERWRITING and self._first(tensors_in((args[1:], kwargs))) is None:
            if _is_whole(args[0]):
                self._marks.pop(_key(args[0]), None)
            return result
        operations = (*mark.operations, _NAMES.get(name, name).strip("_"))[-_MAX_OPERATIONS:]
        place = _place()
        for tensor in (*tensors_in(result), *written_by(operation, args, kwargs)):
            self._marks.setdefault(_key(tensor), _Mark(mark.module, operations, place, tensor))
        return result

    def refuse_reading(self, name: str, mark: _Mark) -> None:
        """Refuse an operation that makes a Python value or a shape of something marked."""
        place = _place()
        where = f" in {place}" if place else ""
        name = _NAMES.get(name, name)
        self._refuse(f"a Python value or shape that the step takes by `{name}`{where}", mark)

    def escape(self, name: str, tensor: object) -> None:
        """Refuse code that reads the memory of something marked."""
        mark = self._first(tensors_in(tensor))
        if mark is not None:
            self.refuse_reading(name, mark)


class _Operations(OperatorMode):
    def __init__(self, tracker: PlaceholderTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not isinstance(func, OpOverload):
            return func(*args, **(kwargs or {}))
        return self._tracker.run(func, args, kwargs or {})


class _Escapes(TorchFunctionMode):
    def __init__(self, tracker: PlaceholderTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _ESCAPES and args:
            self._tracker.escape(name, args[0])
        return func(*args, **(kwargs or {}))


def _eagerly() -> AbstractContextManager[Any]:
    """Run compiled functions as written; in effect at once, not from ``with`` on."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _key(tensor: Tensor) -> int:
    tensor = local_memory(tensor)
    return storage_key(tensor) if has_storage(tensor) else id(tensor)


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage."""
    if not has_storage(tensor) or not tensor.is_contiguous():
        return False
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _read_by(
    operation: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    """Yield the arguments whose values decide a Python value or the shape of the result."""
    if name == "index":  # a mask, not numbers of rows
        return (t for t in tensors_in(args[1]) if t.dtype in (torch.bool, torch.uint8))
    if name == "masked_select":
        return tensors_in(args[1:])
    tags = operation.tags
    reads = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    return tensors_in((args, kwargs)) if reads or name == "_assert_async" else iter(())


def _place() -> str:
    """The line of the user's code that runs now."""
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_OWN_FOLDERS, "<")) and os.path.basename(file) != "contextlib.py":
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers"):
            yield from value.items()
        elif name != "_modules":
            yield name, value


def _reachable(value: object, objects: bool = True, depth: int = 6) -> Iterator[Tensor]:
    """Yield the tensors in collections, and in attributes of objects that are no modules."""
    if isinstance(value, Tensor):
        yield value
        return
    if depth == 0 or isinstance(value, (nn.Module, str, bytes)) or callable(value):
        return
    items: list[object] = []
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        items += value.values() if isinstance(value, Mapping) else value
    elif objects:
        items += getattr(value, "__dict__", {}).values()
        items += (getattr(value, name, None) for name in getattr(type(value), "__slots__", ()))
    for item in items:
        yield from _reachable(item, objects, depth - 1)
