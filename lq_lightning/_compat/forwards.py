"""FSDP2's forward passes: their number, how they gather weights, what backward needs of them."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

# What holds no tensor of this pass, or others that are none of its results.
_LEAVES = (
    *(type(None), str, bytes, int, float, complex, type, nn.Module),
    *(torch.dtype, torch.device, torch.Generator, types.FunctionType, types.ModuleType),
)
_MAX_SEEN = 1000


class ForwardCounter:
    """Numbers the forward passes of a model sharded by FSDP2, the same on every rank.

    A pass is that of the outermost sharded module: the root, or a submodule that is called by
    itself. Calling the object gives the number of the pass that runs now, None outside of any.

    Args:
        root: Module whose sharded submodules (and itself) are watched.
    """

    def __init__(self, root: nn.Module) -> None:
        self._number = 0
        modules = (m for m in root.modules() if isinstance(m, FSDPModule))
        self._states: list[Any] = [m._get_fsdp_state() for m in modules]
        for state in self._states:
            state._root_pre_forward = self._counting(state, state._root_pre_forward)

    def __call__(self) -> int | None:
        """Return the number of the pass that runs now."""
        running = any(s._state_ctx.iter_forward_root is not None for s in self._states)
        return self._number if running else None

    def _counting(self, state: Any, root_pre_forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(root_pre_forward)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if state._state_ctx.iter_forward_root is None:
                self._number += 1
            return root_pre_forward(*args, **kwargs)

        return counted


def gather_normal_tensors(group: Any) -> None:
    """Let a unit's gathers make normal tensors under ``torch.inference_mode`` too. Idempotent.

    FSDP2 allocates the gathered parameters once, at the first gather. Made in inference mode, they
    could not be written by a gather outside of it, nor used by a forward that is differentiated.

    Args:
        group: FSDP2's parameter group of the unit.
    """
    for name in ("unshard", "wait_for_unshard"):
        if name not in vars(group):
            setattr(group, name, _outside_inference_mode(getattr(group, name)))


def _outside_inference_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return outside


def refuse_second_derivatives(group: Any, name: str) -> None:
    """Let a backward that is to be differentiated itself fail where it enters a unit. Idempotent.

    The graph of such a backward saves the gathered weights, which FSDP2 frees when it is over: the
    next backward reads memory that is gone. Nor would it reduce what the next one computes, as its
    hooks are on outputs of the forward.

    Args:
        group: FSDP2's parameter group of the unit.
        name: Name of the unit.
    """
    if "pre_backward" in vars(group):
        return
    original = group.pre_backward

    def pre_backward(*args: Any) -> None:
        if torch.is_grad_enabled():  # within a backward, iff it was called with create_graph=True
            raise RuntimeError(
                f"a gradient through the unit `{name}` was asked for with `create_graph=True`, to "
                "be differentiated once more (as for a gradient penalty). FSDP2 frees the weights "
                "of a unit after the first backward, and reduces no gradients of a second one. "
                "Allowed are: first derivatives, of inputs too; finite differences in place of the "
                "second ones; `create_graph=True` in `training_step` through modules that belong "
                "to no unit, which `units=[...]` decides; and strategies that do not shard, such "
                "as 'ddp'."
            )
        original(*args)

    group.pre_backward = pre_backward


def refuse_writes_before_backward(group: Any, name: str) -> None:
    """Let a backward fail that would gather other weights than its forward has used. Idempotent.

    torch refuses a write between the two by version counters. FSDP2 frees the weights after forward
    and gathers the shards again for backward, past these counters.

    Args:
        group: FSDP2's parameter group of the unit.
        name: Name of the unit.
    """
    if "post_forward" in vars(group):
        return
    after_forward, before_backward = group.post_forward, group.pre_backward
    known: list[tuple[int, int]] = []

    def versions() -> list[tuple[int, int]]:
        shards = [p.sharded_param for p in group.fsdp_params]
        return [(s._version, s._local_tensor._version) for s in shards]

    def post_forward(*args: Any) -> Any:
        if torch.is_grad_enabled():
            known[:] = versions()
        return after_forward(*args)

    def pre_backward(*args: Any) -> None:
        if known and not group.is_unsharded and (now := versions()) != known:
            params = zip(group.fsdp_params, known, now, strict=True)
            written = next(str(p._param_fqn) for p, a, b in params if a != b)
            raise RuntimeError(
                f"the parameter `{written}` of the unit `{name}` was written between a forward "
                "and its backward, which would use the new weights for the gradients of the old "
                "ones. Write before the forward or after the backward: `on_before_zero_grad` "
                "runs between them, `on_train_batch_start` and `on_train_batch_end` do not."
            )
        before_backward(*args)

    group.post_forward, group.pre_backward = post_forward, pre_backward


def hook_hidden_outputs(module: FSDPModule) -> None:
    """Let backward gather a unit's weights also where its output hides tensors. Idempotent.

    FSDP2 does so when a gradient arrives at a tensor of the output. It looks for them in the
    containers that it knows, and not in objects of other classes, through which backward would use
    weights that were freed.

    Args:
        module: The unit.
    """
    state = module._get_fsdp_state()
    if "_register_pre_backward_hook" in vars(state):
        return
    original = state._register_pre_backward_hook

    def register(output: Any) -> Any:
        result = original(output)
        if not isinstance(result, Tensor) and torch.is_grad_enabled():
            for tensor in _tensors_within(result):
                if tensor.requires_grad and not _has_pre_backward_hook(tensor):
                    tensor.register_hook(state._pre_backward)  # type: ignore[no-untyped-call]
        return result

    state._register_pre_backward_hook = register  # type: ignore[method-assign]


def _has_pre_backward_hook(tensor: Tensor) -> bool:
    """Whether FSDP2 has seen it, in the output of this unit or of one inside."""
    hooks = (tensor._backward_hooks or {}).values()
    return any(getattr(hook, "__name__", "") == "_pre_backward" for hook in hooks)


def _tensors_within(value: Any) -> Iterator[Tensor]:
    """Yield tensors that can be reached from a value through containers and attributes.

    The nearest come first, up to a number of objects: a result may lead to a whole dataset.
    """
    queue = deque([value])
    seen: set[int] = set()
    while queue and len(seen) < _MAX_SEEN:
        value = queue.popleft()
        if isinstance(value, Tensor):
            yield value
        if isinstance(value, (Tensor, *_LEAVES)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            queue += value.values()
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            queue += value
        queue += getattr(value, "__dict__", {}).values()
        slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
        names = [n for s in slots for n in ((s,) if isinstance(s, str) else s)]
        queue += [getattr(value, name, None) for name in names if not name.startswith("__")]
