"""The measurements of saved activations: their formulas, exact, are what autograd computes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

Load = Callable[[str], ModuleType]

QKV = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
GATE_UP = ("mlp.gate_proj.weight", "mlp.up_proj.weight")


@pytest.fixture
def small(load: Load, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Build a small model of a kind, and run a batch through it."""
    models = load("research/trained_models")
    sizes = {"SEQ": 8, "LAYERS": 2, "HIDDEN": 32, "HEADS": 2, "INTERMEDIATE": 48}
    for name, value in sizes.items():
        monkeypatch.setattr(models, name, value)

    def make(kind: str) -> Any:
        model = models.build(kind, 24)
        with torch.no_grad():  # so that no gradient is nearly zero
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        tokens = torch.randint(24, (2, 9), generator=torch.Generator().manual_seed(1))
        return model, load("research/activation_capture").capture(
            model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        )

    return make


@pytest.mark.parametrize("how", ["rebuilt", "recomputed", "stored"])
def test_exact_gradients_of_sites_are_those_of_the_model(
    load: Load, small: Callable[[str], Any], how: str
) -> None:
    gradients = load("research/activation_gradients")
    for kind in ("llama", "gpt"):
        model, layers = small(kind)
        block = (model.blocks if kind == "gpt" else model.model.layers)[1]
        found = gradients.layer_gradients(layers[1], gradients.exact, how)
        if kind == "gpt":
            expected = {
                "norm linears (attention)": ("qkv.weight",),
                "norm dweight (attention)": ("norm1.weight",),
                "norm linears (mlp)": ("up.weight",),
                "norm dweight (mlp)": ("norm2.weight",),
                "gelu down": ("down.weight",),
                "attention o_proj": ("out.weight",),
            }
        else:
            expected = {
                "norm linears (attention)": QKV,
                "norm dweight (attention)": ("input_layernorm.weight",),
                "norm linears (mlp)": GATE_UP,
                "norm dweight (mlp)": ("post_attention_layernorm.weight",),
                "silu down": ("mlp.down_proj.weight",),
                "attention o_proj": ("self_attn.o_proj.weight",),
            }
        for name, parameters in expected.items():
            if name in found:
                true = torch.cat([block.get_parameter(p).grad for p in parameters])
                torch.testing.assert_close(found[name], true, rtol=1e-4, atol=1e-6, msg=name)
        if how == "rebuilt":
            true = torch.cat([p.grad.flatten() for p in block.parameters()])
            torch.testing.assert_close(found["block weights"], true, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["rebuilt", "stored"])
def test_exact_gradients_of_inputs_are_those_of_autograd(
    load: Load, small: Callable[[str], Any], how: str
) -> None:
    gradients = load("research/activation_gradients")
    layer = small("llama")[1][0]
    found = gradients.layer_gradients(layer, gradients.exact, how)
    site = layer.attention
    inputs = [x.requires_grad_() for x in (site.q_BHSD, site.k_BHSD, site.v_BHSD)]
    out = F.scaled_dot_product_attention(*inputs, is_causal=True)
    for name, true in zip("qkv", torch.autograd.grad(out, inputs, site.dout_BHSD), strict=True):
        torch.testing.assert_close(found[f"attention d{name}"], true, rtol=1e-4, atol=1e-6)
    norm = layer.norms[1]
    x = norm.x_TN.requires_grad_()
    y = F.rms_norm(x, x.shape[-1:], norm.weight_N, norm.eps)
    (true,) = torch.autograd.grad(y, x, norm.dy_TN)
    torch.testing.assert_close(found["norm dx (mlp)"], true, rtol=1e-4, atol=1e-6)
    mlp = layer.mlp
    factors = [mlp.gate_TN.requires_grad_(), mlp.up_TN.requires_grad_()]
    dgate, dup = torch.autograd.grad(F.silu(factors[0]) * factors[1], factors, mlp.dh_TN)
    torch.testing.assert_close(found["silu dgate"], dgate)
    torch.testing.assert_close(found["silu dup"], dup)


def test_outliers_change_the_input_of_a_norm_and_not_its_function(
    load: Load, small: Callable[[str], Any]
) -> None:
    error = load("research/activation_error")
    site = small("llama")[1][0].norms[0]
    plain, outliers = (error.with_outliers(site, size) for size in (1.0, 30.0))
    assert outliers.x_TN.abs().max() > 10 * plain.x_TN.abs().max()
    kinds = [error.norm_gradients(s, error.exact)["norm linears"] for s in (plain, outliers)]
    assert error.relative(kinds[1], kinds[0]) < 0.3
    code = error.round_trip(error.SPECS["nf4/64"])
    losses = [
        error.relative(error.norm_gradients(s, code)["norm linears"], kind)
        for s, kind in zip((plain, outliers), kinds, strict=True)
    ]
    assert losses[1] > losses[0]


