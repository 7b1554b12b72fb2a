"""Quantized reductions of gradients under raw FSDP2, on gloo ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing.cases import on_both, on_gpus, on_ranks, rank_tests
from lq_testing.devices import device
from lq_testing.fsdp2 import (
    QWD8,
    TLQ_HS,
    UnitReduction,
    build,
    gradients,
    replicas,
    same_on_all_ranks,
    tokens,
    train,
    units,
)
from lq_testing.models import OptionalBlock
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lq_lightning._compat.fsdp2 import GroupParam, PackedGradients
from lq_lightning.data_parallel import GradientQuantization, Topology, reduce_scatter, unit


def _gradient_error(rank: int, world: int, cases: list[tuple[int, str, float]]) -> None:
    exact = gradients(build()[0])
    for node_size, method, limit in cases:
        config = GradientQuantization(method=method)  # type: ignore[arg-type]
        model, _, communication = build(gradients=config, node_size=node_size)
        communication.measure_errors = True
        quantized = gradients(model)
        for name, a, b in zip(dict(model.named_parameters()), quantized, exact, strict=True):
            if b.ndim < 2 or b.numel() < 256:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=f"{name} is not exact")
        squared = sum(((a - b) ** 2).sum() for a, b in zip(quantized, exact, strict=True))
        error = (squared / sum((b**2).sum() for b in exact)).sqrt().item()
        assert 1e-5 < error < limit, (node_size, method, error)
        sums = torch.tensor(communication.errors(), dtype=torch.float64, device=device())
        dist.all_reduce(sums)
        # the padding of uneven shards is measured too: a Hadamard block spreads its error over it
        assert (sums[2] / sums[3]).sqrt().item() == pytest.approx(error, rel=0.05)


ERRORS = [(4, "TLq-HS", 0.02), (1, "TLq-HS", 0.25), (2, "TLq", 0.35), (2, "ULq", 0.45)]


def _reduction(config: GradientQuantization, node_size: int | None = None) -> UnitReduction:
    return UnitReduction(build(gradients=config, node_size=node_size)[2], 1)


def _int8_bound(rank: int, world: int) -> None:
    """One level, nearest, no transform: the error is at most half a step per rank and group."""
    reduction = _reduction(GradientQuantization(method="TLq", rounding="nearest", group_size=16))
    slots = reduction.random_slots()
    result, exact = reduction(slots, dist.ReduceOp.SUM), reduction.exact(slots) * world
    every = [torch.empty_like(slots) for _ in range(world)]
    dist.all_gather(every, slots)
    mine = torch.stack(every)[:, rank]
    bound = torch.zeros_like(exact)
    for _, run in reduction.layouts.intra.quantized:
        for start in range(run.start, run.stop, 16):
            group = slice(start, min(start + 16, run.stop))
            bound[group] = (mine[:, group].abs().amax(dim=1) / 127 / 2).sum()
    assert ((result - exact).abs() <= bound * 1.0001 + 1e-6).all()
    with pytest.raises(NotImplementedError, match="set_force_sum_reduction_for_comms"):
        reduction(slots, dist.ReduceOp.MAX)


def _stochastic(rank: int, world: int) -> None:
    config = GradientQuantization(method="TLq", inter_bits=2, group_size=16, rounding="stochastic")
    reduction, rounds = _reduction(config, node_size=1), 200
    slots = reduction.random_slots()
    exact = reduction.exact(slots)
    results = torch.stack([reduction(slots) for _ in range(rounds)])
    single = (results[0] - exact).norm() / exact.norm()
    mean = (results.mean(dim=0) - exact).norm() / exact.norm()
    assert single > 0.3, "2-bit codes must err visibly"
    assert mean < 3 * single / rounds**0.5, (mean, single)

    # every slot holds the same values: rounding noise is another for each message
    same = torch.randn(reduction.numel, generator=torch.Generator().manual_seed(0)).to(device())
    inter = reduction.layouts.inter
    slots = same.repeat(1, world, 1)
    messages = reduction.scatter.encode_for_nodes(slots, inter)[:, 0].contiguous()
    assert messages.shape == (world - 1, inter.nbytes)
    every = [torch.empty_like(messages) for _ in range(world)]
    dist.all_gather(every, messages)
    assert len(torch.cat(every).unique(dim=0)) == world * (world - 1)


def _own_part_stays(rank: int, world: int, node_size: int) -> None:
    """One node at a time has gradients: 4 bits are on the way to the other nodes only."""
    reduction = _reduction(GradientQuantization(rounding="nearest"), node_size)
    slots, topology = reduction.random_slots(), reduction.communication.topology
    for node in range(topology.num_nodes):
        values = slots if topology.node == node else torch.zeros_like(slots)
        exact, result = reduction.exact(values), reduction(values)
        error = ((result - exact).norm() / exact.norm()).item()
        if topology.node != node:
            assert 0.05 < error < 0.2, (node, error)
        elif node_size == 1:
            torch.testing.assert_close(result, exact, rtol=1e-6, atol=0)
        else:
            assert 0 < error < 0.01, (node, error)  # 8-bit codes within the node


# --- calls --------------------------------------------------------------------------------------


def _each_call_is_announced(rank: int, world: int) -> None:
    reduction = _reduction(TLQ_HS)
    slots = reduction.random_slots()
    reduction(slots)
    result = torch.empty(reduction.numel)
    with pytest.raises(AssertionError, match="`blocks.0` is reduced, but nothing said"):
        reduction.scatter(result, slots.view(-1), dist.group.WORLD, dist.ReduceOp.AVG)
    reduction.scatter.expect(PackedGradients((0,), False))
    reductions, joined = reduction.communication._context.reductions, []
    reductions.join = lambda: joined.append(1)  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=f"FSDP2 packed {reduction.numel} elements"):
        reduction.scatter(result, slots.view(-1), dist.group.WORLD, dist.ReduceOp.AVG)
    assert joined, "what is on its way may write to memory that is freed now"
    reduction.scatter.expect(PackedGradients((0,), False))
    reduction.communication.recover()  # from a backward that failed before the call
    with pytest.raises(AssertionError, match="nothing said"):
        reduction.scatter(result, slots.view(-1), dist.group.WORLD, dist.ReduceOp.AVG)
    reduction.scatter.expect(PackedGradients((0,), False))  # of a call that did not come
    reduction(slots)


def test_a_failed_backward_is_joined_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never gets to the callback that waits for its deferred reductions."""
    order: list[str] = []
    callbacks: list[Callable[[], None]] = []
    running = [1]

    class Stages:
        def make_room(self) -> None:
            order.append("room")

        def submit(
            self, sent: Tensor, transfer: Callable[[], Tensor], finish: Callable[[Tensor], None]
        ) -> None:
            finish(transfer())

        def join(self) -> None:
            order.append("join")

    monkeypatch.setattr(unit, "CommPipeline", Stages)
    monkeypatch.setattr(unit, "backward_id", lambda: running[0])
    monkeypatch.setattr(unit, "after_backward", callbacks.append)
    reductions, messages = unit.DeferredReductions(), torch.empty(0)
    for number in (1, 1, 2, 2):
        running[0] = number
        reductions.make_room()
        reductions.submit(messages, lambda: messages, lambda _: order.append("work"))
    assert order == ["room", "work", "room", "work", "join", "room", "work", "room", "work"]
    assert len(callbacks) == 2
    order.clear()
    callbacks[-1]()  # backward 2 ends as it should
    running[0] = 3
    reductions.make_room()
    assert order == ["join", "room"]


