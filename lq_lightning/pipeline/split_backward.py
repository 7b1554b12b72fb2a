"""Backward passes in two halves: first for the input of a stage, later for its weights.

What zero-bubble schedules need (arXiv 2401.10241). The first half runs backward for the input
alone, and notes which gradients arrive at the nodes where weights come in. The second half starts
from there, so that nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lq_lightning._compat.autograd import is_owned_by_graph
from lq_lightning._compat.modules import (
    has_compiled_forward,
    is_compiled_in_place,
    is_compiled_wrapper,
)

from .received import Received
from .saved_tensors import SavedTensors
from .schedules import SPLIT_SCHEDULES

__all__ = ["SplitBackward", "check_not_compiled"]

_COMPILED = (is_compiled_wrapper, is_compiled_in_place, has_compiled_forward)


def check_not_compiled(schedule: str, module: nn.Module) -> None:
    """Check that the schedule can run a module; compiled graphs have one backward pass only.

    Args:
        schedule: name of the schedule.
        module: the user's, with all layers that run.

    Raises:
        NotImplementedError: the schedule splits backward passes, and the module or a part of it is
            compiled.
    """
    if schedule not in SPLIT_SCHEDULES:
        return
    for name, part in module.named_modules():
        if any(is_compiled(part) for is_compiled in _COMPILED):
            raise NotImplementedError(
                f"`schedule={schedule!r}` splits backward passes, which compiled graphs do not "
                f"support: {f'`{name}`' if name else 'the module'} is compiled. Use '1f1b' or "
                "'interleaved_1f1b', or do not compile layers."
            )


@dataclass(slots=True, eq=False)
class _Meeting:
    """Weights, and the nodes where they meet the way of the input.

    Attributes:
        weights: parameters that reach the same nodes.
        nodes: where the second half starts.
        owners: what keeps the nodes alive.
        gradients: what arrived at each node in the first half.
    """

    weights: list[Tensor] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    owners: list[Node] = field(default_factory=list)
    gradients: dict[Node, Sequence[Tensor | None]] = field(default_factory=dict)


class SplitBackward:
    """The backward pass of one micro-batch through one stage.

    Args:
        output: where it starts.
        received: the input of the stage, where its gradient is to arrive.
        weights: parameters of the stage; those that need no gradient or take no part are left out.
        saved: what the forward pass saved, to be let go after the first half where it can.

    Raises:
        NotImplementedError: a part of the stage is checkpointed in the reentrant way.
    """

    def __init__(
        self,
        output: GradientEdge,
        received: Received,
        weights: Iterable[Tensor],
        saved: SavedTensors | None = None,
    ) -> None:
        self._output: GradientEdge | None = output
        self._received = received
        self._saved = saved
        self._meetings = _meetings(
            output, received.edge.node, [w for w in weights if w.requires_grad]
        )

    def backward_input(self, gradient: Tensor | None) -> None:
        """Compute the gradient of the input; none arrives if the output does not depend on it.

        Args:
            gradient: of the output; None for a scalar.
        """
        if self._output is None:
            raise AssertionError("called twice")
        handles: list[RemovableHandle] = []
        for meeting in self._meetings:
            for node in meeting.nodes:
                handles.append(node.register_prehook(self._note(meeting, node)))
                handles.append(node.register_hook(self._left))
        try:
            with self._first_half():
                found: tuple[Tensor | None, ...] = torch.autograd.grad(
                    (self._output,), (self._received.edge,), (gradient,),
                    retain_graph=True, allow_unused=True,
                )  # fmt: skip
        finally:
            for handle in handles:
                handle.remove()
        (result,) = found
        if result is None and self._meetings:  # the input takes no part: nothing was run yet
            self._meetings[:] = [_whole(self._output, self._meetings, gradient)]
        self._received.arrive(result)
        # The way of the output to the first of the nodes is not needed again.
        self._output = self._saved = None

    def kept(self) -> list[Tensor]:
        """Return the gradients that wait for ``backward_weight``."""
        arrived = (each for meeting in self._meetings for each in meeting.gradients.values())
        return [gradient for each in arrived for gradient in each if gradient is not None]

    def backward_weight(self) -> None:
        """Add to the gradients of the weights; nothing is kept after."""
        while self._meetings:
            _add_gradients(self._meetings.pop())

    def _first_half(self) -> AbstractContextManager[None]:
        if self._saved is None:
            return nullcontext()
        # Else the second half runs what lies between two nodes again.
        return self._saved.first_half(all(len(each.nodes) == 1 for each in self._meetings))

    def _note(self, meeting: _Meeting, node: Node) -> Callable[[Any], None]:
        def hook(gradients: Sequence[Tensor | None]) -> None:
            meeting.gradients[node] = gradients
            if self._saved is not None:
                self._saved.keep(True)

        return hook

    def _left(self, *_: object) -> None:
        if self._saved is not None:
            self._saved.keep(False)


def _meetings(output: GradientEdge, leaf: Node, weights: Sequence[Tensor]) -> list[_Meeting]:
    """Find where weights meet the way from ``output`` to ``leaf``; what shares nodes is one."""
    root = output.node
    wanted = {get_gradient_edge(weight).node: weight for weight in weights}
    order = _children_first(root)
    if any(node.name() == "CheckpointFunctionBackward" for node in order):
        raise NotImplementedError(
            "schedules that split backward passes do not support reentrant checkpointing, which "
            "computes the gradients of weights together with those of inputs: call `torch.utils."
            "checkpoint.checkpoint(..., use_reentrant=False)`, for Hugging Face's models "
            "`gradient_checkpointing_enable({'use_reentrant': False})`, or use '1f1b' or "
            "'interleaved_1f1b'."
        )
    way: set[Node] = {root}  # without a way to the input, all is left to the second half
    below: dict[Node, frozenset[Node]] = {}  # weights behind what is not on the way
    for node in order:
        children = _children(node)
        if node is leaf or any(child in way for child in children):
            way.add(node)
        elif node is not root:
            own = frozenset((node,)) if node in wanted else frozenset()
            below[node] = own.union(*(below[child] for child in children))
    meetings: list[tuple[_Meeting, set[Node]]] = []
    for node in order:
        if node not in way:
            continue
        reached = frozenset[Node]().union(*(below.get(c, frozenset()) for c in _children(node)))
        if reached:
            nodes, behind = [node], set(reached)
            for each in [entry for entry in meetings if not behind.isdisjoint(entry[1])]:
                meetings.remove(each)
                nodes = each[0].nodes + nodes
                behind |= each[1]
            meetings.append((_Meeting([wanted[w] for w in behind], nodes), behind))
    owners = _owners(output, order)
    for meeting, _ in meetings:
        meeting.owners = [owners[node] for node in meeting.nodes]
    return [meeting for meeting, _ in meetings]


def _owners(output: GradientEdge, order: Sequence[Node]) -> dict[Node, Node]:
    """Return what to hold so that each node stays: itself, or the nearest that leads to it.

    Args:
        output: where the graph starts; its token owns a first node that only the graph owns.
        order: all nodes, each behind what it leads to.
    """
    owners = {output.node: output.ownership_token or output.node}
    for node in reversed(order):
        for child in _children(node):  # the last node that leads to it is the nearest, and stays
            owners[child] = owners[node] if is_owned_by_graph(child) else child
    return owners


def _whole(output: GradientEdge, meetings: Sequence[_Meeting], gradient: Tensor | None) -> _Meeting:
    """Return one meeting at the output, from where the second half is the whole backward pass."""
    weights = [weight for meeting in meetings for weight in meeting.weights]
    arrived: list[Tensor | None] = [None] * output.output_nr
    arrived.append(torch.ones(()) if gradient is None else gradient)
    owner = output.ownership_token or output.node
    return _Meeting(weights, [output.node], [owner], {output.node: arrived})


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _children_first(root: Node) -> list[Node]:
    """Return all nodes of a graph, each behind what it leads to.

    The list keeps Python's objects for them, which are made anew once they are let go.
    """
    order: list[Node] = []
    seen = {root}
    stack = [(root, iter(_children(root)))]
    while stack:
        node, children = stack[-1]
        for child in children:
            if child not in seen:
                seen.add(child)
                stack.append((child, iter(_children(child))))
                break
        else:
            order.append(node)
            stack.pop()
    return order


def _add_gradients(meeting: _Meeting) -> None:
    edges, gradients = [], []
    for node, arrived in meeting.gradients.items():
        for slot, gradient in enumerate(arrived):
            if gradient is not None:
                edges.append(GradientEdge(node, slot))
                gradients.append(gradient)
    if not edges:
        return
    handles = []
    if len(meeting.nodes) > 1:
        # One may lead to another that shares a weight with it: what the first sends on has arrived
        # at the second already, in the first half.
        for node, arrived in meeting.gradients.items():
            handles.append(node.register_prehook(lambda _, arrived=arrived: arrived))
    try:
        # Into `.grad`, so that hooks behind the accumulation of gradients see them. The graph is
        # retained, since the way between two nodes can lead through those of other meetings. Nodes
        # are freed with the last meeting that leads to them.
        torch.autograd.backward(edges, gradients, retain_graph=True, inputs=meeting.weights)
    finally:
        for handle in handles:
            handle.remove()
