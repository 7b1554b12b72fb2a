"""Coded boundaries of one process are those of a pipeline, and runs of their ablation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lq_testing import pipeline_toys
from torch import nn

from lq_lightning.pipeline.boundary import (
    AQSGDQuantization,
    TAHQuantization,
    make_boundary_codec,
)

Load = Callable[[str], ModuleType]
Run = Callable[..., str]

STAGES, MICROBATCHES, WIDTH = 4, 4, 32
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMOKE = ("pipeline_ablation.py", "--cpu", "--no-compile", "--preset", "smoke", "--stages", "2")


def _update(layers: nn.ModuleList) -> None:
    with torch.no_grad():
        for parameter in layers.parameters():
            assert parameter.grad is not None
            parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (TAHQuantization(tile_size=32), "int6"),
        (AQSGDQuantization(tile_size=32), "int6"),
        ("bf16", "none"),
    ],
    ids=["tah", "aq_sgd", "bf16"],
)
def test_losses_are_those_of_the_engine(
    load: Load, monkeypatch: pytest.MonkeyPatch, forward: Any, backward: Any
) -> None:
    """Three steps over the same samples, four stages on two ranks, each a thread."""
    monkeypatch.setattr(pipeline_toys, "WIDTH", WIDTH)
    boundary = pipeline_toys.Boundary(shape=(pipeline_toys.BATCH, WIDTH))
    samples = torch.arange(MICROBATCHES * pipeline_toys.BATCH)

    def codecs() -> tuple[Any, Any]:
        return make_boundary_codec(forward), make_boundary_codec(backward, backward=True)

    # Neighbouring stages on different ranks, so that all boundaries are coded.
    toy = pipeline_toys.make_toy("interleaved_1f1b", 2, MICROBATCHES, STAGES // 2, codecs=codecs)
    expected, sent = [], 0
    for _ in range(3):
        sent -= sum(engine.traffic.sent for engine in toy.engines)
        results = toy.run(lambda engine: engine.step(boundary, samples))
        sent += sum(engine.traffic.sent for engine in toy.engines)
        evaluated = toy.run(lambda engine: engine.evaluate(boundary, samples))
        expected += next(result for result in results if result)
        expected += [output["loss"] for output in next(e for e in evaluated if e)]
        _update(toy.layers)
    toy.close()

    script = load("coded_boundaries")
    layers = pipeline_toys.make_layers(2 * STAGES)
    (whole,) = pipeline_toys.make_stages(layers, 1, pipeline_toys.make_data(MICROBATCHES))
    boundaries = script.CodedBoundaries(forward, backward)
    boundaries.install(whole.layers, script.layers_before_boundaries(len(layers), STAGES))
    found = []
    for _ in range(3):
        for training in (True, False):
            for index, part in enumerate(samples.split(pipeline_toys.BATCH)):
                whole.index = index
                boundaries.begin(index, part)
                with torch.set_grad_enabled(training):
                    output = whole()
                if training:
                    output.backward()
                found.append(output.detach() if training else output["loss"])
        _update(layers)
    assert torch.equal(torch.stack(found), torch.stack(expected))
    values = 3 * (STAGES - 1) * MICROBATCHES * pipeline_toys.BATCH * WIDTH
    assert sum(boundaries.bits_per_value()) * values / 8 == sent


def test_stages_are_of_equal_size(load: Load) -> None:
    after = load("coded_boundaries").layers_before_boundaries
    assert after(8, 8) == list(range(7))
    assert after(12, 8) == [0, 2, 3, 5, 6, 8, 9]
    assert after(5, 2) == [1]
    with pytest.raises(ValueError, match="2 layers do not make 3 stages"):
        after(2, 3)


def test_identities_are_those_of_the_content(load: Load) -> None:
    identities = load("pipeline_ablation").identities
    tokens = torch.tensor([[1, 2], [2, 1], [1, 2]])
    first, second, third = identities(tokens).tolist()
    assert first == third != second
    assert identities(tokens.flip(0)).tolist() == [third, second, first]


def test_fine_tuning_remembers_its_sequences(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    shown = run(
        *SMOKE,
        *("--text", str(BENCHMARKS), "--trunk-steps", "50", "--trunk", str(tmp_path)),
        *("--tune-blocks", "8", "--tune-epochs", "4", "--json", str(report)),
        *("--runs", "full precision:0,aq_sgd:0,int4 tile 64 hadamard 64:0,none / int6:0"),
    )
    assert "without codes" in shown
    assert list(tmp_path.glob("trunk_smoke_tune8_0_50.pt"))
    results = json.loads(report.read_text())["results"]
    assert results["preset"]["steps"] == 8
    found = {name: runs[0] for name, runs in results["variants"].items()}
    assert found["full precision"]["val_loss"] == found["full precision"]["exact_val_loss"]
    # bf16 once, then differences of 4.5 bits.
    assert found["aq_sgd"]["forward_bits"] == pytest.approx((16 + 3 * 4.5) / 4)
    assert found["aq_sgd"]["backward_bits"] == found["none / int6"]["backward_bits"] == 7.0
    coded = found["int4 tile 64 hadamard 64"]
    assert coded["forward_bits"] == 4.5
    assert coded["val_loss"] != coded["exact_val_loss"]
    assert "int4 tile 64 hadamard 64" in run("table.py", str(report))
