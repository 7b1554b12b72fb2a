"""Compiled blocks keep codes: the partitioner may save other tensors than eager code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from lq_testing.small_block import run
from lq_testing.small_llama import SmallLlama, tokens
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from lq_lightning.activations import ActivationPolicy, ActivationRule, quantize_activations
from lq_lightning.activations.calibrate import FULL_PRECISION
from lq_lightning.activations.measure import SavedTensors

WIDTH = 128


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("recipe", ["agoq", "coat"])
def test_compiled_block_saves_codes(
    architectures: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    block = architectures["example"].build(1).blocks[0].bfloat16()
    x = torch.randn(1, 32, 512, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    plain, full = run(block, x, call=compiled)
    handle = quantize_activations(block, recipe)
    eager, codes = run(block, x)
    traced, kept = run(block, x, call=compiled)
    torch.testing.assert_close(traced, eager, rtol=0.01, atol=0.01)
    assert kept.nbytes <= codes.nbytes + 4 * x.numel()
    assert kept.nbytes < (0.55 if recipe == "coat" else 0.42) * full.nbytes
    handle.remove()
    again, restored = run(block, x, call=compiled)
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
    assert restored.nbytes == full.nbytes


def test_compiled_dropout_of_nothing_keeps_nothing() -> None:
    """As between the projections of timm's MLPs and of ``nn.TransformerEncoderLayer``."""
    inner = 4 * WIDTH
    layers = (nn.Linear(WIDTH, inner), nn.GELU(), nn.Dropout(0.0), nn.Linear(inner, WIDTH))
    model, x = nn.Sequential(*layers), torch.randn(8, WIDTH, requires_grad=True)
    quantize_activations(model)
    _, kept = run(model, x, call=torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert max(s.nbytes for s in kept.storages) == 4 * x.numel()


def test_compiled_blocks_follow_apply() -> None:
    """Codecs, and what is recomputed, are part of what a trace depends on."""
    torch.manual_seed(0)
    model, other = SmallLlama(2), SmallLlama(2)
    other.load_state_dict(model.state_dict())
    handle, expected = (quantize_activations(m, FULL_PRECISION) for m in (model, other))
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    data = tokens()
    rules: tuple[ActivationRule, ...]
    for rules in (
        (),
        (ActivationRule(module="blocks.*", codec="int4"),),
        (
            ActivationRule(module="blocks.0.mlp", recompute=True),
            ActivationRule(module="blocks.1", recompute=True),
        ),
        (),
    ):
        found = []
        for applied, net in ((handle, model), (expected, other)):
            applied.apply(replace(FULL_PRECISION, rules=rules))
            with SavedTensors(net) as saved:
                loss = net(data)
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            found.append((saved.nbytes, torch.cat([g.flatten() for g in gradients])))
        torch.testing.assert_close(found[0][1], found[1][1])
        assert found[0][0] <= found[1][0]


class Changed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y.mul_(2)
        return self.out(y)


def test_change_in_place_is_noticed_in_a_trace() -> None:
    model, x = Changed(), torch.randn(8, WIDTH, requires_grad=True)
    quantize_activations(model, ActivationPolicy(norm="int8"))
    eager, _ = run(model, x)
    traced, _ = run(model, x, call=torch.compile(model, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(traced, eager)


def test_hooks_break_the_graph_by_name() -> None:
    """Never silently other than in eager code: a break, or an error where none is allowed."""
    model = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1))
    quantize_activations(model)
    x = torch.randn(2, WIDTH, 32, requires_grad=True)
    eager, codes = run(model, x)
    traced, kept = run(model, x, call=torch.compile(model, backend="aot_eager"))
    torch.testing.assert_close(traced, eager)
    assert kept.nbytes == codes.nbytes
    torch._dynamo.reset()
    with pytest.raises(Exception, match="saved-tensor hooks of quantized activations"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(x)


class Both(nn.Module):
    """An input that is encoded by itself, and one that an activation function makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.middle, self.act, self.last = (
            nn.Linear(WIDTH, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.middle(self.norm(self.first(x)))))


@pytest.mark.parametrize("matmul", ["native", "int8_forward"])
def test_batches_of_any_size_are_one_graph(matmul: Any) -> None:
    model = Both()
    quantize_activations(model, ActivationPolicy(linear="int8", matmul=matmul))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in (16, 33, 50, 128):
        run(model, torch.randn(1, length, WIDTH, requires_grad=True), call=compiled)
    assert counter.frame_count == 2, "of the first size, and of any"
