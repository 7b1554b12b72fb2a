"""The report agrees with what is saved, and says what is left."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lq_lightning.activations import ActivationPolicy, ActivationRule, quantize_activations

WIDTH = 128


class MLP(nn.Module):
    def __init__(self, width: int = WIDTH, inner: int = 256) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def model() -> nn.Module:
    block = nn.Sequential(nn.RMSNorm(WIDTH), MLP())
    return nn.Sequential(block, nn.Linear(WIDTH, WIDTH)).bfloat16()


def test_bytes_per_token_before_the_first_step() -> None:
    """As by hand: an RMSNorm in bf16 on the CPU saves fp32 x, its root and the normed x."""
    report = quantize_activations(
        model(), ActivationPolicy(norm="int4", activation="int8")
    ).report()
    rows = {row.kind: row for row in report.rows}
    norm, mlp, linear = rows["norm"], rows["MLP"], rows["linear"]
    assert (norm.count, mlp.count, linear.count) == (1, 1, 4)
    assert norm.bits == 4.25
    assert norm.after == pytest.approx(WIDTH * 4.25 / 8 + 4, abs=0.1)
    assert mlp.bits == 8.125
    assert mlp.after == pytest.approx(2 * 256 * 8.125 / 8, abs=0.1)
    assert mlp.before == pytest.approx(2 * (WIDTH + 4 * 256), abs=0.1)
    assert norm.before is not None
    assert norm.before >= 2 * WIDTH
    assert linear.before is None
    assert "others kept" in linear.note
    text = str(report)
    assert "bytes/token" in text
    assert "int4, groups of 128" in text
    assert "as they are" not in text
    assert "together, where known" in text


def test_measured_bytes_are_those_of_the_forward() -> None:
    net = model()
    handle = quantize_activations(net)
    x = torch.randn(4, 16, WIDTH, dtype=torch.bfloat16)
    with handle.measure(original=True) as before:
        outputs = [net(x)]
    with handle.measure() as after:
        outputs.append(net(x))
    report = handle.report(before=before, after=after)
    assert report.measured
    assert report.before == before.nbytes > 3 * after.nbytes
    assert report.after == after.nbytes
    assert "where known" not in str(report)
    static = {row.kind: row for row in handle.report().rows}
    for row in report.rows:
        if row.kind in ("norm", "MLP"):
            assert row.after == pytest.approx(64 * (static[row.kind].after or 0), abs=1)
    linear = next(row for row in report.rows if row.kind == "linear")
    assert linear.after == 64 * WIDTH * 2, "the last layer's input, which no norm made"
    assert outputs[0].shape == outputs[1].shape


def test_adapters_with_dropout_are_counted() -> None:
    """Dropout of LoRA lets its layer make a code, where no code was before."""
    mlp = MLP()
    mlp.up_proj = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 256))  # type: ignore[assignment]
    mlp.up_proj.in_features = WIDTH
    (row, *_) = quantize_activations(mlp).report().rows
    assert row.kind == "MLP"
    assert row.after is not None
    assert row.before is not None
    assert 0 < row.after < row.before


def test_layers_that_could_be_checkpointed_are_shown_once_they_are() -> None:
    class GradientCheckpointingLayer(nn.Sequential):
        gradient_checkpointing = False

    handle = quantize_activations(nn.Sequential(GradientCheckpointingLayer(*model())))
    assert "checkpoint" not in {row.kind for row in handle.report().rows}
    handle.model[0].gradient_checkpointing = True  # type: ignore[index, union-attr]
    assert "checkpoint" in {row.kind for row in handle.report().rows}


def test_bits_are_those_of_the_rows_that_are_encoded() -> None:
    """400 features are groups of 16 codes of 4 bits, with 2 bytes each of scale and offset."""
    policy = ActivationPolicy(activation="int4", rules=[ActivationRule(module="0")])
    model = nn.Sequential(nn.LayerNorm(100), MLP(100, 400))
    report = quantize_activations(model, policy).report()
    rows = {row.kind: row for row in report.rows}
    assert rows["MLP"].bits == pytest.approx(6.0, abs=0.01)
    assert rows["MLP"].after == pytest.approx(2 * 400 * 6 / 8, abs=0.1)
    assert rows["MLP"].format == "int4, groups of 16"
    assert rows["norm"].note == "as they are, or inside of what is recomputed"


class Packed(nn.Module):
    """A frozen layer whose weight is another library's codes."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.in_features, self.out_features = width, inner
        self.weight = nn.Parameter(torch.ones(inner, width, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) / 256)


def test_weights_in_codes_of_others_are_not_counted() -> None:
    net = model()
    net[0][1].gate_proj = Packed(WIDTH, 256)
    report = quantize_activations(net).report()
    assert {row.kind: row.before for row in report.rows}["MLP"] is None
