"""Quantized optimizers on parameters that are sharded over data- and tensor-parallel ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lq_testing import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lq_lightning.optim import OptimizerQuantization, QuantizedAdamW
from lq_lightning.optim.base import QuantizedOptimizer

AXES = ("data_parallel", "tensor_parallel")
# Shape, and dimension that is sharded over tensor-parallel ranks; None: replicated; "plain": no
# DTensor before `fully_shard`. Rows do not divide by the data-parallel ranks.
PARAMETERS: dict[str, tuple[tuple[int, ...], int | str | None]] = {
    "column": ((10, 96), 0),
    "rows_of_one_rank": ((4, 130), 0),
    "column_bias": ((10,), 0),
    "whole_groups": ((5, 512), 1),
    "cut_groups": ((3, 144), 1),
    "one_row": ((1, 512), 1),
    "replicated": ((7, 64), None),
    "plain": ((7, 64), "plain"),
    "norm": ((9,), "plain"),
}


class Holder(nn.Module):
    """Parameters without a forward."""

    def __init__(
        self, dtype: torch.dtype, mesh: DeviceMesh | None = None, without: str = ""
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, (shape, dim) in PARAMETERS.items():
            if name == without:
                continue
            value = torch.randn(shape, generator=generator).to(dtype)
            if mesh is not None and dim != "plain":
                place = Replicate() if dim is None else Shard(dim)  # type: ignore[arg-type]
                value = distribute_tensor(value, mesh["tensor_parallel"], [place])
            self.register_parameter(name, nn.Parameter(value))
        if mesh is not None:
            fully_shard(self, mesh=mesh["data_parallel"])


def gradient(name: str, step: int, dtype: torch.dtype) -> Tensor:
    """Values over a wide range; a row of zeros now and then."""
    shape = PARAMETERS[name][0]
    seed = 1000 * step + list(PARAMETERS).index(name)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values * values.abs().exp()).to(dtype)


def take_steps(module: nn.Module, optimizer: QuantizedOptimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for name, param in module.named_parameters():
            grad = gradient(name, step, param.dtype)
            if isinstance(param, DTensor):
                grad = distribute_tensor(
                    grad, param.device_mesh, param.placements, src_data_rank=None
                )
            else:
                grad = stack(grad, param)
            param.grad = grad
        optimizer.step()


def stack(value: Tensor, like: Tensor) -> Tensor:
    """Pieces of rows above each other, as one process has them in a parameter of more rows."""
    rows = like.shape[0] // value.shape[0]
    return value if rows == 1 else torch.cat(value.chunk(rows, 1))


def spread(value: Tensor, rows: int) -> Tensor:
    """The inverse of ``stack``: pieces side by side."""
    return torch.cat(value.split(rows), 1) if value.shape[0] != rows else value


def alone(dtype: torch.dtype, config: OptimizerQuantization, size: int) -> tuple[Any, Any]:
    """One process whose rows are the pieces of ``size`` tensor-parallel ranks."""
    module = Holder(dtype)
    for name, (_, dim) in PARAMETERS.items():
        if dim == 1:
            value = torch.cat(module.get_parameter(name).detach().chunk(size, 1))
            setattr(module, name, nn.Parameter(value))
    ordered = [module.get_parameter(name) for name in PARAMETERS]
    optimizer = QuantizedAdamW(ordered, 1e-2, quantization=config)
    return module, optimizer


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def entries(module: nn.Module, optimizer: QuantizedOptimizer) -> dict[str, dict[str, Tensor]]:
    """Parameters and states, whole."""
    return {
        name: {"param": whole(param.detach()), **{k: whole(v) for k, v in state.items()}}
        for name, param in module.named_parameters()
        for state in [optimizer.state[param]]
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, entry in expected.items():
        assert found[name].keys() == entry.keys()
        for key, value in entry.items():
            assert found[name][key].dtype == value.dtype, (name, key)
            assert torch.equal(found[name][key], value), (name, key)


def compare_with_one_process(mesh: DeviceMesh, dtype: torch.dtype, code: str, steps: int) -> None:
    config = OptimizerQuantization(
        first_moment=code,  # type: ignore[arg-type]
        second_moment=code,  # type: ignore[arg-type]
        min_numel=1,
        stochastic_rounding=dtype == torch.bfloat16,
    )
    module = Holder(dtype, mesh)
    optimizer = QuantizedAdamW(module.parameters(), 1e-2, quantization=config)
    single, reference = alone(dtype, config, mesh.size(1))
    take_steps(module, optimizer, 0, steps)
    take_steps(single, reference, 0, steps)
    found = entries(module, optimizer)
    for name, entry in entries(single, reference).items():
        rows = PARAMETERS[name][0][0]
        is_cut = name == "cut_groups"
        for key, value in entry.items():
            constants = key.endswith(("_scale", "_exponent"))
            wanted = value if is_cut and constants or not value.dim() else spread(value, rows)
            assert torch.equal(found[name][key], wanted), (code, name, key)
    quantized = {p.name for p in optimizer.quantization_plan() if p.reason is None}
    assert len(quantized) == (0 if code == "float32" else 7), quantized
    group = mesh.get_group("tensor_parallel")
    for name in ("replicated", "plain", "norm"):
        param = module.get_parameter(name)
        for tensor in (param, *optimizer.state[param].values()):
            own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            copies = [torch.empty_like(own) for _ in range(mesh.size(1))]
            dist.all_gather(copies, own.contiguous(), group=group)
            assert all(torch.equal(copy, own) for copy in copies), name


def make(mesh: DeviceMesh | None, code: str, without: str = "") -> tuple[Holder, QuantizedAdamW]:
    config = OptimizerQuantization(first_moment=code, second_moment=code, min_numel=1)  # type: ignore[arg-type]
    module = Holder(torch.float32, mesh, without)
    return module, QuantizedAdamW(module.parameters(), 1e-2, quantization=config)


def states(module: nn.Module, optimizer: QuantizedOptimizer) -> dict[str, dict[str, Tensor]]:
    found = entries(module, optimizer)
    return {name: {k: v for k, v in e.items() if k != "param"} for name, e in found.items()}


def reshard_files(mesh: DeviceMesh, others: list[DeviceMesh], path: str) -> None:
    """Every bit stays where ranks cut rows between groups."""
    module, optimizer = make(mesh, "expanded_fp8", without="cut_groups")
    take_steps(module, optimizer, 0, 3)
    expected = states(module, optimizer)
    for number, other in enumerate([*others, mesh]):
        saved = {"optimizer": get_optimizer_state_dict(module, optimizer)}
        dcp.save(saved, checkpoint_id=f"{path}/{number}")
        module, optimizer = make(other, "expanded_fp8", without="cut_groups")
        take_steps(module, optimizer, 5, 6)
        state = get_optimizer_state_dict(module, optimizer)
        dcp.load({"optimizer": state}, checkpoint_id=f"{path}/{number}")
        set_optimizer_state_dict(module, optimizer, state)
        assert_same(states(module, optimizer), expected)


def load_at_other_sizes(mesh: DeviceMesh, others: list[DeviceMesh]) -> None:
    """Codes of cut groups pass through fp32; all others stay as they are."""
    module, optimizer = make(mesh, "expanded_fp8")
    take_steps(module, optimizer, 0, 3)
    saved, exact = optimizer.state_dict(), optimizer.full_precision_state_dict()
    expected = states(module, optimizer)
    for other, is_whole in zip(others, (False, True, True), strict=True):
        module, resumed = make(other, "expanded_fp8")
        resumed.load_state_dict(exact)
        cut = {"cut_groups": states(module, resumed)["cut_groups"]}
        if is_whole:  # one file
            table = {i: {k: whole(v) for k, v in e.items()} for i, e in saved["state"].items()}
            saved = {**saved, "state": table}
        resumed.load_state_dict(copy.deepcopy(saved))
        assert_same(states(module, resumed), expected | (cut if other.shape != mesh.shape else {}))
        take_steps(module, resumed, 3, 4)


CASES = [
    (torch.bfloat16, "expanded_fp8", 10),
    (torch.float32, "expanded_fp8", 10),
    (torch.float32, "float32", 10),
    (torch.float32, "dynamic8", 2),
]


def as_one_process(rank: int, world: int, path: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    module = Holder(torch.float32, mesh)
    assert module.column.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert module.cut_groups.placements == (Shard(0), Shard(1))
    assert module.plain.device_mesh.ndim == 1
    assert (module.rows_of_one_rank.to_local().shape[0], module.one_row.to_local().shape[0]) == (
        (1, 1) if rank < 2 else (1, 0)
    )
    for dtype, code, steps in CASES:
        compare_with_one_process(mesh, dtype, code, steps)
    shapes = [(1, 4), (4, 1), (2, 2)]
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=AXES) for shape in shapes]
    reshard_files(mesh, meshes[:2], path)
    load_at_other_sizes(mesh, meshes)


def test_ranks_compute_what_one_process_does(tmp_path: Path) -> None:
    run_ranks(as_one_process, 4, str(tmp_path))