def test_bias_is_free_of_the_noise_of_few_batches(load: Load) -> None:
    error = load("research/activation_error")
    generator = torch.Generator().manual_seed(0)
    count, g = 64, torch.randn(4000, generator=generator)

    def sums(make: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
        values = [make() for _ in range(count)]
        return torch.stack(values).sum(0), sum(float(v.square().sum()) for v in values)

    found = error.bias(
        {
            ("", "down", 0): sums(lambda: g + torch.randn(4000, generator=generator)),
            ("noise", "down", 0): sums(lambda: 0.2 * torch.randn(4000, generator=generator)),
            ("shrinks", "down", 0): sums(lambda: -0.1 * g),
        },
        count,
    )
    noise, shrinks = found
    assert noise["bias"] < 0.01
    assert noise["added variance"] == pytest.approx(0.04, rel=0.05)
    assert shrinks["bias"] == pytest.approx(0.1, rel=0.02)
    assert shrinks["shrinkage"] == pytest.approx(0.1, rel=0.02)


def test_attention_keeps_codes_only_inside(load: Load) -> None:
    attention, specs = load("coded_attention"), load("research/activation_error").SPECS
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, 16, 32, generator=generator).requires_grad_() for _ in "qkv"]
    dy = torch.randn(2, 2, 16, 32, generator=generator)

    def gradients() -> tuple[torch.Tensor, ...]:
        out = F.scaled_dot_product_attention(*inputs, is_causal=True)
        return torch.autograd.grad(out, inputs, dy)

    exact, original, found = gradients(), F.scaled_dot_product_attention, []
    for name in ("int8/128", "int4 asym/128"):
        with attention.coded_attention(specs[name]):
            found.append(
                [float((g - e).norm() / e.norm()) for g, e in zip(gradients(), exact, strict=True)]
            )
    assert F.scaled_dot_product_attention is original
    for coarse, fine in zip(found[1], found[0], strict=True):
        assert 0.0 < fine < 0.02 < coarse < 0.5


def test_losses_are_compared_with_the_mean_of_all_full_precision_runs(load: Load) -> None:
    report, ablation = load("activation_report"), load("ablation_report")

    def run(loss: float, norms: int = 0) -> Any:
        curve = tuple((50 * i, float(i)) for i in range(1, norms + 1))
        return ablation.Outcome(seed=0, val_loss=loss, train_s=1.0, grad_norms=curve)

    outcomes = {
        "full precision": [run(1.99), run(2.0)],
        "full precision perturbed": [run(2.01)],
        "agoq": [run(2.02, norms=20)],
    }
    percent, error = report.against_mean(outcomes, "agoq")
    assert percent == pytest.approx(1.0)
    assert error == pytest.approx(0.5 * math.sqrt(1 / 3 + 1))  # the deviation of one run is 0.5%
    assert report.norm_tenths(outcomes["agoq"]).split()[:2] == ["1.50", "3.50"]
    assert "one run deviates by 0.500%" in report.summary(outcomes)
    assert math.isnan(report.against_mean({"agoq": [run(1.0)]}, "agoq")[0])


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("agoq as in 1f1b", "4 4 5 5 8 8 8 8"),
        ("agoq as in interleaved 1f1b", "4 4 6 8 4 4 6 8"),  # two stages on each rank
        ("agoq in 2 bits as in 1f1b", "2 2 2 2 4 4 8 8"),
    ],
)
def test_layers_have_the_bits_of_their_stages(load: Load, variant: str, expected: str) -> None:
    ablation = load("activation_ablation")
    given = ablation.VARIANTS[variant]
    policy = ablation.by_stage(given.policy, given.schedule, 8, given.bits)
    layers = [f"llama.model.layers.{index}" for index in range(8)]
    for kind, name in (("norm", "input_layernorm"), ("activation", "mlp")):
        codes = [policy.codec(kind, f"{layer}.{name}").code for layer in layers]
        assert codes == [f"int{bits}" for bits in expected.split()]
    last = policy.codec("norm", "llama.model.norm")
    assert (last.code, last.hadamard_size) == ("int8", 128)


def test_errors_that_cannot_be_measured_do_not_end_the_study(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    ablation = load("activation_ablation")

    def fail(training: Any, data: Any) -> dict[str, Any]:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(ablation, "errors_of_run", fail)
    asked, variants = argparse.Namespace(gradient_errors=True), ablation.VARIANTS
    found = ablation.gradient_errors(variants["full precision"], None, None, asked)
    assert found == {"gradient_errors": {"failed": "RuntimeError: no kernel image"}}
    assert ablation.gradient_errors(variants["agoq"], None, None, asked) is None
    run = load("ablation_report").Outcome(seed=0, val_loss=2.0, train_s=1.0, details=found)
    shown = load("activation_report").summary({"full precision": [run]})
    assert "no kernel image" in shown
    assert "2.0000" in shown