def _experts() -> reduce_scatter.TwoLevelReduceScatter:
    parameter = nn.Parameter(torch.zeros(64, 64))
    params = [GroupParam(None, parameter, 2048, 4096, 2, torch.float32)] * 9
    none: Any = None
    context = unit.UnitContext(
        topology=Topology(world_size=2, rank=0, node_size=1),
        groups=none,
        seed=0,
        vocabulary=frozenset(),
        min_quantized_numel=1,
    )
    description = unit.Unit(
        name="experts",
        index=0,
        params=lambda: params,
        names=tuple(f"expert{i}" for i in range(9)),
        context=context,
    )
    return reduce_scatter.TwoLevelReduceScatter(TLQ_HS, description)


def test_layouts_of_conditional_experts_do_not_pile_up() -> None:
    scatter = _experts()
    every = tuple(range(9))
    chosen = [c for size in range(1, 9) for c in itertools.combinations(every, size)]
    always = scatter.layouts_of(every, 9 * 2048, torch.float32)
    for number, packed in enumerate(chosen):
        made = scatter.layouts_of(packed, len(packed) * 2048, torch.float32)
        assert made.inter.numel == len(packed) * 2048
        if number % 10 == 0:
            assert scatter.layouts_of(every, 9 * 2048, torch.float32) is always, (
                "in use, and yet dropped"
            )
    assert len(chosen) > 500
    assert len(scatter._layouts) == reduce_scatter.MAX_LAYOUTS
    assert scatter.layouts_of((0,), 2048, torch.bfloat16).intra.raw_dtype == torch.bfloat16
    with pytest.raises(AssertionError, match="`experts`: FSDP2 packed 2049 elements"):
        scatter.layouts_of((0,), 2049, torch.float32)


