"""Products forward in INT8: outputs are nearer than from FP8, gradients are those of FP8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lq_testing.small_block import Conv1D
from lq_testing.small_llama import SmallLlama, tokens
from torch import Tensor, nn

from lq_lightning.activations import (
    ActivationPolicy,
    ActivationRule,
    functions,
    quantize_activations,
)
from lq_lightning.activations.policy import Matmul

COAT = {"norm": "fp8_e4m3", "activation": "fp8_e4m3"}


def trained(layer: nn.Module, x: Tensor, dy: Tensor, matmul: Matmul) -> tuple[Tensor, ...]:
    """Return output and gradients of a layer with products in a precision."""
    rule = ActivationRule(module="0", matmul=matmul)
    model = nn.Sequential(layer)
    handle = quantize_activations(model, ActivationPolicy(rules=(rule,)))
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(dy)
    handle.remove()
    assert x.grad is not None
    gradients = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    return y.detach(), x.grad, *gradients


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_outputs_from_int8_and_gradients_from_fp8(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layer = kind(256, 48)
    x, dy = torch.randn(3, 40, 256), torch.randn(3, 40, 48)
    x[:, 0] *= 0.01  # the first tokens
    x[..., 7] += 10.0
    exact = layer(x).detach()
    y, *gradients = trained(layer, x, dy, "int8_forward")
    float8, *expected = trained(layer, x, dy, "float8")
    assert (y - exact).norm() < 0.015 * exact.norm()
    assert (float8 - exact).norm() > 0.02 * exact.norm()
    assert len(gradients) == 3
    for ours, theirs in zip(gradients, expected, strict=True):
        assert torch.equal(ours, theirs)
    x[1, 5, 9] = torch.nan
    y = trained(layer, x, dy, "int8_forward")[0]
    assert torch.equal(y.isnan().any(-1), x.isnan().any(-1))
    assert y[1, 5].isnan().all()


def test_views_of_a_shared_input_have_sequences_of_their_own() -> None:
    """Of ``[B, S, K]`` and ``[B * S, K]`` other rows are first, though both have one source."""
    torch.manual_seed(0)
    norm, first, second = nn.LayerNorm(64), nn.Linear(64, 32), nn.Linear(64, 32)
    model = nn.ModuleList([norm, first, second])
    quantize_activations(model, ActivationPolicy(norm="int8", matmul="int8_forward"))
    x = torch.randn(3, 40, 64)
    h = norm(x)
    first(h)
    expected = second(norm(x).flatten(0, 1))
    assert torch.equal(second(h.flatten(0, 1)), expected)
    assert not torch.equal(second(h).flatten(0, 1), expected)


def test_layers_share_an_input_and_a_compiled_block_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[Any, ...]] = []
    original = functions.int8_quantize

    def counted(x: Tensor, *options: Any) -> Any:
        made.append((tuple(x.shape), *options))
        return original(x, *options)

    model, text = SmallLlama(2, 64), tokens()
    model(text).backward()
    exact = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    handle = quantize_activations(model, ActivationPolicy(**COAT, matmul="int8_forward"))
    with monkeypatch.context() as context:
        context.setattr(functions, "int8_quantize", counted)
        model(text)
    # queries, keys and values read one input, gate and up another
    inputs = [call for call in made if call[-1]]
    assert [call[0] for call in inputs] == [(64, 64), (64, 64), (64, 64), (64, 128)] * 2
    assert len(made) == 2 * (4 + 7)
    assert [call[2] for call in inputs] == [False, True, False, False] * 2  # that of `o_proj`
    loss = model(text)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    for name, gradient in exact.items():
        assert gradient is not None
        assert found[name] is not None
        assert (found[name] - gradient).norm() < 0.1 * gradient.norm(), name
    block, x = model.blocks[0], torch.randn(2, 32, 64, requires_grad=True)
    outputs = [block(x), torch.compile(block, backend="aot_eager", fullgraph=True)(x)]
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in outputs]
    assert torch.equal(*outputs)
    assert torch.equal(*gradients)
    handle.remove()
