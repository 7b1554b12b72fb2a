"""Modules that look like others, under every way to keep codes, against the plain module."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from lq_testing.look_alike_mlps import MLP_ROWS, hugging_face_rows
from lq_testing.look_alikes import ROWS, WIDTH, GlobalState, Row
from torch import Tensor, nn

from lq_lightning.activations import ActivationPolicy, quantize_activations

OFF = ActivationPolicy(norm=None, activation=None, checkpoint=None, other=None)
INT8 = ActivationPolicy(norm="int8", activation="int8", linear="int8", other=None)
BY_RULE = ActivationPolicy(norm=None, activation=None, other="int8")
# By name: a policy, what it is compared to, and the largest relative errors of outputs, which have
# no codes, and of gradients. Products in FP8 are compared to products in FP8.
FP8 = replace(OFF, matmul="float8")
Mechanism = tuple["str | ActivationPolicy", ActivationPolicy, float, float]
MECHANISMS: dict[str, Mechanism] = {
    "int8": (INT8, OFF, 2e-6, 0.03),
    "off": (OFF, OFF, 0.0, 0.0),
    "agoq": ("agoq", OFF, 2e-6, 0.25),
    "coat": ("coat", FP8, 5e-3, 0.25),
    "fp8-4bit": ("fp8-4bit", FP8, 5e-3, 0.4),
    "by rule": (BY_RULE, OFF, 2e-6, 0.25),
}
ALL = {**ROWS, **MLP_ROWS}


class _Between(nn.Module):
    """A module with linear layers on both sides, whose gradients read what it makes and takes."""

    def __init__(self, module: nn.Module, width: int) -> None:
        super().__init__()
        self.before, self.module = nn.Linear(width, width), module
        self.behind = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.module(self.before(x)))


def run(model: nn.Module, row: Row, x: Tensor) -> list[Tensor | None]:
    """Output and all gradients, that of the input first."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    GlobalState.calls = 0
    x = x.clone().requires_grad_()
    y = sum(model(x) for _ in range(row.calls))
    assert isinstance(y, Tensor)
    leaves = [x, *model.parameters()]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy, allow_unused=True)]


def errors(row: Row, policy: str | ActivationPolicy, against: ActivationPolicy) -> list[float]:
    """Relative errors of output and gradients with codes; infinite if one of two is None."""
    models, results = [], []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(_Between(row.build(), row.shape[-1]).to(row.dtype).train(row.training))
    x = (row.scale * torch.randn(row.shape)).to(row.dtype)
    for model, recipe in zip(models, (against, policy), strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if recipe is not OFF or recipe is policy:
                quantize_activations(model, recipe)
            if row.after is not None:
                row.after(model.module)
            results.append(run(model, row, x))
    expected, found = results
    largest = max(float(g.double().norm()) for g in expected[1:] if g is not None)
    errors = []
    for y, e in zip(found, expected, strict=True):
        if y is None or e is None:
            errors.append(0.0 if y is e else math.inf)
            continue
        size = max(float(e.double().norm()), 1e-3 * largest)
        errors.append(float((y.double() - e.double()).norm()) / size)
    return errors


def check(row: Row, mechanism: str) -> None:
    policy, against, output, gradient = MECHANISMS[mechanism]
    first, *others = errors(row, policy, against)
    assert first <= max(output, 0.02 * (row.dtype == torch.bfloat16 and output > 0)), first
    assert max(others) <= gradient, others


def _pairs() -> Iterator[Any]:
    """Every row with 8 bits, and with one of the other ways in turn; the rest are slow."""
    others = list(MECHANISMS)[1:]
    for index, row in enumerate(ALL):
        for mechanism in MECHANISMS:
            now = mechanism == "int8" or (index % 6 == 0 and mechanism == others[index // 6 % 5])
            yield pytest.param(row, mechanism, marks=() if now else pytest.mark.slow)


@pytest.mark.parametrize(("row", "mechanism"), list(_pairs()))
def test_look_alike(row: str, mechanism: str) -> None:
    check(ALL[row], mechanism)


@pytest.mark.parametrize(
    "mechanism", ["int8", *(pytest.param(m, marks=pytest.mark.slow) for m in list(MECHANISMS)[1:])]
)
def test_hugging_face(mechanism: str, subtests: pytest.Subtests) -> None:
    pytest.importorskip("transformers")
    for name, row in hugging_face_rows().items():
        with subtests.test(name):
            check(row, mechanism)


class PlainNorm(nn.Module):
    """A norm whose class has a setting."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return self.gain * normal * self.weight


class ScaledNorm(PlainNorm):
    pass


def test_what_a_class_gives_may_change_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was quantized before computes as written; one quantized after is looked at."""
    x, models = torch.randn(4, WIDTH), [nn.Sequential(ScaledNorm()) for _ in range(2)]
    assert [type(s).__name__ for s in quantize_activations(models[0], "agoq").sites] == ["NormSite"]
    torch.testing.assert_close(models[0](x), PlainNorm()(x))
    monkeypatch.setattr(ScaledNorm, "gain", 3.0)
    with pytest.warns(UserWarning, match="was changed since"):
        torch.testing.assert_close(models[0](x), 3 * PlainNorm()(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_activations(models[1], "agoq")
    torch.testing.assert_close(models[1](x), 3 * PlainNorm()(x))
