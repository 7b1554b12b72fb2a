"""Full-precision values within quantized runs (norms between matrices), on gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.devices import device
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from lq_lightning._compat.fsdp2 import Reduced
from lq_lightning.data_parallel import (
    GradientQuantization,
    QuantizedCommunication,
    Topology,
    WeightQuantization,
    all_gather,
    quantize_communication,
)

WIDTH = 80  # so that norms share the blocks of a Hadamard transform with matrices
NORMS = ("norm1", "norm2")


class Normed(nn.Module):
    """Three matrices with a 1-D parameter between them, and one at either end."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "a", "norm1", "b", "norm2", "c", "last"):
            shape = (WIDTH, WIDTH) if len(name) == 1 else (WIDTH,)
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 8))

    def forward(self, x: Tensor) -> Tensor:
        x = ((x * self.first) @ self.a).tanh() * self.norm1
        return ((x @ self.b).tanh() * self.norm2) @ self.c + self.last


class Counter(TorchDispatchMode):
    """Counts the operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def build(
    node_size: int,
    *,
    weights: WeightQuantization | None = None,
    gradients: GradientQuantization | None = None,
    dtype: torch.dtype = torch.float32,
    frozen: tuple[str, ...] = (),
) -> tuple[Any, QuantizedCommunication]:
    torch.manual_seed(0)
    model: Any = Normed().to(device())
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype))
    communication = quantize_communication(
        model,
        weights=weights,
        gradients=gradients,
        topology=Topology(
            world_size=dist.get_world_size(), rank=dist.get_rank(), node_size=node_size
        ),
        min_quantized_numel=256,
    )
    return model, communication


# --- gradients ----------------------------------------------------------------------------------


class Reduction:
    """The reduce-scatter of one unit, and slots for it with large values in place of norms."""

    def __init__(self, node_size: int, dtype: torch.dtype = torch.float32, **config: Any) -> None:
        gradients = GradientQuantization(**config)
        _, self.communication = build(node_size, gradients=gradients)
        self.scatter: Any = self.communication._units[0].scatter
        params = self.scatter._params()
        self.scatter.record_packed(Reduced([p.fsdp_param for p in params], False))
        self.world, self.dtype = dist.get_world_size(), dtype
        segments = {s.name: s for s in self.scatter.segments()}
        self.numel = sum(s.numel for s in segments.values())
        self.matrices = torch.ones(self.numel, dtype=torch.bool, device=device())
        for name in ("first", "last", *NORMS):
            self.matrices[self.columns(segments[name])] = False
        self.norms = [self.columns(segments[name]) for name in NORMS]
        layout = self.scatter._layouts_for(self.numel, dtype)[0]
        assert len(layout.quantized) == 1, "the norms must lie within one run"
        assert layout.numel == self.numel

    @staticmethod
    def columns(segment: Any) -> slice:
        return slice(segment.start, segment.start + segment.numel)

    def slots(self, *, large: bool) -> Tensor:
        """``[world, n]`` of this rank; what is not quantized has few bits, so sums are exact."""
        generator = torch.Generator().manual_seed(dist.get_rank())
        slots = torch.randn(self.world, self.numel, generator=generator).to(device())
        integers = torch.randint(-8, 9, slots.shape, generator=generator).to(slots)
        slots = torch.where(self.matrices, slots, integers)
        for columns in self.norms:
            slots[:, columns] *= 1024 if large else 0
        return slots.to(self.dtype)

    def __call__(self, slots: Tensor) -> Tensor:
        """This rank's part of the mean."""
        result = torch.empty(self.numel, dtype=self.dtype, device=device())
        self.scatter(result, slots.clone().view(-1), dist.group.WORLD, dist.ReduceOp.AVG)
        return result

    def mean(self, slots: Tensor) -> Tensor:
        """What plain FSDP2 computes."""
        every = [torch.empty_like(slots) for _ in range(self.world)]
        dist.all_gather(every, slots)
        return torch.stack(every)[:, dist.get_rank()].float().mean(dim=0)


