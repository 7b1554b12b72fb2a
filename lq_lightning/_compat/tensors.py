"""Local parts of sharded tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
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


class RowPieces(NamedTuple):
    """How ranks cut the rows of a tensor: its dimension 0 apart, all others flattened."""

    number: int  # pieces of a row; 1 unless a dimension other than 0 is sharded
    own: int  # which of them this rank has
    length: int  # elements of a piece, of the longest one if it is cut unevenly
    dim: int  # the last that is cut; 0 if none is


def row_pieces(tensor: Tensor) -> RowPieces:
    """Tell how the rows of a tensor are cut."""
    sizes, number, own, last = list(tensor.shape), 1, 0, 0
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        axes = zip(mesh.shape, mesh.get_coordinate() or (), tensor.placements, strict=True)
        for count, rank, placement in axes:
            if is_shard(placement) and (dim := placement.dim):  # type: ignore[attr-defined]
                sizes[dim] = -(-sizes[dim] // count)
                number, own, last = number * count, own * count + rank, max(last, dim)
    return RowPieces(number, own, math.prod(sizes[1:]), last)


class ShardGrid(NamedTuple):
    """Which ranks hold the pieces of a tensor: those along the axes of its mesh that cut it."""

    mesh: DeviceMesh | None  # None if the tensor is whole on this rank
    axes: tuple[int, ...]
    sizes: tuple[int, ...]  # ranks along each axis
    own: tuple[int, ...]  # coordinates of this rank


def shard_grid(tensor: Tensor) -> ShardGrid:
    """Tell which ranks hold the pieces of a tensor."""
    if not isinstance(tensor, DTensor):
        return ShardGrid(None, (), (), ())
    mesh = tensor.device_mesh
    place = mesh.get_coordinate() or ()
    axes = tuple(a for a, p in enumerate(tensor.placements) if is_shard(p) and mesh.shape[a] > 1)
    sizes, own = (tuple(values[axis] for axis in axes) for values in (mesh.shape, place))
    return ShardGrid(mesh if axes else None, axes, sizes, own)


def piece_of_rank(tensor: Tensor, rank: tuple[int, ...]) -> tuple[slice, ...]:
    """Index of the piece of a rank of the :func:`shard_grid` in the whole tensor.

    Raises:
        NotImplementedError: Pieces are no contiguous blocks.
    """
    _, axes, sizes, own = shard_grid(tensor)
    cuts = [(n, tensor.placements[axis]) for n, axis in enumerate(axes)]  # type: ignore[attr-defined]
    # What FSDP2 shards is a shard of the axes further right already.
    cuts.sort(key=lambda cut: -cut[0] if isinstance(cut[1], _StridedShard) else -len(axes))
    bounds = [(0, size) for size in tensor.shape]
    for n, placement in cuts:
        start, stop = bounds[placement.dim]
        step = -(-(stop - start) // sizes[n])
        first = min(start + rank[n] * step, stop)
        bounds[placement.dim] = (first, min(first + step, stop))
    piece = tuple(slice(*pair) for pair in bounds)
    if rank == own and piece != (true := shard_slices(tensor)) and local_tensor(tensor).numel():
        raise AssertionError(f"a rank has {true} of {tuple(tensor.shape)}, not {piece}")
    return piece


def empty_like_sharded(like: DTensor, dtype: torch.dtype) -> DTensor:
    """An uninitialised DTensor with the sharding of ``like`` and another dtype."""
    return _from_local(torch.empty_like(like.to_local(), dtype=dtype), like)


def to_sharded_dtensor(flat_slot: Tensor, like: Tensor) -> DTensor:
    """Wrap the valid part of a padded ``[padded_shard_numel]`` slot as a DTensor like ``like``."""
    if not isinstance(like, DTensor):
        raise AssertionError("an FSDP2 parameter must be a DTensor")
    local_shape = like._local_tensor.shape
    return _from_local(flat_slot[: local_shape.numel()].view(local_shape), like)


def _from_local(local: Tensor, like: DTensor, layout: Layout | None = None) -> DTensor:
    shape, placements = layout or (like.shape, like.placements)
    stride = torch.empty(shape, device="meta").stride() if layout else like.stride()
    mesh = like.device_mesh
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


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
        result: Tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]
        return result
    return tensor


def placed_like(gradient: Tensor, like: Tensor) -> Tensor:
    """A gradient with the placements of its parameter, to which ranks' parts are added up."""
    placements = like.placements if isinstance(like, DTensor) else ()
    if isinstance(gradient, DTensor) and gradient.placements != placements:
        return gradient.redistribute(placements=placements)
    return gradient


class Layout(NamedTuple):
    """Shape and placements of a DTensor on the mesh of another one."""

    shape: torch.Size
    placements: tuple[Placement, ...] = ()  # empty beside a tensor that is no DTensor


def layout(tensor: Tensor) -> Layout:
    """The layout of a tensor itself."""
    return Layout(tensor.shape, tensor.placements if isinstance(tensor, DTensor) else ())


def rows_layout(tensor: Tensor, columns: int) -> Layout:
    """Layout of a matrix that has ``columns`` values for each local row of ``tensor``.

    The ranks' values lie side by side, so that a whole row has those of all its pieces.
    """
    return layout(tensor)._replace(
        shape=torch.Size((tensor.shape[0], columns * row_pieces(tensor).number))
    )


def stacked_layout(tensor: Tensor, columns: int) -> Layout:
    """As :func:`rows_layout`, with first all rows' first pieces, then all rows' second ones, ...

    The shape tells the number of pieces.
    """
    pieces = row_pieces(tensor).number
    shape = torch.Size((pieces * tensor.shape[0], columns))
    if not isinstance(tensor, DTensor):
        return Layout(shape)
    placements: list[Placement] = []
    right = 1  # pieces made by axes further right, which come before the rows of this one
    axes = list(zip(tensor.device_mesh.shape, tensor.placements, strict=True))
    for count, placement in reversed(axes):
        if is_shard(placement, 0):
            factor = right * getattr(placement, "split_factor", 1)
            placement = Shard(0) if factor == 1 else _StridedShard(0, split_factor=factor)
        elif is_shard(placement):
            placement, right = Shard(0), right * count
        placements.insert(0, placement)
    return Layout(shape, tuple(placements))


def placed(local: Tensor, like: Tensor, layout: Layout) -> Tensor:
    """Wrap this rank's part of a tensor of ``layout`` on the mesh of ``like``.

    Where ``like`` is no DTensor, ``local`` is returned.
    """
    return _from_local(local, like, layout) if isinstance(like, DTensor) else local


def shard(full: Tensor, like: Tensor, layout: Layout) -> Tensor:
    """Cut this rank's part out of a whole tensor of ``layout`` on the mesh of ``like``."""
    if not isinstance(like, DTensor):
        return full
    part = full[_slices(layout.shape, like, layout.placements)].contiguous()
    return placed(part, like, layout)


def first_row(tensor: Tensor) -> int:
    """Number of this rank's first row among all pieces of rows: all first ones, second ones, ...

    Ranks with different rows, or pieces of them, have different numbers; replicas the same.
    """
    rows = shard_slices(tensor)[0].start if isinstance(tensor, DTensor) else 0
    return row_pieces(tensor).own * (tensor.shape[0] if tensor.dim() else 0) + rows
