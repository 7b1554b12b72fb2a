"""Autograd of torch: saved tensors (storages, versions, hooks), graph nodes and their order."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as checkpointing

from lq_lightning._compat.layouts import held_by

_AT_ONCE = 2**64 - 1  # the age of nodes that accumulate gradients

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def has_storage(tensor: Tensor) -> bool:
    """Return whether a tensor is one piece of memory: not sparse, nested or distributed."""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return strided and not isinstance(tensor, DTensor)


def shows_its_memory(tensor: Tensor) -> bool:
    """Return whether a tensor with a storage is what that holds, read by dtype and strides."""
    lazily = tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()
    return not lazily and not tensor.is_quantized


def storage_key(tensor: Tensor) -> int:
    """Identify a storage while it lives; also of tensors without memory (``FakeTensorMode``)."""
    key: int = tensor.untyped_storage()._cdata
    return key


def storage_reference(tensor: Tensor) -> StorageWeakRef:
    """Refer to a tensor's storage: while the reference lives, no other storage gets its key."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_freed(reference: StorageWeakRef) -> bool:
    """Return whether the storage that is referred to is gone."""
    return bool(reference.expired())  # type: ignore[no-untyped-call]


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that another is a view of, None if it is none."""
    return tensor._base


def version_of(tensor: Tensor) -> int:
    """Count the changes of a tensor in place; also in a trace of ``torch.compile``."""
    if torch.compiler.is_dynamo_compiling():
        from lq_lightning._compat.tracing import traced_version

        return traced_version(tensor)
    return version_now(tensor)


def version_now(tensor: Tensor) -> int:
    """Count changes of a tensor, for a DTensor also of what it holds: neither counts the other's.

    A tensor that is no DTensor is what it holds.
    """
    held = held_by(tensor)
    own = 0 if held is tensor else tensor._version
    return own if held.is_inference() else own + held._version


def outer_hooks() -> Hooks | None:
    """Return the pack and unpack hooks of saved tensors that are in effect now."""
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def hooks_are_free() -> bool:
    """Return whether no hooks of saved tensors are in effect, nor forbidden (``torch.func``)."""
    allowed: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return allowed and outer_hooks() is None


def checkpoint_region() -> Callable[[Tensor], Any] | None:
    """Return the pack hook of the checkpointed region that runs now, for the first or second time.

    None outside of any, and where other hooks are in effect within one.
    """
    hooks = outer_hooks()
    inside = hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
    return hooks[0] if hooks is not None and inside else None


def nodes_made() -> int:
    """Count the autograd nodes that this thread has made."""
    count: int = torch._C._autograd._get_sequence_nr()
    return count


def node_number(node: Node) -> int:
    """Return what ``nodes_made`` was before a node was made; beyond any for leaves."""
    return node._sequence_nr()


def packed_value(node: Node, slot: str) -> Any:
    """Return the pack hook's result for a tensor that a node saved; None if it saved none.

    ``slot`` is its name in torch's ``derivatives.yaml``.
    """
    saved = getattr(node, f"_raw_saved_{slot}", None)
    return None if saved is None else saved.data


def saved_value(node: Node, name: str) -> Any:
    """Return a saved value of a built-in operator's node that is no tensor; None if it has none."""
    return getattr(node, f"_saved_{name}", None)


def saves_inputs_of_region() -> bool:
    """Return whether the pack hook that calls this is given an input of a checkpointed region.

    Inside of a region its own hooks are in effect, so what ``torch.utils.checkpoint`` saves under
    other hooks are the inputs: by itself, or as a ``Function``, by version of torch.
    """
    frame = inspect.currentframe()
    for _ in range(2):  # this function, and the hook
        frame = None if frame is None else frame.f_back
    if frame is not None and frame.f_globals.get("__name__") == "torch.autograd.function":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == checkpointing.__name__


class _Wrap(threading.local):
    """Hooks that ``around_checkpoints`` applies, by thread."""

    hooks: Callable[[Hooks], Hooks] | None = None


_wrap = _Wrap()


class _WrappedHooks(checkpointing._checkpoint_hook):
    """The hooks in effect while a checkpointed region runs for the first time."""

    def __init__(self, frame: Any) -> None:
        super().__init__(frame)
        if _wrap.hooks is not None:
            pack, unpack = _wrap.hooks((self.pack_hook, self.unpack_hook))

            @wraps(self.pack_hook)  # it is known by its module, and has marks
            def wrapped(tensor: Tensor) -> Any:
                return pack(tensor)

            self.pack_hook, self.unpack_hook = wrapped, unpack


