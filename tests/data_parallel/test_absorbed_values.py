"""Full-precision weights within quantized runs (norms between matrices), on gloo ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lq_testing.cases import on_both, on_gpus, on_ranks, rank_tests
from lq_testing.devices import device
from lq_testing.fsdp2 import same_on_all_ranks
from lq_testing.normed import build_normed
from torch import Tensor

from lq_lightning.data_parallel import WeightQuantization


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
    rank: int,
    world: int,
    node_size: int,
    replica: str,
    dtype: torch.dtype,
    frozen: tuple[str, ...],
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


def _plain_weights(rank: int, world: int, node_size: int, dtype: torch.dtype) -> None:
    model, _ = build_normed(node_size, weights=WeightQuantization(method="qW"), dtype=dtype)
    torch.manual_seed(rank)
    for _ in range(2):
        _update(model)
        values, main = _gathered(model), _main(model, dtype)
        assert same_on_all_ranks(list(values.values()))
        for name, value in values.items():
            if value.ndim == 1:
                assert torch.equal(value, main[name]), name
            else:
                gap = (value - main[name]).abs().max()
                assert 1e-3 < gap < main[name].abs().max() / 7, (name, gap)


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


test_on_ranks = rank_tests(
    on_ranks(_exchanges, 2, 1, "full", torch.float32, ()),
    on_both(_exchanges, 4, 2, "full", torch.bfloat16, ()),
    on_both(_exchanges, 4, 2, "node", torch.bfloat16, ()),
    on_ranks(_exchanges, 2, 1, "full", torch.bfloat16, ("norm1",)),
    on_ranks(_exchanges, 2, 1, "node", torch.bfloat16, ("norm1", "b")),
    on_ranks(_plain_weights, 4, 2, torch.bfloat16),
    on_ranks(_infinite_weights, 2, "node"),
    on_gpus(_exchanges, 2, 1, "full", torch.bfloat16, ()),
    on_gpus(_exchanges, 2, 1, "node", torch.bfloat16, ("norm1",)),
    on_gpus(_plain_weights, 2, 1, torch.bfloat16),
    on_gpus(_infinite_weights, 2, "full"),
)
