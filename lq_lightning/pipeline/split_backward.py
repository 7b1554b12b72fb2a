"""Backward passes in two halves: first for the input of a stage, later for its weights.

Zero-bubble schedules need this (arXiv 2401.10241). The first half runs backward for the input
alone, and records the gradients that arrive at cut points, the nodes where weights join the path to
the input. The second half starts from there, so nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lq_lightning._compat.modules import (
    has_compiled_forward,
    is_compiled_in_place,
    is_compiled_wrapper,
)
from lq_lightning._compat.saved_tensors import (
    Hooks,
    around_checkpoints,
    is_owned_by_graph,
    version_of,
)

from .schedules import SPLIT_SCHEDULES

_COMPILED = (is_compiled_wrapper, is_compiled_in_place, has_compiled_forward)


def check_not_compiled(schedule: str, module: nn.Module) -> None:
    """Raise ``NotImplementedError`` for a schedule with split backward passes and compiled parts.

    Compiled graphs have one backward pass only. ``module`` is the user's, with all layers.
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


# --- the received hidden state ------------------------------------------------------------------


# Holds the gradient of a received hidden state once it is there. Apart from `Received`, which owns
# the node that owns this: a cycle would live forever.
_Arrived = list[Tensor]


class _Receive(torch.autograd.Function):
    """Puts a hidden state at the beginning of a graph.

    Not as a leaf: a leaf could not be changed in place, as a layer may do with its input, and would
    be kept until backward, also where the layers keep only a code of it.
    """

    @staticmethod
    def forward(ctx: Any, root: Tensor, hidden: Tensor, arrived: _Arrived) -> Tensor:
        ctx.arrived = arrived
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.arrived[:] = [gradient]
        return None, None, None


class Received:
    """Where the gradient of a received hidden state arrives; holds no values.

    ``edge`` is the hidden state in the graph.
    """

    __slots__ = ("_arrived", "_like", "edge")

    def __init__(self, edge: GradientEdge, arrived: _Arrived, like: Tensor) -> None:
        self.edge = edge
        self._arrived = arrived
        self._like = like.new_empty(1).expand(like.shape)  # shape, dtype and device

    def arrive(self, gradient: Tensor | None) -> None:
        """Set a gradient that was computed for ``edge``, instead of by a backward through it."""
        self._arrived[:] = [] if gradient is None else [gradient]

    def take_gradient(self) -> Tensor:
        """Return the gradient that arrived, zeros if none did; contiguous."""
        if not self._arrived:  # the stage does not use its input
            return torch.zeros_like(self._like, memory_format=torch.contiguous_format)
        return self._arrived.pop().contiguous()


def receive(hidden: Tensor) -> tuple[Tensor, Received]:
    """Start a graph with a hidden state that has none.

    Returns:
        The hidden state, which requires a gradient, and where that arrives. It shares the memory of
        ``hidden``, may be changed in place, and is freed as soon as no node and nobody else keeps
        it. Each call starts a graph of its own, also for one tensor.
    """
    arrived: _Arrived = []
    root = hidden.new_empty(0).requires_grad_()
    entered: Tensor = _Receive.apply(root, hidden, arrived)  # type: ignore[no-untyped-call]
    return entered, Received(get_gradient_edge(entered), arrived, hidden)


# --- saved tensors that can be freed before the graph -------------------------------------------


class _Saved:
    """One saved tensor of one node, which alone owns it."""

    __slots__ = ("__weakref__", "held", "region", "tensor", "version")

    def __init__(self, tensor: Tensor | None, region: _Region | None = None) -> None:
        # Detached: an output leads to the node that owns this, and both would live forever.
        # None before it is recomputed, and once it is freed.
        self.tensor = None if tensor is None else tensor.detach()
        self.version = 0 if tensor is None else version_of(tensor)
        self.region = region  # in which it was saved, if it is to be recomputed
        self.held: Any = None  # checkpointing's handle of it


