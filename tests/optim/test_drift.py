"""Coded states over many steps: nothing drifts, and no update is larger than fp32's allow."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lq_lightning.optim import (
    OptimizerQuantization,
    QuantizedAdamW,
    QuantizedLion,
    QuantizedOptimizer,
    QuantizedSGD,
)

FORMATS = ["expanded_fp8", "dynamic8"]


def config(name: str, **changes: Any) -> OptimizerQuantization:
    return OptimizerQuantization(first_moment=name, second_moment=name, min_numel=0, **changes)  # type: ignore[arg-type]


def update_ratios(name: str, beta2: float, steps: int, falls: bool) -> tuple[float, float]:
    """Return mean magnitudes and norms of the last tenth's updates beside those of fp32 states."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.exp(torch.randn(16, 128, generator=generator))
    params = [nn.Parameter(torch.zeros(16, 128)) for _ in range(2)]
    options: dict[str, Any] = {"lr": 1.0, "betas": (0.9, beta2), "weight_decay": 0.0}
    optimizers = [
        QuantizedAdamW([params[0]], quantization=config(name), **options),
        torch.optim.AdamW([params[1]], **options),
    ]
    means, squares = [0.0, 0.0], [0.0, 0.0]
    every = steps // 200  # 20 samples
    for step in range(1, steps + 1):
        fallen = 0.1 if falls and step > steps // 2 else 1.0
        grad = fallen * scale * torch.randn(16, 128, generator=generator)
        for index, (param, optimizer) in enumerate(zip(params, optimizers, strict=True)):
            param.grad = grad.clone()
            with torch.no_grad():
                param.zero_()  # so that a step leaves its update
            optimizer.step()
            if step > steps - every * 20 and step % every == 0:
                means[index] += float(param.detach().abs().mean())
                squares[index] += float(param.detach().square().mean())
    return means[0] / means[1], (squares[0] / squares[1]) ** 0.5


# With codes rounded to the nearest the ratios were 0.65, 0.2 and 0.8.
@pytest.mark.parametrize(
    ("name", "beta2", "steps", "falls"),
    [
        ("expanded_fp8", 0.999, 1200, False),
        ("expanded_fp8", 0.99, 1000, True),
        ("dynamic8", 0.99, 600, False),
    ],
)
def test_updates_stay_as_large_as_those_of_fp32(
    name: str, beta2: float, steps: int, falls: bool
) -> None:
    mean, norm = update_ratios(name, beta2, steps, falls)
    assert abs(mean - 1) < 0.01
    assert abs(norm - 1) < 0.01


@pytest.mark.parametrize("beta", [0.9, 0.99])
def test_momentum_follows_a_constant_gradient(beta: float) -> None:
    """Up to it, and down to a tenth of it, where rounding to the nearest stops at the start."""
    weight = nn.Parameter(torch.zeros(16, 128))
    optimizer = QuantizedLion([weight], 0.0, (0.9, beta), quantization=config("expanded_fp8"))
    size = torch.exp(torch.randn(16, 128))
    steps = round(6 / (1 - beta))
    value = torch.zeros(())
    for grad in (size, 0.1 * size):
        for _ in range(steps):
            value = beta * value + (1 - beta) * float(grad[0, 0] / size[0, 0])
            weight.grad = grad
            optimizer.step()
        state = optimizer.full_precision_state_dict()["state"][0]["exp_avg"]
        assert abs((state / size).mean() / value - 1) < 0.02


# --- updates that would be too large --------------------------------------------------------------


def largest_updates(name: str, grads: list[Tensor], eps: float = 1e-8) -> list[tuple[float, float]]:
    """Largest updates of each step, with codes and in fp32."""
    params = [nn.Parameter(torch.zeros(grads[0].shape)) for _ in range(2)]
    options: dict[str, Any] = {"lr": 1.0, "eps": eps, "weight_decay": 0.0}
    optimizers = [
        QuantizedAdamW([params[0]], quantization=config(name), **options),
        torch.optim.AdamW([params[1]], **options),
    ]
    found = []
    for grad in grads:
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = grad.clone()
            with torch.no_grad():
                param.zero_()
            optimizer.step()
        found.append((params[0].abs().max().item(), params[1].abs().max().item()))
    return found


