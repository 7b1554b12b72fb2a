"""Modules that are recognized, calls that they take, and values that they are left alone for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from lq_testing.small_block import (
    EXACT,
    MLP,
    WIDTH,
    Block,
    Conv1D,
    Quantize,
    assert_close,
    gradients,
    saved_nbytes,
)
from torch import Tensor, nn

from lq_lightning.activations import ActivationPolicy
from lq_lightning.activations.measure import CodeMeter


@pytest.mark.parametrize(("recipe", "bound"), [(EXACT, 0.01), ("coat", 0.1), ("fp8-4bit", 0.2)])
def test_transposed_weights(
    x: Tensor, quantize: Quantize, recipe: str | ActivationPolicy, bound: float
) -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), Conv1D(WIDTH, 100), nn.GELU(), Conv1D(100, WIDTH))
    exact = gradients(model, x)
    quantize(model, recipe)
    assert_close(gradients(model, x), exact, bound)


@pytest.mark.parametrize("codec", ["int4", "int8", "nf4"])
def test_what_relu_passes_back_is_exact(x: Tensor, quantize: Quantize, codec: str) -> None:
    """Only the weight that reads its output sees the code, and the meter that part alone."""
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH))
    exact = gradients(model, x)
    quantize(model, ActivationPolicy(activation=codec))
    meter = CodeMeter(measure=True)
    meter.start()
    made = gradients(model, x)
    meter.stop()
    sizes = [x.numel(), *(p.numel() for p in model.parameters())]
    errors = [
        float((a - b).norm() / b.norm())
        for a, b in zip(made.split(sizes), exact.split(sizes), strict=True)
    ]
    assert 1e-4 < errors.pop(3) < 0.12
    assert max(errors) < 1e-6
    error, norm = meter.take_errors("activation")
    assert 0.0 < error / norm < 0.12**2


class HandWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_proj = nn.Linear(2 * WIDTH, WIDTH)
        self.value, self.gate = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.value(x) * F.silu(self.gate(x)))


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w12, self.w3 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(self.act(gate) * up)


@pytest.mark.parametrize("mlp", [HandWritten, Halves])
def test_gated_mlps_of_any_names(mlp: type[nn.Module], x: Tensor, quantize: Quantize) -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), mlp())
    exact, before = gradients(model, x), saved_nbytes(model, x)
    handle = quantize(model)
    assert [type(site).__name__ for site in handle.sites].count("MLPSite") == 1
    assert_close(gradients(model, x), exact)
    assert saved_nbytes(model, x) < 0.3 * before


class DroppingHalves(Halves):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.drop = nn.Sequential(nn.Dropout(p))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(self.drop(self.act(gate) * up))


class DroppingByFunction(HandWritten):
    def forward(self, x: Tensor) -> Tensor:
        inner = self.value(x) * F.silu(self.gate(x))
        return self.c_proj(F.dropout(inner, 0.5, self.training))


@pytest.mark.parametrize(
    ("mlp", "found"),
    [(lambda: DroppingHalves(0.01), 0), (lambda: DroppingHalves(0.0), 1), (DroppingByFunction, 0)],
)
def test_dropout_of_a_model_in_evaluation_mode_is_seen(
    mlp: Callable[[], nn.Module], found: int, quantize: Quantize
) -> None:
    handle = quantize(nn.Sequential(mlp()).eval())
    assert [type(site).__name__ for site in handle.sites].count("MLPSite") == found
    assert not handle.model.training


class Caller(nn.Module):
    """Calls modules by names of arguments, and with more of them than they are known to take."""

    class Masked(MLP):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            y = super().forward(x)
            return y if mask is None else y * mask

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act, self.drop = nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(1e-9)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), self.Masked()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.out(input=self.drop(input=self.act(input=self.norm(input=x))))
        x = self.mlp(x, torch.full((WIDTH,), 2.0)) + self.mlp(x=x)
        x = self.norm(x)
        return self.attention(x, x, x, None, False)[0]


def test_any_call_that_the_original_takes(x: Tensor, quantize: Quantize) -> None:
    model = Caller()
    exact = gradients(model, x)
    before = saved_nbytes(model, x)
    quantize(model)
    assert_close(gradients(model, x), exact, 0.03)
    assert saved_nbytes(model, x) < 0.8 * before


@pytest.mark.parametrize("batch_first", [True, False])
def test_dropout_behind_attention_draws_the_same(quantize: Quantize, batch_first: bool) -> None:
    options = {"dropout": 0.5, "batch_first": batch_first, "norm_first": True}
    model, x = nn.TransformerEncoderLayer(WIDTH, 2, 64, **options), torch.randn(2, 5, WIDTH)

    def run() -> Tensor:
        torch.manual_seed(3)
        return model(x)

    exact = run()
    quantize(model)
    torch.testing.assert_close(run(), exact)


@pytest.mark.parametrize("recipe", ["agoq", "coat", "fp8-4bit"])
@pytest.mark.parametrize("shape", [(), (1,), (4, 15), (4, 17), (4, 24), (4, 50)])
def test_codes_are_smaller_than_what_they_stand_for(
    quantize: Quantize, recipe: str, shape: tuple[int, ...]
) -> None:
    model, value = nn.SiLU(), torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    before = saved_nbytes(model, value)
    quantize(model, recipe)
    assert saved_nbytes(model, value) <= before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_factors_of_other_dtypes_and_shapes(
    block: Block, x: Tensor, quantize: Quantize, dtype: torch.dtype
) -> None:
    block.mlp.up_proj.register_forward_hook(lambda *a: a[-1].mean(-1, keepdim=True).to(dtype))
    exact = gradients(block, x)
    quantize(block)
    assert_close(gradients(block, x), exact)


def test_nested_tensors_are_left_alone(quantize: Quantize) -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
    rows = [torch.randn(3, WIDTH), torch.randn(5, WIDTH)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    expected = model(x).values()
    quantize(model)
    torch.testing.assert_close(model(x).values(), expected)
