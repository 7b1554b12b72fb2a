"""Quantized collectives under raw FSDP2, on gloo ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.devices import device
from lq_testing.models import Block, LoRABlock, OptionalBlock, TinyLM, batch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lq_lightning._compat.fsdp2 import Reduced
from lq_lightning.data_parallel import (
    GradientQuantization,
    QuantizedCommunication,
    Topology,
    WeightQuantization,
    quantize_communication,
    reduce_scatter,
)
from lq_lightning.data_parallel.weight_difference import _checksum

QWD = WeightQuantization(group_size=64)
QWD8 = WeightQuantization(group_size=64, bits=8)
NODE = WeightQuantization(group_size=64, replica="node")
TLQ_HS = GradientQuantization()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def tokens(step: int) -> Tensor:
    """This rank's tokens of one step, on its device."""
    return batch(step, dist.get_rank()).to(device())


def build(
    *,
    weights: WeightQuantization | None = None,
    gradients: GradientQuantization | None = None,
    node_size: int | None = None,
    block: type[Block] = Block,
    tied: bool = False,
    policy: MixedPrecisionPolicy | None = None,
    prepare: Callable[[TinyLM], None] | None = None,
    lr: float = 1e-2,
    **shard_kwargs: Any,
) -> tuple[TinyLM, torch.optim.Optimizer, QuantizedCommunication]:
    torch.manual_seed(0)
    model = TinyLM(block=block, tied=tied).to(device())
    if prepare is not None:
        prepare(model)
    shard_kwargs["mp_policy"] = policy or MixedPrecisionPolicy()
    shard_kwargs["mesh"] = init_device_mesh(device().type, (dist.get_world_size(),))
    for child in model.blocks:
        fully_shard(child, **shard_kwargs)
    fully_shard(model, **shard_kwargs)
    world = dist.get_world_size()
    communication = quantize_communication(
        model,
        weights=weights,
        gradients=gradients,
        topology=Topology(world_size=world, rank=dist.get_rank(), node_size=node_size or world),
        min_quantized_numel=256,
        seed=7,
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    communication.register_optimizer(optimizer)
    return model, optimizer, communication


def train(
    model: TinyLM, optimizer: torch.optim.Optimizer, steps: int, first: int = 0, clip: float = 0.0
) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = model(tokens(step))
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def units(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def replicas(model: nn.Module) -> list[Tensor]:
    """The weights that this rank computes with, as FSDP2 unshards them."""
    weights = []
    for unit in units(model):
        unit.unshard()
        weights += [p.detach().clone() for p in unit.parameters(recurse=False)]
        for child in unit.children():
            if not isinstance(child, FSDPModule) and not isinstance(child, nn.ModuleList):
                weights += [p.detach().clone() for p in child.parameters()]
        unit.reshard()
    return weights


def same_on_all_ranks(tensors: list[Tensor]) -> bool:
    flat = torch.cat([t.float().flatten() for t in tensors])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    return all(torch.equal(flat, other) for other in every)


# --- weights ------------------------------------------------------------------------------------


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
    assert communication.outside_writes == {}


@pytest.mark.parametrize(("replica", "node_size"), [("full", 2), ("node", 2), ("node", 1)])
def test_difference_gather_follows_the_weights(replica: str, node_size: int) -> None:
    run_ranks(_weights_follow, 2, replica, node_size)


def _replica_modes_agree(rank: int, world: int) -> None:
    full = train(*build(weights=QWD, gradients=TLQ_HS, policy=BF16, node_size=2)[:2], 6)
    model, optimizer, communication = build(
        weights=NODE, gradients=TLQ_HS, policy=BF16, node_size=2
    )
    assert train(model, optimizer, 6) == full, "both modes exchange the same differences"
    assert same_on_all_ranks(replicas(model))
    assert communication.check_replicas(on_drift="raise") == []
    mains = [p for p in model.parameters() if isinstance(p, DTensor)]
    gap = [
        (a.full_tensor().bfloat16() != b).any()
        for a, b in zip(mains, _by_name(model), strict=True)
        if a.ndim == 2 and a.numel() >= 256
    ]
    assert any(gap), "with 4 bits the replica must differ from the main weights somewhere"


def _by_name(model: nn.Module) -> list[Tensor]:
    for unit in units(model):
        unit.unshard()
    values = [p.detach().clone() for p in model.parameters()]
    for unit in units(model):
        unit.reshard()
    return values


def test_node_replica_equals_full_replica_on_two_by_two_nodes() -> None:
    run_ranks(_replica_modes_agree, 4)


def _residual_is_fed_back(rank: int, world: int) -> None:
    model, optimizer, communication = build(weights=WeightQuantization(bits=2, group_size=64))
    train(model, optimizer, 1)
    gaps = []
    for _ in range(40):
        values = _by_name(model)
        gaps.append(
            max(
                (p.full_tensor() - v).abs().max().item()
                for p, v in zip(model.parameters(), values, strict=True)
            )
        )
        communication.note_optimizer_step()  # exchanges; the main weights stay as they are
    assert gaps[0] > 1e-4
    assert gaps[-1] < gaps[0] / 100, gaps


def test_lost_differences_are_sent_later() -> None:
    run_ranks(_residual_is_fed_back, 2)


def _outside_writes(rank: int, world: int, replica: str) -> None:
    config = WeightQuantization(group_size=64, replica=replica)  # type: ignore[arg-type]
    model, optimizer, communication = build(weights=config)
    train(model, optimizer, 2)

    def assert_exact(expected_new_writes: bool) -> None:
        writes = sum(communication.outside_writes.values())
        for parameter, value in zip(model.parameters(), _by_name(model), strict=True):
            assert torch.equal(parameter.full_tensor(), value)
        assert (sum(communication.outside_writes.values()) > writes) == expected_new_writes

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert_exact(True)
    train(model, optimizer, 1)
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    train(model, optimizer, 2)
    model.load_state_dict(saved)
    assert_exact(True)
    train(model, optimizer, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(1)
    assert_exact(True)
    train(model, optimizer, 1)
    communication.invalidate()
    assert_exact(False)
    train(model, optimizer, 1)
    assert same_on_all_ranks(replicas(model))


@pytest.mark.parametrize("replica", ["full", "node"])
def test_outside_writes_are_gathered_exactly(replica: str) -> None:
    run_ranks(_outside_writes, 2, replica)


def _corrupt(gather: Any, amount: float) -> None:
    """Change one quantized element of another node's part of this rank's replica."""
    run = next(r for r in gather._layout.runs if r.quantized)
    slots = gather._replica.view(2, -1)
    slots[1 - dist.get_rank()][run.start] += amount


def _drift(rank: int, world: int, replica: str) -> None:
    config = WeightQuantization(group_size=64, replica=replica)  # type: ignore[arg-type]
    model, optimizer, communication = build(weights=config, node_size=1)
    assert communication.check_replicas() == []
    train(model, optimizer, 2)
    assert communication.check_replicas() == []
    gather = [u.gather for u in communication._units][1]
    if rank == 1:
        _corrupt(gather, 0.25)
    assert communication.check_replicas() == [gather.name]
    train(model, optimizer, 1)
    assert communication.check_replicas() == []
    if rank == 0:
        _corrupt(gather, 1e-3)
    with pytest.raises(RuntimeError, match=rf"differ between ranks.*`{gather.name}`"):
        communication.check_replicas(on_drift="raise")
    with pytest.raises(ValueError, match="on_drift='ignore'"):
        communication.check_replicas(on_drift="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("replica", ["full", "node"])
def test_drift_is_named_and_mended(replica: str) -> None:
    run_ranks(_drift, 2, replica)


def _plain_weight_quantization(rank: int, world: int) -> None:
    config = WeightQuantization(method="qW", bits=4, group_size=64)
    model, optimizer, communication = build(weights=config)
    train(model, optimizer, 2)
    first, second = replicas(model), replicas(model)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert same_on_all_ranks(first)
    assert communication.traffic().exchanges > 2 * 3, "qW encodes at every gather"
    assert communication.replica_state_dict() == {}
    levels = max(t.unique().numel() for t in first if t.ndim == 2)
    assert levels < 15 * 64, "weights must come from the lattice"


def test_qw_computes_with_decoded_weights() -> None:
    run_ranks(_plain_weight_quantization, 2)


def _replica_is_the_only_copy(rank: int, world: int) -> None:
    model, optimizer, communication = build(weights=QWD, policy=BF16)
    train(model, optimizer, 2)
    for gather in communication._difference_gathers():
        replica = gather._replica
        params = gather._params()
        numel = world * sum(p.padded_shard_numel for p in params)
        assert replica.untyped_storage().nbytes() == 2 * numel
        held = [v for v in vars(gather).values() if isinstance(v, Tensor)]
        assert {v.untyped_storage().data_ptr() for v in held} == {
            replica.untyped_storage().data_ptr()
        }
        before = replica.clone()
        replicas(model)  # FSDP2 writes main weights into the output of each gather
        assert torch.equal(replica, before)


def test_full_replica_takes_two_bytes_per_parameter() -> None:
    run_ranks(_replica_is_the_only_copy, 2)


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
    assert communication.outside_writes == {}
    for p, v in zip(model.parameters(), _by_name(model), strict=True):
        assert (p.full_tensor() - v).abs().max() < 1e-2, "an update did not arrive"


def test_each_optimizer_exchanges_the_units_it_updates() -> None:
    run_ranks(_optimizers_exchange_their_own_units, 2)


def _frozen_write_before_a_step(rank: int, world: int) -> None:
    """As of a teacher that follows the student between backward and the optimizer step."""

    def freeze(model: TinyLM) -> None:
        model.blocks[0].up.weight.requires_grad_(False)

    model, optimizer, communication = build(weights=QWD, node_size=1, prepare=freeze)
    optimizer.add_param_group({"params": [model.blocks[0].up.weight]})
    train(model, optimizer, 2)
    assert communication.outside_writes == {}
    model(tokens(2)).backward()
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    assert communication.outside_writes == {"blocks.0": 1}
    weights = dict(zip(dict(model.named_parameters()), _by_name(model), strict=True))
    whole = model.blocks[0].up.weight.full_tensor()
    assert torch.equal(weights["blocks.0.up.weight"], whole), "the write did not arrive"


def test_frozen_weights_written_before_a_step_arrive() -> None:
    run_ranks(_frozen_write_before_a_step, 2)


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


def test_steps_with_a_closure_are_the_same() -> None:
    run_ranks(_closures, 2)


class WideBlock(Block):
    """Large enough that kernels on different streams overlap on a GPU."""

    def __init__(self, width: int = 24) -> None:
        super().__init__(width)
        self.wide = nn.Linear(width, 200_000, bias=False)
        nn.init.normal_(self.wide.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wide(x[:, :2]).relu()
        return super().forward(x) + (hidden @ self.wide.weight).mean() * 1e-3


def _streams_change_nothing(rank: int, world: int, replica: str) -> None:
    """Everything in order on FSDP2's streams must give the same bits as the overlapping run."""
    config = WeightQuantization(replica=replica)  # type: ignore[arg-type]
    losses, weights = [], []
    in_backward = reduce_scatter.backward_id
    for overlap in (False, True):
        model, optimizer, communication = build(
            weights=config, gradients=TLQ_HS, policy=BF16, node_size=2, block=WideBlock
        )
        communication._exchanges._device = torch.device("cuda" if overlap else "cpu")
        reduce_scatter.backward_id = in_backward if overlap else lambda: -1
        losses.append(train(model, optimizer, 12))
        weights.append(replicas(model))
        deferred = communication._context.reductions._stage._stream is not None
        assert deferred == overlap
        assert communication.check_replicas(on_drift="raise") == []
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


# --- gradients ----------------------------------------------------------------------------------


def _gradients(model: TinyLM, step: int = 0) -> list[Tensor]:
    model(tokens(step)).backward()
    gradients = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients


def _gradient_error(rank: int, world: int, node_size: int, method: str, limit: float) -> None:
    exact = _gradients(build()[0])
    config = GradientQuantization(method=method)  # type: ignore[arg-type]
    model, _, communication = build(gradients=config, node_size=node_size)
    communication.measure_errors = True
    quantized = _gradients(model)
    for name, a, b in zip(dict(model.named_parameters()), quantized, exact, strict=True):
        if b.ndim < 2 or b.numel() < 256:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=f"{name} is not exact")
    squared = sum(((a - b) ** 2).sum() for a, b in zip(quantized, exact, strict=True))
    error = (squared / sum((b**2).sum() for b in exact)).sqrt().item()
    assert 1e-5 < error < limit, error
    sums = torch.tensor(communication.errors(), dtype=torch.float64, device=device())
    dist.all_reduce(sums)
    # the padding of uneven shards is measured too: a Hadamard block spreads its error over it
    assert (sums[2] / sums[3]).sqrt().item() == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize(
    ("node_size", "method", "limit"),
    [
        (4, "TLq-HS", 0.02),
        (2, "TLq-HS", 0.25),
        (1, "TLq-HS", 0.25),
        (2, "TLq", 0.35),
        (2, "ULq", 0.45),
    ],
)
def test_gradient_error(node_size: int, method: str, limit: float) -> None:
    run_ranks(_gradient_error, 4, node_size, method, limit)


def _unit_scatter(config: GradientQuantization, node_size: int | None = None) -> tuple[Any, Tensor]:
    """The reduce-scatter of one block, and slots with this rank's values for it."""
    _, _, communication = build(gradients=config, node_size=node_size)
    scatter = communication._units[1].scatter
    scatter.record_packed(Reduced([p.fsdp_param for p in scatter._params()], False))
    numel = dist.get_world_size() * sum(p.padded_shard_numel for p in scatter._params())
    generator = torch.Generator().manual_seed(dist.get_rank())
    return scatter, torch.randn(numel, generator=generator).to(device())


def _int8_bound(rank: int, world: int) -> None:
    """One level, nearest, no transform: the error is at most half a step per rank and group."""
    config = GradientQuantization(method="TLq", rounding="nearest", group_size=16)
    scatter, slots = _unit_scatter(config)
    numel = slots.numel() // world
    result = torch.empty(numel, device=device())
    scatter(result, slots, dist.group.WORLD, dist.ReduceOp.SUM)
    every = [torch.empty_like(slots) for _ in range(world)]
    dist.all_gather(every, slots)
    mine = torch.stack([e.view(world, numel)[rank] for e in every])
    bound = torch.zeros(numel, device=device())
    for run in scatter._layouts_for(numel, torch.float32)[0].runs:
        if not run.quantized:
            continue
        for start in range(run.start, run.start + run.numel, 16):
            stop = min(start + 16, run.start + run.numel)
            bound[start:stop] = (mine[:, start:stop].abs().amax(dim=1) / 127 / 2).sum()
    assert ((result - mine.sum(dim=0)).abs() <= bound * 1.0001 + 1e-6).all()
    with pytest.raises(NotImplementedError, match="set_force_sum_reduction_for_comms"):
        scatter(result, slots, dist.group.WORLD, dist.ReduceOp.MAX)


def test_int8_error_is_within_the_derived_bound() -> None:
    run_ranks(_int8_bound, 2)


def _stochastic_is_unbiased(rank: int, world: int) -> None:
    config = GradientQuantization(method="TLq", inter_bits=2, group_size=16, rounding="stochastic")
    scatter, slots = _unit_scatter(config, node_size=1)
    numel = slots.numel() // world
    exact = torch.empty(numel, device=device())
    dist.reduce_scatter_tensor(exact, slots.clone())
    total, single, rounds = torch.zeros(numel, device=device()), 0.0, 200
    for _ in range(rounds):
        result = torch.empty(numel, device=device())
        scatter(result, slots, dist.group.WORLD, dist.ReduceOp.SUM)
        total += result
        single = ((result - exact).norm() / exact.norm()).item()
    mean = ((total / rounds - exact).norm() / exact.norm()).item()
    assert single > 0.3, "2-bit codes must err visibly"
    assert mean < 3 * single / rounds**0.5, (mean, single)


def test_stochastic_rounding_is_unbiased() -> None:
    run_ranks(_stochastic_is_unbiased, 2)


def _messages_differ(rank: int, world: int) -> None:
    """Every slot holds the same values: rounding noise is another for each message."""
    config = GradientQuantization(rounding="stochastic")
    scatter, slots = _unit_scatter(config, node_size=1)
    numel = slots.numel() // world
    same = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device())
    intra, inter = scatter._layouts_for(numel, torch.float32)
    messages = scatter._encode_for_nodes(same.repeat(world, 1), intra, inter)
    assert messages.shape == (world - 1, inter.nbytes)
    every = [torch.empty_like(messages) for _ in range(world)]
    dist.all_gather(every, messages)
    assert len(torch.cat(every).unique(dim=0)) == world * (world - 1)


def test_stochastic_messages_of_equal_slots_differ() -> None:
    run_ranks(_messages_differ, 3)


def _own_part_stays(rank: int, world: int, node_size: int) -> None:
    """One node at a time has gradients: 4 bits are on the way to the other nodes only."""
    scatter, slots = _unit_scatter(GradientQuantization(rounding="nearest"), node_size)
    topology = scatter._context.topology
    for node in range(topology.num_nodes):
        values = slots if topology.node == node else torch.zeros_like(slots)
        exact, result = (torch.empty(slots.numel() // world, device=device()) for _ in range(2))
        dist.reduce_scatter_tensor(exact, values.clone())
        scatter(result, values.clone(), dist.group.WORLD, dist.ReduceOp.SUM)
        error = ((result - exact).norm() / exact.norm()).item()
        if topology.node != node:
            assert 0.05 < error < 0.2, (node, error)
        elif node_size == 1:
            assert torch.equal(result, exact), node
        else:
            assert 0 < error < 0.01, (node, error)  # 8-bit codes within the node


@pytest.mark.parametrize(("world", "node_size"), [(3, 1), (4, 2)])
def test_what_a_node_contributes_to_its_own_slots_is_not_encoded(
    world: int, node_size: int
) -> None:
    run_ranks(_own_part_stays, world, node_size)


def _nonfinite(rank: int, world: int, node_size: int) -> None:
    for value in (float("nan"), float("inf"), float("-inf")):
        for name in ("blocks.0.up.weight", "blocks.1.norm.weight", "embed.weight"):
            model, _, _ = build(gradients=TLQ_HS, node_size=node_size)

            def poison(gradient: Tensor, value: float = value) -> Tensor:
                gradient = gradient.clone()
                gradient.view(-1)[gradient.numel() // 3] = value
                return gradient

            loss = model(tokens(0))
            if rank == world - 1:  # only one rank sees the bad gradient
                for unit in units(model):
                    unit.unshard()
                dict(model.named_parameters())[name].register_hook(poison)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            assert not torch.isfinite(norm), (name, value)


@pytest.mark.parametrize("node_size", [1, 2])
def test_nonfinite_gradients_reach_the_norm_on_every_rank(node_size: int) -> None:
    run_ranks(_nonfinite, 2, node_size)


# --- whole trainings ------------------------------------------------------------------------------


def _checkpointed(model: TinyLM) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)


def _compiled(model: TinyLM) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"policy": BF16},
    "tied": {"tied": True},
    "lora": {"block": LoRABlock},
    "checkpointing": {"prepare": _checkpointed},
    "compiled": {"prepare": _compiled},
    "no reshard": {"reshard_after_forward": False},
}


def _trains(rank: int, world: int, names: list[str], node_size: int) -> None:
    for name in names:
        options = CASES[name]
        plain = train(*build(**options)[:2], 6, clip=1.0)
        for weights in (QWD8, NODE):
            model, optimizer, communication = build(
                weights=weights, gradients=TLQ_HS, node_size=node_size, **options
            )
            losses = train(model, optimizer, 6, clip=1.0)
            gap = max(abs(a - b) for a, b in zip(losses, plain, strict=True))
            assert gap < 0.15, (name, weights.replica, losses, plain)
            assert same_on_all_ranks(replicas(model)), name
            assert communication.check_replicas(on_drift="raise") == []
            assert communication.outside_writes == {}, name
            again = train(
                *build(weights=weights, gradients=TLQ_HS, node_size=node_size, **options)[:2],
                6,
                clip=1.0,
            )
            assert again == losses, f"{name}: not reproducible"


@pytest.mark.parametrize("names", [list(CASES)[:3], list(CASES)[3:5], list(CASES)[5:]])
def test_trains_like_full_precision(names: list[str]) -> None:
    run_ranks(_trains, 2, names, 1, timeout=180)


def test_trains_on_two_by_two_nodes() -> None:
    run_ranks(_trains, 4, ["bf16", "tied"], 2, timeout=180)


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


def test_frozen_parameters_send_no_differences() -> None:
    run_ranks(_frozen_send_nothing, 2)


def _unfreezing(rank: int, world: int) -> None:
    model, optimizer, communication = build(weights=QWD8, gradients=TLQ_HS, block=LoRABlock)
    train(model, optimizer, 2)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    optimizer.add_param_group(
        {"params": [p for n, p in model.named_parameters() if "blocks" in n and "lora" not in n]}
    )
    train(model, optimizer, 2)
    values = _by_name(model)
    assert same_on_all_ranks(values)
    for parameter, value in zip(model.parameters(), values, strict=True):
        torch.testing.assert_close(parameter.full_tensor(), value, atol=2e-3, rtol=0)


def test_parameters_may_be_unfrozen_on_the_way() -> None:
    run_ranks(_unfreezing, 2)


def _unused(rank: int, world: int) -> None:
    exact, _, _ = build(block=OptionalBlock)
    model, optimizer, _ = build(weights=QWD8, gradients=TLQ_HS, block=OptionalBlock)
    for use in (True, False, True):
        for m in (exact, model):
            for block in m.blocks:
                block.use_extra = use
        a, b = _gradients(exact), _gradients(model)
        assert len(a) == len(b)
        error = sum(((x - y) ** 2).sum() for x, y in zip(a, b, strict=True))
        assert (error / sum((x**2).sum() for x in a)).sqrt() < 0.05
    for use in (False, True):
        for block in model.blocks:
            block.use_extra = use
        train(model, optimizer, 1)
    assert same_on_all_ranks(replicas(model))


def test_parameters_without_gradients() -> None:
    run_ranks(_unused, 2)


def _accumulates(rank: int, world: int) -> None:
    model, _, communication = build(gradients=TLQ_HS, node_size=1)
    exact, _, _ = build()
    for m in (model, exact):
        for micro in range(4):
            m.set_requires_gradient_sync(micro == 3)
            m(tokens(micro)).backward()
    assert communication.traffic().reductions == 3, "once per unit and optimizer step"
    for a, b in zip(model.parameters(), exact.parameters(), strict=True):
        x, y = a.grad.full_tensor(), b.grad.full_tensor()
        assert (x - y).norm() <= 0.25 * y.norm() + 1e-6


def test_gradients_are_quantized_once_per_accumulated_step() -> None:
    run_ranks(_accumulates, 2)


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
        assert communication.outside_writes == {}
    with pytest.raises(ValueError, match="version 99"):
        communication.load_state_dict({**state, "version": 99}, slots)


@pytest.mark.parametrize("replica", ["full", "node"])
def test_resume_is_bit_exact(replica: str) -> None:
    run_ranks(_resumes, 2, replica)


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


@pytest.mark.parametrize(
    ("world", "node_size", "replica"),
    [(2, 1, "full"), (2, 2, "full"), (4, 2, "full"), (4, 2, "node")],
)
def test_counted_bytes_are_the_bytes_handed_to_the_collectives(
    world: int, node_size: int, replica: str
) -> None:
    run_ranks(_traffic_is_real, world, node_size, replica)


def _off(rank: int, world: int) -> None:
    plain = train(*build(policy=BF16)[:2], 20, clip=1.0)
    model, optimizer, communication = build(policy=BF16, weights=None, gradients=None)
    before = [type(g._all_gather_comm) for g in _groups(model)]
    assert all("Default" in t.__name__ for t in before)
    assert train(model, optimizer, 20, clip=1.0) == plain
    assert communication.traffic().sent == 0


def _groups(model: nn.Module) -> list[Any]:
    from lq_lightning._compat.fsdp2 import fsdp_units

    return [group for _, _, group in fsdp_units(model)]


def test_off_is_plain_fsdp2() -> None:
    run_ranks(_off, 2)


def _refuses(rank: int, world: int) -> None:
    topology = Topology(world_size=world, rank=rank, node_size=1)
    with pytest.raises(ValueError, match="no module sharded by FSDP2"):
        quantize_communication(nn.Linear(2, 2), weights=QWD, gradients=None, topology=topology)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    hybrid = fully_shard(nn.Linear(4, 4), mesh=mesh)
    with pytest.raises(NotImplementedError, match="HSDP"):
        quantize_communication(hybrid, weights=QWD, gradients=None, topology=topology)
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="min_quantized_numel=0"):
        quantize_communication(
            model, weights=QWD, gradients=None, topology=topology, min_quantized_numel=0
        )
    with pytest.raises(ValueError, match="world_size=4.*2 ranks"):
        quantize_communication(
            model,
            weights=QWD,
            gradients=None,
            topology=Topology(world_size=4, rank=rank, node_size=1),
        )


def test_refuses_what_it_cannot_do() -> None:
    run_ranks(_refuses, 2)


def _plan(rank: int, world: int) -> str:
    _, _, communication = build(weights=QWD, gradients=TLQ_HS)
    plan = {t.name: t for t in communication.plan.tensors}
    assert plan["blocks.0.up.weight"][2:5] == ("quantized", "quantized", "")
    assert plan["blocks.0.norm.weight"].reason == "1-D"
    assert plan["tiny"].weights == "full"
    assert len(plan) == len(communication.plan.tensors) == 13
    return communication.plan.summary()


def test_plan_names_what_is_not_quantized_and_why() -> None:
    summary = run_ranks(_plan, 2)[0]
    assert "4-bit differences, nearest rounding, groups of" in summary
    assert "int8 within the one node, nearest rounding, groups of" in summary
    assert "not quantized, 1-D" in summary


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
    for name, value in zip(dict(model.named_parameters()), _by_name(model), strict=True):
        if name.startswith("blocks"):
            assert torch.equal(dict(model.named_parameters())[name].full_tensor(), value), name


def test_units_of_mixed_dtypes_travel_exactly() -> None:
    run_ranks(_mixed_dtypes, 2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [1, 7, (1 << 16) + 3])
def test_checksum_sees_one_changed_element(dtype: torch.dtype, numel: int) -> None:
    values = (torch.arange(numel) % 100).to(dtype)
    before = _checksum(values)
    assert torch.equal(before, _checksum(values.clone()))
    values[numel // 2] += 1
    assert not torch.equal(before, _checksum(values))


# --- the same on GPUs -----------------------------------------------------------------------------


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (_weights_follow, ("full", 2)),
        (_weights_follow, ("node", 1)),
        (_residual_is_fed_back, ()),
        (_outside_writes, ("full",)),
        (_drift, ("node",)),
        (_plain_weight_quantization, ()),
        (_int8_bound, ()),
        (_stochastic_is_unbiased, ()),
        (_own_part_stays, (1,)),
        (_nonfinite, (1,)),
        (_nonfinite, (2,)),
        (_trains, (["fp32", "bf16", "tied", "lora", "checkpointing", "compiled"], 1)),
        (_unused, ()),
        (_accumulates, ()),
        (_replica_is_the_only_copy, ()),
        (_optimizers_exchange_their_own_units, ()),
        (_resumes, ("full",)),
        (_resumes, ("node",)),
        (_off, ()),
    ],
)
def test_on_two_gpus(fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    run_ranks(fn, 2, *args, backend="nccl", timeout=200)


@pytest.mark.gpu(4)
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (_replica_modes_agree, ()),
        (_streams_change_nothing, ("full",)),
        (_streams_change_nothing, ("node",)),
        (_gradient_error, (4, "TLq-HS", 0.02)),
        (_gradient_error, (2, "TLq-HS", 0.25)),
        (_gradient_error, (1, "TLq-HS", 0.25)),
        (_gradient_error, (2, "ULq", 0.45)),
        (_own_part_stays, (2,)),
        (_trains, (["bf16", "tied"], 2)),
        (_traffic_is_real, (2, "full")),
        (_traffic_is_real, (2, "node")),
    ],
)
def test_on_four_gpus(fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    run_ranks(fn, 4, *args, backend="nccl", timeout=200)
