"""Full-precision weights and gradients within quantized runs (norms between matrices), on ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lq_testing.cases import on_both, on_gpus, on_ranks, rank_tests
from lq_testing.devices import device
from lq_testing.fsdp2 import UnitReduction, same_on_all_ranks
from lq_testing.normed import NORMS, WIDTH, build_normed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lq_lightning._compat.fsdp2 import PackedGradients
from lq_lightning.data_parallel import GradientQuantization, WeightQuantization


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


def _exchanges(
    rank: int, world: int, node_size: int, replica: str, dtype: torch.dtype, frozen: tuple[str, ...]
) -> None:
    config = WeightQuantization(replica=replica)  # type: ignore[arg-type]
    model, communication = build_normed(node_size, weights=config, dtype=dtype, frozen=frozen)
    _gathered(model)
    communication.measure_errors = True
    layout = communication._units[0].gather._current_layout(dtype)  # type: ignore[union-attr]
    absorbed = {(): 2, ("norm1",): 1, ("norm1", "b"): 0}[frozen]
    assert len(layout.gap_indices) == absorbed
    torch.manual_seed(rank)
    for _ in range(3):
        _update(model, frozen)
        communication.note_optimizer_step()
        values, main = _gathered(model), _main(model, dtype)
        assert same_on_all_ranks(list(values.values()))
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
    assert communication.external_weight_updates == {}


def _infinite_weights(rank: int, world: int, replica: str) -> None:
    """Some models mask with weights of minus infinity; they must not reach the next matrix."""
    config = WeightQuantization(replica=replica)  # type: ignore[arg-type]
    model, communication = build_normed(1, weights=config)
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


test_on_ranks = rank_tests(
    on_ranks(_exchanges, 2, 1, "full", torch.float32, ()),
    on_both(_exchanges, 4, 2, "full", torch.bfloat16, ()),
    on_both(_exchanges, 4, 2, "node", torch.bfloat16, ()),
    on_ranks(_exchanges, 2, 1, "full", torch.bfloat16, ("norm1",)),
    on_ranks(_exchanges, 2, 1, "node", torch.bfloat16, ("norm1", "b")),
    on_ranks(_infinite_weights, 2, "node"),
    on_gpus(_exchanges, 2, 1, "full", torch.bfloat16, ()),
    on_gpus(_exchanges, 2, 1, "node", torch.bfloat16, ("norm1",)),
    on_gpus(_infinite_weights, 2, "full"),
    on_ranks(_reduces, 2, 2, torch.float32),
    on_ranks(_reduces, 2, 1, torch.bfloat16),
    on_ranks(_reduces, 3, 1, torch.float32),
    on_both(_reduces, 4, 2, torch.float32),
    on_both(_reduces, 4, 2, torch.bfloat16),
    on_ranks(_nonfinite, 2, 2),
    on_both(_nonfinite, 2, 1),
    on_both(_nonfinite, 4, 2),
    on_ranks(_measures, 4, 2),
    on_both(_backward, 2, 1, ()),
    on_ranks(_backward, 2, 1, ("b", "norm2")),
    on_ranks(_backward, 4, 2, ("norm1",)),
    on_ranks(_operators, 2, 1, 45, poison=False),
    on_ranks(_operators, 2, 2, 36, poison=False),
    on_ranks(_operators, 4, 2, 77, poison=False),
    on_gpus(_reduces, 2, 1, torch.float32),
    on_gpus(_reduces, 2, 2, torch.bfloat16),
    on_gpus(_backward, 4, 2, ()),
)