# --- whole backwards ----------------------------------------------------------------------------


def _nonfinite(rank: int, world: int, node_size: int) -> None:
    names = ("blocks.0.up.weight", "blocks.1.norm.weight", "embed.weight")
    values = (float("nan"), float("inf"), float("-inf"))
    for name, value in [
        *((name, values[0]) for name in names),
        *((names[0], v) for v in values[1:]),
    ]:
        model, _, _ = build(gradients=TLQ_HS, node_size=node_size)

        def poison(gradient: Tensor, value: float = value) -> Tensor:
            gradient = gradient.clone()
            gradient.view(-1)[gradient.numel() // 3] = value
            return gradient

        loss = model(tokens(0))
        if rank == world - 1:  # only one rank sees the bad gradient
            for module in units(model):
                module.unshard()
            dict(model.named_parameters())[name].register_hook(poison)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        assert not torch.isfinite(norm), (name, value)


def _unused(rank: int, world: int) -> None:
    exact, _, _ = build(block=OptionalBlock)
    model, optimizer, _ = build(weights=QWD8, gradients=TLQ_HS, block=OptionalBlock)
    for use in (True, False, True):
        for m in (exact, model):
            for block in m.blocks:
                block.use_extra = use
        a, b = gradients(exact), gradients(model)
        assert len(a) == len(b)
        error = sum(((x - y) ** 2).sum() for x, y in zip(a, b, strict=True))
        assert (error / sum((x**2).sum() for x in a)).sqrt() < 0.05
    for use in (False, True):
        for block in model.blocks:
            block.use_extra = use
        train(model, optimizer, 1)
    assert same_on_all_ranks(replicas(model))


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


test_on_ranks = rank_tests(
    on_ranks(_gradient_error, 4, ERRORS),
    on_both(_int8_bound, 2),
    on_ranks(_stochastic, 3),
    on_ranks(_own_part_stays, 3, 1),
    on_both(_own_part_stays, 4, 2),
    on_ranks(_each_call_is_announced, 2),
    on_both(_nonfinite, 2, 1),
    on_both(_nonfinite, 2, 2),
    on_both(_unused, 2),
    on_both(_accumulates, 2),
    on_gpus(_stochastic, 2),
    on_gpus(_own_part_stays, 2, 1),
    on_gpus(_gradient_error, 4, [*ERRORS, (2, "TLq-HS", 0.25)]),
)
