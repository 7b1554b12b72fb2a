"""Autograd of torch: which gradients a backward is for, who owns nodes, and when they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

_AT_ONCE = 2**64 - 1  # the age of nodes that accumulate gradients


def hasten_casts(output: Tensor) -> None:
    """Let backward passes run the casts of leaves as soon as their gradients are there.

    The engine runs the youngest node first. A cast that several graphs share is older than the
    other nodes of most of them, so that the gradients of all casts would pile up until the end.

    Args:
        output: Output of a graph; without one nothing happens.
    """
    for node in _nodes(output):
        if type(node).__name__ == "ToCopyBackward0" and _accumulates(node.next_functions[0][0]):
            node._set_sequence_nr(_AT_ONCE)


def let_go_of_casts(output: Tensor) -> bool:
    """Let backward passes empty autocast's cache behind each reentrantly checkpointed region.

    It is computed again from leaves that require gradients, which autocast takes for weights: it
    would keep them, their casts and their gradients.

    Args:
        output: Output of a graph; without one nothing happens.

    Returns:
        Whether there are such regions. Each graph has nodes of its own for them.
    """
    regions = [n for n in _nodes(output) if type(n).__name__ == "CheckpointFunctionBackward"]
    for node in regions:
        node.register_hook(lambda *_: torch.clear_autocast_cache())
    return bool(regions)


def _nodes(output: Tensor) -> Iterator[Any]:
    """All nodes of a graph, once."""
    stack: list[Any] = [output.grad_fn]
    seen = {None}
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack += [child for child, _ in node.next_functions]


def _accumulates(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


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
        tensors: Which of the first arguments of ``forward`` were tensors, not None. No tensor comes
            after them.

    Returns:
        One bool for each of them.
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
    except RuntimeError:  # so the engine says that a leaf's gradient is to be returned
        return True


def with_shape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an output of an autograd function, which nothing else refers to, in another shape.

    No view for autograd, as outputs of torch's own functions are none: it may be changed in place,
    and hooks of FSDP2 on it stay then.
    """
    result: Tensor = torch.ops.aten._unsafe_view.default(tensor, list(shape))
    return result
