"""FP8 products are for the layers of blocks; heads and odd shapes are left, with a reason."""

from __future__ import annotations

import torch
from lq_testing.small_block import Conv1D
from lq_testing.small_llama import SmallLlama, tokens
from torch import Tensor, nn

from lq_lightning.activations import ActivationPolicy, ActivationRule, quantize_activations
from lq_lightning.activations.sites import LinearSite, MultiheadSite, NormSite

COAT = ActivationPolicy(norm="fp8_e4m3", activation="fp8_e4m3", matmul="float8")


def native(model: nn.Module, policy: ActivationPolicy = COAT) -> dict[str, str]:
    """Reasons by name of the layers whose products are not in FP8."""
    handle = quantize_activations(model, policy)
    handle.remove()
    sites = [s for s in handle.sites if isinstance(s, (LinearSite, MultiheadSite))]
    left = {s.name: s for s in sites if s.matmul == "native"}
    return {n: s.native if isinstance(s, LinearSite) else "" for n, s in left.items()}


def test_blocks_but_not_what_is_outside() -> None:
    model, seen = SmallLlama(3), dict[str, Tensor]()

    def look(head: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        seen["in"], seen["out"] = inputs[0].detach(), output.detach()

    model.head.register_forward_hook(look)  # type: ignore[arg-type]
    handle = quantize_activations(model, "coat")
    model(tokens()).backward()
    exact = nn.functional.linear(seen["in"], model.head.weight)
    torch.testing.assert_close(seen["out"], exact, rtol=0, atol=0)
    linear = [s for s in handle.sites if isinstance(s, LinearSite)]
    assert [s.name for s in linear if s.matmul == "native"] == ["head"]
    assert "1 x head: products stay native: outside of the repeated" in str(handle.report())
    norms = {s.name: s.amax for s in handle.sites if isinstance(s, NormSite)}
    assert [name for name, amax in norms.items() if not amax] == ["norm"]
    handle.remove()
    rule = ActivationRule(module="head", matmul="float8")
    handle = quantize_activations(model, ActivationPolicy(matmul="float8", rules=(rule,)))
    model(tokens()).backward()
    error = (seen["out"] - nn.functional.linear(seen["in"], model.head.weight)).norm()
    assert 0.01 < error / seen["out"].norm() < 0.1
    assert "products stay native" not in str(handle.report())
    handle.remove()
    assert native(model, ActivationPolicy(matmul="float8", rules=(rule,))) == {}
    other = ActivationRule(module="blocks.0.*", matmul="native")
    left = native(model, ActivationPolicy(matmul="float8", rules=(other,)))
    assert {name.split(".")[1] for name in left if name != "head"} == {"0"}
    for kind, native_too in (("linear", {"0"}), ("norm", set[str]())):
        other = ActivationRule(module="blocks.0.*", kind=kind, matmul="native")  # type: ignore[arg-type]
        left = native(model, ActivationPolicy(matmul="float8", rules=(other,)))
        assert {name.split(".")[1] for name in left if name != "head"} == native_too


def test_heads_and_odd_shapes_of_a_model_without_blocks() -> None:
    parts = {
        "table": nn.Embedding(64, 32),
        "same": nn.Linear(32, 32),
        "narrow": nn.Linear(32, 40),
        "rows": nn.Linear(40, 32),
        "wide": Conv1D(32, 64),
        "down": Conv1D(64, 32),
        "odd": nn.MultiheadAttention(24, 2),
        "tied": nn.Linear(32, 64, bias=False),
        "score": nn.Linear(64, 16),
        "head": nn.Linear(32, 64),
    }
    model = nn.ModuleDict(parts)  # nothing is repeated
    model["tied"].weight = model["table"].weight
    odd, token = "dimensions are no multiples of 16", "predicts tokens"
    assert native(model) == {
        "narrow": odd,
        "rows": odd,
        "wide": token,
        "tied": token,
        "head": token,
        "odd": "",
        "odd.out_proj": odd,
    }
    assert native(model, ActivationPolicy()).keys() > native(model).keys()
    assert set(native(model, ActivationPolicy()).values()) == {""}


def test_gradients_keep_three_bits_beside_a_massive_row() -> None:
    """Two E4M3 operands make 3.7%, an E5M2 one beside E4M3 5.9%; the other rows keep theirs."""
    torch.manual_seed(0)
    layer = nn.Linear(256, 128, bias=False)
    model = nn.Sequential(layer)
    rule = ActivationRule(module="0", matmul="float8")
    x, dy = torch.randn(512, 256, requires_grad=True), torch.randn(512, 128)
    dy[0] *= 1000
    handle = quantize_activations(model, ActivationPolicy(matmul="float8", rules=(rule,)))
    model(x).backward(dy)
    handle.remove()
    assert x.grad is not None
    assert layer.weight.grad is not None
    exact = dy @ layer.weight.detach()
    others = x.grad[1:] - exact[1:]
    assert 0.03 < others.norm() / exact[1:].norm() < 0.045
    weight = dy.t() @ x.detach()
    assert 0.03 < (layer.weight.grad - weight).norm() / weight.norm() < 0.045
    x.grad = None
    dy[3, 5] = torch.inf
    handle = quantize_activations(model, ActivationPolicy(matmul="float8", rules=(rule,)))
    model(x).backward(dy)
    handle.remove()
    assert x.grad.isnan().all()
