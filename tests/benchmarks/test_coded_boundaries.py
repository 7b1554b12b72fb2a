"""Coded boundaries of one process are those of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
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

STAGES, MICROBATCHES, WIDTH = 4, 4, 32


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
    for number, index in enumerate(script.layers_before_boundaries(len(layers), STAGES)):
        whole.layers[index].register_forward_hook(
            lambda _, __, hidden, number=number: boundaries.cross(hidden, number)
        )
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
