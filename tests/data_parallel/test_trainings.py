"""Whole trainings under raw FSDP2 with quantized collectives, on gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.cases import on_ranks, rank_tests
from lq_testing.fsdp2 import (
    BF16,
    NODE,
    QWD,
    QWD8,
    TLQ_HS,
    build,
    replicas,
    same_on_all_ranks,
    tokens,
    train,
)
from lq_testing.models import LoRABlock, TinyLM
from torch import Tensor, nn

from lq_lightning._compat.fsdp2 import fsdp_units
from lq_lightning.data_parallel import WeightQuantization


def _checkpointed(model: TinyLM) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)


def _compiled(model: TinyLM) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


CASES: dict[str, dict[str, Any]] = {
    "bf16": {"policy": BF16},
    "tied": {"tied": True},
    "lora": {"block": LoRABlock},
    "checkpointing": {"prepare": _checkpointed},
    "compiled": {"prepare": _compiled},
    "no reshard": {"reshard_after_forward": False},
}


def _trains(rank: int, world: int, cases: dict[str, WeightQuantization], node_size: int) -> None:
    for name, weights in cases.items():
        options = CASES[name]
        plain = train(*build(**options)[:2], 6, clip=1.0)
        model, optimizer, communication = build(
            weights=weights, gradients=TLQ_HS, node_size=node_size, **options
        )
        losses = train(model, optimizer, 6, clip=1.0)
        gap = max(abs(a - b) for a, b in zip(losses, plain, strict=True))
        assert gap < 0.15, (name, losses, plain)
        assert same_on_all_ranks(replicas(model)), name
        assert communication.check_replicas(on_drift="raise") == []
        assert communication.external_weight_updates == {}, name
        if name == "bf16":
            again = build(weights=weights, gradients=TLQ_HS, node_size=node_size, **options)
            assert train(*again[:2], 6, clip=1.0) == losses, "not reproducible"


def _frozen_send_nothing(rank: int, world: int) -> None:
    model, optimizer, communication = build(weights=QWD, gradients=TLQ_HS, block=LoRABlock)
    plan = {t.name: t for t in communication.plan.tensors}
    assert plan["blocks.0.up.weight"].weights == "skipped"
    assert plan["blocks.0.up.weight"].gradients == "none"
    assert "frozen" in plan["blocks.0.up.weight"].reason
    train(model, optimizer, 2)
    before = communication.traffic()
    train(model, optimizer, 1)
    counted = communication.traffic().since(before)
    adapters = sum(p.numel() for n, p in model.named_parameters() if "lora" in n)
    others = sum(p.numel() for n, p in model.named_parameters() if "blocks" not in n)
    assert counted.weights_elements < (adapters + others) / world * 1.2


def _unfreezing(rank: int, world: int) -> None:
    model, optimizer, communication = build(weights=QWD8, gradients=TLQ_HS, block=LoRABlock)
    train(model, optimizer, 2)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    train(model, optimizer, 2)
    values = replicas(model)
    assert same_on_all_ranks(values)
    for parameter, value in zip(model.parameters(), values, strict=True):
        torch.testing.assert_close(parameter.full_tensor(), value, atol=2e-3, rtol=0)


def _traffic_is_real(rank: int, world: int, node_size: int, replica: str) -> None:
    config = WeightQuantization(group_size=64, replica=replica)  # type: ignore[arg-type]
    model, optimizer, communication = build(
        weights=config, gradients=TLQ_HS, node_size=node_size, policy=BF16
    )
    train(model, optimizer, 2)
    sent = {"gather": 0.0, "scatter": 0.0}
    originals = dist.all_to_all_single, dist.all_gather_into_tensor
    single = getattr(dist, "all_gather_single", None)

    def all_to_all(output: Tensor, input: Tensor, group: Any = None, **kwargs: Any) -> Any:
        splits = kwargs.get("input_split_sizes") or [input.numel() / group.size()] * group.size()
        sent["scatter"] += (input.numel() - splits[group.rank()]) * input.itemsize
        return originals[0](output, input, group=group, **kwargs)

    def gather(output: Tensor, input: Tensor, group: Any = None, **kwargs: Any) -> Any:
        sent["gather"] += input.numel() * input.itemsize * (group.size() - 1)
        return (single or originals[1])(output, input, group=group, **kwargs)

    dist.all_to_all_single = all_to_all
    if single is not None:
        dist.all_gather_single = gather
    dist.all_gather_into_tensor = gather
    before = communication.traffic()
    loss = model(tokens(9))
    loss.backward()
    optimizer.step()
    counted = communication.traffic().since(before)
    assert counted.weights_intra + counted.weights_inter == sent["gather"]
    assert counted.gradients_intra + counted.gradients_inter == sent["scatter"]
    assert (counted.weights_inter > 0) == (node_size < world)
    if replica == "full":
        assert counted.sent < counted.baseline / 2


def _off(rank: int, world: int) -> None:
    plain = train(*build(policy=BF16)[:2], 20, clip=1.0)
    model, optimizer, communication = build(policy=BF16, weights=None, gradients=None)
    before = [type(g._all_gather_comm) for g in _groups(model)]
    assert all("Default" in t.__name__ for t in before)
    assert train(model, optimizer, 20, clip=1.0) == plain
    assert communication.traffic().sent == 0


def _groups(model: nn.Module) -> list[Any]:

    return [group for _, _, group in fsdp_units(model)]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("weights", [QWD8, NODE])
def test_on_two_gpus(weights: WeightQuantization) -> None:
    run_ranks(_trains, 2, dict.fromkeys(CASES, weights), 1, backend="nccl", timeout=400)
    run_ranks(_off, 2, backend="nccl", timeout=200)


@pytest.mark.gpu(4)
@pytest.mark.parametrize("weights", [QWD8, NODE])
def test_on_four_gpus(weights: WeightQuantization) -> None:
    cases = dict.fromkeys(("bf16", "tied"), weights)
    run_ranks(_trains, 4, cases, 2, backend="nccl", timeout=200)
    run_ranks(_traffic_is_real, 4, 2, weights.replica, backend="nccl", timeout=200)


test_on_ranks = rank_tests(
    on_ranks(_trains, 2, {"bf16": QWD8, "tied": NODE, "lora": QWD8}, 1, timeout=180),
    on_ranks(
        _trains, 2, {"checkpointing": NODE, "compiled": QWD8, "no reshard": QWD8}, 1, timeout=180
    ),
    on_ranks(_trains, 4, {"bf16": NODE, "tied": QWD8}, 2, timeout=180),
    on_ranks(_frozen_send_nothing, 2),
    on_ranks(_unfreezing, 2),
    on_ranks(_traffic_is_real, 2, 1, "full"),
    on_ranks(_traffic_is_real, 2, 2, "full"),
    on_ranks(_traffic_is_real, 4, 2, "full"),
    on_ranks(_traffic_is_real, 4, 2, "node"),
    on_ranks(_off, 2),
)