@contextmanager
def around_checkpoints(wrap: Callable[[Hooks], Hooks]) -> Iterator[None]:
    """Replace the hooks of non-reentrant checkpointing in regions that begin inside.

    Regions within a region that is computed again have not begun inside. ``wrap`` gets the pack and
    unpack hooks of a region and returns those to use.
    """
    # For good: other threads may be inside, and without `wrap` it does what the original does.
    checkpointing._checkpoint_hook = _WrappedHooks  # type: ignore[misc]
    previous, _wrap.hooks = _wrap.hooks, wrap
    try:
        yield
    finally:
        _wrap.hooks = previous


def running_modules() -> Iterator[nn.Module]:
    """Modules whose forward runs now, from the innermost; found without hooks on them."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                yield module
        frame = frame.f_back


# --- graphs -------------------------------------------------------------------------------------


def hasten_casts(output: Tensor) -> None:
    """Let backward passes run the casts of leaves as soon as their gradients are there.

    The engine runs the youngest node first. A cast that several graphs share is older than the
    other nodes of most of them, so that the gradients of all casts would pile up until the end.
    """
    for node in graph_nodes(output):
        is_cast = type(node).__name__ == "ToCopyBackward0"
        if is_cast and type(node.next_functions[0][0]).__name__ == "AccumulateGrad":
            node._set_sequence_nr(_AT_ONCE)


def let_go_of_casts(output: Tensor) -> bool:
    """Let backward passes empty autocast's cache behind each reentrantly checkpointed region.

    It is computed again from leaves that require gradients, which autocast takes for weights: it
    would keep them, their casts and their gradients.

    Returns whether the graph of ``output`` has such regions.
    """
    regions = [n for n in graph_nodes(output) if type(n).__name__ == "CheckpointFunctionBackward"]
    for node in regions:
        node.register_hook(lambda *_: torch.clear_autocast_cache())
    return bool(regions)


def graph_nodes(output: Tensor) -> Iterator[Any]:
    """All nodes of a graph, once."""
    stack: list[Any] = [output.grad_fn]
    seen = {None}
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack += [child for child, _ in node.next_functions]


def kept_tensors(output: Tensor, besides: tuple[str, ...] = ()) -> Iterator[Tensor]:
    """Tensors that a graph keeps for backward, as hooks have packed them; some more than once.

    Nodes whose names begin with one of ``besides`` are left out.
    """
    for node in graph_nodes(output):
        for name in () if type(node).__name__.startswith(besides) else dir(node):
            if name.startswith("_raw_saved"):
                yield from _tensors_in(getattr(node, name), depth=4)


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, torch._C._autograd.SavedTensor):
        yield from _tensors_in(getattr(value, "data", None), depth)
    elif isinstance(value, Sequence | Mapping) and not isinstance(value, str | bytes):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(part, depth - 1)
    elif depth > 0 and not isinstance(value, nn.Module | type):
        slots = (n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ()))
        parts = {name: getattr(value, name, None) for name in slots}
        yield from _tensors_in(parts | getattr(value, "__dict__", {}), depth - 1)


def is_owned_by_graph(node: Any) -> bool:
    """Whether a node can be gone while Python still holds an object for it.

    In torch 2.11 the objects for nodes of a ``torch.autograd.Function`` do not own them: they are
    freed with the last node of C++ that leads to them, and cannot be run then. Objects for nodes of
    C++ own these.
    """
    return isinstance(node, BackwardCFunction)


def wanted_gradients(ctx: Any, tensors: tuple[bool, ...]) -> tuple[bool, ...]:
    """Inputs of a ``torch.autograd.Function`` that the running backward needs gradients of.

    ``ctx.needs_input_grad`` says which inputs require gradients, also where the backward is for
    others only: the split backward of zero-bubble pipelines runs once for inputs and once for
    weights, and would compute everything twice (pytorch issues 166577 and 174017). The engine knows
    better.

    Args:
        ctx: Context of the function, within its ``backward``.
        tensors: Whether each of the first arguments of ``forward`` was a tensor, not None. No
            tensor comes after them.
    """
    needs: tuple[bool, ...] = ctx.needs_input_grad[: len(tensors)]
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return needs
    edges = iter(ctx.next_functions)  # of tensors only
    nodes = [next(edges)[0] if tensor else None for tensor in tensors]
    return tuple(need and _will_run(node) for need, node in zip(needs, nodes, strict=True))


def _will_run(node: Any) -> bool:
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # the engine is to return the gradient of this leaf
        return True


def with_shape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an output of an autograd function, which nothing else refers to, in another shape.

    No view for autograd, as outputs of torch's own functions are none: it may be changed in place,
    and hooks of FSDP2 on it stay then.
    """
    result: Tensor = torch.ops.aten._unsafe_view.default(tensor, list(shape))
    return result
