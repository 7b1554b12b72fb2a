"""Full-precision gradients within quantized runs (norms between matrices), on gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.devices import device
from lq_testing.fsdp2 import UnitReduction
from lq_testing.normed import NORMS, WIDTH, build_normed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lq_lightning._compat.fsdp2 import PackedGradients
from lq_lightning.data_parallel import GradientQuantization


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


class Reduction(UnitReduction):
    """The reduce-scatter of the unit, and slots for it with large values in place of norms."""

    def __init__(self, node_size: int, dtype: torch.dtype = torch.float32) -> None:
        _, communication = build_normed(node_size, gradients=GradientQuantization())
        super().__init__(communication, dtype=dtype)
        self.matrices = torch.ones(self.numel, dtype=torch.bool, device=device())
        for name in ("first", "last", *NORMS):
            self.matrices[self.columns(name)] = False
        self.norms = [self.columns(name) for name in NORMS]
        assert len(self.layouts.intra.quantized) == 1, "the norms must lie within one run"
        assert self.layouts.intra.numel == self.numel

    def columns(self, name: str) -> slice:
        segment = self.segments[name]
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


def _reduces(rank: int, world: int, node_size: int, dtype: torch.dtype) -> None:
    large, small = Reduction(node_size, dtype), Reduction(node_size, dtype)
    values, quiet = large.slots(large=True), small.slots(large=False)
    exact, matrices = large.exact(values), large.matrices
    assert exact[large.norms[0]].abs().max() > 400
    exactly = {"rtol": 1e-6, "atol": 1e-3} if world == 3 else {"rtol": 0, "atol": 0}
    for _ in range(2):
        reduced, alone = large(values), small(quiet)
        torch.testing.assert_close(reduced[~matrices].float(), exact[~matrices], **exactly)
        assert torch.equal(reduced[matrices], alone[matrices]), "a norm changes its neighbours"
        error = (reduced.float() - exact)[matrices].norm() / exact[matrices].norm()
        assert error < 0.2, error


REDUCTIONS = [
    (2, 2, torch.float32),
    (2, 1, torch.bfloat16),
    (3, 1, torch.float32),  # the middle node has slots for nodes on either side
    (4, 2, torch.float32),
    (4, 2, torch.bfloat16),
]


@pytest.mark.parametrize(("world", "node_size", "dtype"), REDUCTIONS)
def test_gradients_of_gaps_are_exact_and_change_no_others(
    world: int, node_size: int, dtype: torch.dtype
) -> None:
    run_ranks(_reduces, world, node_size, dtype)


def _nonfinite(rank: int, world: int, node_size: int) -> None:
    for value in (float("nan"), float("-inf")):
        reduction, good = Reduction(node_size), Reduction(node_size)
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


@pytest.mark.parametrize(("world", "node_size"), [(2, 2), (2, 1), (4, 2)])
def test_a_bad_gradient_of_a_gap_arrives_and_stays_alone(world: int, node_size: int) -> None:
    run_ranks(_nonfinite, world, node_size)


def _measures(rank: int, world: int, node_size: int) -> None:
    reduction = Reduction(node_size)
    slots = reduction.slots(large=True)
    exact = reduction.exact(slots)
    reduction.communication.measure_errors = True
    before = reduction.communication.traffic()
    reduced = reduction(slots)
    counted = reduction.communication.traffic().since(before)
    errors = reduction.communication.errors()
    norm, error = exact.square().sum(), (reduced - exact).square().sum()
    torch.testing.assert_close(errors.gradients_squared_norm, norm.item(), rtol=1e-4, atol=0)
    torch.testing.assert_close(errors.gradients_squared_error, error.item(), rtol=1e-3, atol=0)
    assert norm > 1e6, "the values of gaps are missing"
    others = world // node_size - 1
    assert counted.gradients_elements == others * reduction.numel
    assert counted.gradients_messages == others * reduction.layouts.inter.nbytes


def test_gradients_of_gaps_are_measured_and_counted() -> None:
    run_ranks(_measures, 4, 2)


def _backward(rank: int, world: int, node_size: int, frozen: tuple[str, ...]) -> None:
    """Through FSDP2, which packs the slots into a buffer that the collective overwrites."""
    found = []
    for config in (None, GradientQuantization()):
        model, _ = build_normed(node_size, gradients=config, frozen=frozen)
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


@pytest.mark.parametrize(
    ("world", "node_size", "frozen"), [(2, 1, ()), (2, 1, ("b", "norm2")), (4, 2, ("norm1",))]
)
def test_gradients_of_backward(world: int, node_size: int, frozen: tuple[str, ...]) -> None:
    run_ranks(_backward, world, node_size, frozen)


def _operators(rank: int, world: int, node_size: int, limit: int) -> None:
    reduction = Reduction(node_size)
    slots = reduction.slots(large=True)
    result = torch.empty(reduction.numel)
    counts = []
    for _ in range(3):
        reduction.scatter.expect(PackedGradients(reduction.packed, False))
        with Counter() as counter:
            reduction.scatter(result, slots.view(-1), dist.group.WORLD, dist.ReduceOp.AVG)
        counts.append(counter.count)
    assert 30 < counts[-1] <= limit, counts


@pytest.mark.parametrize(("world", "node_size", "limit"), [(2, 1, 45), (2, 2, 36), (4, 2, 77)])
def test_a_reduction_is_a_bounded_number_of_operators(
    world: int, node_size: int, limit: int
) -> None:
    run_ranks(_operators, world, node_size, limit, poison=False)  # which fills what is allocated


# --- the same on GPUs ---------------------------------------------------------------------------


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (_reduces, (1, torch.float32)),
        (_reduces, (2, torch.bfloat16)),
        (_nonfinite, (1,)),
        (_backward, (1, ())),
    ],
)
def test_on_two_gpus(fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    run_ranks(fn, 2, *args, backend="nccl", timeout=200)


@pytest.mark.gpu(4)
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (_reduces, (2, torch.float32)),
        (_reduces, (2, torch.bfloat16)),
        (_nonfinite, (2,)),
        (_backward, (2, ())),
    ],
)
def test_on_four_gpus(fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    run_ranks(fn, 4, *args, backend="nccl", timeout=200)
