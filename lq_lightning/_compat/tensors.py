"""Local parts of sharded tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard


def local_shard(full: Tensor, like: DTensor) -> DTensor:
    """Cut this rank's shard out of a whole tensor, whose dtype is kept, without communication."""
    return _from_local(full[shard_slices(like)].to(like.device).contiguous(), like)


def shard_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Index of this rank's part in the whole tensor, which is all of it if it is no DTensor.

    Raises:
        NotImplementedError: The part is no contiguous block.
    """
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    return _slices(tensor.shape, tensor, tensor.placements)


def _slices(shape: torch.Size, like: DTensor, placements: Sequence[Placement]) -> tuple[slice, ...]:
    mesh = like.device_mesh
    for axis, placement in enumerate(placements):
        if not isinstance(placement, _StridedShard):
            continue
        # FSDP2 shards what tensor parallelism, whose axis is further right, has sharded before
        inner = zip(mesh.shape[axis + 1 :], placements[axis + 1 :], strict=True)
        if placement.split_factor != math.prod(n for n, p in inner if is_shard(p, placement.dim)):
            raise NotImplementedError(
                f"a tensor of shape {tuple(shape)} is placed as {tuple(placements)}: a rank's part "
                "of it is no contiguous block. Shard each of the matrices that it consists of as "
                "a parameter of its own."
            )
    local, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    starts = [min(start, size) for start, size in zip(offset, shape, strict=True)]
    return tuple(slice(start, start + length) for start, length in zip(starts, local, strict=True))


def is_shard(placement: Placement, dim: int | None = None) -> bool:
    """Whether a placement cuts a dimension (``dim``, if given), be it before or after others."""
    shards = isinstance(placement, Shard | _StridedShard)
    return shards and dim in (None, placement.dim)  # type: ignore[attr-defined]


def empty_like_sharded(like: DTensor, dtype: torch.dtype) -> DTensor:
    """An uninitialised DTensor with the sharding of ``like`` and another dtype."""
    return _from_local(torch.empty_like(like.to_local(), dtype=dtype), like)


def to_sharded_dtensor(flat_slot: Tensor, like: Tensor) -> DTensor:
    """Wrap the valid part of a padded ``[padded_shard_numel]`` slot as a DTensor like ``like``."""
    if not isinstance(like, DTensor):
        raise AssertionError("an FSDP2 parameter must be a DTensor")
    local_shape = like._local_tensor.shape
    return _from_local(flat_slot[: local_shape.numel()].view(local_shape), like)


def _from_local(local: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, without autograd; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def materialize(root: nn.Module, device: torch.device) -> None:
    """Give tensors on the meta device memory of unknown contents; others stay as they are.

    ``Module.to_empty`` would empty these too, and part parameters that modules share.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                places[id(parameter)].append((module, name))
    root._apply(  # type: ignore[no-untyped-call]
        lambda t: torch.empty_like(t, device=device) if t.is_meta else t
    )
    for (first, first_name), *others in places.values():
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]


def whole_tensor(tensor: DTensor) -> Tensor:
    """Gather a DTensor on all ranks of its mesh, which call this together.

    What FSDP2 has sharded of a tensor-parallel shard is gathered first. ``full_tensor`` begins with
    the last axis, and warns of that.
    """
    if not any(isinstance(placement, _StridedShard) for placement in tensor.placements):
        return tensor.full_tensor()
    mesh, placements, local = tensor.device_mesh, list(tensor.placements), tensor._local_tensor
    for axis, placement in enumerate(tensor.placements):
        placements[axis] = Replicate()
        if not is_shard(placement):
            continue
        shape, _ = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        part = DTensor.from_local(
            local,
            mesh[(mesh.mesh_dim_names or ())[axis]],
            [Shard(placement.dim)],  # type: ignore[attr-defined]
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )
        local = part.full_tensor()
    return local


def waited(tensor: Tensor) -> Tensor:
    """The result of a collective that still runs, which has no address before; else ``tensor``."""
    if isinstance(tensor, AsyncCollectiveTensor):
        result: Tensor = tensor.wait()
        return result
    return tensor


def like_rows(local: Tensor, like: Tensor) -> Tensor:
    """Wrap ``[D_local, ...]`` rows, one per local row of ``like``, as a DTensor placed like it.

    Where ``like`` is no DTensor, ``local`` is returned.
    """
    if not isinstance(like, DTensor):
        return local
    shape = torch.Size([like.shape[0], *local.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )


def shard_rows(full: Tensor, like: Tensor) -> Tensor:
    """Cut the rows that belong to the local rows of ``like`` out of a whole ``[D, ...]`` tensor."""
    if not isinstance(like, DTensor):
        return full
    return like_rows(full[shard_slices(like)[0]].contiguous(), like)


def first_row(tensor: Tensor) -> int:
    """Index of the first local row of a tensor that is sharded on dimension 0 at most."""
    return shard_slices(tensor)[0].start if isinstance(tensor, DTensor) else 0
