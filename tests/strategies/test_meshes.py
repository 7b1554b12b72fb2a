"""Meshes that users give: those of the strategy's ranks work, others are named before a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lq_testing.fsdp2 import pretend_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lq_lightning.strategies.checks import check_meshes

OTHERS, HYBRID = r"was sharded over the ranks {}.* ranks \[0, 2\]", r"\(HSDP\).*replica='node'"

# what `fully_shard` gets for a block of rank 0 on a mesh [data, tensor] of 2 x 2, and what is said
UNITS: dict[str, tuple[Any, str | None]] = {
    "the strategy's": (lambda mesh: mesh["data_parallel"], None),
    "of the same ranks": (lambda mesh: DeviceMesh("cpu", [0, 2]), None),
    "all ranks": (lambda mesh: None, OTHERS.format(r"\[0, 1, 2, 3\]")),
    "another order": (lambda mesh: DeviceMesh("cpu", [2, 0]), OTHERS.format(r"\[2, 0\]")),
    "one rank": (lambda mesh: DeviceMesh("cpu", [0]), OTHERS.format(r"\[0\]")),
    "the tensor axis": (
        lambda mesh: mesh["tensor_parallel"],
        OTHERS.format(r"\[0, 1\] \(`tensor_parallel`\)"),
    ),
    "both axes": (lambda mesh: mesh, r"over the ranks \[\[0, 1\], \[2, 3\]\].*" + HYBRID),
    "own ranks as replicas": (
        lambda mesh: DeviceMesh("cpu", [[0], [2]], mesh_dim_names=("copy", "shard")),
        HYBRID,
    ),
}


def _mesh() -> DeviceMesh:
    pretend_ranks(4)
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))


@pytest.mark.parametrize(("choose", "said"), UNITS.values(), ids=UNITS)
def test_units(choose: Any, said: str | None) -> None:
    mesh = _mesh()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[1], mesh=choose(mesh))
    fully_shard(model, mesh=mesh["data_parallel"])
    if said is None:
        check_meshes(model, mesh)
        return
    with pytest.raises((ValueError, NotImplementedError), match=f"unit `1` .*{said}") as error:
        check_meshes(model, mesh)
    assert "mesh=self.device_mesh['data_parallel']" in str(error.value)


@pytest.mark.parametrize("axes", ["tensor_parallel", "data_parallel", None])
def test_distributed_parameters(axes: str | None) -> None:
    """Only an axis of ranks that do not share the parameter may hold parts of it."""
    mesh = _mesh()
    layer, place = nn.Linear(4, 4), mesh if axes is None else mesh[axes]
    placements = [Shard(0), Replicate()][: place.ndim]
    layer.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), place, placements))
    if axes == "tensor_parallel":
        check_meshes(layer, mesh)
        return
    with pytest.raises(ValueError, match=r"`weight` was distributed over .* over \[0, 2\] itself"):
        check_meshes(layer, mesh)


@pytest.mark.parametrize("names", [("data_parallel", "tensor_parallel"), ("dp", "tp")])
def test_units_of_parallelized_modules(names: tuple[str, str]) -> None:
    """What is not on the strategy's axis would be taken for equal on all tensor-parallel ranks."""
    mesh, own = _mesh(), init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    layer = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(layer, own[names[1]], {"0": ColwiseParallel()})
    fully_shard(layer, mesh=own[names[0]])
    if names[1] == "tensor_parallel":
        check_meshes(layer, mesh)
        return
    said = r"another axis than `tensor_parallel`: .*\(`dp`, `tp`\)"
    with pytest.raises(ValueError, match=said):
        check_meshes(layer, mesh)
