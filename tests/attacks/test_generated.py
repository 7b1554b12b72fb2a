"""Modules made at random keep their functions and gradients when their activations are codes."""

from __future__ import annotations

import warnings
from collections import Counter

import hypothesis
import pytest
import torch
from lq_testing.generated_modules import Block, Plan, plans
from torch import Tensor, nn

from lq_lightning.activations import ActivationPolicy, quantize_activations
from lq_lightning.codecs import CodecSpec

# Fine enough that another function is not taken for rounding.
FINE = CodecSpec(code="int8", group_size=16, symmetric=False, scale_dtype="float32")
POLICY = ActivationPolicy(norm=FINE, activation=FINE, linear=FINE, other=None)
seen: Counter[str] = Counter()


def _run(block: Block, plan: Plan) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(2)
    x = (plan.scale * torch.randn(plan.shape, generator=generator)).requires_grad_()
    y = block(x)
    dy = torch.randn(y.shape, generator=generator)
    leaves = [x, *block.parameters()]
    if not y.requires_grad:
        return [y, *(None for _ in leaves)]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy, allow_unused=True)]


def _outcome(block: Block, plan: Plan) -> list[Tensor | None] | str:
    """Result of a step, or the error that it ends in, as code of users may by itself."""
    try:
        return _run(block, plan)
    except RuntimeError as error:
        return str(error)[:40]


def _check(plan: Plan) -> None:
    plain, coded = plan.build(), plan.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = quantize_activations(coded, POLICY)
        seen.update(type(site).__name__ for site in handle.sites)
        plan.change(plain)
        plan.change(coded)
        found, expected = _outcome(coded, plan), _outcome(plain, plan)
    if isinstance(found, str) or isinstance(expected, str):
        assert found == expected
        return
    finite = [e for e in expected if e is not None]
    if not all(bool(e.isfinite().all()) for e in finite):
        return
    largest = max(float(e.norm()) for e in finite[1:]) if finite[1:] else 0.0
    for index, (y, e) in enumerate(zip(found, expected, strict=True)):
        assert (y is None) == (e is None), "a gradient that is None"
        if y is not None and e is not None:
            # The gradient of a gain in front of a norm is a small sum of large terms.
            size = max(float(e.norm()), 0.1 * largest * (index > 0), 1e-30)
            error = float((y - e).norm()) / size
            assert error <= (0.05 if index else 1e-5), (index, error)


@hypothesis.settings(max_examples=250)
@hypothesis.given(plans())
def test_generated_modules(plan: Plan) -> None:
    _check(plan)


def test_true_forms_are_recognized() -> None:
    """Else the examples would show nothing."""
    for kind, spellings, site in ((0, 5, "NormSite"), (1, 10, "ActivationSite"), (2, 9, "MLPSite")):
        seen.clear()
        for spelling in range(spellings):
            _check(Plan(((kind, spelling, ()),), False, (4, 3, 32), 1.0, True, None))
        known = spellings - (kind == 1)  # all but tanh; one between linear layers may be an MLP
        assert known in (seen[site], seen["MLPSite"]), (site, seen)


class _VarianceNorm(nn.Module):
    """A layer norm that asks torch for the variance."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.var(-1, keepdim=True, correction=0)
        return (x - x.mean(-1, keepdim=True)) / (variance + 1e-5).sqrt() * self.weight


class _Clamp(nn.Module):
    """ReLU as a clamp."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=0)


@pytest.mark.parametrize(("module", "site"), [(_VarianceNorm, "NormSite"), (_Clamp, "MLPSite")])
def test_rarer_spellings_are_recognized(module: type[nn.Module], site: str) -> None:
    model = nn.Sequential(nn.Linear(32, 32), module(), nn.Linear(32, 32))
    handle = quantize_activations(model, POLICY)
    assert site in {type(found).__name__ for found in handle.sites}


@pytest.mark.slow
@hypothesis.settings(max_examples=5_000)
@hypothesis.given(plans())
def test_many_generated_modules(plan: Plan) -> None:
    _check(plan)
