"""Gradients with error feedback, on gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lq_testing import run_ranks
from lq_testing.devices import device
from lq_testing.fsdp2 import pretend_ranks
from lq_testing.lightning_models import TinyModule, loader, trainer
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lq_lightning import QuantizedFSDPStrategy
from lq_lightning.data_parallel import (
    GradientQuantization,
    QuantizedCommunication,
    Topology,
    quantize_communication,
)

SIZES = (96, 160, 40)


def build(
    node_size: int,
    error_feedback: bool = True,
    policy: MixedPrecisionPolicy | None = None,
    **config: Any,
) -> tuple[nn.Module, QuantizedCommunication]:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in zip(SIZES, SIZES[1:], strict=False)]
    model = nn.Sequential(*layers).to(device())
    policy = policy or MixedPrecisionPolicy()
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    communication = quantize_communication(
        model,
        weights=None,
        gradients=GradientQuantization(error_feedback=error_feedback, **config),
        topology=Topology.of(node_size=node_size),
        min_quantized_numel=256,
    )
    return model, communication


def gradients(model: nn.Module, scale: float = 1.0) -> Tensor:
    """The whole averaged gradient of the quantized parameters, for this rank's fixed input."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(8, SIZES[0], generator=generator).to(device())
    model.zero_grad()
    loss: Tensor = (model(x) ** 2).mean() * scale
    loss.backward()
    whole = [p.grad.full_tensor() for p in model.parameters() if p.ndim > 1]
    return torch.cat([gradient.flatten() for gradient in whole])


def _sums_are_exact(rank: int, world: int, node_size: int, rounding: str, method: str) -> None:
    exact = gradients(build(world, method="QuanGrad")[0])  # no messages between nodes
    config = {"method": method, "rounding": rounding, "intra_bits": 8}
    model, communication = build(node_size, **config)
    single, total, rounds = 0.0, torch.zeros_like(exact), 24
    for _ in range(rounds):
        reduced = gradients(model)
        single = float((reduced - exact).norm() / exact.norm())
        total += reduced
    error = float((total / rounds - exact).norm() / exact.norm())
    assert single > 0.08, "4-bit codes must err visibly"
    # what is left over is the residual of the last call, and the error of 8-bit codes
    assert error < 1.5 * single / rounds + 0.01, (error, single)
    assert "error feedback" in communication.plan.summary()


SUMS = [
    (2, 1, "stochastic", "TLq"),
    (3, 1, "stochastic", "ULq"),
    (6, 2, "nearest", "TLq-HS"),  # the middle node has messages for nodes on either side
]


@pytest.mark.parametrize(("world", "node_size", "rounding", "method"), SUMS)
def test_what_one_step_loses_the_next_ones_bring(
    world: int, node_size: int, rounding: str, method: str
) -> None:
    run_ranks(_sums_are_exact, world, node_size, rounding, method)


def _nonfinite(rank: int, world: int, node_size: int) -> None:
    model, _ = build(node_size, rounding="nearest")
    gradients(model)
    for value in (float("nan"), float("inf")):
        bad = gradients(model, scale=value if rank == world - 1 else 1.0)
        assert not torch.isfinite(bad).any()
        assert torch.isfinite(gradients(model)).all()


def test_a_bad_gradient_does_not_stay() -> None:
    run_ranks(_nonfinite, 2, 1)


def _dropped(rank: int, world: int) -> None:
    model, communication = build(2, rounding="nearest")
    held = [unit.scatter.residual for unit in communication._units]
    assert all(residual.nbytes == 0 for residual in held)
    first, second = gradients(model), gradients(model)
    assert not torch.equal(first, second)
    numel = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    codes = sum(residual.nbytes for residual in held)
    # 1.03 / node_size for each node but this one, with padding
    assert codes < 1.2 * numel / 2 / 2
    communication.drop_residuals()
    assert torch.equal(gradients(model), first)
    communication.load_state_dict(communication.state_dict(), {})
    assert torch.equal(gradients(model), first)


def test_dropped_residuals_start_from_zero() -> None:
    run_ranks(_dropped, 4)


