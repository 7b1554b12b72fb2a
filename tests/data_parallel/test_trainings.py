"""Trainings under raw FSDP2 with quantized collectives, and exchanges of weight differences."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.cases import on_both, on_gpus, on_ranks, rank_tests
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
from lq_testing.models import Block, LoRABlock, TinyLM
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lq_lightning._compat.fsdp2 import fsdp_units
from lq_lightning.data_parallel import QuantizedCommunication, WeightQuantization, reduce_scatter


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
    before = [type(group._all_gather_comm) for _, _, group in fsdp_units(model)]
    assert all("Default" in t.__name__ for t in before)
    assert train(model, optimizer, 20, clip=1.0) == plain
    assert communication.traffic().sent == 0


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


class Collectives(TorchDispatchMode):
    """Records the names of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def _weights_follow(rank: int, world: int, replica: str, node_size: int) -> None:
    plain = train(*build(policy=BF16)[:2], 8)
    config = WeightQuantization(group_size=64, bits=8, replica=replica)  # type: ignore[arg-type]
    model, optimizer, communication = build(weights=config, policy=BF16, node_size=node_size)
    losses = train(model, optimizer, 8)
    assert losses[0] == plain[0], "the first gather is exact"
    assert max(abs(a - b) for a, b in zip(losses, plain, strict=True)) < 0.02
    assert plain[-1] < plain[0] - 0.3, "the model does not learn, so the test shows nothing"

    # the exchange follows the optimizer step; forward and backward only read
    before = communication.traffic()
    first, second = replicas(model), replicas(model)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert same_on_all_ranks(first)
    counted = communication.traffic().since(before)
    assert counted.exchanges == 0, "one exchange per unit and step"
    assert counted.full_precision_gathers == 0
    assert communication.traffic().exchanges == 3 * 8
    assert communication.traffic().full_precision_gathers == 3
    assert communication.check_replicas(on_drift="raise") == []
    assert communication.external_weight_updates == {}


