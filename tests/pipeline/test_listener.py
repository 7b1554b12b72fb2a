"""What learns from a pipeline encodes every hidden state and hears its gradient, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lq_testing.pipeline_toys import BATCH, WIDTH, Boundary, make_data, make_stages, make_toy
from torch import Tensor, nn

from lq_lightning.pipeline.boundary import Message, make_boundary_codec
from lq_lightning.pipeline.engine import PipelineEngine
from lq_lightning.pipeline.schedules import rank_of_stage

CASES = [
    ("1f1b", 2, 4, 1),
    ("gpipe", 2, 2, 1),
    ("interleaved_1f1b", 2, 4, 2),
    ("zero_bubble", 2, 4, 1),
    ("zero_bubble", 2, 4, 2),
    ("zbv", 2, 4, 2),  # with a boundary between two stages of one rank
]


class Recorder:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.starts_heard = 0
        self.hidden: dict[tuple[int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self.codec = make_boundary_codec("none")

    def starts(self, boundary: Any) -> None:
        assert boundary.shape == (BATCH, WIDTH)
        self.starts_heard += 1

    def encode(self, message: Message, hidden: Tensor) -> Tensor:
        assert message.training
        assert not message.backward
        assert not hidden.requires_grad
        key = message.boundary, message.microbatch
        assert key not in self.hidden
        self.hidden[key] = hidden
        return self.codec.encode(hidden, message)

    def returned(self, message: Message, gradient: Tensor) -> None:
        assert message.backward
        key = message.boundary, message.microbatch
        assert key in self.hidden
        assert key not in self.gradients
        self.gradients[key] = gradient.clone()


def _expected(layers: nn.ModuleList, num_stages: int, count: int) -> dict[Any, tuple[Any, Any]]:
    """Hidden states and gradients at all boundaries, in one process."""
    stages = make_stages(layers, num_stages, make_data(count))
    found = {}
    for microbatch in range(count):
        hidden: list[Tensor] = []
        for stage in stages:
            stage.index = microbatch
            output = stage() if stage.first else stage(hidden[-1])
            if not stage.last:
                output.requires_grad_()
                output.retain_grad()
                hidden.append(output)
        output.backward()
        for index, each in enumerate(hidden):
            found[index, microbatch] = (each.detach(), each.grad)
    return found


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_gradient_is_heard_once(case: tuple[str, int, int, int], frozen: bool) -> None:
    schedule, size, count, per_rank = case
    num_stages = size * per_rank
    toy = make_toy(*case)
    if frozen:  # the layers of the first stage, so that nothing there needs a gradient
        toy.layers[:2].requires_grad_(False)
    expected = _expected(toy.layers, num_stages, count)
    recorders = [Recorder() for _ in toy.engines]
    for engine, recorder in zip(toy.engines, recorders, strict=True):
        engine.listener = recorder

    def each(engine: PipelineEngine) -> None:
        engine.evaluate(Boundary())
        engine.step(Boundary())

    toy.run(each)
    toy.close()
    assert [recorder.starts_heard for recorder in recorders] == [1] * size
    for rank, recorder in enumerate(recorders):
        wanted = {
            key
            for key in expected
            if rank_of_stage(schedule, key[0], num_stages, size) == rank
            and rank_of_stage(schedule, key[0] + 1, num_stages, size) != rank
        }
        assert recorder.hidden.keys() == recorder.gradients.keys() == wanted
        for key in wanted:
            hidden, gradient = expected[key]
            torch.testing.assert_close(recorder.hidden[key], hidden)
            torch.testing.assert_close(recorder.gradients[key], gradient)