class _Region:
    """A checkpointed region: recomputed once, for both halves.

    Checkpointing by itself does so in each backward pass that reads something of the region.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._pack, self._unpack = hooks
        self._saved: list[ref[_Saved]] = []
        self.is_computed = False

    def pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(None, self)
        saved.held = self._pack(tensor)
        self._saved.append(ref(saved))
        return saved

    def compute(self) -> None:
        """Take over all tensors, which checkpointing recomputes when it is asked for the first."""
        for saved in (each() for each in self._saved):
            if saved is not None:
                saved.tensor = self._unpack(saved.held)
                saved.version = version_of(saved.tensor)
                saved.held = None
        self._saved.clear()
        self.is_computed = True


class SavedTensors:
    """Tensors that nodes save in the forward pass of a stage whose backward pass is split.

    The first half runs every node on the path to the input, and has to retain the graph for the
    second, which runs only nodes where weights join. Tensors saved by the other nodes are not read
    again, but without this they would stay as long as later nodes lead to them.

    A checkpointed region is recomputed when the first half reaches it. Tensors that the second half
    reads stay until then; the rest is freed before the next region is recomputed, so there is never
    more than one whole region.

    Code with saved-tensor hooks of its own keeps its tensors itself.
    """

    # Nothing here may own tensors of nodes: nodes own these hooks, and so would live forever.

    def __init__(self) -> None:
        self._read: list[_Saved] = []
        self._keeping = False
        self._freeing = False

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Around the forward pass."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with hooks, around_checkpoints(self._around):
            yield

    @contextmanager
    def first_half(self, reads_once: bool) -> Iterator[None]:
        """Around the first half.

        ``reads_once`` says that the second half reads only tensors that the first reads while
        ``keep(True)`` is in effect, so that all others can be freed once they are read.
        """
        self._freeing = reads_once
        try:
            yield
            self._free()
        finally:
            self._read.clear()
            self._freeing = False

    def keep(self, keeping: bool) -> None:
        """Set whether the second half needs tensors that are read from now on."""
        self._keeping = keeping

    def _free(self) -> None:
        for saved in self._read:
            saved.tensor = None
        self._read.clear()

    def _around(self, hooks: Hooks) -> Hooks:
        return _Region(hooks).pack, self._unpack

    def _pack(self, tensor: Tensor) -> _Saved:
        return _Saved(tensor)

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.region is not None and not saved.region.is_computed:
            self._free()
            saved.region.compute()
        tensor = saved.tensor
        if tensor is None:
            raise AssertionError("a node runs in both halves, but no weights join there")
        if version_of(tensor) != saved.version:  # autograd checks this only without hooks
            raise RuntimeError(
                f"a tensor {list(tensor.shape)} that backward needs was changed in place after it "
                "was saved: change a copy instead."
            )
        if self._freeing and not self._keeping:
            self._read.append(saved)
        return tensor


# --- the two halves -----------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _CutPoint:
    """Weights that reach the same nodes on the path to the input, where the second half starts."""

    weights: list[Tensor]
    nodes: list[Node]
    owners: list[Node] = field(default_factory=list)  # keep the nodes alive
    # Arrived at each node in the first half.
    gradients: dict[Node, Sequence[Tensor | None]] = field(default_factory=dict)


class SplitBackward:
    """The backward pass of one micro-batch through one stage, from ``output`` to ``received``.

    ``weights`` that need no gradient or take no part are left out. Tensors ``saved`` in the forward
    pass are freed after the first half where possible. Reentrant checkpointing is refused.
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
        self._cut_points = _cut_points(
            output, received.edge.node, [w for w in weights if w.requires_grad]
        )

    def backward_input(self, gradient: Tensor | None) -> None:
        """Compute the gradient of the input; none arrives if the output does not depend on it.

        ``gradient`` belongs to the output; None for a scalar.
        """
        if self._output is None:
            raise AssertionError("called twice")
        handles: list[RemovableHandle] = []
        for point in self._cut_points:
            for node in point.nodes:
                handles.append(node.register_prehook(self._record(point, node)))
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
        if result is None and self._cut_points:  # the input takes no part: nothing was run yet
            self._cut_points[:] = [_whole(self._output, self._cut_points, gradient)]
        self._received.arrive(result)
        # The path from the output to the first of the nodes is not needed again.
        self._output = self._saved = None

    def backward_weight(self) -> None:
        """Add to the gradients of the weights; nothing is kept after."""
        while self._cut_points:
            _add_gradients(self._cut_points.pop())

    def _first_half(self) -> AbstractContextManager[None]:
        if self._saved is None:
            return nullcontext()
        # With several nodes the second half runs what lies between them again.
        return self._saved.first_half(all(len(each.nodes) == 1 for each in self._cut_points))

    def _record(self, point: _CutPoint, node: Node) -> Callable[[Any], None]:
        def hook(gradients: Sequence[Tensor | None]) -> None:
            point.gradients[node] = gradients
            if self._saved is not None:
                self._saved.keep(True)

        return hook

    def _left(self, *_: object) -> None:
        if self._saved is not None:
            self._saved.keep(False)


