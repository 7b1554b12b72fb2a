"""Tensor parallelism as parameters show it: the axis of their mesh beside FSDP2's."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

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
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


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
    for bound in ("_compiled_call_impl", "forward"):  # to the module itself
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