def _changes(rank: int, world: int) -> None:
    """A parameter that gets no gradient for a while changes what the messages hold."""
    _other_parameters(rank, world)
    model, _ = build(1, rounding="nearest")
    first = gradients(model)
    for layer in model:
        layer.weight.requires_grad_(False)
    gradients_of_biases = [p for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    (model(torch.ones(1, SIZES[0], device=device())) ** 2).mean().backward()
    assert all(p.grad is not None for p in gradients_of_biases)
    for layer in model:
        layer.weight.requires_grad_(True)
    assert torch.equal(gradients(model), first)


def test_other_parameters_start_from_zero() -> None:
    run_ranks(_changes, 2)


def _other_parameters(rank: int, world: int) -> None:
    """Of two parameters of one size, only one at a time gets gradients."""

    def gradient(model: nn.Module, trained: int) -> Tensor:
        for index, layer in enumerate(model):
            layer.weight.requires_grad_(index == trained)
        model.zero_grad()
        generator = torch.Generator().manual_seed(rank)
        (model(torch.randn(8, 64, generator=generator)) ** 2).mean().backward()
        grad: Any = model[trained].weight.grad
        whole: Tensor = grad.full_tensor()
        return whole

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
        fully_shard(model)
        quantize_communication(
            model,
            weights=None,
            gradients=GradientQuantization(rounding="nearest", error_feedback=True),
            topology=Topology.of(node_size=1),
            min_quantized_numel=256,
        )
        return model

    alone = gradient(make(), 1)
    model = make()
    gradient(model, 0)
    assert torch.equal(gradient(model, 1), alone)


def _bf16(rank: int, world: int, node_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    exact = gradients(build(world, method="QuanGrad", policy=policy)[0])
    model, _ = build(node_size, rounding="nearest", policy=policy)
    rounds = 16
    total = torch.stack([gradients(model).float() for _ in range(rounds)]).mean(0)
    assert (total - exact).norm() < 0.03 * exact.norm()


def test_reductions_in_bf16() -> None:
    run_ranks(_bf16, 2, 1)


def test_one_node_keeps_no_residual() -> None:
    pretend_ranks(2)
    for node_size, error_feedback in ((2, True), (1, False)):
        _, communication = build(node_size, error_feedback)
        assert all(unit.scatter.residual is None for unit in communication._units)
        assert "error feedback" not in communication.plan.summary()


class Bursting(TinyModule):
    """One rank has an infinite loss in the second step."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(tokens, batch_idx)
        return loss * float("inf") if batch_idx == 1 and self.global_rank == 1 else loss


class Held(Callback):
    """Whether anything is kept after each step."""

    def __init__(self) -> None:
        self.values: list[bool] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        kept = [unit.scatter.residual._messages for unit in trainer.strategy.communication._units]
        self.values.append(any(bool(m.any()) for m in kept))


def _skips(rank: int, world: int, root: str) -> None:
    config = GradientQuantization(rounding="nearest", error_feedback=True)
    options: dict[str, Any] = {"gradients": config, "min_quantized_numel": 64}
    strategy = QuantizedFSDPStrategy(**options, node_size=1, skip_nonfinite_steps=True)
    held = Held()
    trainer(strategy, root, callbacks=[held]).fit(Bursting(), loader())
    assert strategy.num_skipped_steps == 1
    assert held.values == [True, False, True, True]
    with pytest.warns(UserWarning, match="no effect on one node") if rank == 0 else nullcontext():
        trainer(QuantizedFSDPStrategy(**options), root).fit(TinyModule(), loader(8))


def test_nothing_is_kept_of_a_skipped_step(tmp_path: Path) -> None:
    run_ranks(_skips, 2, str(tmp_path), backend=None, torchrun=True)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("fn", "args"),
    [(_sums_are_exact, (1, "nearest", "TLq-HS")), (_nonfinite, (1,)), (_changes, ())],
)
def test_on_two_gpus(fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    run_ranks(fn, 2, *args, backend="nccl", timeout=200)


@pytest.mark.gpu(4)
@pytest.mark.parametrize(
    ("fn", "args"),
    [(_sums_are_exact, (2, "nearest", "TLq-HS")), (_nonfinite, (2,)), (_dropped, ())],
)
def test_on_four_gpus(fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    run_ranks(fn, 4, *args, backend="nccl", timeout=200)