def _cut_points(output: GradientEdge, leaf: Node, weights: Sequence[Tensor]) -> list[_CutPoint]:
    """Find where weights join the path from ``output`` to ``leaf``; shared nodes make one point."""
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
    path: set[Node] = {root}  # without a path to the input, all is left to the second half
    below: dict[Node, frozenset[Node]] = {}  # weights behind nodes that are not on the path
    for node in order:
        children = _children(node)
        if node is leaf or any(child in path for child in children):
            path.add(node)
        elif node is not root:
            own = frozenset((node,)) if node in wanted else frozenset()
            below[node] = own.union(*(below[child] for child in children))
    points: list[tuple[_CutPoint, set[Node]]] = []
    for node in order:
        if node not in path:
            continue
        reached = frozenset[Node]().union(*(below.get(c, frozenset()) for c in _children(node)))
        if reached:
            nodes, behind = [node], set(reached)
            for each in [entry for entry in points if not behind.isdisjoint(entry[1])]:
                points.remove(each)
                nodes = each[0].nodes + nodes
                behind |= each[1]
            points.append((_CutPoint([wanted[w] for w in behind], nodes), behind))
    owners = _owners(output, order)
    for point, _ in points:
        point.owners = [owners[node] for node in point.nodes]
    return [point for point, _ in points]


def _owners(output: GradientEdge, order: Sequence[Node]) -> dict[Node, Node]:
    """Return the object that keeps each node alive: itself, or the nearest owner that leads to it.

    ``output`` starts the graph; its token owns a first node that only the graph owns. ``order`` has
    all nodes, each behind its children.
    """
    owners = {output.node: output.ownership_token or output.node}
    for node in reversed(order):
        for child in _children(node):  # the last node that leads to it is the nearest, and stays
            owners[child] = owners[node] if is_owned_by_graph(child) else child
    return owners


def _whole(output: GradientEdge, points: Sequence[_CutPoint], gradient: Tensor | None) -> _CutPoint:
    """Return one cut point at the output, so that the second half is the whole backward pass."""
    weights = [weight for point in points for weight in point.weights]
    arrived: list[Tensor | None] = [None] * output.output_nr
    arrived.append(torch.ones(()) if gradient is None else gradient)
    owner = output.ownership_token or output.node
    return _CutPoint(weights, [output.node], [owner], {output.node: arrived})


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _children_first(root: Node) -> list[Node]:
    """Return all nodes of a graph, each behind its children.

    The list keeps Python's objects for them, which are made anew once they are dropped.
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


def _add_gradients(point: _CutPoint) -> None:
    edges, gradients = [], []
    for node, arrived in point.gradients.items():
        for slot, gradient in enumerate(arrived):
            if gradient is not None:
                edges.append(GradientEdge(node, slot))
                gradients.append(gradient)
    if not edges:
        return
    handles = []
    if len(point.nodes) > 1:
        # A node may lead to another that shares a weight with it: the gradient it passes on arrived
        # at the second already, in the first half.
        for node, arrived in point.gradients.items():
            handles.append(node.register_prehook(lambda _, arrived=arrived: arrived))
    try:
        # Into `.grad`, so that hooks behind the accumulation of gradients see them. The graph is
        # retained, since the path between two nodes can lead through nodes of other cut points.
        # Nodes are freed with the last cut point that leads to them.
        torch.autograd.backward(edges, gradients, retain_graph=True, inputs=point.weights)
    finally:
        for handle in handles:
            handle.remove()
