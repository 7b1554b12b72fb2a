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
from lq_testing.cases import on_ranks, rank_tests
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lq_lightning.optim import OptimizerQuantization, QuantizedAdamW, quantize_optimizer

CONFIG = OptimizerQuantization(min_numel=64, stochastic_rounding=True)


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


def build(world: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Sequential, QuantizedAdamW]:
    """Dimension 0 does not divide by 2, 3 or 4; three rows leave a rank of four without any."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 131), nn.GELU(), nn.Linear(131, 3)).to(dtype)
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return model, quantize_optimizer(optimizer, CONFIG)  # type: ignore[return-value]


def shard_and_train(rank: int, world: int, dtype: torch.dtype) -> Any:
    model, optimizer = build(world, dtype)
    take_steps(model, optimizer, 0, 3)
    assert isinstance(optimizer.state[model[0].weight]["exp_avg_codes"], DTensor)
    assert optimizer.state[model[0].weight]["exp_avg_scale"].shape == (131, 1)
    assert optimizer.state[model[2].weight]["exp_avg_sq_exponent"].shape == (3, 2)
    params = [whole(p.detach()) for p in model.parameters()]
    return params, whole_state(optimizer)


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.bfloat16), (4, torch.float32)], ids=str)
def test_states_do_not_depend_on_the_world_size(world: int, dtype: torch.dtype) -> None:
    model, optimizer = build(1, dtype)
    take_steps(model, optimizer, 0, 3)
    for params, state in run_ranks(shard_and_train, world, dtype):
        assert_same(state, whole_state(optimizer))
        for one, other in zip(params, model.parameters(), strict=True):
            assert torch.equal(one, other)


# --- checkpoints ------------------------------------------------------------------------------


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


def exchange_states(rank: int, world: int) -> None:
    """Of one process with shards: whole tensors, fp32 states, and torch's own functions."""
    alone, single = build(1)
    take_steps(alone, single, 0, 2)

    model, optimizer = build(world)
    optimizer.load_state_dict(single.state_dict())
    assert_same(whole_state(optimizer), whole_state(single))

    exported = single.full_precision_state_dict()
    single.load_state_dict(exported)
    optimizer.load_state_dict(exported)
    sharded = optimizer.full_precision_state_dict()
    values = {i: {k: whole(v) for k, v in e.items()} for i, e in sharded["state"].items()}
    assert_same(values, single.full_precision_state_dict()["state"])
    plain = torch.optim.AdamW(model.parameters(), 1e-2)
    plain.load_state_dict(sharded)
    take_steps(model, plain, 3, 4)

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    before = whole_state(optimizer)
    gathered = [copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))]
    take_steps(model, optimizer, 2, 3)
    dist.broadcast_object_list(gathered)
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optimizer, gathered[0], options=options)
    assert_same(whole_state(optimizer), before)


def other_placements(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))

    def plan(shape: tuple[int, ...], placement: Placement, **options: Any) -> str | None:
        full = torch.randn(shape)
        weight = nn.Parameter(distribute_tensor(full, mesh, [placement], src_data_rank=None))
        optimizer = QuantizedAdamW([weight], **options)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        return optimizer.quantization_plan()[0].reason

    assert plan((64, 128), Shard(1)) is None
    assert plan((64, 129), Shard(1)) == "sharded on dimension 1 unevenly"
    assert plan((128, 62), Shard(1)) == "rows of fewer than 32 elements"
    assert plan((4, 32, 64), Shard(2)) == "sharded on dimension 2"
    packed = _StridedShard(0, split_factor=2)
    with pytest.raises(NotImplementedError, match="no contiguous block"):
        plan((64, 128), packed)
    few = OptimizerQuantization(min_numel=10**6)
    assert plan((64, 128), packed, quantization=few) is not None


test_on_ranks = rank_tests(on_ranks(exchange_states, 2), on_ranks(other_placements, 2))
