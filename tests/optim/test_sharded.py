"""Quantized optimizers on FSDP2 parameters: same codes for any world size, saved and resharded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lq_testing import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lq_lightning.optim import OptimizerQuantization, QuantizedAdamW, quantize_optimizer

CONFIG = OptimizerQuantization(min_numel=64, stochastic_rounding=True)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Dimension 0 does not divide by 2, 3 or 4; three rows leave a rank of four without any."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 131), nn.GELU(), nn.Linear(131, 3)).to(dtype)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """All ranks see the same batch, so that the mean gradient is that of one process."""
    dtype = next(model.parameters()).dtype
    for step in range(first, last):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step)).to(dtype)
        model(x).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)  # multiplies by one
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def whole_state(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    state = optimizer.state_dict()["state"]
    return {i: {k: whole(v).clone() for k, v in entry.items()} for i, entry in state.items()}


def assert_same(one: dict[int, dict[str, Tensor]], other: dict[int, dict[str, Tensor]]) -> None:
    assert one.keys() == other.keys()
    for index, entry in one.items():
        assert entry.keys() == other[index].keys()
        for key, value in entry.items():
            assert value.dtype == other[index][key].dtype, key
            assert torch.equal(value, other[index][key]), key


def shard_and_train(rank: int, world: int, dtype: torch.dtype) -> Any:
    model = make_model(dtype)
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    quantize_optimizer(optimizer, CONFIG)
    take_steps(model, optimizer, 0, 3)
    assert isinstance(optimizer.state[model[0].weight]["exp_avg_codes"], DTensor)
    assert optimizer.state[model[0].weight]["exp_avg_scale"].shape == (131, 1)
    assert optimizer.state[model[2].weight]["exp_avg_sq_exponent"].shape == (3, 2)
    params = [whole(p.detach()) for p in model.parameters()]
    return params, whole_state(optimizer)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_do_not_depend_on_the_world_size(world: int, dtype: torch.dtype) -> None:
    model = make_model(dtype)
    optimizer = QuantizedAdamW(model.parameters(), 1e-2, quantization=CONFIG)
    take_steps(model, optimizer, 0, 3)
    for params, state in run_ranks(shard_and_train, world, dtype):
        assert_same(state, whole_state(optimizer))
        for one, other in zip(params, model.parameters(), strict=True):
            assert torch.equal(one, other)


# --- checkpoints ------------------------------------------------------------------------------


def build(world: int) -> tuple[nn.Module, QuantizedAdamW]:
    model = make_model()
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, QuantizedAdamW(model.parameters(), 1e-2, quantization=CONFIG)


def pass_on(rank: int, world: int, source: str | None, target: str) -> Any:
    """Load what another world size saved, check nothing, save it again; return it whole."""
    model, optimizer = build(world)
    if source is None:
        take_steps(model, optimizer, 0, 3)
    else:
        state = get_optimizer_state_dict(model, optimizer)
        dcp.load({"optimizer": state}, checkpoint_id=source)
        set_optimizer_state_dict(model, optimizer, state)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=target)
    return whole_state(optimizer)


def test_resharding_keeps_every_bit(tmp_path: Path) -> None:
    source, expected = None, None
    for number, world in enumerate([4, 2, 3, 1, 4]):
        target = str(tmp_path / str(number))
        states = run_ranks(pass_on, world, source, target)
        expected = expected or states[0]
        for state in states:
            assert_same(state, expected)
        source = target


def load_whole(rank: int, world: int, state: dict[str, Any]) -> Any:
    """Whole tensors, as in a single-file checkpoint."""
    _, optimizer = build(world)
    optimizer.load_state_dict(state)
    return whole_state(optimizer)


def test_whole_states_are_sharded_on_load() -> None:
    model, optimizer = build(1)
    take_steps(model, optimizer, 0, 2)
    for state in run_ranks(load_whole, 2, optimizer.state_dict()):
        assert_same(state, whole_state(optimizer))


def load_plain(rank: int, world: int, state: dict[str, Any]) -> Any:
    model, optimizer = build(world)
    optimizer.load_state_dict(state)
    exported = optimizer.full_precision_state_dict()["state"]
    plain = torch.optim.AdamW(model.parameters(), 1e-2)
    plain.load_state_dict(optimizer.full_precision_state_dict())
    take_steps(model, plain, 3, 4)
    return {i: {k: whole(v) for k, v in entry.items()} for i, entry in exported.items()}


def test_import_and_export_of_shards() -> None:
    model, optimizer = build(1)
    take_steps(model, optimizer, 0, 2)
    exported = optimizer.full_precision_state_dict()
    local = copy.deepcopy(optimizer)
    local.load_state_dict(exported)
    expected = local.full_precision_state_dict()["state"]
    for state in run_ranks(load_plain, 2, exported):
        assert_same(state, expected)


def full_options(rank: int, world: int) -> Any:
    """torch's own functions for whole optimizer states, there and back."""
    model, optimizer = build(world)
    take_steps(model, optimizer, 0, 2)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    before = whole_state(optimizer)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    take_steps(model, optimizer, 2, 3)
    gathered = [state]
    dist.broadcast_object_list(gathered)
    set_optimizer_state_dict(
        model, optimizer, gathered[0], options=StateDictOptions(full_state_dict=True)
    )
    return before, whole_state(optimizer)


def test_full_state_dict_of_torch() -> None:
    for before, after in run_ranks(full_options, 2):
        assert_same(after, before)


def shard_columns(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    weight = nn.Parameter(distribute_tensor(torch.randn(64, 128), mesh, [Shard(1)]))
    optimizer = QuantizedAdamW([weight])
    weight.grad = torch.ones_like(weight)
    with pytest.raises(NotImplementedError, match="support sharding on dimension 0"):
        optimizer.step()
    QuantizedAdamW([weight], full_precision=[weight]).step()


def test_other_shardings_are_refused() -> None:
    run_ranks(shard_columns, 2)