def _reduces(
    rank: int, world: int, node_size: int, error_feedback: bool, dtype: torch.dtype
) -> None:
    config: dict[str, Any] = {"error_feedback": error_feedback, "dtype": dtype}
    large, small = Reduction(node_size, **config), Reduction(node_size, **config)
    values, quiet = large.slots(large=True), small.slots(large=False)
    exact, matrices = large.mean(values), large.matrices
    assert exact[large.norms[0]].abs().max() > 400
    total = torch.zeros_like(exact)
    exactly = {"rtol": 1e-6, "atol": 1e-3} if world == 3 else {"rtol": 0, "atol": 0}
    for _ in range(8):
        reduced, alone = large(values), small(quiet)
        torch.testing.assert_close(reduced[~matrices].float(), exact[~matrices], **exactly)
        assert torch.equal(reduced[matrices], alone[matrices]), "a norm changes its neighbours"
        error = (reduced.float() - exact)[matrices].norm() / exact[matrices].norm()
        assert error < 0.2, error
        total += reduced / 8
    if error_feedback and node_size < world:
        mean_error = (total - exact)[matrices].norm() / exact[matrices].norm()
        assert mean_error < error / 3, (mean_error, error)
        intra, inter = large.scatter._layouts_for(large.numel, dtype)
        assert large.scatter.residual.nbytes == (world // node_size - 1) * intra.codes_nbytes


REDUCTIONS = [
    (2, 2, False, torch.float32),
    (2, 1, False, torch.float32),
    (2, 1, False, torch.bfloat16),
    (3, 1, True, torch.float32),  # the middle node has slots for nodes on either side
    (4, 2, False, torch.float32),
    (4, 2, True, torch.float32),
    (4, 2, False, torch.bfloat16),
]


@pytest.mark.parametrize(("world", "node_size", "error_feedback", "dtype"), REDUCTIONS)
def test_absorbed_gradients_are_exact_and_change_no_others(
    world: int, node_size: int, error_feedback: bool, dtype: torch.dtype
) -> None:
    run_ranks(_reduces, world, node_size, error_feedback, dtype)


def _nonfinite(rank: int, world: int, node_size: int, error_feedback: bool) -> None:
    for value in (float("nan"), float("inf"), float("-inf")):
        reduction = Reduction(node_size, error_feedback=error_feedback)
        good = Reduction(node_size, error_feedback=error_feedback)
        slots = reduction.slots(large=True)
        expected = good(slots)
        at = reduction.norms[1].start + 1
        if rank == world - 1:
            slots[0, at] = value  # of one rank, for rank 0
        reduced = reduction(slots)
        if rank == 0:
            expected[at] = value
        assert torch.equal(reduced.nan_to_num(1.5), expected.nan_to_num(1.5)), value
        assert torch.isfinite(reduced).all() == (rank != 0)
        assert torch.isfinite(reduction(reduction.slots(large=True))).all()


@pytest.mark.parametrize(
    ("world", "node_size", "error_feedback"),
    [(2, 2, False), (2, 1, False), (4, 2, False), (4, 2, True)],
)
def test_a_bad_absorbed_gradient_arrives_and_stays_alone(
    world: int, node_size: int, error_feedback: bool
) -> None:
    run_ranks(_nonfinite, world, node_size, error_feedback)


def _measures(rank: int, world: int, node_size: int) -> None:
    reduction = Reduction(node_size)
    slots = reduction.slots(large=True)
    exact = reduction.mean(slots)
    reduction.communication.measure_errors = True
    before = reduction.communication.traffic()
    reduced = reduction(slots)
    counted = reduction.communication.traffic().since(before)
    errors = reduction.communication.errors()
    norm, error = exact.square().sum(), (reduced - exact).square().sum()
    torch.testing.assert_close(errors.gradients_squared_norm, norm.item(), rtol=1e-4, atol=0)
    torch.testing.assert_close(errors.gradients_squared_error, error.item(), rtol=1e-3, atol=0)
    assert norm > 1e6, "the absorbed values are missing"
    assert counted.gradients_elements == (world // node_size - 1) * reduction.numel
    inter = reduction.scatter._layouts_for(reduction.numel, torch.float32)[1]
    assert counted.gradients_messages == (world // node_size - 1) * inter.nbytes


@pytest.mark.parametrize("node_size", [1, 2])
def test_absorbed_gradients_are_measured_and_counted(node_size: int) -> None:
    run_ranks(_measures, 2 * node_size, node_size)


def _backward(rank: int, world: int, node_size: int, frozen: tuple[str, ...]) -> None:
    """Through FSDP2, which packs the slots into a buffer that the collective overwrites."""
    found = []
    for config in (None, GradientQuantization()):
        model, _ = build(node_size, gradients=config, frozen=frozen)
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(8, WIDTH, generator=generator).to(device())
        model(x).square().mean().backward()
        found.append(
            {n: p.grad.full_tensor() for n, p in model.named_parameters() if n not in frozen}
        )
    exact, quantized = found
    for name, gradient in exact.items():
        if gradient.ndim == 1:
            torch.testing.assert_close(quantized[name], gradient, rtol=1e-5, atol=1e-7)
        else:
            error = (quantized[name] - gradient).norm() / gradient.norm()
            assert 1e-4 < error < 0.25, (name, error)


@pytest.mark.parametrize("frozen", [(), ("norm1",), ("b", "norm2")])
@pytest.mark.parametrize(("world", "node_size"), [(2, 1), (4, 2)])
def test_gradients_of_backward(world: int, node_size: int, frozen: tuple[str, ...]) -> None:
    run_ranks(_backward, world, node_size, frozen)


def _operators(rank: int, world: int, node_size: int, limit: int) -> None:
    reduction = Reduction(node_size)
    slots = reduction.slots(large=True).view(-1)
    result = torch.empty(reduction.numel)
    counts = []
    for _ in range(3):
        with Counter() as counter:
            reduction.scatter(result, slots, dist.group.WORLD, dist.ReduceOp.AVG)
        counts.append(counter.count)
    assert 30 < counts[-1] <= limit, counts


@pytest.mark.parametrize(("world", "node_size", "limit"), [(2, 1, 45), (2, 2, 36), (4, 2, 77)])
def test_a_reduction_is_a_bounded_number_of_operators(
    world: int, node_size: int, limit: int
) -> None:
    run_ranks(_operators, world, node_size, limit, poison=False)  # which fills what is allocated


# --- weights ------------------------------------------------------------------------------------


def _gathered(model: Any) -> dict[str, Tensor]:
    model.unshard()
    values = {name: p.detach().clone().float() for name, p in model.named_parameters()}
    model.reshard()
    return values


def _main(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: p.full_tensor().detach().to(dtype).float() for n, p in model.named_parameters()}


@torch.no_grad()
def _update(model: Any, frozen: tuple[str, ...] = ()) -> None:
    """As an optimizer would: matrices a little, 1-D parameters a lot."""
    for name, parameter in model.named_parameters():
        if name not in frozen:
            noise = torch.randn_like(parameter.to_local())
            parameter.to_local().add_(noise * (0.01 if parameter.ndim == 2 else 1e3))


def _same_on_all_ranks(values: dict[str, Tensor]) -> bool:
    flat = torch.cat([value.flatten() for value in values.values()])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    return all(torch.equal(flat, other) for other in every)


def _exchanges(
    rank: int,
    world: int,
    node_size: int,
    replica: str,
    dtype: torch.dtype,
    frozen: tuple[str, ...],
) -> None:
    config = WeightQuantization(replica=replica)  # type: ignore[arg-type]
    model, communication = build(node_size, weights=config, dtype=dtype, frozen=frozen)
    _gathered(model)
    communication.measure_errors = True
    layout = communication._units[0].gather._current_layout(dtype)  # type: ignore[union-attr]
    absorbed = {(): 2, ("norm1",): 1, ("norm1", "b"): 0, ("a", "b"): 0}[frozen]
    assert len(layout.absorbed) == absorbed
    torch.manual_seed(rank)
    for _ in range(3):
        _update(model, frozen)
        communication.note_optimizer_step()
        values, main = _gathered(model), _main(model, dtype)
        assert _same_on_all_ranks(values)
        for name, value in values.items():
            if value.ndim == 1 or name in frozen:
                assert torch.equal(value, main[name]), name
            else:
                gap = (value - main[name]).abs().max()
                assert 1e-4 < gap < 0.012, (name, gap)
        sums = torch.tensor(communication.errors(), dtype=torch.float64, device=device())
        dist.all_reduce(sums)
        squares = sum(m.square().sum() for n, m in main.items() if n not in frozen)
        torch.testing.assert_close(sums[1].item(), squares.item(), rtol=1e-3, atol=0)
    assert communication.traffic().exchanges == 3
    assert communication.check_replicas(on_drift="raise") == []
    assert communication.outside_writes == {}


EXCHANGES = [
    (2, 1, "full", torch.float32, ()),
    (2, 2, "full", torch.bfloat16, ()),
    (2, 1, "node", torch.bfloat16, ()),
    (4, 2, "full", torch.bfloat16, ()),
    (4, 2, "node", torch.bfloat16, ()),
    (2, 1, "full", torch.bfloat16, ("norm1",)),
    (2, 1, "node", torch.bfloat16, ("norm1", "b")),
    (2, 1, "full", torch.bfloat16, ("a", "b")),
]


@pytest.mark.parametrize(("world", "node_size", "replica", "dtype", "frozen"), EXCHANGES)
def test_absorbed_weights_arrive_exactly(
    world: int, node_size: int, replica: str, dtype: torch.dtype, frozen: tuple[str, ...]
) -> None:
    run_ranks(_exchanges, world, node_size, replica, dtype, frozen)


def _plain_weights(rank: int, world: int, node_size: int, dtype: torch.dtype) -> None:
    model, _ = build(node_size, weights=WeightQuantization(method="qW"), dtype=dtype)
    torch.manual_seed(rank)
    for _ in range(2):
        _update(model)
        values, main = _gathered(model), _main(model, dtype)
        assert _same_on_all_ranks(values)
        for name, value in values.items():
            if value.ndim == 1:
                assert torch.equal(value, main[name]), name
            else:
                gap = (value - main[name]).abs().max()
                assert 1e-3 < gap < main[name].abs().max() / 7, (name, gap)


@pytest.mark.parametrize(
    ("world", "node_size", "dtype"), [(2, 1, torch.float32), (4, 2, torch.bfloat16)]
)
def test_absorbed_weights_arrive_exactly_without_replica(
    world: int, node_size: int, dtype: torch.dtype
) -> None:
    run_ranks(_plain_weights, world, node_size, dtype)


def _infinite_weights(rank: int, world: int, replica: str) -> None:
    """Some models mask with weights of minus infinity; they must not reach the next matrix."""
    config = WeightQuantization(replica=replica)  # type: ignore[arg-type]
    model, communication = build(1, weights=config)
    _gathered(model)
    torch.manual_seed(rank)
    for _ in range(2):
        _update(model)
        with torch.no_grad():
            model.norm1.to_local()[3] = float("-inf")
        communication.note_optimizer_step()
        values, main = _gathered(model), _main(model, torch.float32)
        assert values["norm1"].isinf().sum() == world
        assert torch.equal(values["norm1"], main["norm1"])
        for name in ("a", "b", "c"):
            assert (values[name] - main[name]).abs().max() < 0.012, name


@pytest.mark.parametrize("replica", ["full", "node"])
def test_infinite_absorbed_weights_stay_alone(replica: str) -> None:
    run_ranks(_infinite_weights, 2, replica)


def _unfinished(rank: int, world: int) -> None:
    """What a checkpoint written between the start and the end of an exchange would hold."""
    model, communication = build(1, weights=WeightQuantization())
    _gathered(model)
    gather: Any = communication._units[0].gather
    torch.manual_seed(rank)
    _update(model)
    exchange = gather.start_exchange()
    held = gather.replica_slots()
    assert all(torch.equal(held[n].to_local(), getattr(model, n).to_local()) for n in NORMS)
    gather.finish_exchange(exchange)

    def fail(*args: Any, **kwargs: Any) -> Tensor:
        raise KeyboardInterrupt

    _update(model)
    all_gather.encode = fail
    with pytest.raises(KeyboardInterrupt):
        gather.start_exchange()
    held = gather.replica_slots()
    assert all(held[name].to_local().all() for name in NORMS)


def test_an_exchange_that_does_not_end_leaves_no_zeros() -> None:
    run_ranks(_unfinished, 2)


# --- the same on GPUs -----------------------------------------------------------------------------


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (_reduces, (1, False, torch.float32)),
        (_reduces, (1, True, torch.float32)),
        (_reduces, (2, False, torch.bfloat16)),
        (_nonfinite, (1, False)),
        (_backward, (1, ())),
        (_exchanges, (1, "full", torch.bfloat16, ())),
        (_exchanges, (1, "node", torch.bfloat16, ("norm1",))),
        (_plain_weights, (1, torch.bfloat16)),
        (_infinite_weights, ("full",)),
    ],
)
def test_on_two_gpus(fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    run_ranks(fn, 2, *args, backend="nccl", timeout=200)


@pytest.mark.gpu(4)
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (_reduces, (2, False, torch.float32)),
        (_reduces, (2, True, torch.bfloat16)),
        (_nonfinite, (2, True)),
        (_backward, (2, ())),
        (_exchanges, (2, "full", torch.bfloat16, ())),
        (_exchanges, (2, "node", torch.bfloat16, ())),
    ],
)
def test_on_four_gpus(fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    run_ranks(fn, 4, *args, backend="nccl", timeout=200)
