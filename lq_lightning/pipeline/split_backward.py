"""Backward passes in two halves: first for the input of a stage, later for its weights.

What zero-bubble schedules need (arXiv 2401.10241). The first half runs backward for the input
alone, and notes which gradients arrive at the nodes where weights come in. The second half starts
from there, so that nothing is computed twice.
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

from lq_lightning._compat.autograd import is_owned_by_graph
from lq_lightning._compat.modules import (
    has_compiled_forward,
    is_compiled_in_place,
    is_compiled_wrapper,
)
from lq_lightning._compat.saved_tensors import Hooks, around_checkpoints, version_of
from lq_lightning.foundation.parameters import is_copy_of_parameter

from .schedules import SPLIT_SCHEDULES

__all__ = ["Received", "SavedTensors", "SplitBackward", "check_not_compiled", "receive"]


class _Arrived:
    """What backward has brought to a received hidden state."""

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: Tensor | None = None


class _Receive(torch.autograd.Function):
    """Puts a hidden state at the beginning of a graph.

    Not as a leaf: that could not be changed in place, as a layer may do with its input, and would
    be kept until backward, also where the layers keep only a code of it.
    """

    @staticmethod
    def forward(ctx: Any, root: Tensor, hidden: Tensor, arrived: _Arrived) -> Tensor:
        ctx.arrived = arrived
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.arrived.gradient = gradient
        return None, None, None


class Received:
    """Where the gradient of a received hidden state arrives; holds no values.

    Attributes:
        edge: of the hidden state in the graph.
    """

    __slots__ = ("_arrived", "_like", "edge")

    def __init__(self, edge: GradientEdge, arrived: _Arrived, like: Tensor) -> None:
        self.edge = edge
        self._arrived = arrived
        self._like = like.new_empty(1).expand(like.shape)  # shape, dtype and device

    def arrive(self, gradient: Tensor | None) -> None:
        """Bring a gradient that was computed for ``edge``, instead of by a backward through it."""
        self._arrived.gradient = gradient

    def take_gradient(self) -> Tensor:
        """Return what backward has brought, zeros if nothing; contiguous."""
        gradient, self._arrived.gradient = self._arrived.gradient, None
        if gradient is None:  # the stage does not use its input
            return torch.zeros_like(self._like, memory_format=torch.contiguous_format)
        return gradient.contiguous()


def receive(hidden: Tensor) -> tuple[Tensor, Received]:
    """Return a hidden state that requires a gradient, and where that arrives.

    It has the memory of ``hidden``, may be changed in place, and is freed as soon as no node and
    nobody else keeps it. Each call begins a graph of its own, also for one tensor.

    Args:
        hidden: without a graph.
    """
    arrived = _Arrived()
    root = hidden.new_empty(0).requires_grad_()
    entered: Tensor = _Receive.apply(root, hidden, arrived)  # type: ignore[no-untyped-call]
    return entered, Received(get_gradient_edge(entered), arrived, hidden)


class _Saved:
    """One saved tensor of one node, which alone owns it.

    Attributes:
        tensor: None before it is computed again, and once it is let go.
        version: of the tensor.
        region: in which it was saved, if it is to be computed again.
        held: what checkpointing knows it by.
    """

    __slots__ = ("__weakref__", "held", "region", "tensor", "version")

    def __init__(self, tensor: Tensor | None, region: _Region | None = None) -> None:
        # Detached: an output leads to the node that owns this, and both would live forever.
        self.tensor = None if tensor is None else tensor.detach()
        self.version = 0 if tensor is None else version_of(tensor)
        self.region = region
        self.held: Any = None


class _Region:
    """A checkpointed region: computed again once, for both halves.

    Checkpointing by itself does so in each backward pass that reads something of the region.
    """

    def __init__(self, hooks: Hooks, counted: list[ref[_Saved]] | None) -> None:
        self._pack, self._unpack = hooks
        self._saved: list[ref[_Saved]] = []
        self._counted = counted
        self.is_computed = False

    def pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(None, self)
        saved.held = self._pack(tensor)
        self._saved.append(ref(saved))
        if self._counted is not None and not is_copy_of_parameter(tensor):
            self._counted.append(ref(saved))
        return saved

    def compute(self) -> None:
        """Take over what checkpointing computes again as soon as it is asked for a tensor of it."""
        for saved in (each() for each in self._saved):
            if saved is not None:
                saved.tensor = self._unpack(saved.held)
                saved.version = version_of(saved.tensor)
                saved.held = None
        self._saved.clear()
        self.is_computed = True


class SavedTensors:
    """What nodes save in the forward pass of a stage, if its backward pass is split.

    The first half runs every node on the way to the input, and has to retain the graph for the
    second, which runs only nodes where weights come in. What the others have saved is not read
    again, but without this it would stay as long as later nodes lead to them.

    A checkpointed region is computed again when the first half comes to it. What the second half
    reads of it stays until then; the rest is let go before the next region is computed, so that
    there is never more than one whole.

    Code with saved-tensor hooks of its own keeps what it saves itself.

    Args:
        counted: Whether to know what is kept, for ``kept``.
    """

    # Nothing here may own what nodes have saved: nodes own these hooks, and so would live forever.

    def __init__(self, counted: bool = False) -> None:
        self._counted: list[ref[_Saved]] | None = [] if counted else None
        self._read: list[_Saved] = []
        self._keeping = False
        self._letting_go = False

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Around the forward pass."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with hooks, around_checkpoints(self._around):
            yield

    def kept(self) -> list[Tensor]:
        """Return what nodes keep now, of checkpointed regions what was computed.

        Weights too, but no copies of them in another dtype or layout.
        """
        saved = (each() for each in self._counted or ())
        return [each.tensor for each in saved if each is not None and each.tensor is not None]

    @contextmanager
    def first_half(self, reads_once: bool) -> Iterator[None]:
        """Around the first half.

        Args:
            reads_once: whether the second half reads only what is read there while ``keep(True)``
                is in effect, so that all else that the first half reads can be let go.
        """
        self._letting_go = reads_once
        try:
            yield
            self._let_go()
        finally:
            self._read.clear()
            self._letting_go = False

    def keep(self, keeping: bool) -> None:
        """Say whether what is read now is read in the second half, too."""
        self._keeping = keeping

    def _let_go(self) -> None:
        for saved in self._read:
            saved.tensor = None
        self._read.clear()

    def _around(self, hooks: Hooks) -> Hooks:
        return _Region(hooks, self._counted).pack, self._unpack

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        # Autocast's copies of weights are shared by micro-batches, as weights are.
        if self._counted is not None and not is_copy_of_parameter(tensor):
            self._counted.append(ref(saved))
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.region is not None and not saved.region.is_computed:
            self._let_go()
            saved.region.compute()
        tensor = saved.tensor
        if tensor is None:
            raise AssertionError("a node is run in both halves, but no weights come in there")
        if version_of(tensor) != saved.version:  # autograd checks this only without hooks
            raise RuntimeError(
                f"a tensor {list(tensor.shape)} that backward needs was changed in place after it "
                "was saved: change a copy instead."
            )
        if self._letting_go and not self._keeping:
            self._read.append(saved)
        return tensor


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
class _CutPoint:
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
        self._cut_points = _cut_points(
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
        for meeting in self._cut_points:
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
        if result is None and self._cut_points:  # the input takes no part: nothing was run yet
            self._cut_points[:] = [_whole(self._output, self._cut_points, gradient)]
        self._received.arrive(result)
        # The way of the output to the first of the nodes is not needed again.
        self._output = self._saved = None

    def kept(self) -> list[Tensor]:
        """Return the gradients that wait for ``backward_weight``."""
        arrived = (each for meeting in self._cut_points for each in meeting.gradients.values())
        return [gradient for each in arrived for gradient in each if gradient is not None]

    def backward_weight(self) -> None:
        """Add to the gradients of the weights; nothing is kept after."""
        while self._cut_points:
            _add_gradients(self._cut_points.pop())

    def _first_half(self) -> AbstractContextManager[None]:
        if self._saved is None:
            return nullcontext()
        # Else the second half runs what lies between two nodes again.
        return self._saved.first_half(all(len(each.nodes) == 1 for each in self._cut_points))

    def _note(self, meeting: _CutPoint, node: Node) -> Callable[[Any], None]:
        def hook(gradients: Sequence[Tensor | None]) -> None:
            meeting.gradients[node] = gradients
            if self._saved is not None:
                self._saved.keep(True)

        return hook

    def _left(self, *_: object) -> None:
        if self._saved is not None:
            self._saved.keep(False)


def _cut_points(output: GradientEdge, leaf: Node, weights: Sequence[Tensor]) -> list[_CutPoint]:
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
    meetings: list[tuple[_CutPoint, set[Node]]] = []
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
            meetings.append((_CutPoint([wanted[w] for w in behind], nodes), behind))
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


def _whole(
    output: GradientEdge, meetings: Sequence[_CutPoint], gradient: Tensor | None
) -> _CutPoint:
    """Return one meeting at the output, from where the second half is the whole backward pass."""
    weights = [weight for meeting in meetings for weight in meeting.weights]
    arrived: list[Tensor | None] = [None] * output.output_nr
    arrived.append(torch.ones(()) if gradient is None else gradient)
    owner = output.ownership_token or output.node
    return _CutPoint(weights, [output.node], [owner], {output.node: arrived})


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


def _add_gradients(meeting: _CutPoint) -> None:
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
