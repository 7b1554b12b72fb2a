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

from lq_lightning.activations.policy import CODECS

Load = Callable[[str], ModuleType]


def test_errors_are_those_of_gradients(load: Load) -> None:
    """Without codes, gradients of all sites are those of autograd."""
    transformers = pytest.importorskip("transformers")
    table = load("gradient_error_table")
    config = transformers.LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(24, (2, 9))
    layers = model.model.layers
    with table.watched(layers) as seen:
        logits = model(input_ids=tokens[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    found = table.gradients(seen, layers, None)
    first = iter(found[: len(found) // 2])
    layer = layers[0]
    for name, linears in table.LINEARS.items():
        (_, dx), (_, dweight) = next(first), next(first)
        norm = layer.get_submodule(name)
        x = seen.inputs[f"0.{name}"].detach().requires_grad_()
        y = F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
        (true,) = torch.autograd.grad(y, x, seen.outputs[f"0.{name}"].grad)
        torch.testing.assert_close(dx, true.flatten(0, 1), rtol=1e-4, atol=1e-6)
        weights = torch.cat([layer.get_submodule(n).weight.grad for n in linears])
        torch.testing.assert_close(dweight, weights, rtol=1e-4, atol=1e-6)
    expected = [layer.mlp.down_proj.weight.grad]
    expected += [seen.outputs[f"0.mlp.{n}_proj"].grad.flatten(0, 1) for n in ("gate", "up")]
    for true in expected:
        torch.testing.assert_close(next(first)[1], true, rtol=1e-4, atol=1e-6)
    q, k, v, _ = seen.attention[0]
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    scores = (inputs[0] @ inputs[1].mT * q.shape[-1] ** -0.5).masked_fill(
        torch.ones(8, 8).triu(1).bool(), -torch.inf
    )
    out = scores.softmax(-1) @ inputs[2]
    for true in torch.autograd.grad(out, inputs, seen.attention[0][3].grad):
        torch.testing.assert_close(next(first)[1], true, rtol=1e-4, atol=1e-6)
    rows = {row["code"]: row for row in table.site_errors(model, tokens.repeat(2, 1))}
    assert "attention q, L2" not in rows["agoq"]
    assert rows["fp8_e4m3"]["activation, L2"] < rows["int4"]["activation, L2"] / 2


def test_attention_keeps_codes_only_inside(load: Load) -> None:
    attention = load("coded_attention")
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, 16, 32, generator=generator).requires_grad_() for _ in "qkv"]
    dy = torch.randn(2, 2, 16, 32, generator=generator)

    def gradients() -> tuple[torch.Tensor, ...]:
        out = F.scaled_dot_product_attention(*inputs, is_causal=True)
        return torch.autograd.grad(out, inputs, dy)

    exact, original, found = gradients(), F.scaled_dot_product_attention, []
    for name in ("int8", "int4"):
        with attention.coded_attention(CODECS[name]):
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
