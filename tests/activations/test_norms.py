"""Norms: an `eps` that is not given, and dtypes under autocast."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from lq_lightning.activations import ActivationPolicy, quantize_activations
from lq_lightning.activations.functions import output_dtype
from lq_lightning.activations.measure import CodeMeter
from lq_lightning.activations.recognize import Recognizer
from lq_lightning.activations.sites import NormSite, site_of

WIDTH = 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_without_eps(dtype: torch.dtype) -> None:
    """Of an input this small `eps` is most of what the root is taken of."""
    norm = nn.RMSNorm(WIDTH).to(dtype)
    nn.init.normal_(norm.weight)
    x = (torch.randn(16, WIDTH) * 1e-4).to(dtype).requires_grad_()
    dy = torch.randn(16, WIDTH).to(dtype)
    leaves = [x, norm.weight]
    y = norm(x)
    expected = torch.autograd.grad(y, leaves, dy)
    handle = quantize_activations(norm, ActivationPolicy(norm="int8"))
    assert isinstance(site_of(norm), NormSite)
    found_y = norm(x)
    found = torch.autograd.grad(found_y, leaves, dy)
    handle.remove()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found_y, y, rtol=8 * eps, atol=8 * eps)
    for gradient, reference in zip(found, expected, strict=True):
        error = (gradient.float() - reference.float()).norm() / reference.float().norm()
        assert error < 0.02


@pytest.mark.parametrize("recipe", ["agoq", "coat", "fp8-4bit"])
@pytest.mark.parametrize("mean", [0.0, 10.0])
def test_rows_with_a_mean_lose_no_more_than_others(mean: float, recipe: str) -> None:
    """A LayerNorm does not see the mean: neither its gradients nor the next layer's do."""
    model = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 64))
    nn.init.normal_(model[0].weight)
    x = (torch.randn(256, 128) + mean).requires_grad_()
    dy = torch.randn(256, 64)
    leaves = [x, model[0].weight, model[1].weight]
    expected = torch.autograd.grad(model(x), leaves, dy)
    handle = quantize_activations(model, recipe)
    meter = CodeMeter(measure=True)
    meter.start()
    found = torch.autograd.grad(model(x), leaves, dy)
    meter.stop()
    handle.remove()
    for gradient, reference in zip(found, expected, strict=True):
        assert float((gradient - reference).norm() / reference.norm()) < 0.15
    error, norm = meter.take_errors("norm")
    assert 0.004**2 < error / norm < (0.01 if recipe == "coat" else 0.06) ** 2
    assert norm == pytest.approx(x.numel(), rel=0.05)


def test_an_eps_that_depends_on_the_dtype_is_not_taken_for_torchs() -> None:
    class RMSNorm(nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            eps = torch.finfo(x.dtype).eps
            return nn.functional.rms_norm(x, self.normalized_shape, self.weight, eps)

    assert Recognizer().norm(nn.RMSNorm(WIDTH)) is not None
    assert Recognizer().norm(RMSNorm(WIDTH)) is None


class HandMade(nn.Module):
    """What Hugging Face's Llama computes, without a function of torch that autocast knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class HandMadeNorm(HandMade):
    """With a name that is tried out."""


@pytest.mark.parametrize("autocast", [False, True])
def test_dtype_under_autocast_of_a_gpu(autocast: bool) -> None:
    """Functions of torch return fp32 there, so does a norm that keeps codes."""
    before = torch.is_autocast_enabled("cuda")
    matches = map(Recognizer().norm, (nn.LayerNorm(WIDTH), HandMadeNorm()))
    layer, other = (match.found[0] for match in matches)
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(4, WIDTH, device="cuda", dtype=torch.bfloat16)
        weight = torch.empty(WIDTH, device="cuda", dtype=torch.bfloat16)
        try:
            torch.set_autocast_enabled("cuda", autocast)
            expected = nn.functional.layer_norm(x, (WIDTH,), weight, weight).dtype
            assert output_dtype(layer, x.dtype, weight, "cuda") == expected
            assert output_dtype(other, x.dtype, weight, "cuda") == x.dtype
        finally:
            torch.set_autocast_enabled("cuda", before)
