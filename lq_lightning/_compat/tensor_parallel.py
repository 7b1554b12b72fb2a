"""Tensor parallelism as parameters show it: the axis of their mesh beside FSDP2's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import tensor as distributed
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from lq_lightning._compat.saved_tensors import graph_nodes
from lq_lightning._compat.tensors import is_shard, local_tensor

_LOG_SOFTMAX = "LogSoftmaxBackward0"
DATA, TENSOR = "data_parallel", "tensor_parallel"
"""Axes of the mesh, named as in Lightning's ``ModelParallelStrategy``."""


def _axis(tensor: Tensor) -> int | None:
    """Number of the tensor-parallel axis in the mesh of a DTensor."""
    names = tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None
    return names.index(TENSOR) if names is not None and TENSOR in names else None


def tensor_shard(tensor: Tensor) -> int | None:
    """Dimension that is sharded over tensor-parallel ranks; None if each has all of the tensor."""
    axis = _axis(tensor)
    if axis is None:
        return None
    placement = tensor.placements[axis]  # type: ignore[attr-defined]
    return placement.dim if is_shard(placement) else None


def tensor_axis(tensor: Tensor) -> tuple[dist.ProcessGroup, int, int] | None:
    """Group, number of this rank in it, and size of a DTensor's tensor-parallel axis, if any."""
    axis = _axis(tensor)
    if axis is None:
        return None
    mesh: DeviceMesh = tensor.device_mesh  # type: ignore[attr-defined]
    return mesh.get_group(axis), mesh.get_local_rank(axis), mesh.size(axis)


def replicated_parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of which all tensor-parallel ranks hold the same elements, by name."""
    return {name: p for name, p in root.named_parameters() if tensor_shard(p) is None}


def hugging_face_plan(model: nn.Module) -> dict[str, str]:
    """Styles of a transformers model's submodules, as it and its config bring them.

    Configs leave out activation functions with parameters, which see split columns (Apertus).
    """
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    trained = {
        name: "replicated_with_grad_allreduce"
        for name, m in model.named_modules()
        if type(m).__module__ == "transformers.activations" and list(m.parameters())
    }
    return trained | plan if plan else {}


def skeleton(module: nn.Module) -> nn.Module:
    """Copy a module as it is now, with its hooks inside, and with parameters without values."""
    copied = _skeleton(module)
    copied._forward_hooks, copied._forward_pre_hooks = OrderedDict(), OrderedDict()
    return copied


def _skeleton(module: nn.Module) -> nn.Module:
    copied = module.__new__(type(module))
    state = {k: v.copy() if isinstance(v, dict) else v for k, v in vars(module).items()}
    # bound to the module itself; `_lq_call` counts the calls of a pipeline's layers
    for bound in ("_compiled_call_impl", "forward", "_lq_call"):
        state.pop(bound, None)
    state["_parameters"] = {
        name: p if p is None else torch.empty_like(p, device="meta")
        for name, p in module._parameters.items()
    }
    state["_modules"] = {n: m and _skeleton(m) for n, m in module._modules.items()}
    vars(copied).update(state)
    return copied


def why_not_shardable(tensor: DTensor, mesh: DeviceMesh | None) -> str | None:
    """What keeps FSDP2 from sharding a DTensor on a tensor-parallel mesh; None if nothing does.

    Pieces of several sizes would make ranks send messages of several sizes.
    """
    if mesh is None or tensor.device_mesh != mesh:
        return f"is on the mesh {tensor.device_mesh}"
    (placement,) = tensor.placements
    if placement.is_replicate():
        return None
    if type(placement) is not Shard:
        return f"is placed as {placement}"
    size = tensor.shape[placement.dim]
    if size % mesh.size():
        return f"has {size} elements along dimension {placement.dim} for {mesh.size()} ranks"
    return None


def share_tensor_shards(root: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """Copy what is on the tensor-parallel mesh from the first rank of a data-parallel group."""
    for parameter in root.parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh == mesh:
            local = parameter._local_tensor
            if not local.is_meta and local.numel():
                dist.broadcast(local.detach(), group=group, group_src=0)


def tensor_parallel_group(fsdp_group: Any) -> dist.ProcessGroup | None:
    """Ranks that hold the other tensor-parallel shards of an FSDP2 group's parameters, if any."""
    own = fsdp_group.mesh_info.mesh.mesh_dim_names or ()
    for param in fsdp_group.fsdp_params:
        mesh = param.sharded_param.device_mesh
        others = [name for name in mesh.mesh_dim_names or () if name not in own]
        if others:
            found: dist.ProcessGroup = mesh.get_group(others[0])
            return found
    return None


# --- hidden states and losses -------------------------------------------------------------------


def local_memory(tensor: Tensor) -> Tensor:
    """The tensor that holds this rank's values, perhaps before a collective has written them."""
    local = local_tensor(tensor)
    return local.elem if isinstance(local, AsyncCollectiveTensor) else local


def full_like(like: Tensor, shape: Sequence[int], value: float, dtype: torch.dtype) -> Tensor:
    """Fill a tensor on the device of ``like``; a DTensor if that is one.

    It is sharded along the same dimensions, but not along the last, which a module makes anew.
    """
    if not isinstance(like, DTensor):
        return torch.full(tuple(shape), value, dtype=dtype, device=like.device)
    last = len(shape) - 1
    kept = [p if isinstance(p, Shard) and p.dim < last else Replicate() for p in like.placements]
    mesh = like.device_mesh
    return distributed.full(tuple(shape), value, dtype=dtype, device_mesh=mesh, placements=kept)


def keep_style_hooks(source: nn.Module, target: nn.Module) -> None:
    """Give a module the hooks that torch's parallel styles have put on another."""

    def of_style(item: tuple[int, Any]) -> bool:
        return (getattr(item[1], "__module__", None) or "").startswith(distributed.__name__)

    for key, hook in filter(of_style, source._forward_pre_hooks.items()):
        named = key in source._forward_pre_hooks_with_kwargs
        target.register_forward_pre_hook(hook, with_kwargs=named)
    for key, hook in filter(of_style, source._forward_hooks.items()):
        named = key in source._forward_hooks_with_kwargs
        target.register_forward_hook(hook, with_kwargs=named)


def plain_loss(loss: Tensor) -> Tensor:
    """Return a loss, perhaps a DTensor, as a tensor whose backward may come at any time.

    That of ``loss_parallel`` has to run within it, as its forward has.
    """
    if not isinstance(loss, DTensor):
        return loss
    within = ExitStack()
    waiting: list[Any] = []

    def leave(*_: object) -> None:
        waiting.pop()
        if not waiting:
            within.close()

    for node in graph_nodes(loss):
        logits = getattr(node, "_saved_result", None) if node.name() == _LOG_SOFTMAX else None
        # only ``loss_parallel`` leaves this dimension sharded
        if isinstance(logits, DTensor) and any(
            p.is_shard(logits.dim() - 1) for p in logits.placements
        ):
            waiting.append(node.register_hook(leave))
    if waiting and loss.grad_fn is not None:
        loss.grad_fn.register_prehook(lambda _: within.enter_context(loss_parallel()))
    return loss.full_tensor()
