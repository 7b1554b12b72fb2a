"""Backward passes that end at the outputs of the first sites.

Parameters get no gradients, and what hooks into their accumulation notices nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .accounting import measured_site

__all__ = ["backward_to", "run_backward"]


def _roots(loss: Tensor, outputs: list[GradientEdge]) -> list[GradientEdge]:
    """Outputs that depend on no other: a gradient for them runs all backwards in between."""
    wanted = {output.node for output in outputs}
    below: dict[Any, bool] = {}  # whether one of them is below a node
    stack = [loss.grad_fn]
    while stack:
        node = stack[-1]
        if node is None or node in below:
            stack.pop()
            continue
        children = [child for child, _ in node.next_functions if child is not None]
        open_ = [child for child in children if child not in below]
        if open_:
            stack.extend(open_)
            continue
        below[node] = any(child in wanted or below[child] for child in children)
        stack.pop()
    return [output for output in outputs if below.get(output.node) is False]


def backward_to(loss: Tensor, outputs: list[GradientEdge]) -> None:
    """Run the backward pass of a loss down to the first of some tensors; hooks on them are called.

    Args:
        loss: With its graph, which is freed.
        outputs: Places of tensors on the way: the tensors themselves would be held in memory, where
            the recomputed blocks that they are made in shall hold nothing.

    Raises:
        RuntimeError: The loss needs no gradient.
    """
    if not loss.requires_grad:
        raise RuntimeError(
            "The loss that `run` returned needs no gradient: return the loss of a training step, "
            "not detached, with parameters that require gradients."
        )
    roots = _roots(loss, outputs)
    if roots:
        torch.autograd.grad(loss, roots, allow_unused=True)


def run_backward(
    model: nn.Module, run: Callable[[], Tensor], reached: Callable[[Tensor], None]
) -> None:
    """Run forward and backward once, down to the outputs of the first sites.

    Args:
        model: with sites.
        run: returns a loss.
        reached: called with the gradient of each site's output.

    Raises:
        RuntimeError: The loss needs no gradient.
    """
    outputs: list[GradientEdge] = []

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        forward = torch.is_grad_enabled() and listening
        if forward and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(reached)  # type: ignore[no-untyped-call]
            outputs.append(get_gradient_edge(output))

    listening = True
    sites = [module for module in model.modules() if measured_site(module) is not None]
    handles = [module.register_forward_hook(leave) for module in sites]
    try:
        loss = run()
        listening = False
        backward_to(loss, outputs)
    finally:
        for handle in handles:
            handle.remove()
        outputs.clear()  # the graph has hooks that refer to what refers to them