def _assert_not_finite_values_arrive(
    rank: int, world: int, model: TinyLM, communication: QuantizedCommunication
) -> None:
    """One rank's value, which every other rank gets in a code."""
    name, owner = "blocks.0.up.weight", 1
    shard = dict(model.named_parameters())[name]
    row, clean = owner * -(-len(shard) // world), shard.to_local().clone()
    for value in (float("nan"), float("inf"), float("-inf")):
        if rank == owner:
            shard.to_local().detach()[0, 5] = value
        communication.note_optimizer_step()
        arrived = dict(zip(dict(model.named_parameters()), replicas(model), strict=True))
        wrong = {n: ~v.isfinite() for n, v in arrived.items()}
        assert wrong[name][row, 5], f"{value} got lost"
        assert sum(int(w.sum()) for w in wrong.values()) <= 64, "and only its group is lost"
        assert same_on_all_ranks(list(wrong.values()))
        shard.to_local().detach().copy_(clean)
        communication.invalidate()
        assert all(v.isfinite().all() for v in replicas(model)), "a refresh repairs it"


def _replica_modes_agree(rank: int, world: int) -> None:
    whole, whole_optimizer, whole_communication = build(
        weights=QWD, gradients=TLQ_HS, policy=BF16, node_size=2
    )
    full = train(whole, whole_optimizer, 6)
    model, optimizer, communication = build(
        weights=NODE, gradients=TLQ_HS, policy=BF16, node_size=2
    )
    assert train(model, optimizer, 6) == full, "both modes exchange the same differences"
    with Collectives() as issued, torch.no_grad():
        model(tokens(0))
    gathers = [name for name in issued.names if "gather" in name]
    assert len(gathers) == 3, "one for each unit, however many nodes there are"
    assert len(issued.names) == 4, "and one vote"
    assert same_on_all_ranks(replicas(model))
    assert communication.check_replicas(on_drift="raise") == []
    mains = [p for p in model.parameters() if isinstance(p, DTensor)]
    gap = [
        (a.full_tensor().bfloat16() != b).any()
        for a, b in zip(mains, replicas(model), strict=True)
        if a.ndim == 2 and a.numel() >= 256
    ]
    assert any(gap), "with 4 bits the replica must differ from the main weights somewhere"
    _assert_not_finite_values_arrive(rank, world, model, communication)
    _assert_not_finite_values_arrive(rank, world, whole, whole_communication)


def _residual_is_fed_back(rank: int, world: int) -> None:
    model, optimizer, communication = build(weights=WeightQuantization(bits=2, group_size=64))
    train(model, optimizer, 1)
    gaps = []
    for _ in range(40):
        values = replicas(model)
        gaps.append(
            max(
                (p.full_tensor() - v).abs().max().item()
                for p, v in zip(model.parameters(), values, strict=True)
            )
        )
        communication.note_optimizer_step()  # exchanges; the main weights stay as they are
    assert gaps[0] > 1e-4
    assert gaps[-1] < gaps[0] / 100, gaps


def _optimizers_exchange_their_own_units(rank: int, world: int) -> None:
    model, optimizer, communication = build(weights=QWD, node_size=1)
    first = torch.optim.AdamW(model.blocks[0].parameters(), lr=1e-2)
    rest = [*model.embed.parameters(), *model.blocks[1].parameters(), *model.head.parameters()]
    second = torch.optim.SGD([*rest, model.tiny], lr=1e-2)
    communication.register_optimizer(first)
    communication.register_optimizer(second)
    communication.register_optimizer(second)  # twice is once
    model(tokens(0)).backward()
    first.step()
    assert communication.traffic().exchanges == 1
    assert communication.step == 1
    second.step()
    assert communication.traffic().exchanges == 3
    model.zero_grad()
    before = communication.traffic()
    assert same_on_all_ranks(replicas(model))
    counted = communication.traffic().since(before)
    assert counted.exchanges == counted.full_precision_gathers == 0
    assert communication.external_weight_updates == {}
    for p, v in zip(model.parameters(), replicas(model), strict=True):
        assert (p.full_tensor() - v).abs().max() < 1e-2, "an update did not arrive"


def _closures(rank: int, world: int) -> None:
    losses = []
    for as_keyword in (None, False, True):
        model, optimizer, communication = build(weights=QWD, node_size=1)
        seen: list[float] = []
        order: list[str] = []
        communication._exchanges.join = lambda order=order: order.append("wait")  # type: ignore[misc]
        for step in range(3):

            def closure(
                model: TinyLM = model,
                step: int = step,
                seen: list[float] = seen,
                order: list[str] = order,
            ) -> Tensor:
                order.append("forward")
                loss = model(tokens(step))
                model.zero_grad()
                loss.backward()
                seen.append(loss.item())
                return loss

            if as_keyword is None:
                closure()
                assert optimizer.step() is None
            elif as_keyword:
                assert optimizer.step(closure=closure).item() == seen[-1]
            else:
                assert optimizer.step(closure).item() == seen[-1]
        losses.append(seen)
        assert order == ["forward", "wait"] * 3, "forward must not wait for the exchanges"
        assert communication.traffic().exchanges == 3 * 3
    assert losses[0] == losses[1] == losses[2]


class WideBlock(Block):
    """Large enough that kernels on different streams overlap on a GPU."""

    def __init__(self, width: int = 24) -> None:
        super().__init__(width)
        self.wide = nn.Linear(width, 200_000, bias=False)
        nn.init.normal_(self.wide.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wide(x[:, :2]).relu()
        return super().forward(x) + (hidden @ self.wide.weight).mean() * 1e-3


def _streams_change_nothing(rank: int, world: int, replica: str, node_size: int) -> None:
    """Everything in order on FSDP2's streams must give the same bits as the overlapping run."""
    config = WeightQuantization(replica=replica)  # type: ignore[arg-type]
    losses, weights = [], []
    in_backward = reduce_scatter.backward_id
    for overlap in (False, True):
        model, optimizer, communication = build(
            weights=config, gradients=TLQ_HS, policy=BF16, node_size=node_size, block=WideBlock
        )
        communication._exchanges._device = torch.device("cuda" if overlap else "cpu")
        reduce_scatter.backward_id = in_backward if overlap else lambda: -1
        losses.append(train(model, optimizer, 12))
        weights.append(replicas(model))
        deferred = communication._context.reductions._stages._transfers._stream is not None
        assert deferred == overlap
        assert communication.check_replicas(on_drift="raise") == []
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def _resumes(rank: int, world: int, replica: str) -> None:
    config = WeightQuantization(group_size=64, replica=replica)  # type: ignore[arg-type]
    options: dict[str, Any] = {"weights": config, "gradients": TLQ_HS, "node_size": 1}
    for read_before_saving in (False, True):
        model, optimizer, communication = build(**options)
        train(model, optimizer, 3)
        if read_before_saving:
            replicas(model)  # as a validation pass between the step and the checkpoint does
        saved = {k: v.clone() for k, v in model.state_dict().items()}
        moments = copy.deepcopy(optimizer.state_dict())
        state, slots = communication.state_dict(), communication.replica_state_dict()
        expected = train(model, optimizer, 3, first=3)
        model, optimizer, communication = build(**options)
        model.load_state_dict(saved)
        optimizer.load_state_dict(moments)
        communication.load_state_dict(state, slots)
        assert train(model, optimizer, 3, first=3) == expected
        assert communication.external_weight_updates == {}
    with pytest.raises(ValueError, match="version 99"):
        communication.load_state_dict({**state, "version": 99}, slots)


class MixedBlock(Block):
    """Frozen bf16 matrices (odd sizes) beside trained fp32 ones: FSDP2 then gathers bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.full((7, 3), 0.5, dtype=torch.bfloat16), False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.frozen.float().mean() * 2


def _mixed_dtypes(rank: int, world: int) -> None:
    plain = train(*build(block=MixedBlock)[:2], 4)
    model, optimizer, communication = build(block=MixedBlock, weights=QWD)
    communication.measure_errors = True
    reasons = {t.name: t.reason for t in communication.plan.tensors}
    assert reasons["blocks.0.up.weight"] == "mixed dtypes in one unit"
    losses = train(model, optimizer, 4)
    assert max(abs(a - b) for a, b in zip(losses, plain, strict=True)) < 0.1
    weights = sum(p.full_tensor().float().square().sum() for p in model.parameters())
    norm = communication.errors().weights_squared_norm
    assert 0 < norm < 10 * weights, "raw bytes were counted as weights"
    assert communication.check_replicas(on_drift="raise") == []
    for name, value in zip(dict(model.named_parameters()), replicas(model), strict=True):
        if name.startswith("blocks"):
            assert torch.equal(dict(model.named_parameters())[name].full_tensor(), value), name


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
    on_both(_weights_follow, 2, "full", 2),
    on_ranks(_weights_follow, 2, "node", 2),
    on_both(_weights_follow, 2, "node", 1),
    on_both(_replica_modes_agree, 4),
    on_both(_residual_is_fed_back, 2),
    on_both(_optimizers_exchange_their_own_units, 2),
    on_ranks(_closures, 2),
    on_both(_resumes, 2, "full"),
    on_both(_resumes, 2, "node"),
    on_ranks(_mixed_dtypes, 2),
    on_gpus(_streams_change_nothing, 2, "full", 1),
    on_gpus(_streams_change_nothing, 2, "node", 1),
    on_gpus(_streams_change_nothing, 4, "full", 2),
    on_gpus(_streams_change_nothing, 4, "node", 2),
)