@pytest.mark.parametrize("sigma", [4.0, 8.0, 12.0, 16.0, 20.0])
@pytest.mark.parametrize("name", FORMATS)
def test_wide_groups_do_not_explode(name: str, sigma: float) -> None:
    """Second moments whose logarithms have this standard deviation; 1,180 times fp32's before."""
    size = torch.exp(sigma / 2 * torch.randn(32, 128))
    grads = [size * torch.randn(32, 128) for _ in range(20)]
    for coded, exact in largest_updates(name, grads, eps=1e-15):
        assert coded <= 2 * exact


@pytest.mark.parametrize("name", FORMATS)
def test_a_spike_does_not_make_the_rest_explode(name: str) -> None:
    grads = [1e-3 * torch.randn(8, 128) for _ in range(60)]
    grads[5][:, 7] = 1e5
    for coded, exact in largest_updates(name, grads):
        assert coded <= 2 * exact


def test_elements_without_gradient_stay_where_they_are() -> None:
    """Their moments are zero; those that lose their gradient come to rest as in fp32."""
    grads = [torch.randn(8, 128) for _ in range(150)]
    for step, grad in enumerate(grads):
        grad[:, :32] = 0
        if step >= 50:
            grad[:, 32:64] = 0
    weight = nn.Parameter(torch.zeros(8, 128))
    optimizer = QuantizedAdamW([weight], 1.0, weight_decay=0.0, quantization=config("expanded_fp8"))
    for grad in grads:
        with torch.no_grad():
            weight.zero_()
        weight.grad = grad
        optimizer.step()
        assert (weight[:, :32] == 0).all()
    assert (weight[:, 32:64].abs() < 1e-3).all()
    assert (weight[:, 64:] != 0).all()


# --- noise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [QuantizedSGD, QuantizedLion])
def test_bf16_weights_without_adam_get_new_noise_in_every_step(
    make: type[QuantizedOptimizer],
) -> None:
    """Steps of a quarter of what bf16 resolves; with the same noise always the same were moved."""
    weight = nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    chosen = config("expanded_fp8", stochastic_rounding=True)
    lr = 2.0**-9 if make is QuantizedLion else 2.0**-10  # whose momentum doubles the gradient
    options = {} if make is QuantizedLion else {"momentum": 0.5}
    optimizer = make([weight], lr, quantization=chosen, **options)  # type: ignore[call-arg]
    for _ in range(64):
        weight.grad = torch.full_like(weight, -1.0)
        optimizer.step()
    moved = (weight.float() - 1) * 2**7
    assert abs(moved.mean() - 16) < 1
    assert moved.std() < 5


def test_every_parameter_and_seed_has_its_own_noise() -> None:
    grad = torch.randn(8, 128)
    codes = []
    for seed in (0, 0, 1):
        weights = [nn.Parameter(torch.zeros(8, 128)) for _ in range(2)]
        optimizer = QuantizedSGD(weights, 0.1, quantization=config("expanded_fp8", seed=seed))
        for _ in range(2):
            for weight in weights:
                weight.grad = grad.clone()
            optimizer.step()
        codes.append([optimizer.state[weight]["momentum_buffer_codes"] for weight in weights])
    assert torch.equal(codes[0][0], codes[1][0])
    for other in (codes[0][1], codes[2][0]):
        assert 0.05 < (codes[0][0] != other).float().mean() < 0.95


def test_resumed_momentum_goes_on_with_its_noise() -> None:
    torch.manual_seed(0)
    grads = [torch.randn(8, 128) for _ in range(6)]
    weights = [nn.Parameter(torch.zeros(8, 128)) for _ in range(2)]
    optimizers = [QuantizedSGD([w], 0.1, quantization=config("expanded_fp8")) for w in weights]
    for step, grad in enumerate(grads):
        if step == 3:
            optimizers[1] = QuantizedSGD([weights[1]], 0.1, quantization=config("expanded_fp8"))
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = grad.clone()
            optimizer.step()
    assert torch.equal(*weights)
